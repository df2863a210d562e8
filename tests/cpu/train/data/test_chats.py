"""Chats by the template of a tokenizer, prompt and completion, ShareGPT: what is learned."""

import json
import sys

import pytest
from transformers import PreTrainedTokenizerFast
from tuningkit import word_tokenizer

from packgraph.train.data import (
    DataConfig,
    DataError,
    build_tokenizer,
    open_documents,
    row_notes,
)
from packgraph.train.data.rows import document_of_row
from packgraph.train.data.source import Message
from packgraph.train.data.tokenizer import BEGIN, END

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}BEFORE{{ m.content }}<|im_end|>AFTER{{ '\\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = CHATML.replace("BEFORE", "{% generation %}").replace("AFTER", "{% endgeneration %}")
PLAIN = CHATML.replace("BEFORE", "").replace("AFTER", "")
# As Qwen3's: the last answer gets an empty thought, and earlier ones have none.
THINKS = CHATML.replace("AFTER", "").replace(
    "BEFORE", "{% if loop.last %}<think></think>{% endif %}"
)
# Writes earlier answers in other words.
CHANGES = CHATML.replace("AFTER", "").replace(
    "BEFORE{{ m.content }}", "{{ m.content if loop.last else m.content[:2] }}"
)
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "three"},
]


def tokenizer(folder, template, **special):
    return build_tokenizer(DataConfig(tokenizer=str(word_tokenizer(folder, template, **special))))


def encoded(tokens, row):
    (document,) = tokens.encode(document_of_row(row, "here:1", "text"))
    return document


def learned(folder, document):
    fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    words = fast.convert_ids_to_tokens([int(one) for one in document.tokens])
    if document.targets is None:
        return "".join(words)
    return "".join(word for word, target in zip(words, document.targets) if target >= 0)


def test_a_marked_template_gives_what_transformers_gives(tmp_path):
    document = encoded(tokenizer(tmp_path, MARKED), {"messages": CHAT})
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=MARKED
    ).apply_chat_template(CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert document.tokens.tolist() == theirs["input_ids"]
    assert (document.targets >= 0).tolist() == [bool(one) for one in theirs["assistant_masks"]]
    assert learned(tmp_path, document) == "two<|im_end|>three<|im_end|>"


def test_without_marks_answers_are_found_by_prefixes(tmp_path):
    document = encoded(tokenizer(tmp_path, PLAIN), {"messages": CHAT})
    marked = encoded(tokenizer(tmp_path / "m", MARKED), {"messages": CHAT})
    assert document.tokens.tolist() == marked.tokens.tolist()
    assert document.targets.tolist() == marked.targets.tolist()


def test_what_stands_before_the_last_answer_alone_is_learned_there(tmp_path):
    document = encoded(tokenizer(tmp_path, THINKS), {"messages": CHAT})
    assert learned(tmp_path, document) == "two<|im_end|><think></think>three<|im_end|>"


def test_a_template_that_rewrites_answers_is_refused(tmp_path):
    tokens = tokenizer(tmp_path, CHANGES)
    assert learned(tmp_path, encoded(tokens, {"messages": CHAT[:3]})) == "two<|im_end|>"
    with pytest.raises(DataError, match=r"here:1: .*writes message 2 otherwise within this chat"):
        encoded(tokens, {"messages": CHAT})


def test_a_template_may_refuse_a_chat_and_cannot_act(tmp_path):
    raising = "{{ raise_exception('no system here') }}"
    with pytest.raises(DataError, match=r"here:1: .*no system here"):
        encoded(tokenizer(tmp_path / "a", raising), {"messages": CHAT})
    acting = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(DataError, match=r"here:1: .*cannot write it"):
        encoded(tokenizer(tmp_path / "b", acting), {"messages": CHAT})


def test_a_template_in_a_file_of_its_own_wins_and_changes_the_fingerprint(tmp_path):
    before = tokenizer(tmp_path, PLAIN).fingerprint
    (tmp_path / "chat_template.jinja").write_text(MARKED.replace("<|im_start|>", "<|im_end|>"))
    now = tokenizer(tmp_path, PLAIN)
    assert now.fingerprint != before
    assert encoded(now, {"messages": CHAT}).tokens[0] == 1


def test_of_prompt_and_completion_the_latter_is_learned(tmp_path):
    tokens = tokenizer(tmp_path, PLAIN)
    document = encoded(tokens, {"prompt": "ab", "completion": "cd"})
    assert learned(tmp_path, document) == "cd<eos>"
    chat = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    assert learned(tmp_path, encoded(tokens, chat)) == "three<|im_end|>"
    (document,) = build_tokenizer(DataConfig()).encode(
        document_of_row({"prompt": "ab", "completion": "cd"}, "here:1", "text")
    )
    assert document.tokens.tolist() == [BEGIN, *b"abcd", END]
    assert document.targets.tolist() == [-100] * 3 + [*b"cd", END]


def test_sharegpt_is_read_as_messages():
    turns = [
        {"from": "system", "value": "be kind"},
        {"from": "human", "value": "one?"},
        {"from": "gpt", "value": "two"},
    ]
    document = document_of_row({"conversations": turns}, "here:1", "text")
    assert document.messages == tuple(Message(**turn) for turn in CHAT[:3])
    same = document_of_row({"conversations": CHAT[:3]}, "here:1", "text")
    assert same.messages == document.messages


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"conversations": []}, "`conversations` must be a list"),
        ({"conversations": [{"from": "bard", "value": "x"}]}, "turn 0 is from 'bard'"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "turn 0 is from"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "content must be a text"),
        ({"conversations": ["x"]}, "must be an object"),
        ({"prompt": "x", "completion": CHAT}, "must both be texts"),
        ({"prompt": 3, "completion": "x"}, "`prompt` must be a text"),
        ({"prompt": "x", "chosen": "y"}, "`rejected`"),
        ({"chosen": CHAT, "rejected": "z"}, "must both be texts"),
        ({"chosen": CHAT, "rejected": CHAT}, "has no answer"),
        ({"chosen": "yes", "rejected": "yes, no"}, "has no answer"),
        ({"prompt": CHAT, "chosen": "y", "rejected": "z"}, "must both be texts"),
        ({"prompt": "x", "chosen": "y", "rejected": 3}, "`rejected` must be a text"),
        ({"prompt": 3, "chosen": "y", "rejected": "z"}, "`prompt` must be a text"),
        ({"chosen": [{"role": "user"}], "rejected": CHAT}, "message 0 must be an object"),
        ({"prompt": "x"}, "found prompt"),
    ],
)
def test_what_is_no_chat_is_refused_by_name(row, text):
    with pytest.raises(DataError, match=f"here:1.*{text}"):
        document_of_row(json.loads(json.dumps(row)), "here:1", "text")


ASKED = [{"role": "user", "content": "one?"}]
YES, NO = ([{"role": "assistant", "content": said}] for said in ("two", "no"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "one? ", "chosen": "two", "rejected": "no"},
        {"chosen": "one? two", "rejected": "one? no"},
        {"prompt": ASKED, "chosen": YES, "rejected": NO},
        {"chosen": ASKED + YES, "rejected": ASKED + NO},
        {"prompt": "one?", "chosen": ASKED + YES, "rejected": ASKED + NO},
    ],
)
def test_of_a_preference_the_chosen_answer_is_learned(row):
    """The forms of TRL: a prompt of its own, or what both answers begin with."""
    tokens = build_tokenizer(DataConfig())
    document = document_of_row(row, "here:1", "text")
    for one, answer in ((document, "two"), (document.rejected, "no")):
        (found,) = tokens.encode(one)
        ids, said = found.tokens.tolist(), [n for n in found.targets.tolist() if n >= 0]
        assert tokens.decode(ids) in (f"one? {answer}", f"one?{answer}")
        assert tokens.decode(said).strip() == answer and said[-1] >= 256
    assert document.rejected.rejected is None


def test_a_space_before_the_answers_is_theirs():
    """As in TRL: tokens of words begin with it."""
    document = document_of_row({"chosen": "so? yes", "rejected": "so? no"}, "here:1", "text")
    assert (document.prompt, document.text, document.rejected.text) == ("so?", " yes", " no")


def test_earlier_answers_of_a_preference_are_its_prompt(tmp_path):
    tokens = tokenizer(tmp_path, MARKED)
    row = {"chosen": CHAT, "rejected": [*CHAT[:-1], {"role": "assistant", "content": "two"}]}
    assert learned(tmp_path, encoded(tokens, row)) == "three<|im_end|>"
    document = document_of_row(row, "here:1", "text").rejected
    assert learned(tmp_path, tokens.encode(document)[0]) == "two<|im_end|>"


def test_a_run_on_preferences_says_so(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    (note,) = row_notes(open_documents(DataConfig(source="jsonl", path=str(path))))
    assert "rows.jsonl:1: a preference. Training is on the chosen answer alone" in note
    path.write_text('{"prompt": "a", "completion": "b"}\n')
    assert row_notes(open_documents(DataConfig(source="jsonl", path=str(path)))) == []


def test_a_template_needs_transformers_only_where_there_are_chats(tmp_path, monkeypatch):
    tokens = tokenizer(tmp_path, PLAIN)
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_template_utils", None)
    assert learned(tmp_path, encoded(tokens, {"text": "ab"})) == "ab<eos>"
    with pytest.raises(DataError, match="needs the packages `transformers`"):
        encoded(tokens, {"messages": CHAT})
