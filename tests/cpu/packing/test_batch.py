"""One microbatch: its tensors against a twin written one token at a time, its life as a pytree, its
device moves."""

import copy
import pickle

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from packgraph.packing.batch import PackedBatch, layout_of
from packgraph.packing.capacity import Capacity

CAPACITY = Capacity(12, 4)
FIELDS = (
    "tokens",
    "labels",
    "position_ids",
    "document_ids",
    "cu_seqlens",
    "loss_mask",
    "padding_mask",
)


def naive(documents, capacity):
    """The specification: every tensor as a list, document by document, token by token."""
    wanted = {name: [] for name in FIELDS} | {"cu_seqlens": [0]}
    for number, document in enumerate(documents):
        for place, token in enumerate(document):
            label = document[place + 1] if place + 1 < len(document) else -100
            wanted["tokens"].append(token)
            wanted["labels"].append(label)
            wanted["position_ids"].append(place)
            wanted["document_ids"].append(number)
            wanted["loss_mask"].append(label != -100)
            wanted["padding_mask"].append(False)
        wanted["cu_seqlens"].append(len(wanted["tokens"]))
    tail = {
        "tokens": 0,
        "labels": -100,
        "position_ids": 0,
        "document_ids": capacity.documents,
        "loss_mask": False,
        "padding_mask": True,
    }
    for name, value in tail.items():
        wanted[name] += [value] * (capacity.tokens - len(wanted[name]))
    wanted["cu_seqlens"] += [wanted["cu_seqlens"][-1]] * (
        capacity.documents + 1 - len(wanted["cu_seqlens"])
    )
    return wanted


@pytest.mark.parametrize(
    "documents",
    [
        [[5, 6, 7], [8, 9], [1, 2, 3, 4]],
        [[3]],
        [[1], [2], [3], [4]],
        [list(range(12))],
        [[7] * 11, [8]],
    ],
)
def test_build_equals_the_naive_twin(documents):
    batch = PackedBatch.build(documents, CAPACITY)
    for name, values in naive(documents, CAPACITY).items():
        assert getattr(batch, name).tolist() == values, name
    assert batch.lengths == tuple(map(len, documents))
    assert batch.num_tokens == sum(batch.lengths)
    assert batch.num_documents == len(documents)
    assert batch.num_loss_tokens == int(batch.loss_mask.sum())


def test_tensors_have_the_promised_types_and_share_one_buffer():
    batch = PackedBatch.build([[1, 2]], CAPACITY)
    kinds = {name: getattr(batch, name).dtype for name in FIELDS}
    assert [kinds[name] for name in FIELDS] == [torch.int64] * 3 + [torch.int32] * 2 + [
        torch.bool
    ] * 2
    start = batch.data.data_ptr()
    for name in FIELDS:
        place = layout_of(CAPACITY).fields[name]
        assert getattr(batch, name).data_ptr() == start + place.start
        assert place.start % 8 == 0
    assert batch.data.is_contiguous()
    assert batch.data.dtype == torch.uint8


def test_a_pack_is_made_on_the_host_whatever_the_default_device_is():
    made = PackedBatch.build([[1, 2, 3]], Capacity(8, 2))
    with torch.device("meta"):
        assert torch.equal(PackedBatch.build([[1, 2, 3]], Capacity(8, 2)).data, made.data)


@pytest.mark.parametrize(
    ("documents", "numbers"),
    [
        ([[1] * 13], "1 documents of 13 tokens"),
        ([[1]] * 5, "5 documents of 5 tokens"),
        ([], "at least one"),
    ],
)
def test_build_refuses_what_does_not_fit(documents, numbers):
    with pytest.raises(ValueError, match=numbers):
        PackedBatch.build(documents, CAPACITY)


def test_build_respects_the_longest_document():
    with pytest.raises(ValueError, match="the longest of 4"):
        PackedBatch.build([[1] * 4], Capacity(12, 4, longest=3))


def test_pytree_has_one_leaf_and_keeps_lengths():
    batch = PackedBatch.build([[1, 2], [3]], CAPACITY)
    leaves, spec = tree_flatten({"batch": batch, "x": torch.ones(1)})
    assert leaves[0] is batch.data
    assert len(leaves) == 2
    again = tree_unflatten(leaves, spec)["batch"]
    assert again.lengths == batch.lengths
    assert again.num_loss_tokens == batch.num_loss_tokens
    cloned = tree_map(torch.clone, batch)
    assert cloned.lengths == batch.lengths
    assert torch.equal(cloned.labels, batch.labels)
    assert cloned.data.data_ptr() != batch.data.data_ptr()


def test_structure_does_not_depend_on_lengths_but_on_capacity():
    first = tree_flatten(PackedBatch.build([[1, 2], [3]], CAPACITY))[1]
    second = tree_flatten(PackedBatch.build([[4]], CAPACITY).without_lengths())[1]
    other = tree_flatten(PackedBatch.build([[4]], Capacity(12, 5)))[1]
    assert first == second
    assert hash(first.context) == hash(second.context)
    assert first != other


def test_without_lengths_says_why_they_are_missing():
    batch = PackedBatch.build([[1, 2]], CAPACITY).without_lengths()
    for name in ("lengths", "num_tokens", "num_documents", "num_loss_tokens"):
        with pytest.raises(RuntimeError, match="a captured graph would bake it"):
            getattr(batch, name)
    assert "PackedBatch" in repr(batch)


def test_batch_is_immutable_and_can_be_copied_and_sent():
    batch = PackedBatch.build([[1, 2]], CAPACITY)
    with pytest.raises(AttributeError):
        batch.capacity = Capacity(1, 1)
    for again in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert torch.equal(again.data, batch.data)
        assert again.lengths == (2,)


@pytest.mark.parametrize("arguments", [(0, 1), (8, 0), (8, 2, 0), (8, 2, 9), (8.0, 2), (True, 2)])
def test_capacity_refuses_senseless_numbers(arguments):
    with pytest.raises(ValueError, match="Capacity"):
        Capacity(*arguments)


def test_words_outside_a_vocabulary_are_refused_by_what_the_host_knows():
    batch = PackedBatch.build(
        [[1, 2, 7], {"input_ids": [3, 4], "labels": [-100, 9]}], Capacity(8, 2)
    )
    batch.check_words(10)
    with pytest.raises(
        ValueError, match="token id or label 9, but the model has a vocabulary of 9"
    ):
        batch.check_words(9)
    batch.without_lengths().check_words(1)
    PackedBatch.empty(Capacity(8, 2)).check_words(1)


def test_equal_documents_give_equal_bytes():
    first, second = (PackedBatch.build([[1, 2, 3], [4]], Capacity(7, 3)) for _ in range(2))
    assert torch.equal(first.data, second.data)
