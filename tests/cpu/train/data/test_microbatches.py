"""The stream of packs of a run: every document once an epoch, the same packs after a stop, and
clear ends."""

import itertools
import json
from collections import Counter

import pytest
import torch

from packgraph.packing.capacity import Capacity
from packgraph.train.data import (
    DataConfig,
    DataError,
    Microbatches,
    SourceDocument,
    build_tokenizer,
    open_documents,
)
from packgraph.train.data.files import OpenedFiles

CAPACITIES = [Capacity(64, 6), Capacity(128, 12), Capacity(128, 40)]


class Texts(OpenedFiles):
    """A source of texts in memory."""

    def __init__(self, texts):
        super().__init__()
        self.texts = list(texts)
        self._fingerprint = str(hash(tuple(self.texts)))

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return SourceDocument(f"text {index}", text=self.texts[index])


WORDS = Texts(chr(97 + number % 26) * (1 + number * 37 % 200) for number in range(60))


def opened(config, source=WORDS, capacities=CAPACITIES):
    return Microbatches(config, source, build_tokenizer(config), capacities)


def documents_of(packs):
    for pack in packs:
        for start, stop in itertools.pairwise(pack.cu_seqlens.tolist()):
            if stop > start:
                yield tuple(pack.tokens[start:stop].tolist())


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("window", [1, 16, 500])
def test_every_document_comes_once_an_epoch(epochs, window):
    stream = opened(DataConfig(overlong="split", window=window, epochs=epochs))
    found = Counter(documents_of(stream))
    tokenizer = build_tokenizer(DataConfig())
    wanted = Counter()
    for index in range(len(WORDS)):
        (document,) = tokenizer.encode(WORDS[index])
        wanted.update(
            tuple(document.tokens[start : start + 128].tolist())
            for start in range(0, len(document), 128)
        )
    assert found == Counter({document: count * epochs for document, count in wanted.items()})
    assert stream.report.documents == sum(found.values())
    assert next(stream, None) is None


@pytest.mark.parametrize("stop", [0, 1, 7, 25, 61])
@pytest.mark.parametrize("window", [3, 40, 100])
def test_a_resumed_stream_goes_on_as_if_never_stopped(stop, window):
    config = DataConfig(overlong="split", window=window, epochs=3)
    whole = opened(config)
    wanted = list(whole)
    first = opened(config)
    for _ in range(stop):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = opened(config)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    rest = list(resumed)
    assert len(rest) == len(wanted) - stop
    for pack, expected in zip(rest, wanted[stop:]):
        assert pack.capacity == expected.capacity
        assert torch.equal(pack.data, expected.data)
    assert resumed.report == whole.report


def test_orders_differ_between_epochs_and_seeds_and_are_fixed():
    def first_documents(seed, skip=0):
        stream = opened(DataConfig(window=1, overlong="drop", seed=seed))
        return list(itertools.islice(documents_of(stream), skip, skip + 20))

    assert first_documents(0) == first_documents(0)
    assert first_documents(0) != first_documents(1)
    used = sum(len(text) + 2 <= 128 for text in WORDS.texts)
    assert first_documents(0) != first_documents(0, skip=used)


def test_the_stream_is_endless_by_default():
    packs = list(itertools.islice(opened(DataConfig(overlong="split")), 300))
    assert len(packs) == 300
    assert sum(pack.num_documents for pack in packs) > 5 * len(WORDS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 1}, "data.seed was 0, is 1"),
        ({"window": 9}, "data.window was 256, is 9"),
        ({"overlong": "drop"}, "data.overlong was 'split', is 'drop'"),
    ],
)
def test_a_state_of_another_run_is_refused(change, text):
    state = opened(DataConfig(overlong="split")).state_dict()
    with pytest.raises(DataError, match=text):
        opened(DataConfig(**{"overlong": "split", **change})).load_state_dict(state)


def test_a_state_of_other_data_capacities_or_format_is_refused():
    config = DataConfig(overlong="split")
    state = opened(config).state_dict()
    with pytest.raises(DataError, match="documents was 60, is 1; data fingerprint was"):
        opened(config, Texts(["other"])).load_state_dict(state)
    with pytest.raises(DataError, match="capacities was"):
        opened(config, capacities=CAPACITIES[:1]).load_state_dict(state)
    with pytest.raises(DataError, match="version 7"):
        opened(config).load_state_dict({**state, "version": 7})


def test_overlong_documents_are_named():
    with pytest.raises(DataError, match=r"text 0 has 302 tokens.*of 128.*\(data\.overlong\)"):
        next(opened(DataConfig(), Texts(["x" * 300])))


def test_empty_documents_are_left_out_and_counted():
    stream = opened(DataConfig(epochs=1), Texts(["", "a", ""]))
    assert [pack.lengths for pack in stream] == [(3,)]
    assert stream.empty_documents == 2


def chat(*roles):
    return json.dumps({"messages": [{"role": role, "content": "words"} for role in roles]}) + "\n"


def lines(tmp_path, text, **options):
    (tmp_path / "data.jsonl").write_text(text)
    config = DataConfig(source="jsonl", path=str(tmp_path / "data.jsonl"), epochs=1, **options)
    return opened(config, open_documents(config))


def test_documents_without_a_token_to_predict_are_left_out_and_counted(tmp_path):
    masked = json.dumps(
        {"input_ids": [1, 2, 3, 4, 5], "labels": [1, -100, -100, -100, 5], "seq_lengths": [3, 2]}
    )
    stream = lines(
        tmp_path, chat("user") + chat("user", "assistant") + masked + "\n" + '{"input_ids": [7]}\n'
    )
    packs = list(stream)
    assert [pack.num_documents for pack in packs] == [2]
    assert stream.unlabelled_documents == 3 and stream.state_dict()["unlabelled_documents"] == 3
    assert all(pack.num_loss_tokens for pack in packs)


def test_an_answer_is_never_cut_from_its_prompt(tmp_path):
    long = {"role": "user", "content": "words " * 60}
    answer = {"role": "assistant", "content": "no"}
    rows = [
        {"messages": [long, answer]},
        {"prompt": long["content"], "completion": "no"},
        {"input_ids": [5] * 200, "labels": [-100] * 190 + [5] * 10},
        {"text": long["content"]},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    stream = lines(tmp_path, text, overlong="split")
    packs = list(stream)
    assert (stream.report.dropped_documents, stream.report.split_documents) == (3, 1)
    assert sum(pack.num_tokens for pack in packs) == 362
    with pytest.raises(DataError, match=r"dropped as longer than .*never cut from its prompt"):
        next(lines(tmp_path, json.dumps(rows[0]) + "\n", overlong="split"))
    with pytest.raises(DataError, match=r"has \d+ tokens.*\(data.overlong\)"):
        next(lines(tmp_path, json.dumps(rows[0]) + "\n"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            chat("user") + chat("system", "user"),
            r"2 have no token to predict \(.*data\.jsonl:[12]: no assistant turn",
        ),
        (
            '{"input_ids": [1, 2], "labels": [-100, -100]}\n',
            r"data\.jsonl:1: its labels or masks leave nothing",
        ),
        ('{"input_ids": [1]}\n{"text": ""}\n', r"1 are empty, 1 have no token"),
    ],
)
def test_data_without_anything_to_predict_are_refused(tmp_path, text, reason):
    with pytest.raises(DataError, match=reason):
        next(lines(tmp_path, text))


def test_a_position_that_lacks_something_is_refused():
    state = opened(DataConfig(overlong="split")).state_dict()
    for key in state.keys() - {"version"}:
        with pytest.raises(DataError, match=f"damaged: it has no {key}"):
            opened(DataConfig(overlong="split")).load_state_dict(
                {k: v for k, v in state.items() if k != key}
            )


def test_data_that_leave_nothing_end_with_an_error_not_in_a_loop():
    with pytest.raises(
        DataError, match="none of the 2 documents can be used: 1 are empty, 1 were dropped"
    ):
        next(opened(DataConfig(overlong="drop"), Texts(["", "x" * 500])))
    with pytest.raises(DataError, match="no documents"):
        opened(DataConfig(), Texts([]))


IDS = '{"input_ids": [1, 2, 3]}\n'


@pytest.mark.parametrize(
    "row", ['{"input_ids": [1, 999]}', '{"input_ids": [1, 2], "labels": [1, 999]}']
)
def test_words_outside_the_vocabulary_are_named_before_the_first_step(tmp_path, row):
    with pytest.raises(
        DataError, match=r"data\.jsonl:3: token id 999, but the tokenizer has 264 ids"
    ):
        lines(tmp_path, 2 * IDS + row + "\n" + IDS)


def test_bad_documents_are_left_out_counted_and_kept_in_the_state(tmp_path):
    text = (
        IDS
        + '{"input_ids": [999, 1]}\n'
        + "no json\n"
        + '{"input_ids": [1, 2], "labels": [-100, 5000]}\n'
        + IDS
    )
    stream = lines(tmp_path, text, on_bad="skip")
    assert [pack.num_documents for pack in stream] == [2]
    assert stream.bad.count == 3
    assert {error.split(": ")[0].rpartition(":")[2] for error in stream.bad.first} == {
        "2",
        "3",
        "4",
    }
    state = json.loads(json.dumps(stream.state_dict()))
    other = lines(tmp_path, text, on_bad="skip")
    assert other.bad.count == 1
    other.load_state_dict(state)
    assert other.bad == stream.bad
    before = {
        key: value for key, value in state.items() if key != "bad"
    }  # as written before there was this option
    other.load_state_dict(before)
    assert other.bad.count == 1


def test_only_bad_documents_are_an_error(tmp_path):
    with pytest.raises(
        DataError, match=r"none of the 1 documents.*: 1 are bad \(.*data\.jsonl:1: token id 999"
    ):
        next(lines(tmp_path, '{"input_ids": [999, 1]}\n', on_bad="skip"))


def test_a_file_that_was_replaced_ends_the_epoch_with_an_error(tmp_path):
    """All its documents were read before, so that only the check at the end can find it."""
    stream = lines(tmp_path, 3 * IDS, window=1)
    taken = [next(stream) for _ in range(3)]
    (tmp_path / "data.jsonl").write_text(4 * IDS)
    with pytest.raises(
        DataError, match=r"data\.jsonl: changed since.* \(its size was 75 bytes and is 100"
    ):
        next(stream)
    assert len(taken) == 3
