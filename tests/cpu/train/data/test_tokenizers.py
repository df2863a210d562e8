"""Tokenizers: bytes and tokenizer.json, text and chats, tokenized rows."""

import json

import pytest

from packgraph.train.data import DataConfig, DataError, SourceDocument, build_tokenizer
from packgraph.train.data.source import Message
from packgraph.train.data.tokenizer import BEGIN, END, FIRST_ROLE, TURN_END

CHAT = (
    Message("user", "add one"),
    Message("assistant", "two"),
    Message("user", "and?"),
    Message("assistant", "three"),
)
SYSTEM, USER, ASSISTANT = FIRST_ROLE, FIRST_ROLE + 1, FIRST_ROLE + 2


def text(words):
    return SourceDocument("here:1", text=words)


def write_tokenizer(folder, specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
    """A small byte-level tokenizer.json, made on the spot."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(specials),
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["user assistant one two three\n\nadd and"] * 5, trainer)
    tokenizer.enable_truncation(4)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path, tokenizer


def test_bytes_are_tokens_between_begin_and_end():
    tokenizer = build_tokenizer(DataConfig())
    (document,) = tokenizer.encode(text("aü\n"))
    assert document.tokens.tolist() == [BEGIN, *"aü\n".encode(), END]
    assert document.targets is None
    assert tokenizer.decode(document.tokens.tolist()) == "aü\n"
    assert tokenizer.vocab_size == 264
    assert tokenizer.encode(text("")) == []


def test_in_a_chat_of_bytes_only_the_assistant_is_learned():
    (document,) = build_tokenizer(DataConfig()).encode(SourceDocument("here:1", messages=CHAT[:2]))
    asked, said = [*b"add one", TURN_END], [*b"two", TURN_END]
    assert document.tokens.tolist() == [BEGIN, USER, *asked, ASSISTANT, *said]
    assert document.targets.tolist() == [-100] * (3 + len(asked)) + said


def test_tokenized_rows_pass_through_and_are_checked():
    tokenizer = build_tokenizer(DataConfig())
    row = {"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}
    assert [
        document.tokens.tolist() for document in tokenizer.encode(SourceDocument("f:1", row=row))
    ] == [[1, 2], [3]]
    with pytest.raises(DataError, match="f:1: token id 999, but the tokenizer has 264 ids"):
        tokenizer.encode(SourceDocument("f:1", row={"input_ids": [999]}))
    with pytest.raises(DataError, match=r"f:1.*lengths sum to 9"):
        tokenizer.encode(SourceDocument("f:1", row={"input_ids": [1], "seq_lengths": [9]}))


def test_a_tokenizer_file_ends_texts_and_does_not_cut_them(tmp_path):
    path, original = write_tokenizer(tmp_path)
    tokenizer = build_tokenizer(DataConfig(tokenizer=str(path)))
    (document,) = tokenizer.encode(text("one two three add and user"))
    original.no_truncation()
    wanted = original.encode("one two three add and user").ids
    assert len(wanted) > 4
    assert document.tokens.tolist() == [*wanted, original.token_to_id("<|endoftext|>")]
    assert tokenizer.vocab_size == original.get_vocab_size()
    assert build_tokenizer(DataConfig(tokenizer=str(tmp_path))).fingerprint == tokenizer.fingerprint


def test_the_end_token_is_the_one_of_the_config_beside(tmp_path):
    path, original = write_tokenizer(tmp_path)
    for named in ("<|im_end|>", {"content": "<|im_end|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        (document,) = build_tokenizer(DataConfig(tokenizer=str(path))).encode(text("one"))
        assert document.tokens[-1] == original.token_to_id("<|im_end|>")
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: holds a list"):
        build_tokenizer(DataConfig(tokenizer=str(path)))


def test_in_a_chat_of_a_tokenizer_file_only_the_assistant_is_learned(tmp_path):
    path, original = write_tokenizer(tmp_path)
    tokenizer = build_tokenizer(DataConfig(tokenizer=str(path)))
    (document,) = tokenizer.encode(SourceDocument("here:1", messages=CHAT))
    decoded = original.decode(document.tokens.tolist(), skip_special_tokens=False)
    assert decoded == "".join(
        f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in CHAT
    )
    learned = document.targets[document.targets >= 0].tolist()
    assert original.decode(learned, skip_special_tokens=False) == "two<|im_end|>three<|im_end|>"


def test_a_chat_needs_the_tokens_of_chatml(tmp_path):
    path, _ = write_tokenizer(tmp_path, specials=("</s>",))
    tokenizer = build_tokenizer(DataConfig(tokenizer=str(path)))
    with pytest.raises(DataError, match=r"here:1: chat messages.*no token <\|im_start\|>"):
        tokenizer.encode(SourceDocument("here:1", messages=CHAT))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"{", "not valid JSON"),
        (b"{}", "it has no `model`"),
        (b"[]", "holds a list"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b'{"model": {"type": "BPE"}}', r"not a tokenizer.json that `tokenizers` .* reads"),
    ],
)
def test_a_foreign_tokenizer_file_is_refused_by_name(tmp_path, content, wanted):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"tokenizer\.json: .*{wanted}"):
        build_tokenizer(DataConfig(tokenizer=str(path)))


def test_a_missing_tokenizer_file_is_named():
    with pytest.raises(DataError, match=r"no such file; data\.tokenizer must be `bytes` or"):
        build_tokenizer(DataConfig(tokenizer="nowhere.json"))
