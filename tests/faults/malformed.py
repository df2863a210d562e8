"""Made-up malformed inputs: each is refused in one line that names the file, or trains what is
given.

    seed ─▶ a good folder, one thing changed ─▶ the real command, in a forked child ─▶ outcome

Three families: `models` (folders of transformers: configs, indexes, safetensors), `tokenizers`
(tokenizer.json, its config, chat templates) and `values` (options, TOML and JSON files, manifests
and indexes of shards, checkpoints, configurations of runs). An input that is accepted must have a
reason to be right: the loss is that of plain transformers on the same folder, tokens are those of
`tokenizers`, values are those given, or the run is that of the good folder.

    python tests/faults/malformed.py --count 1000 --seed 0
    python tests/faults/malformed.py --family models --only 17
"""

import argparse
import collections
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from inputkit import (
    ARCHITECTURES,
    CHATS,
    ODD,
    ONE_STEP,
    SIZES,
    SMALL,
    TEMPLATE,
    TEXT,
    damage,
    data_words,
    dump,
    mutate_index,
    mutate_json,
    mutate_safetensors,
    mutated,
    prepare,
    resign,
    show,
    value_at,
)

from packgraph import cli
from packgraph.train.config.command_line import leaves
from packgraph.train.config.presets import preset
from packgraph.train.data.source import SourceDocument
from packgraph.train.data.tokenizer import FileTokenizer
from packgraph.train.run_files import CHECKSUM, digest_of

SECONDS = 30  # longer is a hang
LONGEST = 1200  # characters of a line of a message
MEMORY = 10 * 2**30  # bytes of address space
REFUSED, ACCEPTED, TRACEBACK, HANG, SILENT, WORDY = (
    "refused",
    "accepted",
    "TRACEBACK",
    "HANG",
    "SILENT",
    "WORDY",
)
GOOD = (REFUSED, ACCEPTED)
UNCAUGHT, BADLY_ACCEPTED = 97, 98  # exit codes of a child


class Case(NamedTuple):
    """One input.

    Attributes:
        name: What was changed.
        words: Of the command.
        named: One of these must be in a refusal.
        judge: Says of what is accepted why that is right; raises AssertionError if it is not.
    """

    name: str
    words: list[str]
    named: tuple[str, ...]
    judge: Callable[[], str]


class Outcome(NamedTuple):
    """How a case has ended, and the last of what it said."""

    kind: str
    said: str


def model_case(base: Path, folder: Path, draw: random.Random) -> Case:
    """A folder of transformers."""
    kind = draw.choice(sorted(path.name for path in (base / "models").iterdir()))
    model = folder / "model"
    shutil.copytree(base / "models" / kind, model)
    change = draw.random()
    weights = sorted(model.glob("*.safetensors"))
    if change < 0.6:
        what = mutate_json(model / "config.json", draw)
    elif change < 0.67:
        what = mutate_json(model / "generation_config.json", draw)
    elif change < 0.75 and kind == "sharded":
        what = mutate_json(model / "model.safetensors.index.json", draw)
    elif change < 0.9:
        what = mutate_safetensors(draw.choice(weights), draw)
    else:
        what = damage(draw.choice(sorted(model.iterdir())), draw)
    if kind in ("qwen3", "llama", "qwen3_moe") and draw.random() < 0.2:
        words = ["train", "qwen3-tiny", "--run.init-from", str(model), *data_words(base)]
        words += ["--data.tokenizer", str(base / "tokenizer")]
    else:
        words = ["train", f"hf:{model}", *data_words(base)]
    words += [*ONE_STEP, "--run.steps", "1", "--run.folder", str(folder / "runs")]
    words += ["--data.epochs", "1"]  # the step is all of the documents
    words += ["--data.tokenizer", str(base / "tokenizer")] if draw.random() < 0.5 else []
    named = (str(model), "with more memory", "model.vocab_size")
    whole = base / "models" / kind if "--run.init-from" in words else None
    judge = lambda: as_transformers(model, base, folder, whole)  # noqa: E731
    return Case(f"{kind} {what}", words, named, judge)


def as_transformers(model: Path, base: Path, folder: Path, whole: Path | None) -> str:
    """The loss of the step is that of plain transformers over the same documents; where that
    refuses what packgraph's own reader does not read, that of the `whole` folder."""
    loss = json.loads((folder / "runs/r/metrics.jsonl").read_text().splitlines()[0])["loss"]
    read = functools.partial(
        transformers.AutoModelForCausalLM.from_pretrained,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        attn_implementation="eager",  # others leave Gemma's caps out
    )
    try:
        made = read(model).train()
    except (ValueError, TypeError, KeyError, AssertionError, StrictDataclassError):
        if whole is None:
            raise
        made = read(_mended(model, whole, folder)).train()
    drops = [name for name, value in made.config.to_dict().items() if "drop" in name and value]
    names = [name for name, one in made.named_modules() if getattr(one, "p", 0) and "drop" in name]
    if drops or names:
        return "random by its config"
    tokenizer = FileTokenizer(str(base / "tokenizer"))
    total, count = 0.0, 0
    for line in (base / TEXT).read_text().splitlines():
        (document,) = tokenizer.encode(SourceDocument("", text=json.loads(line)["text"]))
        ids = torch.from_numpy(document.tokens)[None]
        with torch.no_grad():
            logits = made(input_ids=ids).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    expected = total / count
    assert abs(loss - expected) < 1e-4 * max(1, abs(expected)), f"{loss} instead of {expected}"
    return "as transformers"


def _mended(model: Path, whole: Path, folder: Path) -> Path:
    """The whole folder with those numbers of the other that were to have a decimal point."""
    config = json.loads((whole / "config.json").read_text())
    changed = json.loads((model / "config.json").read_text())
    numbers = {
        name: float(changed[name])
        for name, value in config.items()
        if isinstance(value, float) and type(changed.get(name)) is int
    }
    shutil.copytree(whole, folder / "mended")
    (folder / "mended" / "config.json").write_text(json.dumps(config | numbers))
    return folder / "mended"


def tokenizer_case(base: Path, folder: Path, draw: random.Random) -> Case:
    """A tokenizer.json and what lies beside it."""
    tokenizer = folder / "tokenizer"
    kind = draw.choice(("bpe", "unigram", "wordpiece"))
    shutil.copytree(base / "tokenizers" / kind, tokenizer)
    file, *options = (
        tokenizer / f"{name}.json"
        for name in ("tokenizer", "tokenizer_config", "special_tokens_map")
    )
    change = draw.random()
    if change < 0.5:
        what = mutate_json(file, draw)
    elif change < 0.7:
        what = mutate_json(draw.choice(options), draw)
    elif change < 0.85:
        what = damage(draw.choice((file, *options)), draw)
    else:
        at = draw.randrange(len(TEMPLATE))
        text = draw.choice(
            (TEMPLATE[:at], TEMPLATE[:at] + draw.choice(FRAGMENTS) + TEMPLATE[at:], TEMPLATE[at:])
        )
        (tokenizer / "chat_template.jinja").write_text(text)
        what = f"template {show(text[max(0, at - 9) : at + 20])}"
    name = CHATS if what.startswith("template") else draw.choice((TEXT, TEXT, CHATS))
    words = ["train", "qwen3-tiny", *SMALL, *ONE_STEP, *data_words(base, name), "--run.steps", "1"]
    words += ["--data.tokenizer", str(tokenizer), "--model.vocab-size", "320"]
    words += ["--run.folder", str(folder / "runs")]
    judge = lambda: as_tokenizers(tokenizer, base, name)  # noqa: E731
    return Case(f"{name} {kind} {what}", words, (str(tokenizer), "vocab"), judge)


FRAGMENTS = (
    *("{{ 1/0 }}", "{% for %}", "{{ x.y.z }}", "{{ raise_exception('no') }}", "{{", "%}"),
    *("{{ [][3] }}", "{{ 'x' * 10**9 }}", "{{ range(10**9) }}", "{{ 'x'.encode('nope') }}"),
    *("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{{ none + 1 }}", "{{ '\\ud800' }}"),
    *("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ x }}"),
    *("{% include 'x' %}", "{{ messages.x() }}", "{{ 10**10**8 }}", "{% generation %}"),
)


def as_tokenizers(folder: Path, base: Path, name: str) -> str:
    """Tokens are those that transformers makes of the same files, and at most an end."""
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    made.backend_tokenizer.no_padding()
    made.backend_tokenizer.no_truncation()
    ours, end = FileTokenizer(str(folder)), ["<|endoftext|>"]
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        if os.path.lexists(file):
            named = json.loads(file.read_text()).get("eos_token")
            end = [named.get("content") if isinstance(named, dict) else named] if named else end
    end = [number for number in made.convert_tokens_to_ids(end) if number is not None]
    for line in (base / name).read_text().splitlines():
        row = json.loads(line)
        if name == TEXT:
            (document,) = ours.encode(SourceDocument("", text=row["text"])) or [None]
            expected = made.backend_tokenizer.encode(row["text"]).ids
            found = [] if document is None else document.tokens.tolist()
            expected = expected if expected[-1:] == end else expected + end
            assert found == expected, f"{found} instead of {expected}"
    return "as tokenizers" if name == TEXT else "a chat"


def value_case(base: Path, folder: Path, draw: random.Random) -> Case:
    """A value of the command line or a file, or a file that packgraph has written."""
    kinds = (option_case, option_case, file_case, manifest_case, manifest_case, run_case, run_case)
    return draw.choice(kinds)(base, folder, draw)


def option_case(base: Path, folder: Path, draw: random.Random) -> Case:
    """An option with an odd value."""
    found = [leaf for leaf in leaves(preset("qwen3-tiny")) if leaf.path not in HARMFUL]
    leaf = draw.choice(found)
    odd = draw.choice([*ODD, leaf.default])
    text = odd if isinstance(odd, str) else draw.choice((str, json.dumps))(show_all(odd))
    words = ["train", "qwen3-tiny", *SMALL, *ONE_STEP, *data_words(base), "--run.steps", "1"]
    words += ["--run.folder", str(folder / "runs"), f"--{leaf.path}={text}"]
    words = [word.replace("\0", "\ufffd") for word in words]  # no word of a command can hold it
    judge = lambda: as_given(folder, leaf.path, text)  # noqa: E731
    return Case(f"--{leaf.path}={show(text)}", words, ("",), judge)


def show_all(value: Any) -> Any:
    """What can be a word: no number of hundreds of digits."""
    return value if not isinstance(value, int) or abs(value) < 10**40 else 10**40


HARMFUL = {"run.folder", "run.name", "run.steps", "data.workers"}  # or slow to start


def as_given(folder: Path, path: str, given: Any) -> str:
    """The configuration of the run has the value that was given."""
    stored = json.loads((folder / "runs/r/config.json").read_text())
    for key in path.split("."):
        stored = stored[key]
    flat = given.replace("-", "_") if isinstance(given, str) else given
    same = stored == given or str(stored).lower() in (str(given).lower(), str(flat).lower())
    words = {"none", "off", "null", "", "no", "yes", "on", "1", "0", "1.0", "0.0"}
    number = re.fullmatch(r"-?[\d_.e+]+", str(given)) and float(given) == stored
    listed = isinstance(stored, list) and ",".join(map(str, stored)) == str(given)
    assert same or number or listed or str(given).lower() in words, f"{path} is {stored!r}"
    return "as given"


def file_case(base: Path, folder: Path, draw: random.Random) -> Case:
    """A TOML or JSON file of values."""
    values = json.loads((base / "runs/r/config.json").read_text())
    values.pop(CHECKSUM)
    values["run"] |= {"folder": str(folder / "runs"), "steps": 1, "checkpoint_every": 0}
    what, changed = mutated(values, draw)
    file = folder / "my.json"
    file.write_text(dump(changed))
    if draw.random() < 0.2:
        what = damage(file, draw)
    words = ["train", "--config", str(file), "--run.name", "r", "--run.steps", "1"]
    words += ["--run.folder", str(folder / "runs"), *data_words(base)]
    keys = what.partition(" ")[0].split(".")

    def judge() -> str:
        if ".".join(keys) in HARMFUL or keys[0] == "data":
            return "an option says otherwise"
        with contextlib.suppress(KeyError, TypeError, IndexError, ValueError):
            return as_given(folder, ".".join(keys), value_at(changed, tuple(keys)))
        return "dropped"

    return Case(f"my.json: {what}", words, (str(file), *keys, "preset"), judge)


def manifest_case(base: Path, folder: Path, draw: random.Random) -> Case:
    """A folder of shards."""
    shards = folder / "shards"
    shutil.copytree(base / "shards", shards)
    manifest = shards / "manifest.json"
    content = json.loads(manifest.read_text())
    change = draw.random()
    if change < 0.6:
        content.pop(CHECKSUM)
        what, content = mutated(content, draw)
        resign(manifest, content)
    elif change < 0.8:
        index = draw.choice(sorted(shards.glob("*.npy")))
        what = mutate_index(index, draw)
        for one in content["shards"]:
            if index.name in one["files"]:
                one["files"][index.name] = {
                    "size": index.stat().st_size,
                    "sha256": digest_of(index),
                }
        resign(manifest, content)
    else:
        what = damage(draw.choice(sorted(shards.iterdir())), draw)
    if draw.random() < 0.2:
        return Case(what, ["data", "check", str(shards)], (str(shards),), lambda: "checked")
    words = ["train", "qwen3-tiny", *SMALL, *ONE_STEP, "--run.steps", "1"]
    words += ["--run.folder", str(folder / "runs")]
    words += ["--data.source", "shards", "--data.path", str(shards)]
    return Case(f"shards {what}", words, (str(shards),), lambda: as_before(base, folder, 1))


def run_case(base: Path, folder: Path, draw: random.Random) -> Case:
    """A run that goes on, or is exported, from files that something has changed."""
    run = folder / "runs/r"
    shutil.copytree(base / "runs", folder / "runs")
    last = run / "checkpoints/step-00000002"
    if draw.random() < 0.5:
        shutil.rmtree(run / "checkpoints/step-00000001")
    files = [run / "config.json", last / "state.json"]
    change = draw.random()
    if change < 0.7:
        file = draw.choice(files)
        content = json.loads(file.read_text())
        is_signed = draw.random() < 0.8
        if is_signed:
            content.pop(CHECKSUM)
        what, content = mutated(content, draw)
        what = f"{file.name}, signed: {what}" if is_signed else f"{file.name}: {what}"
        resign(file, content) if is_signed else file.write_text(dump(content))
    else:
        files += [*sorted(last.iterdir()), run / "metrics.jsonl", run / "summary.json"]
        what = damage(draw.choice(files), draw)
    end = draw.random()
    if end < 0.15:
        words = ["export", str(run), str(folder / "out")]
        return Case(f"export {what}", words, (str(run),), lambda: "exported")
    words = ["train", "qwen3-tiny", *SMALL, *ONE_STEP, "--run.steps", "3", "--run.resume", "true"]
    if end < 0.6:
        words = ["train", "--config", str(run / "config.json"), "--resume", "--run.steps", "3"]
    words += ["--run.checkpoint-every", "1"]
    words += ["--run.folder", str(folder / "runs"), *data_words(base)]
    key = what.partition(": ")[2].partition(" ")[0].removeprefix("state.config.")
    named = (str(run), "a resumed run must be the same", key or str(run))
    if what.startswith("config.json, signed") and what.endswith("dropped"):
        return Case(f"run {what}", words, named, lambda: "as one of an older version")
    return Case(f"run {what}", words, named, lambda: as_before(base, folder, 3))


def as_before(base: Path, folder: Path, step: int) -> str:
    """The loss of a step is that of the good folder."""
    found, expected = (
        next(
            row["loss"]
            for row in map(json.loads, (path / "r/metrics.jsonl").read_text().splitlines())
            if row["step"] == step
        )
        for path in (folder / "runs", base / "clean")
    )
    assert found == expected, f"{found} instead of {expected}"
    return "as before"


FAMILIES: dict[str, Callable[[Path, Path, random.Random], Case]] = {
    "models": model_case,
    "tokenizers": tokenizer_case,
    "values": value_case,
}


def run(case: Case, folder: Path) -> Outcome:
    """Run a case in a forked child."""
    log = folder / "log"
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _child(case, folder, log)
    began = time.monotonic()
    metrics = folder / "runs/r/metrics.jsonl"
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return classify(case, os.waitstatus_to_exitcode(status), log)
        seconds = time.monotonic() - began
        if seconds > SECONDS and (_processor_seconds(child) > SECONDS or seconds > 6 * SECONDS):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            trains = metrics.is_file() and len(metrics.read_text().splitlines()) > 4
            return Outcome(ACCEPTED if trains else HANG, log.read_text(errors="replace")[-300:])
        time.sleep(0.01)


def _processor_seconds(process: int) -> float:
    """What it has run for; others may keep a process waiting for long."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _child(case: Case, folder: Path, log: Path) -> None:
    """The command, in a process of its own, which it leaves in any case."""
    code = UNCAUGHT
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(folder)
        code = cli.main(case.words) if case.words else 0
        if code == 0:
            code = BADLY_ACCEPTED
            print(f"\naccepted: {case.judge()}", file=sys.stderr)
            code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def classify(case: Case, code: int, log: Path) -> Outcome:
    """What an exit code and the last words mean."""
    said = log.read_text(errors="replace").strip()
    if code < 0 or code == UNCAUGHT:
        return Outcome(TRACEBACK, f"exit {code}: {said[-400:]}")
    if code == BADLY_ACCEPTED:
        return Outcome(SILENT, said[-400:])
    if code == 0:
        return Outcome(ACCEPTED, said.rpartition("accepted: ")[2])
    block = re.search(r"^packgraph: (error|training failed): (?s:.)*", said, re.MULTILINE)
    if "Traceback" in said or block is None:
        return Outcome(TRACEBACK, f"exit {code}: {said[-400:]}")
    text = block[0]
    lines = text.splitlines()
    if block[1] == "training failed":
        return Outcome(REFUSED, text)
    flat = all(line.startswith("  ") for line in lines[1:])
    if not flat or max(map(len, lines)) > LONGEST or not any(name in text for name in case.named):
        return Outcome(WORDY, text[:LONGEST])
    return Outcome(REFUSED, text)


@contextlib.contextmanager
def prepared() -> Iterator[Path]:
    """A folder with good inputs."""
    with tempfile.TemporaryDirectory(prefix="malformed-") as place:
        base = Path(place) / "base"
        base.mkdir()
        made = Case("good inputs", [], (), lambda: prepare(base))
        outcome = run(made, base.parent)  # a process that has run autograd cannot be forked
        assert outcome.kind == ACCEPTED, outcome.said
        _import_all()
        yield base


def _import_all() -> None:
    """What children would each import."""
    for name in ("train.launch", "train.export", "train.data.shard_build", "train.features.live"):
        importlib.import_module(f"packgraph.{name}")
    for kind, more in ARCHITECTURES.items():
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(kind, **{**SIZES, **more})
            transformers.AutoModelForCausalLM.from_config(config)
    gc.freeze()


def attempt(base: Path, family: str, seed: int, number: int) -> tuple[Case, Outcome]:
    """Make and run input `number` of a family."""
    draw = random.Random(f"{family} {seed} {number}")
    folder = base.parent / f"{family}-{number}"
    folder.mkdir()
    try:
        case = FAMILIES[family](base, folder, draw)
        return case, run(case, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run as many as asked for, and say how they ended."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="of all families together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--only", type=int, help="the number of one input")
    parser.add_argument("--verbose", action="store_true", help="show those that end well, too")
    asked = parser.parse_args()
    families = asked.family or list(FAMILIES)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with prepared() as base:
        for at in range(asked.count):
            number, family = divmod(at, len(families))
            if asked.only is not None and number != asked.only:
                continue
            case, outcome = attempt(base, families[family], asked.seed, number)
            counts[families[family]][outcome.kind] += 1
            if asked.verbose or outcome.kind not in GOOD:
                said = outcome.said if asked.only is not None else outcome.said[-250:]
                print(
                    f"{outcome.kind} {families[family]} {number}: {case.name}\n  {said}\n",
                    flush=True,
                )
    for family, found in counts.items():
        print(family, dict(found))
    return 1 if any(kind not in GOOD for found in counts.values() for kind in found) else 0


if __name__ == "__main__":
    sys.exit(main())
