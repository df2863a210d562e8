"""Documents and tokenizers that make no sense end with the file, the line and the way out."""

import copy
import json
import struct
import zlib

import pytest
from malformedkit import (
    DEEP,
    DIGITS,
    TRAIN,
    Case,
    bound,
    cases,
    dead,
    folder,
    line,
    loop,
    nowhere,
    pipe,
    refuse,
)

GOOD = line({"text": "to be or not to be"})
LONG = "x" * 300


def of_lines(name: str, content, says: str, *words: str) -> Case:
    """A bad second line."""
    second = content if isinstance(content, (str, bytes)) else line(content)
    data = GOOD.encode() + (
        second.encode("utf-8", "surrogatepass") if isinstance(second, str) else second
    )
    return Case(
        name,
        [*TRAIN, "--data.source", "jsonl", "--data.path", "{dir}/d.jsonl", *words],
        rf"d\.jsonl:2\b.*({says})",
        {"d.jsonl": data},
    )


def ids(name: str, says: str, **row) -> Case:
    return of_lines(f"ids: {name}", {"input_ids": [1, 2, 3]} | row, says)


def chat(name: str, messages, says: str) -> Case:
    return of_lines(f"chat: {name}", {"messages": messages}, says)


TURN = {"role": "user", "content": "?"}
ROWS = cases(
    of_lines("no JSON", "no json", "not JSON"),
    of_lines("half a row", '{"text": "a', "not JSON"),
    of_lines("two rows in a line", '{"text": "a"} {"text": "b"}', "not JSON"),
    of_lines("a comma", '{"text": "a"},', "not JSON"),
    of_lines("single quotes", "{'text': 'a'}", "not JSON"),
    of_lines("a comment", "# text", "not JSON"),
    of_lines("NUL bytes", b"\0" * 64, "not JSON"),
    of_lines("a NUL in a key", b'{"te\0xt": "a"}', "not JSON"),
    of_lines("a tab in a text", b'{"text": "a\tb"}', "not JSON"),
    of_lines("bytes", b"\xff\xfe{}", "not UTF-8"),
    of_lines("a cut letter", '{"text": "é"}'.encode()[:-3], "not UTF-8"),
    of_lines("Latin-1", '{"text": "é"}'.encode("latin-1"), "not UTF-8"),
    of_lines("UTF-16", '{"text": "a"}'.encode("utf-16"), "not UTF-8"),
    of_lines("gzip", b"\x1f\x8b\x08\0\0", "not UTF-8"),
    of_lines("deep", DEEP, "nested too deeply"),
    of_lines("deep text", '{"text": ' + DEEP + "}", "nested too deeply"),
    of_lines("deep objects", '{"a":' * 50_000 + "1" + "}" * 50_000, "nested too deeply"),
    of_lines("digits", '{"input_ids": [' + DIGITS + "]}", "not JSON that Python reads"),
    of_lines("a list", "[1, 2]", "expected a JSON object"),
    of_lines("a number", "3", "expected a JSON object"),
    of_lines("a text", '"a"', "expected a JSON object"),
    of_lines("null", "null", "expected a JSON object"),
    of_lines("true", "true", "expected a JSON object"),
    of_lines("NaN", "NaN", "expected a JSON object"),
    of_lines("empty", "{}", "found nothing"),
    of_lines("other columns", {"content": "a"}, "found content"),
    of_lines("a column that steers", {"\x1b[31m": 1}, "found"),
    of_lines("a column with NUL", {"\0": 1}, "found"),
    of_lines("a long column", {"x" * 50_000: 1}, "found"),
    of_lines("many columns", {f"c{n}": n for n in range(5000)}, "found"),
    of_lines("text is null", {"text": None}, "found text"),
    of_lines("text is a number", {"text": 3}, "must be a text"),
    of_lines("text is a list", {"text": ["a"]}, "must be a text"),
    of_lines("text is an object", {"text": {}}, "must be a text"),
    of_lines("text is true", {"text": True}, "must be a text"),
    of_lines("text of half a pair", '{"text": "\\ud800"}', "not valid Unicode"),
    of_lines("text of a swapped pair", '{"text": "\\udc00\\ud800"}', "not valid Unicode"),
    chat("a text", "hello", "must be a list"),
    chat("an object", {}, "must be a list"),
    chat("empty", [], "at least one"),
    chat("of texts", ["a"], "must be an object"),
    chat("of nulls", [None], "must be an object"),
    chat("of lists", [["user", "?"]], "must be an object"),
    chat("no role", [{"content": "a"}], "must be an object"),
    chat("no content", [{"role": "user"}], "must be an object"),
    chat("unknown role", [{"role": "bot", "content": "a"}], "known roles"),
    chat("role is a list", [{"role": ["user"], "content": "a"}], "role"),
    chat("role is null", [{"role": None, "content": "a"}], "role"),
    chat("role is an object", [{"role": {}, "content": "a"}], "role"),
    chat("role that steers", [{"role": "\x1b[31m", "content": "a"}], "role"),
    chat("a long role", [{"role": "x" * 9999, "content": "a"}], "role"),
    chat("content is null", [TURN, {"role": "assistant", "content": None}], "must be a text"),
    chat("content is parts", [{"role": "user", "content": [{"type": "text"}]}], "must be a text"),
    chat("content of half a pair", [{"role": "user", "content": "\ud800"}], "not valid Unicode"),
    chat("a long message", [["x" * 50_000]], "must be an object"),
    ids("a text", "whole numbers|expected", input_ids="1 2 3"),
    ids("a number", "expected|one", input_ids=3),
    ids("an object", "expected|whole", input_ids={"a": 1}),
    ids("fractions", "whole numbers", input_ids=[1.5, 2.0]),
    ids("texts", "whole numbers", input_ids=["1", "2"]),
    ids("nulls", "whole numbers|expected", input_ids=[1, None]),
    ids("true", "whole numbers|expected", input_ids=[True, False]),
    ids("rows", "row|shape|dimension|lengths|one", input_ids=[[1, 2], [3, 4]]),
    ids("ragged rows", "not a flat sequence", input_ids=[[1, 2], [3]]),
    ids("negative", "negative token id", input_ids=[1, -1]),
    ids("-100", "labels, not in input_ids", input_ids=[1, -100]),
    ids("2^63", "no token id|expected|int64", input_ids=[1, 2**63]),
    ids("2^64", "whole|expected|int64", input_ids=[1, 2**64]),
    ids("2^200", "whole|expected", input_ids=[2**200]),
    ids("outside the vocabulary", "the tokenizer has 264 ids", input_ids=[1, 264]),
    ids("far outside", "the tokenizer has", input_ids=[2**62]),
    ids("deep", "whole|expected|row|dim|deep", input_ids=json.loads("[" * 80 + "]" * 80)),
    ids("NaN", "whole|expected", input_ids=[float("nan")]),
    ids("nothing", "empty|found", input_ids=[]),
    ids("too few labels", "labels has 2 values for 3 tokens", labels=[1, 2]),
    ids("too many labels", "labels has 4", labels=[1, 2, 3, 4]),
    ids("label -1", "has the label -1", labels=[1, -1, 2]),
    ids("label -101", "the label -101", labels=[1, -101, 2]),
    ids("label outside", "the tokenizer has 264 ids", labels=[1, 999, 2]),
    ids("label of text", "whole", labels=["a", "b", "c"]),
    ids("labels a number", "labels", labels=3),
    ids("labels an object", "labels", labels={"a": 1}),
    ids("labels of fractions", "whole", labels=[1.0, 2.0, 3.0]),
    ids("labels of nulls", "labels", labels=[None, 1, 2]),
    ids("short attention_mask", "attention_mask has 1 values", attention_mask=[1]),
    ids("attention_mask with zeros", "holds padding", attention_mask=[1, 1, 0]),
    ids("attention_mask of 2", "value 2", attention_mask=[1, 2, 1]),
    ids("attention_mask of text", "attention_mask", attention_mask="111"),
    ids("attention_mask of fractions", "attention_mask", attention_mask=[0.5, 1, 1]),
    ids("attention_mask an object", "attention_mask", attention_mask={"a": 1}),
    ids("short loss_mask", "loss_mask has 2", loss_mask=[1, 1]),
    ids("loss_mask of text", "loss_mask", loss_mask=["y", "n", "y"]),
    ids("seq_lengths too long", "sum to 5", seq_lengths=[2, 3]),
    ids("seq_lengths too short", "sum to 2", seq_lengths=[2]),
    ids("negative seq_lengths", "length", seq_lengths=[4, -1]),
    ids("seq_lengths that wrap", "length", seq_lengths=[2**62, 2**62, 2**62, 2**62, 3]),
    ids("seq_lengths of text", "whole|length", seq_lengths=["3"]),
    ids("seq_lengths a number", "seq_lengths|length", seq_lengths=4),
    ids("seq_lengths of fractions", "whole|length", seq_lengths=[1.5, 1.5]),
    ids("short position_ids", "position_ids", position_ids=[0]),
    ids("position_ids of text", "position_ids", position_ids=["a", "b", "c"]),
    ids("short seq_idx", "seq_idx", seq_idx=[0]),
)


@ROWS
def test_a_row_that_makes_no_sense_is_named_by_file_and_line(case, tmp_path, capsys):
    refuse(case, tmp_path, capsys)


def source(
    kind: str, name: str, says: str, files=None, path: str = "d", words: tuple[str, ...] = ()
) -> Case:
    return Case(
        f"{kind} {name}",
        [*TRAIN, "--data.source", kind, "--data.path", f"{{dir}}/{path}", *words],
        says,
        files or {},
    )


def places(kind: str, suffix: str):
    """What may stand where data belong."""
    file = f"a.{suffix}"
    return [
        source(kind, "absent", "no such file or folder"),
        source(kind, "an empty folder", "no files ending in", {"d": folder}),
        source(kind, "a failing disk", "(d|parquet): .*(Input/output error|0 bytes)", {"d": dead}),
        source(kind, "a pipe", "no such file|no file", {"d": pipe}),
        source(kind, "a socket", "no such file|no file", {"d": bound}),
        source(kind, "a loop of links", "no such file|cannot", {"d": loop}),
        source(kind, "a link to nothing", "no such file", {"d": nowhere}),
        source(kind, "a pipe in a folder", "not a file", {f"d/{file}": pipe}),
        source(kind, "a folder in a folder", "no files ending in", {f"d/{file}": folder}),
        source(kind, "a loop in a folder", "not a file", {f"d/{file}": loop}),
        source(kind, "a hidden file", "no files ending in", {f"d/.{file}": GOOD}),
        source(kind, "an empty file", "a\\.|no documents|empty", {f"d/{file}": ""}),
        source(kind, "below a file", "no such file or folder", {"d": GOOD}, "d/x"),
        source(
            kind, "a device", "no such file or folder", {}, "../../../../../../../../../../dev/zero"
        ),
        source(kind, "a name that steers", "no files|no such", {"d": folder}, "d/\N{SNOWMAN}"),
    ]


@cases(
    *places("jsonl", "jsonl"),
    *places("text", "txt"),
    *places("parquet", "parquet"),
    source("jsonl", "blank lines", "only blank lines", {"d": "\n\n  \n"}),
    source("jsonl", "one long line", "d:1: not JSON", {"d": "x" * 10**6}),
    source(
        "jsonl",
        "a file name that steers",
        r"x01\[31m\.jsonl:1: not JSON|x1b\[31m\.jsonl:1: not JSON",
        {"d/\x1b[31m.jsonl": "x"},
    ),
    source("jsonl", "a name of no text", "not JSON", {"d/\udcff.jsonl": "x"}),
    source("jsonl", "no path", "needs a path", {}, "../x", ("--data.path", "")),
    source("text", "bytes", "a.txt: not UTF-8", {"d/a.txt": b"\xff\xfe\0"}),
    source("text", "blank files", "all text files are empty", {"d/a.txt": " \n"}),
    source(
        "text", "no suffixes", "no files ending in", {"d/a.txt": "a"}, "d", ("--data.suffixes", "")
    ),
    source(
        "text",
        "a long document",
        "longer|tokens",
        {"d/a.txt": "word " * 1000},
        "d",
        ("--data.overlong", "error"),
    ),
    source(
        "text",
        "a letter",
        "no token to predict|none of",
        {"d/a.txt": "x"},
        "d",
        ("--data.tokenizer", "{dir}/t/tokenizer.json"),
    ),
    source(
        "jsonl",
        "chats to learn nothing from",
        "no assistant turn",
        {"d": line({"messages": [TURN]})},
    ),
    source(
        "jsonl",
        "rows to learn nothing from",
        "nothing to predict",
        {"d": line({"input_ids": [1, 2], "labels": [-100, -100]})},
    ),
    source("jsonl", "empty texts", "none of the 1 documents", {"d": line({"text": ""})}),
    source(
        "jsonl",
        "a row too long",
        "longer|tokens",
        {"d": line({"input_ids": [1] * 5000})},
        "d",
        ("--data.overlong", "error"),
    ),
    source(
        "jsonl",
        "another column",
        "d:1: expected `body`.*found text",
        {"d": GOOD},
        "d",
        ("--data.text-column", "body"),
    ),
    source(
        "jsonl", "only bad ones", "only 2 bad ones", {"d": "x\ny\n"}, "d", ("--data.on-bad", "skip")
    ),
)
def test_a_place_without_data_is_named(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if case.name == "parquet an empty file":  # the one of its kind that is opened
        pytest.importorskip("datasets")
    if "t/tokenizer.json" in " ".join(case.words):
        case = case._replace(files=dict(case.files) | {"t/tokenizer.json": json.dumps(tokenizer())})
    refuse(case, tmp_path, capsys)


def tokenizer(**changes) -> dict:
    made = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {"to": 0, "be": 1, "x": 2, "[UNK]": 3},
            "unk_token": "[UNK]",
        },
    }
    made = copy.deepcopy(made)
    for key, value in changes.items():
        *sections, name = key.split("__")
        place = made
        for section in sections:
            place = place[section]
        place[name] = value
    return made


BPE = {"type": "BPE", "vocab": {"t": 0, "o": 1}, "merges": [], "unk_token": None}


def tokens(name: str, content, says: str, settings=None) -> Case:
    def written(given):
        return given if isinstance(given, (str, bytes)) or callable(given) else json.dumps(given)

    files = {"d.jsonl": 5 * GOOD, "t/tokenizer.json": written(content)}
    if settings is not None:
        files["t/tokenizer_config.json"] = written(settings)
    return Case(
        name,
        [
            *TRAIN,
            "--data.source",
            "jsonl",
            "--data.path",
            "{dir}/d.jsonl",
            "--data.tokenizer",
            "{dir}/t",
        ],
        rf"t/tokenizer(_config)?\.json: .*({says})|t/tokenizer\.json cannot tokenize it "
        rf".*({says})|{says}",
        files,
    )


@cases(
    tokens("empty", "", "not valid JSON"),
    tokens("no JSON", "{", "not valid JSON"),
    tokens("a list", [], "holds a list"),
    tokens("a number", "3", "holds a int"),
    tokens("a failing disk", dead, "Input/output error"),
    tokens("a config on a failing disk", tokenizer(), "Input/output error", dead),
    tokens("a config that is a pipe", tokenizer(), "it is no file", pipe),
    tokens("a config that links to nothing", tokenizer(), "no such file", nowhere),
    tokens("null", "null", "holds a NoneType"),
    tokens("no model", {"a": 1}, "has no `model`"),
    tokens("model is null", {"model": None}, "not a tokenizer.json that"),
    tokens("model is empty", {"model": {}}, "not a tokenizer.json that"),
    tokens("bytes", b"\xff\xfe\0", "cannot be read"),
    tokens("NUL", b"\0" * 100, "not valid JSON"),
    tokens("UTF-16", json.dumps(tokenizer()).encode("utf-16"), "cannot be read"),
    tokens("deep", DEEP, "nested too deeply"),
    tokens("deep model", '{"model": ' + DEEP + "}", "nested too deeply"),
    tokens("deep enough", '{"model": ' + "[" * 500 + "]" * 500 + "}", "not a tokenizer.json that"),
    tokens("digits", '{"model": ' + DIGITS + "}", "not valid JSON"),
    tokens("a pipe", pipe, "no such file"),
    tokens("a folder", folder, "no such file"),
    tokens("a loop of links", loop, "no such file|cannot"),
    tokens(
        "unknown unk",
        tokenizer(model__unk_token="<nope>"),
        "unk_token is '<nope>', which is not in its vocabulary",
    ),
    tokens(
        "unknown unk of BPE",
        tokenizer(model=BPE | {"unk_token": "<nope>"}),
        "unk_token is '<nope>'",
    ),
    tokens(
        "unknown unk of WordPiece",
        tokenizer(
            model={
                "type": "WordPiece",
                "unk_token": "<nope>",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": {"to": 0},
            }
        ),
        "unk_token is '<nope>'",
    ),
    tokens("unk that steers", tokenizer(model__unk_token="\x1b[31m"), "unk_token is"),
    tokens("a long unk", tokenizer(model__unk_token="x" * 9999), "unk_token is"),
    tokens("unk is null", tokenizer(model__unk_token=None), "not a tokenizer.json that"),
    tokens("unk is a number", tokenizer(model__unk_token=3), "not a tok"),
    tokens(
        "no unk of Unigram",
        tokenizer(model={"type": "Unigram", "unk_id": None, "vocab": [["to", 0.0], ["be", 0.0]]}),
        "d.jsonl:[0-9].*cannot tokenize it",
    ),
    tokens(
        "unk of Unigram outside",
        tokenizer(model={"type": "Unigram", "unk_id": 9, "vocab": [["a", 0.0]]}),
        "not a tokenizer.json that",
    ),
    tokens("empty vocabulary", tokenizer(model__vocab={}), "unk_token"),
    tokens("no vocabulary", {"model": {"type": "WordLevel", "unk_token": "a"}}, "not a tok"),
    tokens("vocabulary is a list", tokenizer(model__vocab=[["a", 1]]), "not a tokenizer.json that"),
    tokens("ids of text", tokenizer(model__vocab={"a": "1"}), "not a tok"),
    tokens("negative ids", tokenizer(model__vocab={"a": -4, "[UNK]": 1}), "not a tok"),
    tokens("ids of 2^40", tokenizer(model__vocab={"a": 2**40, "[UNK]": 1}), "not a tok"),
    tokens("fractional ids", tokenizer(model__vocab={"a": 1.5}), "not a tok"),
    tokens(
        "ids of 2^32 - 1",
        tokenizer(model__vocab={"a": 2**32 - 1, "[UNK]": 1}),
        "smaller than the tokenizer's 4294967296 ids",
    ),
    tokens("unknown model", tokenizer(model__type="Foo"), "not a tok"),
    tokens("unknown pre-tokenizer", tokenizer(pre_tokenizer={"type": "Nope"}), "not a tok"),
    tokens("unknown normalizer", tokenizer(normalizer={"type": "Nope"}), "not a tok"),
    tokens("unknown decoder", tokenizer(decoder={"type": "Nope"}), "not a tok"),
    tokens(
        "a bad expression",
        tokenizer(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "(((("},
                "behavior": "Isolated",
                "invert": False,
            }
        ),
        "not a tok",
    ),
    tokens("added tokens of nothing", tokenizer(added_tokens=[{"id": 7}]), "not a tok"),
    tokens("added tokens are a text", tokenizer(added_tokens="a"), "not a tok"),
    tokens("merges of unknown", tokenizer(model=BPE | {"merges": ["t z"]}), "not a tok"),
    tokens("merges of one", tokenizer(model=BPE | {"merges": [["t"]]}), "not a tok"),
    tokens(
        "a template of unknown",
        tokenizer(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
        "d.jsonl:[0-9].*cannot tokenize it|not a tok",
    ),
    tokens("settings are a list", tokenizer(), "not a JSON object", [1]),
    tokens("settings are empty", tokenizer(), "not valid JSON", ""),
    tokens("settings are deep", tokenizer(), "nested too deeply", DEEP),
    tokens("settings of bytes", tokenizer(), "cannot be read", b"\xff\xfe"),
    tokens("settings of digits", tokenizer(), "not valid JSON", '{"a": ' + DIGITS + "}"),
    tokens("settings are null", tokenizer(), "not a JSON object", "null"),
    tokens("end is a number", tokenizer(), "eos_token is 5", {"eos_token": 5}),
    tokens("end is a list", tokenizer(), "eos_token is", {"eos_token": {"content": ["x"]}}),
    tokens(
        "end is unknown",
        tokenizer(),
        "eos_token is '</s>', which is no token",
        {"eos_token": "</s>"},
    ),
    tokens("end is no text", tokenizer(), "eos_token is", {"eos_token": "\ud800"}),
    tokens("end steers", tokenizer(), "eos_token is", {"eos_token": "\x1b[31m"}),
    tokens(
        "chats without ChatML", tokenizer(), "d.jsonl:6: chat messages are written as ChatML"
    )._replace(
        files={
            "d.jsonl": 5 * GOOD + line({"messages": [TURN, {"role": "assistant", "content": "!"}]}),
            "t/tokenizer.json": json.dumps(tokenizer()),
        }
    ),
)
def test_a_tokenizer_that_makes_no_sense_is_named(case, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    refuse(case, tmp_path, capsys)


@pytest.fixture
def quiet(tmp_path, monkeypatch):
    """`datasets` without bars, in a cache of its own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def table(rows, **options) -> bytes:
    """A Parquet file of `rows` (columns → values)."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(rows), sink, **options)
    return sink.getvalue().to_pybytes()


TEXTS = {"text": [f"to be or not to be {n}" * 20 for n in range(200)]}
DAMAGE = {
    "cut at the end": (lambda whole: whole[:-10], "not a Parquet file"),
    "cut in half": (lambda whole: whole[: len(whole) // 2], "not a Parquet file"),
    "cut at the start": (lambda whole: whole[10:], "a.parquet"),
    "magic only": (lambda whole: b"PAR1", "not a Parquet file"),
    "twice the magic": (lambda whole: b"PAR1PAR1", "not a Parquet file"),
    "zeros": (lambda whole: b"\0" * 1000, "not a Parquet file"),
    "text": (lambda whole: GOOD.encode() * 50, "not a Parquet file"),
    "gzip": (lambda whole: zlib.compress(whole), "not a Parquet file"),
    "footer of zeros": (lambda whole: whole[:-60] + b"\0" * 52 + whole[-8:], "not a Parquet file"),
    "footer longer than the file": (
        lambda whole: whole[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "not a Parquet file",
    ),
    "footer of length 0": (
        lambda whole: whole[:-8] + struct.pack("<I", 0) + b"PAR1",
        "not a Parquet file",
    ),
    "pages of zeros": (lambda whole: whole[:4] + b"\0" * 400 + whole[404:], "a.parquet"),
    "pages of ones": (lambda whole: whole[:4] + b"\xff" * 400 + whole[404:], "a.parquet"),
    "a page cut out": (lambda whole: whole[:100] + whole[300:], "a.parquet"),
}
TABLES = {
    "no rows": ({"text": []}, "no rows"),
    "no columns": ({}, "no rows|no columns|a.parquet"),
    "another column": ({"body": ["a"]}, "row 0: expected `text`"),
    "numbers": ({"text": [1, 2]}, "must be a text"),
    "nulls": ({"text": [None, None]}, "row 0: expected"),
    "bytes": ({"text": [b"a", b"\xff"]}, "must be a text"),
    "lists": ({"text": [["a"], ["b"]]}, "must be a text"),
    "ids of fractions": ({"input_ids": [[1.5], [2.5]]}, "whole numbers"),
    "ids outside": ({"input_ids": [[1, 9999], [1, 9999]]}, "the tokenizer has"),
    "negative ids": ({"input_ids": [[1, -3]]}, "negative token id"),
    "labels short": ({"input_ids": [[1, 2, 3]], "labels": [[1]]}, "labels has 1"),
    "roles": ({"messages": [[{"role": "bot", "content": "a"}]]}, "known roles"),
    "empty ids": ({"input_ids": [[], []]}, "empty|found|expected|none of"),
    "empty chat": ({"messages": [[], []]}, "at least one"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_table_is_named(damage, tmp_path, capsys, quiet):
    change, says = DAMAGE[damage]
    whole = table(TEXTS, compression="none", use_dictionary=False)
    refuse(source("parquet", damage, says, {"d/a.parquet": change(whole)}), tmp_path, capsys)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_other_rows_is_named(name, tmp_path, capsys, quiet):
    rows, says = TABLES[name]
    refuse(source("parquet", name, says, {"d/a.parquet": table(rows)}), tmp_path, capsys)


def test_tables_of_different_columns_are_named(tmp_path, capsys, quiet):
    files = {"d/a.parquet": table({"text": ["a b"]}), "d/b.parquet": table({"input_ids": [[1, 2]]})}
    refuse(source("parquet", "columns", "b.parquet", files), tmp_path, capsys)
