"""Documents in all the forms users have them, among them the real collator of transformers; and
what is refused."""

import numpy as np
import pytest
import torch

from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.document import Document
from packgraph.packing.pack import pack

CAPACITY = Capacity(16, 6)
DOCUMENTS = [[5, 6, 7], [8], [9, 10]]


def same(first, second):
    return first.lengths == second.lengths and torch.equal(first.data, second.data)


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        np.array,
        torch.tensor,
        lambda ids: np.array(ids, dtype=np.uint16),
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        lambda ids: {"input_ids": ids},
        lambda ids: {"input_ids": torch.tensor(ids), "attention_mask": [1] * len(ids)},
    ],
)
def test_all_kinds_of_sequences_pack_alike(make):
    (wanted,) = pack(DOCUMENTS, [CAPACITY])
    (batch,) = pack([make(ids) for ids in DOCUMENTS], [CAPACITY])
    assert same(batch, wanted)
    assert same(PackedBatch.build([make(ids) for ids in DOCUMENTS], CAPACITY), wanted)


def test_labels_stand_at_their_token_and_may_be_masked():
    row = {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 44]}
    batch = PackedBatch.build([row, [7, 8]], Capacity(8, 2))
    assert batch.labels.tolist() == [-100, 3, 44, -100, 8, -100, -100, -100]
    assert batch.loss_mask.tolist() == [False, True, True, False, True, False, False, False]
    assert batch.num_loss_tokens == 3


@pytest.mark.parametrize("key", ["loss_mask", "completion_mask", "assistant_masks"])
def test_masks_say_which_tokens_may_be_predicted(key):
    batch = PackedBatch.build([{"input_ids": [1, 2, 3, 4], key: [1, 0, 1, 1]}], Capacity(4, 1))
    assert batch.labels.tolist() == [-100, 3, 4, -100]
    mask = torch.tensor([True, True, False, True])
    batch = PackedBatch.build([{"input_ids": [1, 2, 3, 4], key: mask}], Capacity(4, 1))
    assert batch.labels.tolist() == [2, -100, 4, -100]


def test_finished_labels_win_over_masks():
    row = {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, -100], "completion_mask": [0, 0, 1]}
    assert PackedBatch.build([row], Capacity(4, 1)).labels.tolist() == [2, 3, -100, -100]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_flash_attn_kwargs": True},
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
        {"return_seq_idx": True, "return_position_ids": False},
    ],
)
def test_output_of_the_flattening_collator_is_taken(options):
    transformers = pytest.importorskip("transformers")
    try:
        collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)
    except TypeError:
        pytest.skip("this version of transformers has fewer options")
    flat = collator([{"input_ids": ids} for ids in DOCUMENTS])
    assert flat["input_ids"].shape == (1, 6)
    (wanted,) = pack(DOCUMENTS, [CAPACITY])
    for given in (flat, [flat]):
        (batch,) = pack(given, [CAPACITY])
        assert same(batch, wanted)
    assert len(pack([flat, flat], [CAPACITY])[0].lengths) == 6


def test_labels_of_the_collator_are_taken():
    transformers = pytest.importorskip("transformers")
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt")
    flat = collator(
        [
            {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]},
            {"input_ids": [4, 5], "labels": [4, 5]},
        ]
    )
    assert pack(flat, [Capacity(5, 2)])[0].labels.tolist() == [-100, 3, -100, 5, -100]


def test_position_ids_may_start_anywhere():
    flat = {"input_ids": torch.arange(6)[None], "position_ids": torch.tensor([[2, 3, 4, 2, 2, 3]])}
    assert pack(flat, [CAPACITY])[0].lengths == (3, 1, 2)


def test_rows_with_seq_lengths_are_several_documents():
    row = {"input_ids": [5, 6, 7, 8, 9, 10], "seq_lengths": [3, 1, 2]}
    (wanted,) = pack(DOCUMENTS, [CAPACITY])
    assert same(pack([row], [CAPACITY])[0], wanted)
    masked = pack([{**row, "labels": [5, -100, 7, 8, 9, 10]}], [CAPACITY])[0]
    assert masked.labels.tolist()[:6] == [-100, 7, -100, -100, 10, -100]


@pytest.mark.parametrize(
    "bounds", [{"seq_lengths": [3, 0, 1, 2, 0]}, {"cu_seq_lens_q": [0, 3, 3, 4, 6, 6]}]
)
def test_boundaries_without_a_token_between_them_are_no_document(bounds):
    (wanted,) = pack(DOCUMENTS, [CAPACITY])
    assert same(pack([{"input_ids": [5, 6, 7, 8, 9, 10], **bounds}], [CAPACITY])[0], wanted)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (
            torch.ones(2, 3, dtype=torch.int64),
            r"Tensor of shape \[2, 3\]; its rows may end in padding",
        ),
        (np.ones((2, 3), dtype=np.int64), r"ndarray of shape \[2, 3\]"),
        (torch.ones(3, dtype=torch.int64), r"write \[ids\] for a single document"),
    ],
)
def test_one_tensor_is_no_list_of_documents(ids, text):
    with pytest.raises(TypeError, match=text):
        pack(ids, [CAPACITY])


def test_rows_of_a_data_set_are_taken():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {"input_ids": [[5, 6, 7, 8], [9, 10]], "seq_lengths": [[3, 1], [2]]}
    )
    assert same(pack(table, [CAPACITY])[0], pack(DOCUMENTS, [CAPACITY])[0])


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ([], "document 1 is empty"),
        ({"input_ids": []}, "document 1 is empty"),
        ([3, -100], "document 1 has a negative token id"),
        ([0.5], "expected whole numbers"),
        ("text", "expected whole numbers"),
        ([[1, 2], [3]], "document 1: not a flat sequence"),
        ([[1, 2], [3, 4]], r"shape \[n\]"),
        ({"ids": [1]}, "must have `input_ids`; it has"),
        ({"input_ids": [[1, 2], [3, 0]]}, r"got \[2, 2\]; pass padded"),
        ({"input_ids": [[1, 2]]}, "without boundaries"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 values for 2 tokens"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "holds padding"),
        ({"input_ids": [1, 2], "seq_lengths": [1, 2]}, "lengths sum to 3, but it has 2 tokens"),
        (
            {"input_ids": [1, 2], "seq_lengths": [3, -1]},
            r"seq_lengths has a negative length \(-1\)",
        ),
        ({"input_ids": [1, 2], "cu_seq_lens_q": [0, 3, 2]}, r"cu_seq_lens_q falls \(-1\)"),
        (np.array([2**63 + 5], dtype=np.uint64), "9223372036854775813 does not fit in int64"),
        (
            {"input_ids": [1, 2], "labels": [1, -1]},
            "document 1 has the label -1; a label is a token id, or -100",
        ),
        (
            {"input_ids": [1, 2, 3], "labels": [-2, 1, 1], "seq_lengths": [1, 2]},
            "document 1, part 0 has the label -2",
        ),
        (Document(np.array([1, 2]), np.array([1, -1])), "document 1 has the label -1"),
        (Document(np.array([1, -2])), "document 1 has a negative token id"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask has 1 values for 2 tokens"),
        (
            {"input_ids": [1, 2], "attention_mask": [1, 1, 0]},
            "attention_mask has 3 values for 2 tokens",
        ),
        ({"input_ids": [1, 2], "attention_mask": []}, "attention_mask has 0 values for 2 tokens"),
        (
            {"input_ids": [1, 2], "attention_mask": "11"},
            "attention_mask: expected whole numbers or booleans, got <U2",
        ),
        (
            {"input_ids": [1, 2], "attention_mask": [1.0, 1.0]},
            "attention_mask: expected whole numbers or booleans, got fl",
        ),
        (
            {"input_ids": [1, 2], "attention_mask": {"a": 1}},
            "attention_mask: expected whole numbers or booleans",
        ),
        (
            {"input_ids": [1, 2], "attention_mask": [1, 2]},
            "attention_mask has the value 2.*seq_idx",
        ),
        (
            {"input_ids": [1, 2], "seq_lengths": [2**63 - 1, 2**63 - 1, 4]},
            "a length of 9223372036854775807, but it has 2",
        ),
        (7, r"document 1: expected token ids of shape \[n\], got \[\]; one document is a list"),
        ({"input_ids": [1, 2], "position_ids": [0]}, "position_ids has 1 values for 2 tokens"),
        (
            torch.zeros(3, dtype=torch.int64, device="meta"),
            "document 1 is a tensor on meta.*host wait",
        ),
        (
            {"input_ids": torch.zeros(3, dtype=torch.int64, device="meta")},
            "input_ids is a tensor on meta",
        ),
    ],
)
def test_bad_documents_are_named(item, text):
    with pytest.raises(ValueError, match=text):
        pack([[1, 2], item], [CAPACITY])
