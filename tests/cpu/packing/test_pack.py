"""Packing lists and streams: every document once and whole, the smallest capacity, little padding,
overlong ones."""

import gc
import io
import itertools
import json
import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from packgraph.packing.bins import best_fit_decreasing
from packgraph.packing.capacity import Capacity, CapacitySet, read_capacities
from packgraph.packing.pack import PackReport, pack, pack_stream

pytest.importorskip("hypothesis")
from hypothesis import given, strategies

CAPACITIES = strategies.lists(
    strategies.builds(
        lambda tokens, documents, share: Capacity(tokens, documents, max(1, tokens * share // 4)),
        strategies.integers(1, 40),
        strategies.integers(1, 6),
        strategies.integers(1, 4),
    ),
    min_size=1,
    max_size=4,
)


@strategies.composite
def packings(draw):
    """Capacities, and documents that fit in them; token ids say which document they are from."""
    capacities = draw(CAPACITIES)
    longest = CapacitySet(capacities).longest
    lengths = draw(strategies.lists(strategies.integers(1, longest), max_size=40))
    return capacities, [
        [100 * number + place for place in range(length)] for number, length in enumerate(lengths)
    ]


def unpack(batch):
    """The documents of a batch, from its device tensors alone."""
    bounds = batch.cu_seqlens.tolist()
    pieces = [batch.tokens[start:stop].tolist() for start, stop in itertools.pairwise(bounds)]
    return [piece for piece in pieces if piece]


def check(batches, documents, capacities):
    packed = [document for batch in batches for document in unpack(batch)]
    assert sorted(packed) == sorted(documents)
    for batch in batches:
        inside = unpack(batch)
        assert batch.lengths == tuple(map(len, inside))
        fitting = [
            capacity
            for capacity in capacities
            if capacity.holds(batch.num_tokens, len(inside), max(batch.lengths))
        ]
        assert batch.capacity == min(fitting)


@given(packings())
def test_every_document_lands_whole_in_exactly_one_pack(packing):
    capacities, documents = packing
    batches = pack(documents, capacities)
    check(batches, documents, capacities)
    firsts = [unpack(batch)[0] for batch in batches]
    assert firsts == sorted(firsts)
    assert all(unpack(batch) == sorted(unpack(batch)) for batch in batches)


@given(packings(), strategies.integers(1, 50))
def test_a_stream_packs_every_document_once_with_a_bounded_window(packing, window):
    capacities, documents = packing
    read = 0

    def reading():
        nonlocal read
        for document in documents:
            read += 1
            yield document

    batches = []
    emitted = 0
    for batch in pack_stream(reading(), capacities, window=window):
        assert read - emitted <= window
        emitted += batch.num_documents
        batches.append(batch)
    check(batches, documents, capacities)
    again = pack(documents, capacities, window=window)
    assert all(torch.equal(one.data, two.data) for one, two in zip(batches, again, strict=True))


@given(strategies.lists(strategies.integers(1, 64), min_size=1, max_size=200))
def test_two_packs_are_together_fuller_than_one_capacity(lengths):
    packs = best_fit_decreasing(lengths, CapacitySet([Capacity(64, 200)]))
    totals = sorted(pack.tokens for pack in packs)
    assert len(totals) < 2 or totals[0] + totals[1] > 64
    assert sum(len(pack.members) for pack in packs) == len(lengths)


def test_padding_of_heavy_tailed_documents_is_small():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1.2, 4000).astype(int), 1, 1024)
    documents = [np.zeros(length, dtype=np.int64) for length in lengths]
    for window in (None, 256):
        report = PackReport()
        pack(documents, [Capacity(1024, 64)], window=window, report=report)
        assert report.documents == 4000
        assert report.tokens == lengths.sum()
        assert report.padding_fraction < 0.02


def test_the_longest_waiting_document_is_never_left_behind():
    documents = [[1] * 3] + [[2] * 8] * 50
    batches = list(pack_stream(documents, [Capacity(8, 4)], window=10))
    assert batches[0].lengths == (3,)


def test_a_documents_cap_goes_to_the_next_capacity():
    batches = pack([[1]] * 20, [Capacity(32, 8), Capacity(32, 32)])
    assert [batch.capacity for batch in batches] == [Capacity(32, 32)]


def test_overlong_documents_are_an_error_by_default():
    with pytest.raises(
        ValueError, match=r"document 1 has 9 tokens.*documents of 8; add a.*overlong=\"split\""
    ):
        pack([[1], [1] * 9], [Capacity(8, 2), Capacity(4, 9)])


@pytest.mark.parametrize("window", [None, 3])
def test_overlong_documents_are_split_or_dropped_and_counted(window):
    documents = [list(range(20)), [100, 101]]
    report = PackReport()
    batches = pack(documents, [Capacity(8, 4)], overlong="split", report=report, window=window)
    pieces = sorted(document for batch in batches for document in unpack(batch))
    assert pieces == [list(range(8)), list(range(8, 16)), list(range(16, 20)), [100, 101]]
    assert (report.split_documents, report.dropped_documents, report.documents) == (1, 0, 4)

    report = PackReport()
    batches = pack(documents, [Capacity(8, 4)], overlong="drop", report=report, window=window)
    assert [batch.lengths for batch in batches] == [(2,)]
    assert (report.dropped_documents, report.dropped_tokens, report.packs, report.places) == (
        1,
        20,
        1,
        8,
    )
    assert report.padding_fraction == 0.75


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="overlong must be one of error, split, drop"):
        pack([[1]], [Capacity(8, 4)], overlong="cut")
    with pytest.raises(ValueError, match="window must be at least 1"):
        pack_stream([[1]], [Capacity(8, 4)], window=0)
    with pytest.raises(ValueError, match="at least one Capacity"):
        pack([[1]], [])
    with pytest.raises(TypeError, match=r"packgraph\.Capacity"):
        pack([[1]], [512])
    with pytest.raises(TypeError, match="list of documents"):
        pack("text", [Capacity(8, 4)])


def test_capacities_may_be_one_and_of_any_whole_numbers():
    capacity = Capacity(np.int64(8), np.int32(4))  # type: ignore[arg-type]
    assert capacity == Capacity(8, 4) and {type(capacity.tokens), type(capacity.documents)} == {int}
    assert pack([[1, 2]], capacity)[0].capacity == capacity
    assert read_capacities(capacity) == read_capacities([capacity, capacity]) == (capacity,)
    for wrong in (512, [512], "8x4", None, [(8, 4)]):
        with pytest.raises(TypeError, match=r"packgraph\.Capacity"):
            read_capacities(wrong)
    for number in (4.0, True, "4", 0):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            Capacity(8, number)  # type: ignore[arg-type]


def test_nothing_packs_to_nothing():
    assert pack([], [Capacity(8, 4)]) == []
    assert list(pack_stream(iter([]), [Capacity(8, 4)])) == []


@given(
    strategies.lists(
        strategies.tuples(strategies.integers(1, 12), strategies.integers(1, 5)), max_size=8
    )
)
def test_room_is_the_longest_document_that_may_join(members):
    capacities = CapacitySet([Capacity(20, 3, 8), Capacity(30, 2), Capacity(12, 9)])
    tokens, count = sum(length for length, _ in members), len(members)
    longest = max((length for length, _ in members), default=0)
    fitting = [
        length
        for length in range(1, 31)
        if any(c.holds(tokens + length, count + 1, max(longest, length)) for c in capacities.sorted)
    ]
    assert capacities.room(tokens, count, longest) == max(fitting, default=0)


class Positioned:
    """Documents that keep their own position, as a streamed data set does, and are never read from
    the beginning again."""

    def __init__(self, documents):
        self.documents, self.place = documents, 0

    def __iter__(self):
        while self.place < len(self.documents):
            self.place += 1
            yield self.documents[self.place - 1]
        self.place = 0  # who asks again gets the next epoch

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


SOURCES = {"a list": list, "an iterator": iter, "positioned": Positioned}


def kept(state):
    """A state after a checkpoint, as JSON and as torch keeps it without running code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == json.loads(json.dumps(state)) == state
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("source", SOURCES)
@given(
    strategies.lists(strategies.integers(1, 20), max_size=14),
    strategies.integers(1, 5),
    strategies.sampled_from(["split", "drop"]),
    strategies.sampled_from([1, 2]),
)
def test_a_stream_goes_on_from_every_position(source, lengths, window, overlong, multiple):
    """Rows of several documents and a document with labels among them, split or left out ones."""
    items = [[100 * number + place for place in range(n)] for number, n in enumerate(lengths)]
    rows = [
        {"input_ids": one, "seq_lengths": [len(one) - 1, 1]}
        if number % 3 == 1 and len(one) > 1
        else {"input_ids": one, "labels": one}
        if number % 3 == 2
        else one
        for number, one in enumerate(items)
    ]
    options = {"window": window, "overlong": overlong, "multiple": multiple}

    def stream():
        return pack_stream(
            SOURCES[source](rows), [Capacity(8, 3), Capacity(4, 2)], report=PackReport(), **options
        )

    whole = stream()
    batches = [batch.data for batch in whole]
    for position in range(len(batches) + 1):
        interrupted = stream()
        for batch in batches[:position]:
            assert torch.equal(next(interrupted).data, batch)
        state = kept(interrupted.state_dict())
        again = stream()
        again.load_state_dict(state)
        assert again.state_dict() == state
        rest = [batch.data for batch in again]
        assert len(rest) == len(batches) - position
        assert all(map(torch.equal, rest, batches[position:]))
        assert again.report == whole.report
        assert next(again, None) is None and next(whole, None) is None


def test_a_list_is_not_read_from_its_beginning_again():
    read = []

    class Listed(list):
        def __getitem__(self, place):
            read.append(place)
            return super().__getitem__(place)

        def __iter__(self):
            raise AssertionError("from the beginning")

    documents = [[n] * 4 for n in range(1000)]
    stream = pack_stream(documents, Capacity(8, 2), window=4)
    for _ in range(400):
        next(stream)
    again = pack_stream(Listed(documents), Capacity(8, 2), window=4)
    again.load_state_dict(stream.state_dict())
    assert read == [800, 801]
    assert torch.equal(next(again).data, next(stream).data)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_data_set_of_hugging_face_goes_on(streamed):
    rows = {"input_ids": [[n] * (n % 5 + 1) for n in range(30)]}
    data = pytest.importorskip("datasets").Dataset.from_dict(rows)

    def stream():
        source = data.to_iterable_dataset() if streamed else data
        return pack_stream(source, Capacity(8, 2), window=5)

    wanted = [batch.data for batch in stream()]
    for position in range(len(wanted) + 1):
        first, again = stream(), stream()
        seen = [batch.data for batch in itertools.islice(first, position)]
        again.load_state_dict(kept(first.state_dict()))
        assert ("documents" in first.state_dict()) == streamed
        found = seen + [batch.data for batch in again]
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def test_a_state_of_another_stream_is_refused():
    documents, capacity = [[n] * 4 for n in range(9)], Capacity(8, 2)
    stream = pack_stream(iter(documents), capacity, window=4)
    next(stream)
    state = stream.state_dict()
    for change, text in [
        ({"capacities": Capacity(16, 2)}, "capacities was [[8, 2, 8]], is [[16, 2, 16]]"),
        ({"window": 5}, "window was 4, is 5"),
        ({"overlong": "drop"}, "overlong was 'error', is 'drop'"),
        ({"documents": Positioned(documents)}, "documents.state_dict was False, is True"),
        ({"documents": documents[:2]}, "document 2 is not the one"),
        ({"documents": iter(documents[:2])}, "document 2 is not the one"),
        ({"documents": [*documents[:3], [1]]}, "document 3 is not the one"),
    ]:
        options = {"documents": documents, "capacities": capacity, "window": 4} | change
        with pytest.raises(ValueError, match=re.escape(text)):
            pack_stream(**options).load_state_dict(state)
    for wrong in ({}, [], {"version": 2}, None):
        with pytest.raises(ValueError, match=r"none of packgraph\.pack_stream, version 1"):
            pack_stream(documents, capacity).load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="make another stream"):
        stream.load_state_dict(state)


class OfWorkers(IterableDataset):
    """Documents of each worker, packed in it."""

    def __init__(self, documents):
        self.documents = documents

    def __iter__(self):
        info = get_worker_info()
        share = slice(None) if info is None else slice(info.id, None, info.num_workers)
        return pack_stream(self.documents[share], Capacity(8, 2), window=3)


def test_a_stream_is_a_data_set():
    documents = [[n] * (n % 5 + 1) for n in range(40)]
    wanted = [batch.data for batch in pack_stream(documents, Capacity(8, 2), window=3)]
    for workers in (0, 1):
        stream = pack_stream(documents, Capacity(8, 2), window=3)
        found = [one.data for one in DataLoader(stream, batch_size=None, num_workers=workers)]
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    with pytest.raises(RuntimeError, match="2 workers of a DataLoader would each pack all"):
        [*DataLoader(pack_stream(documents, Capacity(8, 2)), batch_size=None, num_workers=2)]
    gc.collect()  # the error's frames hold the loader and its threads
    both = [*DataLoader(OfWorkers(documents), batch_size=None, num_workers=2)]
    check(both, documents, [Capacity(8, 2)])


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(
    "kind", [OfWorkers, lambda given: pack_stream(given, Capacity(8, 2), window=3)]
)
def test_a_loader_of_torchdata_goes_on(workers, kind):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    documents = [[n] * (n % 5 + 1) for n in range(40)]
    if workers == 2 and kind is not OfWorkers:
        pytest.skip("refused")

    def loader():
        return stateful.StatefulDataLoader(kind(documents), batch_size=None, num_workers=workers)

    wanted = [batch.data for batch in loader()]
    for position in range(0, len(wanted) + 1, 1 if workers == 0 else 5):
        first = loader()
        seen = [*itertools.islice(first, position)]
        again = loader()
        again.load_state_dict(first.state_dict())
        found = [batch.data for batch in [*seen, *again]]
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), position
