"""Folders of runs that are damaged, foreign or hostile end with the file's name and the way out."""

import io
import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from malformedkit import (
    DATA,
    DEEP,
    DIGITS,
    GOOD,
    LONG,
    SMALL,
    TRAIN,
    Case,
    bound,
    cases,
    folder,
    loop,
    nowhere,
    pipe,
    refuse,
    write_weights,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
)

from packgraph import cli
from packgraph.train.checkpoint.writer import write_state
from packgraph.train.run_files import digest_of


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "hf")


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of a run of two steps."""
    base = tmp_path_factory.mktemp("finished")
    (base / "d.jsonl").write_text(GOOD)
    words = [*TRAIN, *DATA, "--run.name", "mine", "--run.steps", "2", "--run.checkpoint-every", "1"]
    assert cli.main([word.replace("{dir}", str(base)) for word in words]) == 0
    return base


RUN = "runs/mine"
STEP = f"{RUN}/checkpoints/step-00000002"
RESUME = [
    "train",
    "qwen3-tiny",
    *SMALL,
    *DATA,
    "--run.folder",
    "{dir}/runs",
    "--run.name",
    "mine",
    "--resume",
    "--run.steps",
    "3",
]


def resume(name: str, says: str, files) -> Case:
    return Case(name, RESUME, says, files)


def sign(base: Path, change) -> None:
    """Change the content of the last state.json, with the right checksum."""
    path = base / STEP / "state.json"
    content = json.loads(path.read_text())
    content.pop("checksum")
    change(content)
    write_state(path, content)


def only_last(base: Path) -> None:
    shutil.rmtree(base / RUN / "checkpoints" / "step-00000001")


ODD = {
    "empty": "",
    "half": "{",
    "a list": "[]",
    "null": "null",
    "deep": DEEP,
    "digits": '{"a": ' + DIGITS + "}",
    "bytes": b"\xff\xfe\0",
    "NUL": b"\0" * 99,
    "NaN": '{"format": NaN}',
    "a number": "9" * 5000,
    "half a pair": '"\\ud800"',
    "a pipe": pipe,
    "a folder": folder,
    "a loop of links": loop,
    "a link to nothing": nowhere,
    "a socket": bound,
}


@cases(
    *(
        resume(f"state.json {name}", r"state\.json", {f"{STEP}/state.json": content})
        for name, content in ODD.items()
    ),
    *(
        resume(f".metadata {name}", r"\.metadata", {f"{STEP}/.metadata": content})
        for name, content in ODD.items()
    ),
    *(
        resume(f"a shard {name}", r"__0_0\.distcp", {f"{STEP}/__0_0.distcp": content})
        for name, content in ODD.items()
    ),
)
def test_damage_of_the_only_checkpoint_is_named(case, tmp_path, capsys, finished, monkeypatch):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    only_last(tmp_path)
    path = next(iter(case.files))
    (tmp_path / path).unlink()
    refuse(case, tmp_path, capsys)


@pytest.mark.parametrize("name", ODD)
def test_a_config_that_cannot_be_read_comes_from_the_checkpoint(
    name, tmp_path, capsys, finished, monkeypatch
):
    """A run goes on without its config.json, metrics and summary; none of them is waited for."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    only_last(tmp_path)
    for file in ("config.json", "summary.json", "checkpoints/latest"):
        path = tmp_path / RUN / file
        path.unlink()
        if callable(ODD[name]):
            ODD[name](path)
        else:
            path.write_bytes(ODD[name].encode() if isinstance(ODD[name], str) else ODD[name])
    with limit_of(tmp_path):
        code = cli.main([word.replace("{dir}", str(tmp_path)) for word in RESUME])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert (code == 0 and "config.json is missing, damaged or was edited" in said) or (
        code == 2 and "error: " in said
    )


def limit_of(path: Path):
    from malformedkit import limit

    assert path.is_dir()
    return limit()


STATES = {
    "step -5": (lambda content: content.update(step=-5), "its step is"),
    "step 2^64": (lambda content: content.update(step=2**64), "its step is"),
    "step of a text": (lambda content: content.update(step="2"), "its step is"),
    "step of a fraction": (lambda content: content.update(step=2.0), "its step is"),
    "step of true": (lambda content: content.update(step=True), "its step is"),
    "step of nothing": (lambda content: content.update(step=None), "its step is"),
    "another step": (lambda content: content.update(step=7), "of step 7"),
    "no format": (lambda content: content.pop("format"), "not a checkpoint"),
    "another format": (lambda content: content.update(format="x" * 999), "not a"),
    "no state": (lambda content: content.pop("state"), "it has no state"),
    "state is a list": (lambda content: content.update(state=[]), "no state"),
    "no files": (lambda content: content.pop("files"), "its list of files"),
    "files are a list": (lambda content: content.update(files=[]), "its list of files"),
    "files are empty": (lambda content: content.update(files={}), "its list of files"),
    "no metadata": (lambda content: content["files"].pop(".metadata"), "lacks .metadata"),
    "no shard": (lambda content: content["files"].pop("__0_0.distcp"), "it does not list __0_0"),
    "a file outside": (
        lambda content: content["files"].update({"../x": [1, "0" * 64]}),
        "has no size and SHA-256",
    ),
    "a file with NUL": (
        lambda content: content["files"].update({"a\0b": [1, "0" * 64]}),
        "state.json|damaged|missing",
    ),
    "a long file": (
        lambda content: content["files"].update({LONG: [1, "0" * 64]}),
        "cannot be read|missing|damaged",
    ),
    "a file that steers": (
        lambda content: content["files"].update({"\x1b[31m": [1, "0" * 64]}),
        "missing|damaged",
    ),
    "a negative size": (
        lambda content: content["files"].update({".metadata": [-1, "0" * 64]}),
        "has no size",
    ),
    "a size of true": (
        lambda content: content["files"].update({".metadata": [True, "0" * 64]}),
        "has no size",
    ),
    "a fractional size": (
        lambda content: content["files"].update({".metadata": [1.5, "0" * 64]}),
        "has no size",
    ),
    "no digest": (lambda content: content["files"].update({".metadata": [1]}), "has no size"),
    "an entry of a number": (lambda content: content["files"].update({".metadata": 3}), "has no"),
    "a short digest": (
        lambda content: content["files"].update({".metadata": [1, "00"]}),
        "has no size and SHA-256",
    ),
    "no data": (lambda content: content["state"].pop("data"), "it has no data"),
    "no graphs": (lambda content: content["state"].pop("graphs"), "it has no graphs"),
    "no device": (lambda content: content["state"].pop("random_device"), "it has no random_device"),
    "another device": (
        lambda content: content["state"].update(random_device="cuda"),
        "written on cuda",
    ),
    "device of a list": (
        lambda content: content["state"].update(random_device=["cpu"]),
        "written on",
    ),
    "data is a list": (lambda content: content["state"].update(data=[]), "data"),
    "data is empty": (lambda content: content["state"].update(data={}), "data position"),
    "data of another version": (
        lambda content: content["state"]["data"].update(version=99),
        "version 99",
    ),
    "no position": (
        lambda content: content["state"]["data"].pop("position"),
        "data position is damaged",
    ),
    "a negative position": (
        lambda content: content["state"]["data"].update(position=-1),
        "data position is damaged",
    ),
    "a position beyond": (
        lambda content: content["state"]["data"].update(position=10**9),
        "data position is damaged",
    ),
    "a position of text": (
        lambda content: content["state"]["data"].update(position="3"),
        "data position is damaged",
    ),
    "an epoch of -1": (
        lambda content: content["state"]["data"].update(epoch=-1),
        "data position is damaged",
    ),
    "an epoch of 2^70": (
        lambda content: content["state"]["data"].update(epoch=2**70),
        "data position is damaged",
    ),
    "waiting is a text": (
        lambda content: content["state"]["data"].update(waiting="ab"),
        "data position is damaged",
    ),
    "waiting for what is not there": (
        lambda content: content["state"]["data"].update(waiting=[[10**6, 0]]),
        "data position is damaged",
    ),
    "waiting for a part": (
        lambda content: content["state"]["data"].update(waiting=[[0, 99]]),
        "data position is damaged",
    ),
    "waiting for -1": (
        lambda content: content["state"]["data"].update(waiting=[[-1, 0]]),
        "data position is damaged",
    ),
    "identity is a list": (
        lambda content: content["state"]["data"].update(identity=[]),
        "data position is damaged",
    ),
    "other data": (
        lambda content: content["state"]["data"]["identity"].update(documents=3),
        "cannot go on with other data",
    ),
    "report is a text": (
        lambda content: content["state"]["data"].update(report="x"),
        "data position is damaged",
    ),
    "counts are texts": (
        lambda content: content["state"]["data"].update(empty_documents="x"),
        "data position is damaged",
    ),
    "bad is a text": (
        lambda content: content["state"]["data"].update(bad="x"),
        "data position is damaged",
    ),
    "graphs are a list": (lambda content: content["state"].update(graphs=[]), "graphs"),
    "a window of texts": (
        lambda content: content["state"]["spikes"].update(window=[["x", {}, None]]),
        "what it says of spikes",
    ),
    "a count of texts": (
        lambda content: content["state"]["graphs"].update(replayed="0"),
        "graphs are no counts",
    ),
    "experts are a text": (lambda content: content["state"].update(experts="x"), "experts"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_makes_no_sense_is_refused(name, tmp_path, capsys, finished):
    """Written with the right checksum: by hand, or by another program."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    only_last(tmp_path)
    change, says = STATES[name]
    sign(tmp_path, change)
    refuse(resume(name, says, {}), tmp_path, capsys)


class Attack:
    """What a pickle can ask for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def edited(change):
    """`.metadata` after `change` of its content."""

    def make(path: Path) -> bytes:
        with path.open("rb") as stream:
            found = pickle.load(stream)  # written by the test itself
        change(found)
        out = io.BytesIO()
        pickle.dump(found, out)
        return out.getvalue()

    return make


def first(found):
    return next(iter(found.state_dict_metadata))


def resize(found, *sizes: int) -> None:
    name = first(found)
    entry = found.state_dict_metadata[name]
    entry.size = torch.Size(sizes)
    old = entry.chunks[0]
    entry.chunks[:] = [
        ChunkStorageMetadata(offsets=torch.Size([0] * len(sizes)), sizes=torch.Size(sizes))
    ]
    place = found.storage_data.pop(MetadataIndex(name, old.offsets))
    found.storage_data[MetadataIndex(name, torch.Size([0] * len(sizes)))] = place


def place_of(found, **changes) -> None:
    for key, changed in changes.items():
        object.__setattr__(next(iter(found.storage_data.values())), key, changed)


HUGE = 2**62
METADATA = {
    "huge sizes": edited(lambda found: resize(found, HUGE)),
    "a huge matrix": edited(lambda found: resize(found, HUGE, HUGE)),
    "many dimensions": edited(lambda found: resize(found, *[2] * 500)),
    "ones without end": edited(lambda found: resize(found, *[1] * 5000)),
    "a huge offset": edited(lambda found: place_of(found, offset=HUGE)),
    "a huge length": edited(lambda found: place_of(found, length=HUGE)),
    "2^200": edited(lambda found: place_of(found, offset=2**200)),
    "a negative offset": edited(lambda found: place_of(found, offset=-1)),
    "an offset of text": edited(lambda found: place_of(found, offset="1")),
    "a path outside": edited(lambda found: place_of(found, relative_path="../../d.jsonl")),
    "an absolute path": edited(lambda found: place_of(found, relative_path="/etc/passwd")),
    "a path of NUL": edited(lambda found: place_of(found, relative_path="a\0b")),
    "a long path": edited(lambda found: place_of(found, relative_path=LONG)),
    "a path of a number": edited(lambda found: place_of(found, relative_path=3)),
    "no chunks": edited(lambda found: found.state_dict_metadata[first(found)].chunks.clear()),
    "no tensors": edited(lambda found: found.state_dict_metadata.clear()),
    "no places": edited(lambda found: found.storage_data.clear()),
    "tables of None": edited(lambda found: setattr(found, "state_dict_metadata", None)),
    "places of None": edited(lambda found: setattr(found, "storage_data", None)),
    "bytes": edited(
        lambda found: found.state_dict_metadata.update({"model.bytes": BytesStorageMetadata()})
    ),
    "names of numbers": edited(lambda found: found.state_dict_metadata.update({3: 4})),
    "a pickle of a call": lambda path: pickle.dumps(Attack(path.parent / "touched")),
    "a pickle of a list": lambda path: pickle.dumps([1, 2]),
    "a pickle of nothing": lambda path: pickle.dumps(None),
    "a huge string": lambda path: b"\x80\x04\x8d" + struct.pack("<Q", 2**62),
    "huge bytes": lambda path: b"\x80\x04\x8e" + struct.pack("<Q", 2**62),
    "a huge frame": lambda path: b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "a huge memo": lambda path: b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b".",
    "protocol 200": lambda path: b"\x80\xc8N.",
    "deep tuples": lambda path: b"\x80\x04N" + b"\x85" * 100_000 + b".",
    "deep lists": lambda path: b"(" * 100_000 + b"l" * 100_000 + b".",
    "a name of os": lambda path: b"cos\nsystem\n(S'true'\ntR.",
    "a name of builtins": lambda path: b"cbuiltins\neval\n(S'1'\ntR.",
    "a name of torch": lambda path: b"ctorch\nload\n.",
    "a name below torch": lambda path: b"ctorch.hub\nload\n.",
    "builtins by name": lambda path: b"cbuiltins\ngetattr\n.",
    "a size of 40 digits": lambda path: b"ctorch\nSize\n((I" + b"9" * 40 + b"\nttR.",
    "a name with dots": lambda path: b"\x80\x04\x8c\x05torch\x8c\x09nn.Linear\x93.",
    "a persistent id": lambda path: b"Pabc\n.",
    "an extension": lambda path: b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("name", METADATA)
def test_hostile_metadata_are_refused(name, tmp_path, capsys, finished):
    """With a manifest that was made for them."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    only_last(tmp_path)
    path = tmp_path / STEP / ".metadata"
    path.write_bytes(METADATA[name](path))
    sign(
        tmp_path,
        lambda content: content["files"].update(
            {".metadata": [path.stat().st_size, digest_of(path)]}
        ),
    )
    refuse(resume(name, r"\.metadata|does not fit|missing|damaged", {}), tmp_path, capsys)
    assert not list(tmp_path.rglob("touched"))


def shards(change):
    def make(path: Path) -> None:
        content = bytearray(path.read_bytes())
        path.write_bytes(change(content))

    return make


SHARDS = {
    "zeros": shards(lambda content: b"\0" * len(content)),
    "ones": shards(lambda content: b"\xff" * len(content)),
    "a zip of nothing": shards(lambda content: content[:64] + b"\0" * (len(content) - 64)),
    "a pickle of a call": shards(
        lambda content: (pickle.dumps(Attack(Path("/nowhere/touched"))) + bytes(len(content)))[
            : len(content)
        ]
    ),
    "a tensor of another kind": lambda path: path.write_bytes(
        _saved([1, 2, 3], path.stat().st_size)
    ),
    "an object": lambda path: path.write_bytes(
        _saved(Attack(Path("/nowhere/touched")), path.stat().st_size)
    ),
    "half": shards(
        lambda content: content[: len(content) // 2] + b"\0" * (len(content) - len(content) // 2)
    ),
}


def _saved(value, size: int) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue() + bytes(max(size - out.tell(), 0))


@pytest.mark.parametrize("name", SHARDS)
def test_hostile_shards_are_refused_without_torchs_hints(name, tmp_path, capsys, finished):
    """With a manifest that was made for them. torch would advise to load them without its own
    check."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    only_last(tmp_path)
    path = tmp_path / STEP / "__0_0.distcp"
    SHARDS[name](path)
    sign(
        tmp_path,
        lambda content: content["files"].update(
            {path.name: [path.stat().st_size, digest_of(path)]}
        ),
    )
    refuse(resume(name, "step-00000002: damaged", {}), tmp_path, capsys)


PLACES = {
    "a file": lambda path: path.write_text("x"),
    "a pipe": pipe,
    "a loop": loop,
    "a link to nothing": nowhere,
    "a socket": bound,
}


@pytest.mark.parametrize(
    "words",
    [
        ["--run.name", "mine"],
        ["--run.name", "mine", "--resume"],
        ["--run.name", "mine", "--resume", "auto"],
    ],
    ids=["start", "resume", "auto"],
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", ["runs", "runs/mine", "runs/mine/.claim", "runs/mine/checkpoints"])
@pytest.mark.few(4)
def test_what_stands_where_a_run_belongs_is_named(
    what, place, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text(GOOD)
    (tmp_path / what).parent.mkdir(parents=True, exist_ok=True)
    if ("claim" in what and place == "a file") or (
        "claim" in what and place == "a link to nothing"
    ):
        pytest.skip("a lock file is such a file, and is made where there is none")
    refuse(Case("", [*TRAIN, *DATA, *words], "runs", {what: PLACES[place]}), tmp_path, capsys)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json", "tensorboard"])
def test_a_pipe_where_a_run_writes_does_not_hang(name, tmp_path, capsys, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    path = tmp_path / RUN / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.mkfifo(path)
    with limit_of(tmp_path):
        code = cli.main([word.replace("{dir}", str(tmp_path)) for word in RESUME])
    said = capsys.readouterr().err
    assert "Traceback" not in said and (code == 0 or (code == 2 and name in said))


@pytest.mark.parametrize(
    "target",
    ["new/../../{dir}", "{dir}/hf", "{dir}/file", "/dev/null", "{dir}/absent/deep/new\N{SNOWMAN}"],
)
def test_an_export_to_where_it_cannot_go_is_named(
    target, tmp_path, capsys, finished, weights, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    shutil.copytree(weights, tmp_path / "hf")
    (tmp_path / "file").write_text("x")
    if "SNOWMAN" in ascii(target) or "\N{SNOWMAN}" in target:
        assert (
            cli.main(["export", str(tmp_path / RUN), target.replace("{dir}", str(tmp_path))]) == 0
        )
        return
    if ".." in target:
        target = "{dir}/d.jsonl/new"
    refuse(
        Case(
            "",
            ["export", f"{{dir}}/{RUN}", target],
            "already holds|could not be written|cannot",
            {},
        ),
        tmp_path,
        capsys,
    )
