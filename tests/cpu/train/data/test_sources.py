"""Sources of documents: what they read, and how they refuse what cannot be trained on."""

import json
import os
import sys
from pathlib import Path

import pytest

from packgraph import cli
from packgraph.train import run_files
from packgraph.train.data import (
    DataConfig,
    DataError,
    MissingPackageError,
    open_documents,
)
from packgraph.train.data.formats import StandardLibrarySource

MODULE = '''"""What the module is for, in a line that is long enough."""
import os

CONSTANT = "a statement of the module that is kept"


@os.decorated
def function(argument):
    """Words."""
    def nested():
        return argument
    return nested


class Holder:
    """Says what instances are, in a line that is long enough."""

    field = 1

    async def method(self):
        """A method that is a document of its own, by its length."""
        return self.field
'''


def write_lines(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def jsonl(path, **options):
    return open_documents(DataConfig(source="jsonl", path=str(path), **options))


def texts(source):
    return [source[index].text for index in range(len(source))]


def test_the_standard_library_gives_thousands_of_documents_in_a_fixed_order():
    first, second = (open_documents(DataConfig(max_documents_loaded=1500)) for _ in range(2))
    assert len(first) == 1500
    assert texts(first) == texts(second)
    assert first.fingerprint() == second.fingerprint()
    lengths = sorted(map(len, texts(first)))
    assert lengths[-1] > 20 * lengths[len(lengths) // 2]
    assert not any(
        "site-packages" in first[index].where or "/test/" in first[index].where
        for index in range(1500)
    )


def test_a_module_is_cut_into_functions_classes_and_the_rest(tmp_path):
    (tmp_path / "module.py").write_text(MODULE)
    source = StandardLibrarySource(folder=tmp_path)
    found = {source[index].where: source[index].text for index in range(len(source))}
    assert set(found) == {"module.py:1", "module.py:7", "module.py:15", "module.py:20"}
    assert found["module.py:1"].endswith('CONSTANT = "a statement of the module that is kept"')
    assert found["module.py:7"].startswith("@os.decorated\ndef function")
    assert "def nested" in found["module.py:7"]
    assert found["module.py:15"].endswith("field = 1")
    assert found["module.py:20"].startswith("async def method(self):\n    ")

    def lines_of(texts):
        return sorted(line.strip() for text in texts for line in text.splitlines() if line.strip())

    assert lines_of(found.values()) == lines_of([MODULE])


def test_unparsable_modules_are_counted_and_tests_left_out(tmp_path):
    (tmp_path / "good.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def broken(:\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe4\n" + b"x = 1\n" * 20)
    (tmp_path / "nulls.py").write_bytes(b"x = 1\0")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text(MODULE)
    source = StandardLibrarySource(folder=tmp_path)
    assert source.unparsable == 3
    assert len(source) == 4


def test_a_library_without_source_says_what_else_to_use(tmp_path):
    with pytest.raises(DataError, match=r"data\.source = jsonl or text"):
        StandardLibrarySource(folder=tmp_path)


def test_jsonl_gives_text_messages_and_rows(tmp_path):
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    path = write_lines(
        tmp_path / "data.jsonl",
        [
            {"text": "first"},
            "",
            {"messages": chat},
            "   ",
            {"input_ids": [1, 2]},
            {"text": "ümlaut"},
        ],
    )
    source = jsonl(path)
    assert len(source) == 4
    assert source[3].text == "ümlaut"
    assert source[0].where == f"{path}:1"
    assert [message.role for message in source[1].messages] == ["user", "assistant"]
    assert source[2].row == {"input_ids": [1, 2]}
    assert len(jsonl(path, max_documents_loaded=2)) == 2


def test_jsonl_of_a_folder_and_another_column(tmp_path):
    write_lines(tmp_path / "b.jsonl", [{"content": "two"}])
    write_lines(tmp_path / "a.jsonl", [{"content": "one"}])
    (tmp_path / ".hidden.jsonl").write_text("no")
    assert texts(jsonl(tmp_path, text_column="content")) == ["one", "two"]


def test_the_fingerprint_follows_the_content(tmp_path):
    prints = {
        jsonl(write_lines(tmp_path / "x.jsonl", [{"text": text}])).fingerprint()
        for text in ("a", "b", "a")
    }
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text": "cut of', "not JSON: Unterminated string.*at column 10"),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": ' + 5000 * "1" + "}", "not JSON that Python reads"),
        ('["text"]', "expected a JSON object.*got list"),
        (
            '{"words": "x", "id": 1}',
            "expected `text`, .* or `input_ids`, found id, words.*data.text_column",
        ),
        ('{"text": 3}', "`text` must be a text, got int"),
        ('{"text": "\\ud800"}', "not valid Unicode"),
        ('{"messages": []}', "at least one entry"),
        ('{"messages": ["hi"]}', "message 0 must be an object with `role` and `content`"),
        (
            '{"messages": [{"role": "bot", "content": "x"}]}',
            "role 'bot'; known roles: system, user, assistant, tool",
        ),
        ('{"messages": [{"role": "user", "content": null}]}', "message 0, content must be a text"),
    ],
)
def test_malformed_lines_are_named_when_the_source_is_opened(tmp_path, line, text):
    path = write_lines(tmp_path / "bad.jsonl", [{"text": "good"}, line])
    with pytest.raises(DataError, match=rf"bad\.jsonl:2.*{text}"):
        jsonl(path)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:1: not UTF-8 \(byte 10"):
        jsonl(tmp_path)


def test_missing_and_empty_data_have_clear_errors(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        jsonl(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"no files ending in \.jsonl"):
        jsonl(tmp_path)
    with pytest.raises(DataError, match="no documents, only blank lines"):
        jsonl(write_lines(tmp_path / "x.jsonl", ["", " "]))


def test_a_folder_of_text_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("deep")
    (tmp_path / "b.md").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "image.png").write_bytes(b"\xff")
    source = open_documents(DataConfig(source="text", path=str(tmp_path)))
    assert texts(source) == ["marked", "deep"]
    (tmp_path / "bad.txt").write_bytes(b"ok \xff")
    with pytest.raises(DataError, match=r"bad\.txt: not UTF-8 \(byte 3"):
        open_documents(DataConfig(source="text", path=str(tmp_path)))


def test_empty_text_files_have_a_clear_error(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="all text files are empty"):
        open_documents(DataConfig(source="text", path=str(tmp_path)))


def test_parquet_rows_are_read_through_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "x.parquet"
    datasets.Dataset.from_dict({"text": ["one", "two", "three"]}).to_parquet(str(path))
    source = open_documents(DataConfig(source="parquet", path=str(path), max_documents_loaded=2))
    assert texts(source) == ["one", "two"]
    assert source.fingerprint()
    path.write_bytes(b"no table")
    with pytest.raises(DataError, match=r"x\.parquet: not a Parquet file"):
        open_documents(DataConfig(source="parquet", path=str(path)))


@pytest.mark.parametrize("whole", [2**25, 10])
def test_the_fingerprint_of_parquet_follows_contents_not_names(tmp_path, monkeypatch, whole):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(run_files, "WHOLE", whole)
    monkeypatch.setattr(run_files, "SAMPLE", 512)

    def fingerprint(name, rows):
        datasets.Dataset.from_dict({"text": rows}).to_parquet(str(tmp_path / name))
        return open_documents(DataConfig(source="parquet", path=str(tmp_path / name))).fingerprint()

    first = fingerprint("a.parquet", ["one", "two"])
    assert fingerprint("b.parquet", ["one", "two"]) == first
    assert fingerprint("c.parquet", ["one", "owt"]) != first


def test_parquet_without_datasets_names_the_command(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match="pip install datasets"):
        open_documents(DataConfig(source="parquet", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"source": "jsonl"}, "source = jsonl needs a path"),
        ({"path": "x"}, "source = stdlib reads none"),
        ({"window": 0, "epochs": 0}, "window must be at least 1, got 0; epochs must be at least 1"),
        ({"seed": -1}, "seed must not be negative"),
    ],
)
def test_a_senseless_configuration_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        DataConfig(**options)


GOOD = {"text": "good"}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"input_ids": [1, -2]}, "has a negative token id"),
        ({"input_ids": "12"}, "expected whole numbers"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "has the label -1"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 values for 2 tokens"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask has 1 values for 2 tokens"),
        (
            {"input_ids": [1, 2], "attention_mask": "11"},
            "attention_mask: expected whole numbers or booleans",
        ),
        ({"input_ids": [1, 2], "attention_mask": 1}, r"attention_mask"),
        ({"input_ids": [1, 2], "seq_lengths": [3]}, "lengths sum to 3"),
    ],
)
def test_bad_tokenized_rows_are_named_when_the_source_is_opened(tmp_path, row, text):
    path = write_lines(tmp_path / "bad.jsonl", [GOOD, row])
    with pytest.raises(DataError, match=rf"bad\.jsonl:2.*{text}"):
        jsonl(path)


def test_bad_lines_are_left_out_and_counted_when_asked(tmp_path):
    bad = ['{"text": 3}', {"input_ids": [1, -2]}, "no json", *[{"messages": []}] * 4]
    path = write_lines(tmp_path / "x.jsonl", [GOOD, *bad, {"text": "last"}])
    source = jsonl(path, on_bad="skip")
    assert texts(source) == ["good", "last"] and source.bad.count == 7
    assert len(source.bad.first) == 5
    assert all(
        text.startswith(f"{path}:{line}") for line, text in enumerate(source.bad.first, start=2)
    )
    with pytest.raises(DataError, match=r"no documents, only 1 bad ones \(.*y\.jsonl:1: not JSON"):
        jsonl(write_lines(tmp_path / "y.jsonl", ["x"]), on_bad="skip")


def test_bad_text_files_are_left_out_and_counted_when_asked(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok \xff")
    (tmp_path / "b.txt").write_text("good")
    source = open_documents(DataConfig(source="text", path=str(tmp_path), on_bad="skip"))
    assert (
        texts(source) == ["good"]
        and source.bad.count == 1
        and "a.txt: not UTF-8" in source.bad.first[0]
    )


def replaced(path):
    """By another file of the same size."""
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes().replace(b"one", b"two"))
    other.rename(path)


def written(path):
    path.write_bytes(path.read_bytes().replace(b"one", b"two"))


def appended(path):
    with path.open("ab") as stream:
        stream.write(b"\n")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (replaced, "another file has taken its place"),
        (written, "it was written to"),
        (appended, "its size was"),
        (Path.unlink, "it is gone"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_a_file_that_changes_after_it_was_opened_is_never_read(tmp_path, kind, change, text):
    first, second = (tmp_path / f"{name}.{'txt' if kind == 'text' else kind}" for name in "ab")
    for path in (first, second):
        path.write_text('{"text": "one"}\n')
    os.utime(first, ns=(10**18, 10**18))
    source = open_documents(DataConfig(source=kind, path=str(tmp_path), on_bad="skip"))
    source.check_unchanged()
    change(first)
    with pytest.raises(DataError, match=rf"{first.name}: changed since the run opened it \({text}"):
        source[0]
    with pytest.raises(DataError, match=f"{first.name}: changed"):
        source.check_unchanged()
    assert "one" in source[1].text


@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_a_file_whose_time_is_put_back_is_not_read_either(tmp_path, kind):
    path = tmp_path / f"a.{'txt' if kind == 'text' else kind}"
    path.write_text('{"text": "one"}\n')
    source = open_documents(DataConfig(source=kind, path=str(tmp_path), on_bad="skip"))
    time = path.stat().st_mtime_ns
    written(path)
    os.utime(path, ns=(time, time))
    with pytest.raises(DataError, match=r"changed since the run opened it \(it was written to"):
        source[0]


TINY = [
    "--model.num-layers=1", "--model.hidden-size=16", "--model.intermediate-size=32",
    "--run.steps=3", "--run.tokens-per-step=64", "--graph.capacities=64x4",
]  # fmt: skip


def test_the_ending_of_a_path_names_the_source(capsys, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "to be or not to be"}\n' * 20)
    words = ["train", "qwen3-tiny", *TINY, "--run.folder", str(tmp_path)]
    path = ["--data.path", str(tmp_path / "x.jsonl")]
    assert cli.main([*words, "--run.name", "mine", *path]) == 0
    stored = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert stored["data"]["source"] == "jsonl"
    (tmp_path / "x.jsonl.gz").write_bytes(b"\x1f\x8b")
    capsys.readouterr()
    packed = ["--run.name", "other", "--data.path", str(tmp_path / "x.jsonl.gz")]
    assert cli.main([*words, *packed]) == 2
    assert "x.jsonl.gz: .gz is not read; unpack it" in capsys.readouterr().err


def test_a_model_without_data_is_not_trained_on_the_standard_library(capsys, tmp_path):
    assert cli.main(["train", f"hf:{tmp_path}", "--run.steps", "3"]) == 2
    assert "hf:PATH needs data" in capsys.readouterr().err


@pytest.mark.parametrize("odd", ["link", "pipe", "folder", "closed"])
def test_nothing_below_a_folder_is_left_out_without_a_word(tmp_path, odd, monkeypatch):
    root = tmp_path / "data"
    (root / "part").mkdir(parents=True)
    for place in (root, root / "part"):
        (place / "x.jsonl").write_text('{"text": "a"}\n')
    (root / "again").symlink_to(root / "part")  # what it leads to is read
    (root / ".hidden").symlink_to(tmp_path)
    config = DataConfig(source="jsonl", path=str(root))
    assert len(open_documents(config)) == 2
    if odd == "link":
        (root / "part" / "y.jsonl").symlink_to(tmp_path / "gone.jsonl")
    elif odd == "pipe":
        os.mkfifo(root / "part" / "y.jsonl")
    elif odd == "folder":
        (root / "part" / "y").symlink_to(tmp_path)
    else:  # for root no folder is closed
        real = os.scandir

        def scandir(path):
            if str(path).endswith("part"):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"data/part(/y|/y\.jsonl)?: (not a|a link|cannot be read)"):
        open_documents(config)
