"""Rows of public formats: the tokens and labels of transformers, or one line that refuses.

The table in docs/guides/fine-tuning.md is made of FORMATS.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from tuningkit import byte_level_tokenizer

from packgraph.train.data import DataConfig, DataError, build_tokenizer, open_documents, row_notes
from packgraph.train.data.rows import document_of_row

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "fine-tuning.md"
# Tools, thoughts and calls, as Qwen3's and Llama's templates write them; answers are marked.
TEMPLATE = (
    "{% if tools %}<|turn|>tools: {{ tools | tojson }}<|stop|>{% endif %}"
    "{% if calm %}<|turn|>calm<|stop|>{% endif %}"
    "{% for m in messages %}<|turn|>{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
    "{% if m.thinking %}[{{ m.thinking }}] {% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function | tojson }}{% endfor %}"
    "<|stop|>{% endgeneration %}{% else %}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "<|stop|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
ASKS = {"role": "user", "content": "how warm?"}
SAYS = {"role": "assistant", "content": "21 degrees"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "roof"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
FOUND = {"role": "tool", "name": "look", "content": "21"}


def part(text):
    return [{"type": "text", "text": text}]


# Format, row, and the chat as apply_chat_template gets it with its arguments and the answers that
# are learned; a text and what of it is learned; or words of the refusal.
FORMATS = [
    (
        "OpenAI `messages`: `tools`, `tool_calls`, `weight`",
        {"messages": [ASKS, {**SAYS, "weight": 0}, ASKS, CALLS, FOUND, SAYS], "tools": [TOOL]},
        ([ASKS, SAYS, ASKS, CALLS, FOUND, SAYS], {"tools": [TOOL]}, (1, 2)),
    ),
    (
        "ShareGPT `conversations`, with `system`",
        {
            "conversations": [
                {"from": "human", "value": "how warm?"},
                {"from": "gpt", "value": "21 degrees"},
            ],
            "system": "be brief",
        },
        ([{"role": "system", "content": "be brief"}, ASKS, SAYS], {}, (0,)),
    ),
    (
        "ShareGPT with `function_call` turns",
        {"conversations": [{"from": "function_call", "value": "{}"}]},
        "turn 0 is from 'function_call'",
    ),
    (
        "Alpaca: `instruction`, `input`, `output`",
        {"instruction": "how warm?", "input": "", "output": "21 degrees"},
        "found input, instruction, output",
    ),
    (
        "`prompt` and `completion` as texts",
        {"prompt": "how warm?", "completion": " 21 degrees"},
        ("how warm? 21 degrees</s>", " 21 degrees</s>"),
    ),
    (
        "`prompt` and `completion` as messages",
        {"prompt": [ASKS, SAYS, ASKS], "completion": [SAYS]},
        ([ASKS, SAYS, ASKS, SAYS], {}, (1,)),
    ),
    (
        "Preferences: `chosen`, `rejected`, beside `messages`",
        {
            "prompt": "how warm?",
            "chosen": [ASKS, SAYS],
            "rejected": [ASKS, {**SAYS, "content": "cold"}],
            "messages": [ASKS, SAYS],
        },
        ([ASKS, SAYS], {}, (0,)),
    ),
    (
        "KTO: `prompt`, `completion`, `label` true",
        {"prompt": [ASKS], "completion": [SAYS], "label": True},
        ([ASKS, SAYS], {}, (0,)),
    ),
    (
        "KTO, `label` false",
        {"prompt": [ASKS], "completion": [SAYS], "label": False},
        "an answer that is not wanted",
    ),
    (
        "harmony (gpt-oss): `developer`, `thinking`",
        {"messages": [{"role": "developer", "content": "x"}, ASKS, {**SAYS, "thinking": "noon"}]},
        ([{"role": "developer", "content": "x"}, ASKS, {**SAYS, "thinking": "noon"}], {}, (0,)),
    ),
    (
        "Qwen3: `reasoning_content`, `chat_template_kwargs`",
        {
            "messages": [ASKS, {**SAYS, "reasoning_content": "noon"}],
            "chat_template_kwargs": {"calm": True, "other": None},
        },
        ([ASKS, {**SAYS, "thinking": "noon"}], {"calm": True}, (0,)),
    ),
    (
        "Llama 3: `tools` as JSON, `content` null, `ipython`",
        {
            "messages": [ASKS, {**CALLS, "content": None}, {"role": "ipython", "content": "21"}],
            "tools": json.dumps([TOOL]),
        },
        (
            [ASKS, {**CALLS, "content": None}, {"role": "ipython", "content": "21"}],
            {"tools": [TOOL]},
            (0,),
        ),
    ),
    (
        "Turns with `train`, `trainable`, `loss`, `loss_mask`, `masked`",
        {
            "messages": [
                ASKS,
                {**SAYS, "train": False},
                {**ASKS, "masked": True},
                {**SAYS, "loss_mask": 1, "trainable": True},
            ]
        },
        ([ASKS, SAYS, ASKS, SAYS], {}, (1,)),
    ),
    (
        "`content` as a list of texts",
        {"messages": [{**ASKS, "content": part("how warm?")}, {**SAYS, "content": part("21")}]},
        ([{**ASKS, "content": part("how warm?")}, {**SAYS, "content": part("21")}], {}, (0,)),
    ),
    (
        "`content` with images or sound",
        {"messages": [{**ASKS, "content": [{"type": "image", "url": "x"}]}, SAYS]},
        "a part 'image'; only texts",
    ),
    (
        "`text`, beside columns that are told and not read",
        {"text": "21 degrees", "id": 7},
        ("21 degrees</s>", "21 degrees</s>"),
    ),
]


def encoded(folder, row):
    """A document as text, what of it is learned, and the tokenizer of transformers."""
    (document,) = build_tokenizer(DataConfig(tokenizer=str(folder))).encode(
        document_of_row(json.loads(json.dumps(row)), "here:1", "text")
    )
    targets = document.tokens if document.targets is None else document.targets
    return document.tokens.tolist(), targets.tolist()


@pytest.mark.parametrize(("name", "row", "wanted"), FORMATS, ids=[one[0] for one in FORMATS])
def test_a_public_format_is_read_as_transformers_does_or_refused(tmp_path, name, row, wanted):
    folder = byte_level_tokenizer(tmp_path, TEMPLATE)
    theirs = AutoTokenizer.from_pretrained(folder)
    if isinstance(wanted, str):
        with pytest.raises(DataError, match=f"^here:1: .*{wanted}"):
            encoded(folder, row)
        return
    tokens, targets = encoded(folder, row)
    learned = [target for target in targets if target >= 0]
    if len(wanted) == 2:
        assert (theirs.decode(tokens), theirs.decode(learned)) == wanted
        return
    chat, arguments, answers = wanted
    found = theirs.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **arguments
    )
    assert tokens == found["input_ids"]
    spans, before = [], 0
    for place, said in enumerate(found["assistant_masks"]):
        if said and not before:
            spans.append([])
        if said:
            spans[-1].append(place)
        before = said
    places = [place for answer in answers for place in spans[answer]]
    assert [place for place, target in enumerate(targets) if target >= 0] == places


def test_the_guide_has_the_table_of_these_formats():
    lines = ["| format | |", "|---|---|"]
    for name, _, wanted in FORMATS:
        lines.append(f"| {name} | {'refused' if isinstance(wanted, str) else 'read'} |")
    assert "\n".join(lines) in GUIDE.read_text()


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [ASKS, {**SAYS, "weight": 0.5}]}, "`weight`: 0.5; a message is learned or"),
        ({"messages": [ASKS, {**SAYS, "train": "no"}]}, "`train`: 'no'"),
        ({"messages": [ASKS, {**SAYS, "weight": 1, "train": False}]}, "`weight` and `train` disag"),
        ({"messages": [{**ASKS, "train": True}, SAYS]}, "of the user and is to be learned"),
        ({"messages": [ASKS, {**SAYS, "loss_weight": 0}]}, "`loss_weight`, which .* does not read"),
        ({"messages": [ASKS, {**SAYS, "train_detail": []}]}, "`train_detail`, which"),
        ({"messages": [ASKS, SAYS], "chat_template_kwargs": {"loud": 1}}, "does not read `loud`"),
        ({"messages": [ASKS, SAYS], "chat_template_kwargs": "x"}, "must be an object"),
        (
            {"messages": [ASKS, SAYS], "chat_template_kwargs": {"add_generation_prompt": True}},
            "does not read `add_generation_prompt`",
        ),
        ({"messages": [ASKS, SAYS], "tools": "{"}, "`tools` is not JSON"),
        ({"messages": [ASKS, SAYS], "tools": "{}"}, "`tools` must be a list of objects"),
        (
            {"messages": [{"role": "system", "content": "a"}, ASKS, SAYS], "system": "b"},
            "`system` and the first message differ",
        ),
        ({"prompt": "a", "completion": "b", "system": "c"}, "`system` is of a chat"),
        ({"text": "a", "labels": [1, 2]}, "the column `labels`"),
        ({"messages": [ASKS, SAYS], "loss_mask": [0, 1]}, "the column `loss_mask`"),
        ({"messages": [ASKS, SAYS], "weight": 0}, "the column `weight` .0. says"),
        ({"messages": [ASKS, SAYS], "train": [0, 0]}, "the column `train` ..0, 0.. says"),
        ({"text": "a", "weight": 0.5}, "the column `weight` .0.5. says what is learned of `text`"),
        ({"input_ids": [5, 6], "trainable": False}, "the column `trainable` .False. says"),
        ({"messages": [ASKS, {**SAYS, "content": None}]}, "content must be a text"),
        ({"messages": [{**ASKS, "role": "asistant"}]}, "has role 'asistant'"),
        ({"messages": [{**ASKS, "content": None, "id": 3}, SAYS]}, "content must be a text"),
    ],
)
def test_what_would_change_labels_or_tokens_is_refused(tmp_path, row, text):
    with pytest.raises(DataError, match=f"^here:1: .*{text}"):
        encoded(byte_level_tokenizer(tmp_path, TEMPLATE), row)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [{**ASKS, "tools": [TOOL]}, SAYS]}, "message 0 has `tools`, which"),
        ({"messages": [ASKS, {**SAYS, "string": "x"}]}, "message 1 has `string`, which"),
        ({"messages": [ASKS, {**SAYS, "function": TOOL}]}, "leaves out message 1: its `function`"),
        ({"messages": [ASKS, SAYS], "chat_template_kwargs": {"m": 1}}, "does not read `m`"),
        ({"messages": [ASKS, SAYS], "chat_template_kwargs": {"role": 1}}, "does not read `role`"),
        ({"messages": [{**ASKS, "thinking": "x"}, SAYS]}, "leaves out message 0: its `thinking`"),
        (
            {"messages": [{**ASKS, "tool_calls": [{"at": 1}]}, SAYS]},
            "leaves out message 0: its `tool_calls`",
        ),
        ({"messages": [ASKS, {**CALLS, "tool_calls": [{1, 2}]}]}, "set is not JSON serializable"),
    ],
)
def test_a_word_of_the_template_is_no_field_that_it_reads(tmp_path, row, text):
    folder = byte_level_tokenizer(tmp_path, TEMPLATE)
    document = document_of_row(row, "here:1", "text")
    with pytest.raises(DataError, match=f"^here:1: .*{text}"):
        build_tokenizer(DataConfig(tokenizer=str(folder))).encode(document)


def test_null_is_not_learned_as_a_word(tmp_path):
    """Templates that write whatever `content` is write None, which transformers trains on."""
    written = TEMPLATE.replace("{% for part in m.content or [] %}{{ part.text }}{% endfor %}", "X")
    folder = byte_level_tokenizer(tmp_path, written.replace("X", "{{ m.content }}"))
    with pytest.raises(DataError, match=r"here:1: .*writes `None` for message 1, whose `content`"):
        encoded(folder, {"messages": [ASKS, {**CALLS, "content": None}]})


def test_a_table_gives_calls_no_arguments_that_nobody_wrote(tmp_path):
    """Objects of a column get the fields of all of them, as None."""
    datasets = pytest.importorskip("datasets")
    other = {"type": "function", "function": {"name": "dig", "arguments": {"depth": 3}}}
    rows = [{"messages": [ASKS, {**CALLS, "tool_calls": [one]}]} for one in (CALL, other)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    folder = byte_level_tokenizer(tmp_path / "model", TEMPLATE)
    config = DataConfig(source="parquet", path=str(tmp_path / "x.parquet"), tokenizer=str(folder))
    source, theirs = open_documents(config), AutoTokenizer.from_pretrained(folder)
    for index, row in enumerate(rows):
        (document,) = build_tokenizer(config).encode(source[index])
        found = theirs.apply_chat_template(row["messages"], tokenize=True, return_dict=True)
        assert document.tokens.tolist() == found["input_ids"]


@pytest.mark.parametrize("tokenizer", ["bytes", "chatml"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKS, CALLS]},
        {"messages": [ASKS, {**SAYS, "thinking": "x"}]},
        {"messages": [ASKS, SAYS], "tools": [TOOL]},
    ],
)
def test_more_than_words_needs_a_template(tmp_path, tokenizer, row):
    folder = byte_level_tokenizer(tmp_path, None)
    text = (folder / "tokenizer.json").read_text()
    text = text.replace("<|turn|>", "<|im_start|>").replace("<|stop|>", "<|im_end|>")
    (folder / "tokenizer.json").write_text(text)
    config = DataConfig(tokenizer=str(folder) if tokenizer == "chatml" else "bytes")
    with pytest.raises(DataError, match=r"^here:1: `(tool_calls|thinking|tools)` of a chat needs"):
        build_tokenizer(config).encode(document_of_row(row, "here:1", "text"))


PAIR = {"chosen": "a b", "rejected": "a c"}


@pytest.mark.parametrize(
    ("row", "column", "unread"),
    [
        ({"input_ids": [5], "text": "x"}, "input_ids", ("text",)),
        ({**PAIR, "messages": [ASKS, SAYS], "text": "x"}, "chosen", ("messages", "text")),
        ({"prompt": "a", "completion": "b", "text": "x"}, "completion", ("text",)),
        ({"messages": [ASKS, SAYS], "text": "x"}, "messages", ("text",)),
        ({"messages": [], "text": "x"}, "text", ()),
        ({"text": "", "messages": [ASKS, SAYS]}, "messages", ()),
        ({"text": "", "prompt": "", "completion": "b"}, "completion", ()),
        ({"text": "", "input_ids": [5, 6]}, "input_ids", ()),
        ({"input_ids": [5, 6], "loss_mask": [0, 1], "weight": 1}, "input_ids", ("weight",)),
        ({"input_ids": [5, 6], "target_mask": [0, 1]}, "input_ids", ("target_mask",)),
        ({"prompt": "a", "completion": "b", "label": "False"}, "completion", ("label",)),
        ({"prompt": "a", "completion": "b", "label": True}, "completion", ()),
        ({"text": ""}, "text", ()),
    ],
)
def test_one_order_says_which_column_wins(row, column, unread):
    found = document_of_row(row, "here:1", "text")
    kinds = {
        "input_ids": found.row is not None,
        "chosen": found.rejected is not None,
        "messages": found.messages is not None and found.rejected is None,
        "completion": found.text == "b",
        "text": found.text in ("x", ""),
    }
    assert kinds[column]
    assert found.unread == unread


def test_a_named_text_column_wins(tmp_path):
    found = document_of_row({"story": "x", "messages": [ASKS, SAYS]}, "here:1", "story")
    assert (found.text, found.unread) == ("x", ("messages",))


def test_unread_columns_are_told_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' + '{"text": "a", "lang": "en", "id": 3}\n' * 3)
    notes = row_notes(open_documents(DataConfig(source="jsonl", path=str(path))))
    assert notes == [f"{path}:2: not read: lang, id"]


def test_a_table_that_is_replaced_in_the_same_second_is_read_anew(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path, found = tmp_path / "x.parquet", []
    for text in ("old words", "new words"):
        parquet.write_table(arrow.table({"text": [text] * 3}), path)
        os.utime(path, (1_700_000_000, 1_700_000_000))
        source = open_documents(DataConfig(source="parquet", path=str(path)))
        found.append((source[0].text, source.fingerprint()))
    assert [text for text, _ in found] == ["old words", "new words"]
    assert found[0][1] != found[1][1]


def test_a_large_table_is_read_anew_where_samples_of_it_are_the_same(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("packgraph.train.run_files.WHOLE", 10)
    monkeypatch.setattr("packgraph.train.run_files.SAMPLE", 1)
    monkeypatch.setattr("packgraph.train.run_files.SAMPLES", 2)
    path, found = tmp_path / "x.parquet", []
    table = arrow.table({"text": ["old words"] * 3})
    parquet.write_table(table, path, compression="none", use_dictionary=False)
    for old, new in (b"old", b"old"), (b"old", b"new"):
        path.write_bytes(path.read_bytes().replace(old, new))
        os.utime(path, (1_700_000_000, 1_700_000_000))
        found.append(open_documents(DataConfig(source="parquet", path=str(path)))[0].text)
    assert found == ["old words", "new words"]


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.arrow"])
def test_files_that_must_be_unpacked_are_refused_by_name(tmp_path, name):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    for path in (tmp_path / name, tmp_path):  # a folder is not read without it
        with pytest.raises(DataError, match=rf"{name}: \.\w+ is not read; (unpack|write) it"):
            open_documents(DataConfig(source="jsonl", path=str(path)))


# Templates that read lists of parts alone.
PICTURES = ("idefics3", "llava_next", "smolvlm")


def templates_of_trl():
    """Chat templates that TRL brings along, of which it trains on those named `training`."""
    trl = find_spec("trl")
    folder = Path(trl.submodule_search_locations[0]) / "chat_templates" if trl else Path("none")
    return sorted(folder.glob("*.jinja"))


@pytest.mark.parametrize("file", templates_of_trl(), ids=lambda file: file.stem)
def test_templates_of_trl_give_the_tokens_of_transformers(tmp_path, file):
    """Or are refused; where answers are marked, what is learned is what transformers marks."""
    folder = byte_level_tokenizer(tmp_path, file.read_text().replace("strftime_now", "no_clock"))
    theirs = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "be brief"}, ASKS, SAYS, ASKS, {**SAYS, "content": "22"}]
    calls = [ASKS, {**CALLS, "content": "I look. "}, FOUND, SAYS]
    thinks, read = [ASKS, {**SAYS, "reasoning_content": "noon"}], 0
    for row in ({"messages": chat}, {"messages": calls, "tools": [TOOL]}, {"messages": thinks}):
        try:
            tokens, targets = encoded(folder, row)
        except DataError:
            continue
        read += 1
        found = theirs.apply_chat_template(
            row["messages"],
            tools=row.get("tools"),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask="{% generation" in file.read_text(),
        )
        said = theirs.decode([target for target in targets if target >= 0])
        for message in row["messages"]:
            assert message["role"] != "assistant" or message["content"].strip() in said
        assert tokens == found["input_ids"]
        if "assistant_masks" in found:
            assert [target >= 0 for target in targets] == [
                bool(m) for m in found["assistant_masks"]
            ]
