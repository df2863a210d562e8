"""Predicted pools: the models of two allocators against known cases and naive twins, and what a
bank makes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packgraph.graphs.memory import trace as memory_trace
from packgraph.graphs.memory.bank import BankModel, Lifetime, MemoryTrace, on_line
from packgraph.graphs.memory.caching import MEBIBYTE, CachingPool
from packgraph.graphs.memory.expandable import ExpandablePool
from packgraph.graphs.memory.first_fit import FirstFitPool, place_blocks
from packgraph.packing.capacity import Capacity

KIB = 1024


def at_once(*sizes):
    return [Lifetime(size, birth) for birth, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2),
        ([512] * 4096, 2),
        ([512] * 4097, 4),
        ([MEBIBYTE], 2),
        ([MEBIBYTE] * 2, 2),
        ([MEBIBYTE] * 3, 4),
        ([MEBIBYTE + 1], 20),
        ([9 * MEBIBYTE] * 2, 20),
        ([9 * MEBIBYTE] * 3, 40),
        ([10 * MEBIBYTE], 10),
        ([11 * MEBIBYTE], 12),
        ([10 * MEBIBYTE - 512] * 2, 20),
        ([33 * MEBIBYTE + 1], 34),
        ([19 * MEBIBYTE, MEBIBYTE], 22),
        ([MEBIBYTE + 512, 300], 22),
    ],
)
def test_segments_of_the_caching_allocator(sizes, reserved):
    pool = CachingPool()
    pool.replay(at_once(*sizes))
    assert pool.nbytes == reserved * MEBIBYTE


def test_what_is_free_is_used_again_and_joined():
    pool = CachingPool()
    held = [pool.allocate(5 * MEBIBYTE) for _ in range(4)]
    assert pool.nbytes == 20 * MEBIBYTE
    for number in (0, 2, 1, 3):
        pool.free(held[number])
    whole = pool.allocate(20 * MEBIBYTE)
    assert pool.nbytes == 20 * MEBIBYTE and whole.nbytes == 20 * MEBIBYTE


def test_a_rest_of_one_mebibyte_is_not_cut_off_a_large_block():
    pool = CachingPool()
    block = pool.allocate(11 * MEBIBYTE)
    assert block.nbytes == pool.nbytes == 12 * MEBIBYTE
    pool.free(block)
    assert pool.allocate(10 * MEBIBYTE).nbytes == 10 * MEBIBYTE


def test_of_equal_pieces_that_of_the_newest_segment_is_taken():
    """Since CUDA mostly hands out addresses from above, and torch takes the lowest."""
    pool = CachingPool()
    older, newer = pool.allocate(64 * MEBIBYTE), pool.allocate(64 * MEBIBYTE)
    pool.free(older)
    pool.free(newer)
    assert pool.allocate(64 * MEBIBYTE) == newer != older


class NaiveCaching:
    """The same rules over lists of pieces, looked through one by one."""

    def __init__(self):
        self.segments = []  # each: small, list of [bytes, owner]

    def allocate(self, nbytes, owner):
        rounded = max(512, -(-nbytes // 512) * 512)
        small = rounded <= MEBIBYTE
        found = self._best(rounded, small)
        if found is None:
            size = 2 * MEBIBYTE if small else 20 * MEBIBYTE
            if rounded >= 10 * MEBIBYTE:
                size = -(-rounded // (2 * MEBIBYTE)) * 2 * MEBIBYTE
            self.segments.append((small, [[size, None]]))
            found = self._best(rounded, small)
        pieces, index = found
        rest = pieces[index][0] - rounded
        if rest >= 512 and (small or rest > MEBIBYTE):
            pieces[index : index + 1] = [[rounded, owner], [rest, None]]
        else:
            pieces[index][1] = owner

    def _best(self, rounded, small):
        fitting = [
            (piece[0], -number, index)
            for number, (kind, pieces) in enumerate(self.segments)
            for index, piece in enumerate(pieces)
            if kind == small and piece[1] is None and piece[0] >= rounded
        ]
        if not fitting:
            return None
        _, older, index = min(fitting)
        return self.segments[-older][1], index

    def free(self, owner):
        for _, pieces in self.segments:
            for piece in pieces:
                piece[1] = None if piece[1] == owner else piece[1]
            index = 1
            while index < len(pieces):
                if pieces[index - 1][1] is None and pieces[index][1] is None:
                    pieces[index - 1 : index + 1] = [
                        [pieces[index - 1][0] + pieces[index][0], None]
                    ]
                else:
                    index += 1

    @property
    def nbytes(self):
        return sum(piece[0] for _, pieces in self.segments for piece in pieces)


SIZES = st.one_of(
    st.integers(1, 4000),
    st.integers(1, 40).map(lambda n: n * 300 * KIB),
    st.integers(1, 12).map(lambda n: n * 3 * MEBIBYTE),
)


@st.composite
def traces(draw, most=40):
    """Blocks with ticks that are all different, as a trace has them."""
    events = draw(st.permutations(sorted([*range(most)] * 2)))
    ticks = {}
    for tick, number in enumerate(events):
        ticks.setdefault(number, []).append(tick)
    blocks = [
        Lifetime(
            draw(SIZES), birth, draw(st.sampled_from([death, death, None])), draw(st.booleans())
        )
        for birth, death in sorted(ticks.values())
    ]
    return MemoryTrace(tuple(blocks), draw(st.integers(0, 100)))


class NaiveExpandable(NaiveCaching):
    """Two ranges of addresses; the last piece of each may be made larger."""

    def __init__(self):
        self.segments = [(False, []), (True, [])]

    def allocate(self, nbytes, owner):
        rounded = max(512, -(-nbytes // 512) * 512)
        small = rounded <= MEBIBYTE
        pieces = self.segments[small][1]
        fitting = [
            (index == len(pieces) - 1, size, index)
            for index, (size, other) in enumerate(pieces)
            if other is None and size >= rounded
        ]
        if not fitting:
            start = sum(size for size, _ in pieces)
            if pieces and pieces[-1][1] is None:
                start -= pieces.pop()[0]
            page = (2 if small else 20) * MEBIBYTE
            pieces.append([-(-(start + rounded) // page) * page - start, None])
            fitting = [(True, 0, len(pieces) - 1)]
        index = min(fitting)[2]
        rest = pieces[index][0] - rounded
        pieces[index : index + 1] = [[rounded, owner], *([[rest, None]] if rest else [])]


def naive_reserved(captures, kind=NaiveCaching):
    naive = kind()
    for blocks in captures:
        events = [(block.birth, number) for number, block in enumerate(blocks)]
        events += [
            (block.death, ~number) for number, block in enumerate(blocks) if block.death is not None
        ]
        for _, number in sorted(events):
            if number >= 0:
                naive.allocate(blocks[number].nbytes, number)
            else:
                naive.free(~number)
        for number in range(len(blocks)):
            naive.free(number)
    return naive.nbytes


@pytest.mark.parametrize(
    ("model", "naive"), [(CachingPool, NaiveCaching), (ExpandablePool, NaiveExpandable)]
)
@given(captures=st.lists(traces(most=20), min_size=1, max_size=3))
def test_models_of_the_allocator_are_their_naive_twins(model, naive, captures):
    pool = model()
    for trace in captures:
        pool.replay(trace.blocks)
    assert pool.nbytes == naive_reserved([trace.blocks for trace in captures], naive)


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2),
        ([MEBIBYTE] * 3, 4),
        ([MEBIBYTE + 1], 20),
        ([9 * MEBIBYTE] * 3, 40),
        ([11 * MEBIBYTE], 20),
        ([33 * MEBIBYTE + 1, 300], 42),
    ],
)
def test_ranges_of_expandable_segments(sizes, reserved):
    pool = ExpandablePool()
    pool.replay(at_once(*sizes))
    assert pool.nbytes == reserved * MEBIBYTE


def test_the_end_of_a_range_is_taken_last_and_grows():
    pool = ExpandablePool()
    first, second, third = (pool.allocate(size * MEBIBYTE) for size in (14, 20, 20))
    pool.free(first)
    pool.free(third)
    assert pool.nbytes == 60 * MEBIBYTE, "6 MiB at the end, with the last piece 26"
    assert pool.allocate(5 * MEBIBYTE).offset == 0, "not at the end, though that would fit as well"
    assert pool.allocate(30 * MEBIBYTE).offset == 34 * MEBIBYTE and pool.nbytes == 80 * MEBIBYTE
    pool.free(second)


@pytest.mark.parametrize("expandable", [False, True])
def test_the_allocators_settings_choose_the_model(expandable, monkeypatch):
    monkeypatch.setattr(memory_trace, "expandable_segments", lambda: expandable)
    assert memory_trace.pool_model("cuda") is (ExpandablePool if expandable else CachingPool)
    assert memory_trace.pool_model("recorder") is FirstFitPool


@given(traces())
def test_a_pool_holds_what_is_alive_at_once_and_is_whole_again_afterwards(trace):
    ticks = [block.birth for block in trace.blocks]
    most = max(
        sum(
            block.nbytes
            for block in trace.blocks
            if block.birth <= tick and (block.death is None or block.death > tick)
        )
        for tick in ticks
    )
    for pool in (CachingPool(), ExpandablePool()):
        pool.replay(trace.blocks)
        assert pool.nbytes >= most
        whole = sorted(size for size in pool.segments if size)
        assert sorted(pool._starts.values()) == whole, "all free again, in whole segments"


@given(traces())
def test_first_fit_blocks_that_live_at_once_do_not_overlap(trace):
    blocks = [(block.nbytes, block.birth, block.death) for block in trace.blocks]
    places, added = place_blocks([], blocks)
    placed = [
        (place[1], *block) for place, block in zip(places, blocks, strict=True) if place is not None
    ]
    assert all(start + nbytes <= added for start, nbytes, *_ in placed)
    for number, (start, nbytes, birth, death) in enumerate(placed):
        for other, size, born, died in placed[:number]:
            if birth < died and born < death:
                assert start + nbytes <= other or other + size <= start


def trace_of(tokens, layers=3):
    """Forwards that each leave a block, backwards that each use one for a moment."""
    left = [Lifetime(4000 * tokens, layer, 3 * layers - layer) for layer in range(layers)]
    used = [
        Lifetime(
            500_000 + 1000 * tokens, 3 * layers + 2 * layer, 3 * layers + 2 * layer + 1, brief=True
        )
        for layer in range(layers)
    ]
    return MemoryTrace((*left, *used), buffers=tokens)


@pytest.mark.parametrize("new_pool", [CachingPool, FirstFitPool])
def test_the_variants_of_a_slot_take_the_most_of_any_not_the_sum(new_pool):
    measured = {Capacity(tokens, 1): trace_of(tokens) for tokens in (512, 1024, 4096)}
    model = BankModel(measured, new_pool)
    bank = model.predict(measured, 1)
    assert (
        bank.seen
        and bank.slot == bank.pools
        and bank.buffers == 4096
        and bank.total == bank.pools + 4096
    )
    # A little more than the largest alone: blocks of other sizes are cut in other ways.
    assert (
        model(Capacity(4096, 1))
        <= bank.slot
        < 1.05 * model(Capacity(4096, 1))
        < sum(map(model, measured))
    )
    three = model.predict(measured, 3)
    assert three.pools == 3 * three.slot + three.shared and three.shared > 0
    assert three.slot <= bank.slot <= three.slot + three.shared
    apart = model.predict(measured, 1, alone=False)
    assert (apart.slot, apart.shared) == (three.slot, three.shared)


def test_capacities_that_were_not_measured_lie_on_a_line():
    model = BankModel(
        {Capacity(tokens, 1): trace_of(tokens) for tokens in (2048, 8192)}, FirstFitPool
    )
    expected = BankModel({Capacity(4096, 1): trace_of(4096)}, FirstFitPool).predict(
        [Capacity(4096, 1)], 3
    )
    found = model.predict([Capacity(4096, 1)], 3)
    assert not found.seen and model.predict([Capacity(8192, 1)], 3).seen
    for name in ("slot", "shared", "buffers", "total"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-3)


@given(
    st.dictionaries(st.integers(1, 100), st.integers(0, 10**9), min_size=1, max_size=5),
    st.integers(1, 200),
)
def test_a_line_passes_through_its_points_and_stays_between_neighbours(points, at):
    values = sorted(points.items())
    assert all(on_line(values, place) == value for place, value in values)
    below = [value for place, value in values if place <= at][-1:]
    above = [value for place, value in values if place >= at][:1]
    found = on_line(values, at)
    assert found >= 0
    if below and above:
        assert min(below + above) <= found <= max(below + above)
    if len(values) == 1:
        assert found >= values[0][1]


def test_there_is_nothing_to_predict_from_or_for():
    with pytest.raises(ValueError, match="there is none"):
        BankModel({}, CachingPool)
    model = BankModel({Capacity(8, 1): trace_of(8)}, CachingPool)
    with pytest.raises(ValueError, match="0 and 1"):
        model.predict([], 1)
    with pytest.raises(ValueError, match="1 and 0"):
        model.predict([Capacity(8, 1)], 0)
    with pytest.raises(ValueError, match="at least one point"):
        on_line([], 3)
