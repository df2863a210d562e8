"""Chats by the template of a tokenizer, prompt and completion, ShareGPT: what is learned."""

import json
import sys

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast
from tuningkit import byte_level_tokenizer, word_tokenizer

from packgraph.train.data import (
    DataConfig,
    DataError,
    build_tokenizer,
    open_documents,
    row_notes,
    tokenizer_notes,
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


# As GLM-4's: the mark of who speaks next ends an answer.
NEXT = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}<|turn|>{% else %}<|stop|>{% endif %}"
    "{{ '\n' }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|stop|>{{ '\n' }}{% endif %}"
)
TURNS = [CHAT[1], CHAT[2], CHAT[1], CHAT[4]]


def byte_level(folder, template, **config):
    return build_tokenizer(
        DataConfig(tokenizer=str(byte_level_tokenizer(folder, template, **config)))
    )


def texts(folder, document):
    """All of a document as text, and what of it is learned."""
    fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    targets = document.tokens if document.targets is None else document.targets
    return fast.decode(document.tokens), fast.decode(targets[targets >= 0])


def test_the_mark_of_the_next_speaker_is_learned_where_it_ends_an_answer(tmp_path):
    tokens = byte_level(tmp_path, NEXT)
    document = encoded(tokens, {"messages": TURNS})
    text, said = texts(tmp_path, document)
    assert text == "<s><|turn|>\none?\n<|stop|>\ntwo\n<|turn|>\none?\n<|stop|>\nthree\n<|turn|>"
    assert said == "two\n<|turn|>three\n<|turn|>"
    assert tokens.ends == (2, 3)  # an export stops at it
    # A template that writes an end of its own gets no other.
    own = byte_level(tmp_path / "own", NEXT.replace("{{ m.content }}\n", "{{ m.content }}</s>\n"))
    assert texts(tmp_path, encoded(own, {"messages": TURNS}))[1] == "two</s>three</s>"


def test_a_call_at_the_end_is_ended_by_the_mark_of_its_tool(tmp_path):
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}\n{% endfor %}{% endfor %}"
    template = NEXT.replace("{% endfor %}", calls, 1).replace(
        "<|turn|>{% else %}", "<|turn|>{% elif m.role == 'tool' %}<pad>{% else %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]}
    said = []
    for chat in ([CHAT[1], call], [CHAT[1], call, {"role": "tool", "content": "21"}, CHAT[2]]):
        document = encoded(byte_level(tmp_path, template), {"messages": chat})
        said.append(texts(tmp_path, document)[1])
    assert said == ["\nlook\n<pad>", "\nlook\n<pad>two\n<|turn|>"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_says_when_nothing_teaches_the_model_to_stop(tmp_path, ends):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}END{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    tokens = byte_level(tmp_path, template.replace("END", "</s>" if ends else "\n"))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    notes = tokenizer_notes(open_documents(DataConfig(source="jsonl", path=str(path))), tokens)
    assert [f"{path}:1: no end of turn" in note for note in notes] == [] if ends else [True]


def test_the_clock_of_a_template_stands_still(tmp_path):
    dated = "Today: {{ strftime_now('%d %B %Y') }}\n" + PLAIN
    tokens = byte_level(tmp_path, dated.replace("im_start", "turn").replace("im_end", "stop"))
    text, _ = texts(tmp_path, encoded(tokens, {"messages": CHAT}))
    assert text.startswith("Today: 26 July 2024\n<|turn|>system")


@pytest.mark.parametrize(
    "draws",
    [
        "{{ [1, 2] | random }}",
        "{{ lipsum() }}",
        "{% filter random %}ab{% endfilter %}",
        "{{ [[1, 2]] | map('ran' ~ 'dom') | list }}",
        "{{ joiner() }}",
        "{{ messages | map('upper') }}",
    ],
)
def test_a_template_that_writes_something_else_each_time_is_refused(tmp_path, draws):
    with pytest.raises(DataError, match=r"here:1: .*something else each time"):
        encoded(byte_level(tmp_path, draws + PLAIN), {"messages": CHAT})
    unused = byte_level(tmp_path / "unused", "{% if pictures %}" + draws + "{% endif %}" + PLAIN)
    encoded(unused, {"messages": CHAT})


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1/0 }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ 'x'.encode('nope') }}",
        "{{ '\\ud800' }}",
        "{{ messages[9].content.no.such }}",
    ],
)
def test_a_template_that_fails_names_the_row(tmp_path, template):
    with pytest.raises(DataError, match=r"^here:1: "):
        encoded(byte_level(tmp_path, template), {"messages": CHAT})


def test_a_template_that_loops_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("packgraph.train.data.chat_template.LONGEST", 0.1)
    loop = (
        "{% set r = range(9999) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"takes more than .*does it loop\? Repair it"):
        encoded(byte_level(tmp_path, loop), {"messages": CHAT})
    assert sys.gettrace() is None or "template" not in repr(sys.gettrace())


def test_a_template_that_drops_a_message_is_refused(tmp_path):
    drops = (
        "{% for m in messages if m.role != 'system' %}<|turn|>{{ m.content }}<|stop|>{% endfor %}"
    )
    with pytest.raises(DataError, match=r"here:1: .*leaves out message 0, of the system"):
        encoded(byte_level(tmp_path, drops), {"messages": CHAT})


def test_tools_choose_the_template_that_is_named_so(tmp_path):
    named = [
        {"name": "default", "template": PLAIN},
        {"name": "tool_use", "template": "{{ tools | tojson }}" + PLAIN},
    ]
    tokens = byte_level(tmp_path, named)
    tool = {"type": "function", "function": {"name": "look"}}
    text, _ = texts(tmp_path, encoded(tokens, {"messages": CHAT, "tools": [tool]}))
    assert text.startswith('[{"type": "function"')
    assert texts(tmp_path, encoded(tokens, {"messages": CHAT}))[0].startswith("<|im_start|>")


def test_a_field_that_another_template_or_a_comment_names_is_not_read(tmp_path):
    named = [
        {"name": "default", "template": "{# thinking is left out #}" + PLAIN},
        {"name": "tool_use", "template": "{{ tools | tojson }}{{ messages[0].mood }}" + PLAIN},
    ]
    tokens = byte_level(tmp_path, named)
    for field in ("mood", "thinking"):
        with pytest.raises(DataError, match=f"`{field}`, which .* does not read"):
            encoded(tokens, {"messages": [CHAT[1], {**CHAT[2], field: "x"}, CHAT[1], CHAT[4]]})


def test_thoughts_of_earlier_answers_may_be_left_out(tmp_path):
    """As Qwen3's template does: what is learned are the words and the end of the turn."""
    thinks = (
        "{% for m in messages %}<|turn|>{{ m.role }}: {% if m.reasoning_content and loop.last %}"
        "[{{ m.reasoning_content }}]{% endif %}{{ m.content }}<|stop|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
    )
    chat = [
        CHAT[1],
        {**CHAT[2], "reasoning_content": "one and one, so two"},
        CHAT[1],
        {**CHAT[4], "reasoning": "now three"},
    ]
    tokens = byte_level(tmp_path, thinks)
    _, said = texts(tmp_path, encoded(tokens, {"messages": chat}))
    assert said == "two<|stop|>[now three]three<|stop|>"


def test_ends_that_a_text_has_are_not_written_twice(tmp_path):
    folder = byte_level_tokenizer(tmp_path, None)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made.save(str(folder / "tokenizer.json"))
    tokens = build_tokenizer(DataConfig(tokenizer=str(folder)))
    for text in ("warm", "<s>warm", "warm</s>", "<s>warm</s>"):
        assert texts(tmp_path, encoded(tokens, {"text": text}))[0] == "<s>warm</s>"
    both = encoded(tokens, {"prompt": "<s>how?", "completion": " so</s>"})
    assert texts(tmp_path, both) == ("<s>how? so</s>", " so</s>")


def test_the_end_token_of_special_tokens_map_counts_and_is_in_the_fingerprint(tmp_path):
    folder, found = byte_level_tokenizer(tmp_path, None), []
    (folder / "tokenizer_config.json").write_text("{}")
    for end in ("</s>", "<|stop|>"):
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": end}))
        tokens = build_tokenizer(DataConfig(tokenizer=str(folder)))
        found.append(tokens.fingerprint)
        assert texts(tmp_path, encoded(tokens, {"text": "warm"}))[0] == f"warm{end}"
    assert found[0] != found[1]


def test_dropout_of_a_tokenizer_is_switched_off_and_told(tmp_path):
    folder = byte_level_tokenizer(tmp_path, None)
    made = json.loads((folder / "tokenizer.json").read_text())
    made["model"]["dropout"] = 0.5
    made["model"]["vocab"]["ab"] = len(made["model"]["vocab"])
    made["model"]["merges"] = [["a", "b"]]
    (folder / "tokenizer.json").write_text(json.dumps(made))
    tokens = build_tokenizer(DataConfig(tokenizer=str(folder)))
    found = {tuple(encoded(tokens, {"text": "ab" * 20}).tokens) for _ in range(5)}
    assert len(found) == 1
    (tmp_path / "x.jsonl").write_text('{"text": "ab"}\n')
    source = open_documents(DataConfig(source="jsonl", path=str(tmp_path / "x.jsonl")))
    assert "dropout is switched off" in tokenizer_notes(source, tokens)[0]


def test_a_template_that_recurses_is_refused_at_any_depth_of_the_stack(tmp_path):
    """The limit may be met in the template, in Jinja, or in the trace of a line."""
    tokens = byte_level(tmp_path, "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}")

    def deeper(levels):
        if levels:
            deeper(levels - 1)
        else:
            encoded(tokens, {"messages": CHAT})

    for levels in range(12):
        with pytest.raises(DataError, match="nested too deeply"):
            deeper(levels)
