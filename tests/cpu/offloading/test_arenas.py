"""Host memory of offloaded groups: pieces that double, and groups that lie in several of them."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offloadkit import DENSE, config, same, train

import packgraph.graphs.copy_streams
from packgraph.graphs.copy_streams import (
    Arenas,
    FreeHost,
    HostMemories,
    HostMemory,
    aligned,
    placed,
)
from packgraph.graphs.recorder.copy_streams import move, plain


@contextlib.contextmanager
def small_pieces(smallest, largest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packgraph.graphs.copy_streams, "SMALLEST_ARENA", smallest)
        patch.setattr(packgraph.graphs.copy_streams, "LARGEST_ARENA", largest)
        yield


def test_arenas_double_and_hand_out_nothing_twice():
    arenas = Arenas(plain)
    spans = [span for _ in range(12) for span in arenas.take(aligned(400_000))]
    starts = sorted((span.data_ptr(), span.data_ptr() + span.numel()) for span in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(starts))
    assert [piece.numel() >> 20 for piece in arenas.pieces] == [1, 2, 4]
    assert sum(span.numel() for span in arenas.take(3 << 22)) == 3 << 22
    assert arenas.pieces[-1].numel() == 16 << 20  # what torch pins anyway


@given(st.lists(st.integers(1, 12_000), min_size=1, max_size=12))
@settings(deadline=None)
def test_only_a_part_of_the_last_piece_is_unused(sizes):
    with small_pieces(512, 4096):
        arenas = Arenas(plain)
        for size in sizes:
            assert sum(span.numel() for span in arenas.take(aligned(size))) == aligned(size)
    assert max(piece.numel() for piece in arenas.pieces) <= 4096
    assert arenas.nbytes() - sum(map(aligned, sizes)) < arenas.pieces[-1].numel()


@given(
    st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=4), min_size=1, max_size=6),
    st.integers(0, 1000),
)
@settings(deadline=None)
def test_buffers_that_grow_are_still_those_that_were_handed_out(groups, more):
    """Of two variants one after another, the second with larger groups, and of the first again: it
    holds beginnings."""
    with small_pieces(512, 2048):
        memories = HostMemories(plain)

        def hosts_for(sizes):
            return [
                HostMemory(memories.number(number, sum(map(aligned, counts))))
                for number, counts in enumerate(sizes)
            ]

        variants = [
            (sizes, hosts_for(sizes))
            for sizes in (groups, [[n + more for n in counts] for counts in groups])
        ]
        for sizes, hosts in [*variants, variants[0]]:
            given = [
                [torch.randint(0, 256, (count,), dtype=torch.uint8) for count in counts]
                for counts in sizes
            ]
            for host, tensors in zip(hosts, given, strict=True):
                move("out", *placed(host, tensors))
            for host, tensors in zip(hosts, given, strict=True):
                found = [torch.empty_like(tensor) for tensor in tensors]
                move("back", *placed(host, found))
                assert all(map(torch.equal, found, tensors))


def test_a_buffer_of_before_does_not_grow_into_what_others_have():
    """Its number means another buffer since memory was let go of."""
    memories = HostMemories(plain)
    free = FreeHost(memories)
    old = free.take(1000)
    memories.let_go()
    new = free.take(4000)
    free.give_back(old)
    larger = free.take(2000)
    assert larger is not old and {span.data_ptr() for span in larger.spans}.isdisjoint(
        span.data_ptr() for span in new.spans
    )
    assert free.take(500) is old
    free.give_back(new)
    grown = free.take(8000)
    assert grown is new and grown.nbytes >= 8000


def test_what_was_taken_before_a_piece_could_not_be_had_is_there_later():
    left = iter([True, True, True, False, True, True])

    def make(nbytes):
        if not next(left):
            raise RuntimeError("no pinned host memory")
        return plain(nbytes)

    with small_pieces(1 << 20, 1 << 20):
        memories = HostMemories(make)
        with pytest.raises(RuntimeError, match="no pinned host memory"):
            memories.number(0, 5 << 20)
        assert (
            sum(span.numel() for span in memories.number(0, 5 << 20))
            == memories.arenas.nbytes()
            == 5 << 20
        )


@pytest.mark.parametrize("granularity", [None, "layer", "chunk"])
def test_groups_that_lie_in_several_pieces_change_no_bit(granularity):
    kept = train(config())[0]
    with small_pieces(512, 1024):
        found, runtime, _ = train(config(), DENSE, granularity=granularity, late=("out", "back"))
    assert max(group.bytes for group in runtime.trace.groups) > 2048
    assert same(found, kept)
