"""Options and config files that make no sense end with one clear message, whatever stands in
them."""

import subprocess
import sys
from pathlib import Path

import pytest
from commandkit import Forked
from malformedkit import (
    DIGITS,
    SMALL,
    TRAIN,
    Case,
    cases,
    line,
    refuse,
)

from packgraph.train.config.command_line import Leaf, leaves
from packgraph.train.config.presets import preset

LEAVES = {leaf.path: leaf for leaf in leaves(preset("qwen3-tiny")) if leaf.path != "preset"}
# The model's sizes by which matrices are made; those of sections that are off mean nothing.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


def wrong_values(leaf: Leaf) -> dict[str, str]:
    """Values that no option of this kind takes, by what is wrong with them."""
    if leaf.kind is bool:
        return {"word": "maybe", "number": "2", "digits": DIGITS}
    if leaf.kind is int:
        return {
            "empty": "",
            "fraction": "1.5",
            "digits": DIGITS,
            "many digits": "9" * 3900,
            "2^64": str(2**64),
        }
    if leaf.kind is float:
        return {"empty": "", "word": "much", "infinite": "1e999", "nan": "nan"}
    if leaf.kind is str:
        return {"control": "a\x1b[31mb", "surrogate": "a\udcffb", "NUL": "a\0b"}
    if "Literal" in str(leaf.kind) and "None" not in str(leaf.kind) and "str" not in str(leaf.kind):
        return {"word": "nonsense", "digits": DIGITS}
    return {}


WRONG = [
    Case(
        f"{path} {what}",
        [*TRAIN, f"{leaf.option}={value}"],
        rf"{leaf.option}|section {path.rpartition('.')[0]}",
    )
    for path, leaf in LEAVES.items()
    for what, value in wrong_values(leaf).items()
]


@cases(*WRONG)
def test_a_value_of_no_use_names_its_option(case, tmp_path, capsys):
    refuse(case, tmp_path, capsys, at_once=True)


def option(name: str, value: str, says: str) -> Case:
    return Case(f"{name}={value[:20]!r}", [*TRAIN, f"--{name}={value}"], says)


LONG = "x" * 300
PATHS = ("run.folder", "data.tokenizer", "run.init-from")


@cases(
    *(
        option(f"model.{size.replace('_', '-')}", str(2**62), f"{size} is {2**62}, must be at most")
        for size in SIZES
    ),
    *(
        option(f"model.{size.replace('_', '-')}", "-1", f"{size} is -1, must be positive")
        for size in SIZES
    ),
    *(
        option("run.name", name, "name must be the name of one folder|argument [0-9]+, .*run.name")
        for name in (
            "",
            " ",
            ".",
            "..",
            "a/b",
            "/",
            "../x",
            "a\\b",
            "\x1b[2J",
            "a\nb",
            "a\x7fb",
            "\udc80",
            "\u2028",
        )
    ),
    option("run.name", LONG, "a name in it has 300 bytes"),
    option("run.name", "é" * 150, "a name in it has 300 bytes"),
    *(option(name, LONG, "a name in it has 300 bytes") for name in PATHS),
    *(option(name, "x/" * 2500, "longer than 4,000 characters") for name in PATHS),
    *(option(name, "a\0b", f"argument .*{name}.*control character") for name in PATHS),
    *(option(name, "a\x1b]0;b\x07", f"argument .*{name}.*control character") for name in PATHS),
    *(option(name, "a\udcff", f"argument .*{name}.*not valid Unicode") for name in PATHS),
    *(option(name, "x/" * 1950, "it has 3,90[0-9] bytes, more than the 3,800") for name in PATHS),
    option("run.folder", "", "folder must name the folder"),
    *(
        option("run.seed", value, "expected a whole number")
        for value in (str(2**63), str(2**64), str(-(2**64)), "0x10", "1e3", "1.0", "inf", "seven")
    ),
    *(
        option("data.seed", value, "data.seed|seed must not be negative")
        for value in (str(2**64), "-1", DIGITS)
    ),
    *(
        option("run.device", value, "run.device|device must be")
        for value in ("gpu", "cuda:-1", "cuda:x", "cuda:" + DIGITS, "cpu:0", "", "tpu", "mps")
    ),
    *(
        option("run.dtype", value, "expected float32 | bfloat16")
        for value in ("float16", "fp8", "", "torch.float32")
    ),
    *(option("run.steps", value, "steps") for value in ("0", "-5", "many", "1e4", "None")),
    *(
        option("run.max-minutes", value, "max_minutes|max-minutes")
        for value in ("0", "-1", "nan", "inf", "soon")
    ),
    *(option("run.tokens-per-step", value, "tokens") for value in ("0", "-1", "1.5")),
    *(option("run.keep-checkpoints", value, "keep") for value in ("0", "-1", "all")),
    *(
        option("optimizer.betas", value, "betas")
        for value in ("0.9", "0.9,0.95,1", "1,1", "a,b", "-1,0.5", "nan,0.9", ",")
    ),
    *(
        option("optimizer.learning-rate", value, "learning.rate")
        for value in ("0", "-1", "nan", "inf", "fast")
    ),
    *(option("optimizer.eps", value, "eps") for value in ("0", "-1e-8", "tiny")),
    *(option("optimizer.clip-norm", value, "clip.norm") for value in ("0", "-1", "hard")),
    *(
        option("optimizer.min-learning-rate-fraction", value, "fraction")
        for value in ("-0.1", "1.1")
    ),
    *(
        option("graph.capacities", value, "capacit")
        for value in (
            "",
            ",",
            "0x0",
            "1x",
            "x1",
            "1x1x9",
            "-1x1",
            "64",
            "64x8x",
            "64*8",
            "1e3x4",
            "9" * 30 + "x1",
            f"{2**31}x1",
            f"64x{2**31}",
            DIGITS + "x1",
            "64x8,foo",
            "64x8x65",
            "axb",
        )
    ),
    *(
        option("graph.memory-budget", value, "budget")
        for value in ("much", "-1GiB", "101%", "0", "12", "1e999GiB")
    ),
    *(option("graph.scope", value, "scope") for value in ("foo", "attn,foo", "ATTN")),
    *(option("graph.slots", value, "slots") for value in ("0", "-1", "two")),
    *(option("graph.warmup", value, "warmup") for value in ("0", "-1")),
    *(option("graph.max-documents", value, "max.documents") for value in ("0", "-1")),
    *(option("model.dropout", value, "dropout") for value in ("1", "-0.1", "2", "nan")),
    *(
        option("model.pattern", value, "pattern|letter")
        for value in ("XYZ", "(M", "M)", "(", "()", "M" * 5 + "\0", "😀")
    ),
    *(
        option("model.attention-backend", value, "attention_backend")
        for value in ("quick", "FLASH", "")
    ),
    *(option("model.head-dim", value, "head_dim") for value in ("7", "0")),
    option("model.num-kv-heads", "3", "num_heads 2 is no multiple of num_kv_heads 3"),
    *(option("parallel.tp", value, "tp") for value in ("0", "-1", "2", "3", str(2**62))),
    *(option("parallel.pp", value, "pp") for value in ("0", "2", str(2**62))),
    *(option("parallel.cp", value, "cp") for value in ("0", "2", str(2**62))),
    *(option("parallel.dp", value, "dp") for value in ("0", "2", str(2**62))),
    *(option("parallel.ep", value, "ep") for value in ("0", "2")),
    *(option("parallel.chunks", value, "chunks") for value in ("0", "2", str(2**62))),
    *(option("buckets.max-tokens", value, "max.tokens") for value in ("0", "-1", "x")),
    *(option("data.source", value, "data.source") for value in ("csv", "JSONL", "", "http://x")),
    *(option("data.window", value, "window") for value in ("0", "-1", "wide")),
    *(option("data.epochs", value, "epochs") for value in ("0", "-1", "0.5")),
    *(option("data.max-documents-loaded", value, "max.documents.loaded") for value in ("0", "-1")),
    *(
        option("data.on-bad", value, "on-bad: expected stop | skip")
        for value in ("ignore", "", "Skip")
    ),
    *(option("data.overlong", value, "overlong: expected error") for value in ("cut", "", "True")),
    *(
        option("data.tokenizer", value, "no such file")
        for value in ("absent", "/absent/tokenizer.json", "Bytes")
    ),
    option("data.tokenizer", "/dev/null", "no such file"),
    option("data.tokenizer", "/", "no such file"),
    *(
        option("offload.modules", value, "offload.modules|modules")
        for value in ("foo", "attn_norm,foo")
    ),
)
def test_an_option_that_makes_no_sense_is_refused(case, tmp_path, capsys):
    refuse(case, tmp_path, capsys, at_once=True)


def words(name: str, *given: str, says: str) -> Case:
    return Case(name, given, says)


@cases(
    words("no such command", "tarin", says="did you mean train"),
    words("command with NUL", "tr\0ain", says="no command"),
    words("command that steers a terminal", "\x1b[2Jtrain", says="no command"),
    words("long command", "x" * 10_000, says="no command .*10,002"),
    words("preset with NUL", "train", "qwen\0", says="argument 1, .*control"),
    words("preset that steers", "train", "\x1b[31mqwen3-tiny", says="argument 1, .*control"),
    words("preset of surrogates", "train", "\udcff\udcfe", says="argument 1, .*Unicode"),
    words("long preset", "train", "x" * 10_000, says="longer than 4,000"),
    words("two presets", "train", "qwen3-tiny", "qwen3-tiny", says="not expected here"),
    words("unknown option", *TRAIN, "--run.setps", "3", says="did you mean --run.steps"),
    words("unknown section", *TRAIN, "--runn.steps", "3", says="did you mean --run.steps"),
    words("option without section", *TRAIN, "--steps=3", says="did you mean --run.steps"),
    words("empty option", *TRAIN, "--=3", says="unknown key"),
    words("two dashes", *TRAIN, "--", "x", says="not expected here"),
    words("dots", *TRAIN, "--....=3", says="unknown key"),
    words("deep option", *TRAIN, "--" + ".".join("a" * 1900), "3", says="unknown key"),
    words("long option", *TRAIN, "--" + "a" * 50_000, "3", says="longer than 4,000"),
    words("option that steers", *TRAIN, "--a\x1b[31mb", "3", says="argument .*control"),
    words("section as a value", *TRAIN, "--run", "3", says="this is a section"),
    words("value as a section", *TRAIN, "--run.steps.more", "3", says="unknown key|run.steps"),
    words("option without value", *TRAIN, "--run.steps", says="expected a whole number"),
    words("steps of verify", *TRAIN, "--steps", "3", says="did you mean --run.steps"),
    words("apart", *TRAIN, "--apart", says="packgraph verify"),
    words("resume of nothing", *TRAIN, "--resume", says="there is no run"),
    words("resume of a name", *TRAIN, "--resume", "--run.name", "absent", says="there is no run"),
    words("resume of a word", *TRAIN, "--resume=perhaps", says="--resume: expected true"),
    words("no preset", "train", says="which preset"),
    words(
        "verify steps word",
        "verify",
        "qwen3-tiny",
        "--steps",
        "many",
        says="--steps: expected a whole number",
    ),
    words("verify steps 0", "verify", "qwen3-tiny", *SMALL, "--steps", "0", says="steps"),
    words("verify steps many", "verify", "qwen3-tiny", "--steps", DIGITS, says="longer than 4,000"),
    words("verify unknown", "verify", "nope", says="unknown preset"),
    words("verify apart", "verify", "--apart", says="apart"),
    words("plan nothing", "plan", "--ranks", "2", says="--microbatches"),
    words("plan ranks 0", "plan", "--ranks", "0", "--microbatches", "1", says="ranks"),
    words("plan ranks negative", "plan", "--ranks", "-1", "--microbatches", "1", says="ranks"),
    words("plan ranks word", "plan", "--ranks", "two", "--microbatches", "1", says="ranks"),
    words(
        "plan ranks digits",
        "plan",
        "--ranks",
        DIGITS,
        "--microbatches",
        "1",
        says="longer than 4,000",
    ),
    words(
        "plan ranks huge",
        "plan",
        "--ranks",
        str(2**62),
        "--microbatches",
        "1",
        says="ranks|cannot be drawn",
    ),
    words(
        "plan microbatches huge",
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        str(2**62),
        says="microbatches",
    ),
    words(
        "plan chunks huge",
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--chunks",
        str(2**62),
        says="chunks",
    ),
    words(
        "plan group 0",
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--chunks",
        "2",
        "--group",
        "0",
        says="group",
    ),
    words(
        "plan capacities",
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--capacities",
        "a,b",
        says="--capacities: expected a whole number",
    ),
    words(
        "plan buckets",
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--capacities",
        "8",
        "--buckets",
        "7",
        says="bucket",
    ),
    words(
        "plan capacity 0",
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--capacities",
        "0",
        says="capacit",
    ),
    words(
        "plan capacity huge",
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--capacities",
        DIGITS,
        says="longer than 4,000",
    ),
    words(
        "plan svg",
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--svg",
        "{dir}/absent/x.svg",
        says="written",
    ),
    words(
        "plan svg folder",
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--svg",
        "{dir}",
        says="written",
    ),
    words(
        "plan svg NUL",
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--svg",
        "a\0b",
        says="argument [0-9], .*control character",
    ),
    words(
        "plan svg long",
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--svg",
        LONG,
        says="300 bytes",
    ),
    words(
        "plan csv NUL",
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--csv",
        "a\0b",
        says="argument [0-9], .*control character",
    ),
    words("plan data absent", "plan", "absent.jsonl", says="no such file"),
    words("plan data NUL", "plan", "a\0b", says="argument [0-9], .*control character"),
    words("plan data long", "plan", LONG, says="300 bytes"),
    words("plan data steers", "plan", "\x1b[31mx", says="control"),
    words("plan data batch 0", "plan", "stdlib", "--batch", "0", says="at least 1"),
    words("plan data batch word", "plan", "stdlib", "--batch", "many", says="--batch"),
    words("plan data batch digits", "plan", "stdlib", "--batch", DIGITS, says="longer than 4,000"),
    words("plan world 0", "plan", "stdlib", "--world", "0", says="world"),
    words("plan world word", "plan", "stdlib", "--world", "many", says="world"),
    *(
        words(f"plan {word}", "plan", "stdlib", *word.split(), says="no option of `packgraph plan`")
        for word in ("--resume", "--steps 3", "--apart", "--skip-one-process")
    ),
    words("plan no buckets", "plan", "stdlib", "--buckets.max-count", "0", says="at least 1"),
    words("plan a preset", "plan", "stdlib", "qwen-tiny", says="did you mean qwen3-tiny"),
    words("try nothing", "try", says="which preset"),
    words("try seconds", "try", "qwen3-tiny", "--seconds", "-1", says="--seconds must be positive"),
    words("try seconds digits", "try", "--seconds", DIGITS, says="argument 2, .*longer"),
    words("try two", "try", "qwen3-tiny", "moonlight", says="not expected here"),
    words("export nothing", "export", says="required"),
    words("export of nothing", "export", "{dir}/absent", "{dir}/new", says="absent"),
    words("export NUL", "export", "a\0b", "{dir}/new", says="argument 1, .*control character"),
    words("export long", "export", LONG, "{dir}/new", says="300 bytes"),
    words("export to NUL", "export", "{dir}", "a\0b", says="argument [0-9], .*control character"),
    words("export three", "export", "a", "b", "c", says="not expected here"),
    words("presets with words", "presets", "x\x1b[31m", says="argument 1, .*control"),
    words("config absent", "train", "--config", "{dir}/absent.toml", says="cannot be read"),
    words("config NUL", "train", "--config", "a\0.toml", says="argument 2, .*control character"),
    words("config long", "train", "--config", LONG + ".toml", says="305 bytes"),
    words(
        "config of another kind", "train", "--config", "{dir}/a.ini", says="ends in .toml, .json"
    ),
    words("config folder", "train", "--config", "{dir}", says="ends in .toml, .json"),
    words(
        "config without a value",
        "train",
        "--config",
        says="--config: expected a path or none, got no value",
    ),
)
def test_words_that_make_no_sense_are_refused(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refuse(case, tmp_path, capsys, at_once=True)


def test_three_unnamed_starts_at_once_take_three_folders(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(10 * line({"text": "to be or not to be"}))
    command = [
        *(word.replace("{dir}", str(tmp_path)) for word in TRAIN),
        "--data.source",
        "jsonl",
        "--data.path",
        str(tmp_path / "data.jsonl"),
    ]
    started = []
    for name in "abc":
        (tmp_path / name).mkdir()
        started.append(Forked(tmp_path / name, command))
    said = [process.ended(120) for process in started]
    assert [code for code, _ in said] == [0, 0, 0], said
    names = ("qwen3-tiny", "qwen3-tiny-2", "qwen3-tiny-3")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(names)
    assert all((tmp_path / "runs" / name / "summary.json").is_file() for name in names)


@pytest.mark.parametrize(
    "raw",
    [
        b"a\xff",
        *(pytest.param(raw, marks=pytest.mark.slow) for raw in (b"\xc3\x28", b"\xed\xa0\x80")),
    ],
)
def test_bytes_that_are_no_text_are_refused_as_a_shell_gives_them(
    tmp_path: Path, raw: bytes
) -> None:
    command = [
        sys.executable.encode(),
        b"-m",
        b"packgraph.cli",
        b"train",
        b"qwen3-tiny",
        b"--run.name",
        raw,
    ]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert b"--run.name" in done.stderr and b"not valid Unicode" in done.stderr
