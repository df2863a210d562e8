"""The command as a user meets it: help, one clear block for every mistake, whole runs."""

import builtins
import contextlib
import dataclasses
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from commandkit import Forked, command

from packgraph import cli
from packgraph.train import launch
from packgraph.train.config.command_line import COMMON, all_options
from packgraph.train.config.presets import PRESETS, preset
from packgraph.train.run_folder import can_go_on, claimed
from packgraph.train.signals import StopRequest

SMALL = [
    "--model.hidden-size",
    "16",
    "--model.intermediate-size",
    "32",
    "--model.num-layers",
    "1",
    "--model.num-heads",
    "2",
    "--model.num-kv-heads",
    "1",
    "--model.head-dim",
    "8",
    "--graph.capacities",
    "32x4,64x8",
    "--run.tokens-per-step",
    "100",
    "--optimizer.warmup-steps",
    "2",
    "--run.device",
    "cpu",
]


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    path = tmp_path / "data.jsonl"
    rows = [{"text": "to be or not to be " * (1 + index % 3)} for index in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--data.source",
        "jsonl",
        "--data.path",
        str(path),
        "--run.folder",
        str(tmp_path / "runs"),
    ]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The text of a user error: on stderr, exit code 2, no traceback."""
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], [], ["-h"]):
        assert cli.main(words) == 0
        assert "train PRESET" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("packgraph ")
    assert cli.main(["presets"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in PRESETS)


OWN = {"--config", "--resume", "--help"}


def shown_options(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.startswith("  --")]


@pytest.mark.parametrize("words", [["--help", "all"], ["--help=all"], ["-h", "all"]])
def test_train_help_all_lists_every_option_of_the_preset(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "qwen3-0.6b", *words]) == 0
    text = capsys.readouterr().out
    assert set(all_options(preset("qwen3-0.6b"))) == set(shown_options(text)) - OWN
    assert "(default: 151936)" in text
    assert re.search(r"\n  --.*\n      \(default", text) is None, "an option without help"


@pytest.mark.parametrize("words", [["qwen3-0.6b", "--help"], ["-h", "qwen3-0.6b"]])
def test_train_help_is_short_and_names_the_whole_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *words]) == 0
    text = capsys.readouterr().out
    options = [name for name in shown_options(text) if name not in OWN]
    every = all_options(preset("qwen3-0.6b"))
    assert 12 <= len(options) <= 20 and set(options) <= set(every)
    assert len(options) == len(set(options)) == len(COMMON)
    for name in options:  # each with type, default and one line
        found = re.search(rf"\n  {name} (\S.*) \(default: (.*)\)\n {{6}}(\S.*)\n(?! {{6}})", text)
        assert found is not None, name
    assert "--graph.capacities TOKENSxDOCUMENTS[xLONGEST], ... or auto (default: 1024x32," in text
    *_, last = text.splitlines()
    more = len(every) - len(options)
    assert last == f"`packgraph train qwen3-0.6b --help all` has every option: {more} more."
    assert "--help: expected short | all, got 'al'" in refused(capsys, "train", "--help=al")


def test_a_config_file_needs_a_preset_and_presets_take_no_word(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert "says no preset" in refused(capsys, "train", "--config", str(tmp_path / "empty.toml"))
    assert "takes no arguments" in refused(capsys, "presets", "x")


def test_bad_data_create_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    folder = ["--run.folder", str(tmp_path / "runs")]
    words = ["train", "qwen3-tiny", "--data.source", "jsonl", "--data.path", str(path), *folder]
    path.write_text('{"text": "fine"}\n{"text": \n')
    assert "bad.jsonl:2" in refused(capsys, *words)
    path.write_text("")
    assert "bad.jsonl" in refused(capsys, *words)
    path.write_text('{"text": "fine"}\n')
    assert "smaller than the tokenizer's" in refused(capsys, *words, "--model.vocab-size", "100")
    assert not (tmp_path / "runs").exists()


def test_a_run_from_start_to_resume(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: list[str]
) -> None:
    words = ["train", "qwen3-tiny", *SMALL, *data, "--run.name", "mine"]
    assert cli.main([*words, "--run.steps", "5"]) == 0
    assert "all steps done: 5 steps" in capsys.readouterr().err
    folder = tmp_path / "runs" / "mine"
    summary = json.loads((folder / "summary.json").read_text())
    assert (
        summary["replayed"] > 0
        and summary["backend"] == "recorder"
        and list(summary["fallbacks"]) == ["warm-up"]
    )
    assert "exists already" in refused(capsys, *words)
    config = ["--config", str(folder / "config.json")]
    assert cli.main(["train", *config, "--resume", "--run.steps", "8"]) == 0
    assert json.loads((folder / "summary.json").read_text())["steps"] == 8
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert "optimizer.eps: the run has 1e-08" in refused(
        capsys, "train", *config, "--resume", "--optimizer.eps", "1e-6"
    )
    assert cli.main(["train", *config, "--run.name", "again", "--run.steps", "3"]) == 0
    assert (tmp_path / "runs" / "again" / "summary.json").exists()


def next_words(text: str) -> dict[str, list[str]]:
    """The commands at the end of a run, by what they are for."""
    found = re.findall(r"^(to go on|Hugging Face weights|curves): +(\S.*)$", text, re.MULTILINE)
    return {what: shlex.split(command) for what, command in found}


def test_a_run_of_two_steps_replays_one_and_writes_a_trace_of_it(
    tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ["--run.steps", "2", "--run.profile", "1"]
    assert cli.main(["train", "qwen3-tiny", *SMALL, *data, *steps]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "note: graph.warmup = 1 instead of 2: so that a step of run.steps = 2 is left" in said
    trace = tmp_path / "runs" / "qwen3-tiny" / "profile" / "rank-0.json"
    assert f"steps 2 to 2 traced in {trace}" in said
    assert json.loads((trace.parents[1] / "summary.json").read_text())["replayed"] > 0
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert [name for name in names if name.startswith("ProfilerStep")] == ["ProfilerStep#1"]
    assert any(re.match(r"packgraph layer 0 forward slot 0 \d+x\d", name) for name in names)
    assert names.count("packgraph optimizer update") == 1


def test_the_commands_at_the_end_of_a_run_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: list[str]
) -> None:
    folder = tmp_path / "runs" / "with space"
    words = ["train", "qwen3-tiny", *SMALL, *data, "--run.name", "with space", "--run.steps", "8"]
    assert cli.main(words) == 0
    text = capsys.readouterr().err
    assert re.search(r"\nloss \S+ \(mean of steps 1 to 2\) → \S+ \(mean of steps 7 to 8\), ", text)
    found = next_words(text)
    again, export = found["to go on"], found["Hugging Face weights"]
    assert cli.main(export[export.index("export") :]) == 0
    assert (folder / "weights-step-8" / "config.json").exists()
    capsys.readouterr()
    assert cli.main(again[again.index("train") :]) == 0
    text = capsys.readouterr().err
    assert "resumed from" in text and "all steps done: 16 steps" in text
    assert re.search(
        r"\nloss \S+ \(mean of steps 1 to 2\) → \S+ \(mean of steps 13 to 16\), ", text
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = (sum(row["loss"] for row in part) / len(part) for part in (rows[:2], rows[12:]))
    assert f"\nloss {first:.4f} (mean" in text and f" → {last:.4f} (mean" in text
    found = next_words(text)
    export = found["Hugging Face weights"]
    assert cli.main(export[export.index("export") :]) == 0
    assert (folder / "weights-step-16" / "config.json").exists()
    if find_spec("tensorboard"):
        assert found["curves"][-2:] == ["--logdir", str(folder / "tensorboard")]
    else:
        assert "curves" not in found


@pytest.mark.slow
def test_documents_that_were_left_out_are_said_and_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: list[str]
) -> None:
    with (tmp_path / "data.jsonl").open("a") as stream:
        stream.write(
            '{"text": "'
            + "x" * 100
            + '"}\n{"text": ""}\n{"messages": [{"role": "user", "content": "?"}]}\n'
        )
    words = ["train", "qwen3-tiny", *SMALL, *data, "--data.epochs", "1", "--run.steps", "50"]
    for overlong, said, line in (
        ("drop", "was dropped (by data.overlong = drop, or ", r"1 dropped \(102 tokens\)"),
        ("split", "was split into pieces", "1 split"),
    ):
        assert cli.main([*words, "--data.overlong", overlong, "--run.name", overlong]) == 0
        text = capsys.readouterr().err
        assert text.count(f"data: a document longer than every capacity {said}") == 1
        assert re.search(
            rf"documents: 4[0-9] packed, {line}, 1 empty, 1 without a token to predict", text
        )
        counts = json.loads((tmp_path / "runs" / overlong / "summary.json").read_text())[
            "documents"
        ]
        assert (counts["dropped"], counts["split"]) == ((1, 0) if overlong == "drop" else (0, 1))
        assert counts["empty"] == counts["unlabelled"] == 1


def test_bad_documents_are_skipped_when_asked_said_and_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: list[str]
) -> None:
    with (tmp_path / "data.jsonl").open("a") as stream:
        stream.write(
            'no json\n{"input_ids": [1, 5000, 2]}\n{"input_ids": [1, 2], "attention_mask": [1]}\n'
        )
    words = ["train", "qwen3-tiny", *SMALL, *data, "--data.epochs", "1", "--run.steps", "50"]
    assert re.search(r"data\.jsonl:41: not JSON", refused(capsys, *words))
    assert cli.main([*words, "--data.on-bad", "skip"]) == 0
    text = capsys.readouterr().err
    said = r"data: a bad document was left out \(data.on_bad = skip\): .*data\.jsonl:41: not JSON"
    assert len(re.findall(said, text)) == 1
    found = re.search(r"documents: 40 packed, 3 bad \(the first: (.*)\)", text)
    assert found and re.findall(r"data\.jsonl:(4[0-9])", found[1]) == ["41", "43", "42"]
    counts = json.loads((tmp_path / "runs" / "qwen3-tiny" / "summary.json").read_text())[
        "documents"
    ]
    assert counts["bad"] == 3 and len(counts["first_bad"]) == 3


@pytest.mark.slow
def test_a_config_file_of_a_run_resumes_that_run(tmp_path: Path, data: list[str]) -> None:
    words = ["train", "qwen3-tiny", *SMALL, *data, "--run.steps", "3"]
    assert cli.main(words) == 0 and cli.main(words) == 0
    first, last = tmp_path / "runs" / "qwen3-tiny", tmp_path / "runs" / "qwen3-tiny-2"
    assert (
        cli.main(["train", "--config", str(first / "config.json"), "--resume", "--run.steps", "4"])
        == 0
    )
    assert [
        json.loads((folder / "summary.json").read_text())["steps"] for folder in (first, last)
    ] == [4, 3]
    moved = first.rename(tmp_path / "moved")
    assert (
        cli.main(["train", "--config", str(moved / "config.json"), "--resume", "--run.steps", "5"])
        == 0
    )
    assert json.loads((moved / "summary.json").read_text())["steps"] == 5
    assert not first.exists()


def test_verify_refuses_what_compares_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for steps in ("-3", "0"):
        assert f"--steps must be at least 1, got {steps}" in refused(
            capsys, "verify", "--steps", steps
        )
        assert "--steps must be" in refused(capsys, "verify", "qwen3-tiny", "--steps", steps)
    assert "--steps 2 is too few" in refused(capsys, "verify", "--steps", "2")
    assert "graph.enabled = false: verify compares" in refused(
        capsys, "verify", "qwen3-tiny", "--graph.enabled", "no"
    )


def test_a_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    process = command("train", "--help", stdout=write)
    os.close(write)
    assert process.communicate(timeout=60)[1] == ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")
def test_ctrl_c_before_torch_is_there_is_one_line() -> None:
    process = command("train", "qwen3-tiny", stdout=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while (
        b"libtorch" not in Path(f"/proc/{process.pid}/maps").read_bytes()
    ):  # torch is being imported
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "packgraph: interrupted\n"
    assert process.returncode == 130


def test_ctrl_c_that_an_import_swallows_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def swallowing(name: str, *rest: Any, **more: Any) -> Any:
        if (
            name == "packgraph.train.config.presets"
            and signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        ):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return real(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "packgraph.commands", raising=False)
    monkeypatch.setattr(builtins, "__import__", swallowing)
    assert cli.main(["train", "--help"]) == 130
    assert capsys.readouterr().err == "packgraph: interrupted\n"


def test_a_damaged_checkpoint_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: list[str]
) -> None:
    words = ["train", "qwen3-tiny", *SMALL, *data, "--run.name", "mine", "--run.steps", "3"]
    assert cli.main(words) == 0
    capsys.readouterr()
    part = tmp_path / "runs" / "mine" / "checkpoints" / "step-00000003" / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:100])
    assert cli.main([*words, "--resume"]) == 2
    assert f"{part}: damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_an_older_checkpoint_is_taken_when_the_newest_are_damaged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: list[str]
) -> None:
    words = [
        "train",
        "qwen3-tiny",
        *SMALL,
        *data,
        "--run.name",
        "mine",
        "--run.steps",
        "5",
        "--run.checkpoint-every",
        "2",
    ]
    assert cli.main(words) == 0
    checkpoints = tmp_path / "runs" / "mine" / "checkpoints"
    for name in ("step-00000005", "step-00000004"):
        (checkpoints / name / ".metadata").write_bytes(b"")
    capsys.readouterr()
    assert cli.main([*words, "--resume"]) == 0
    text = " ".join(capsys.readouterr().err.split())
    assert f"resumed from {checkpoints / 'step-00000002'}" in text
    assert all(
        f"{checkpoints / name / '.metadata'}: damaged" in text
        for name in ("step-00000005", "step-00000004")
    )


@pytest.mark.slow
def test_a_damaged_line_of_metrics_is_left_out_and_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: list[str]
) -> None:
    words = ["train", "qwen3-tiny", *SMALL, *data, "--run.name", "mine", "--run.steps", "3"]
    assert cli.main(words) == 0
    capsys.readouterr()
    metrics = tmp_path / "runs" / "mine" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("{", "[", 1))
    assert cli.main([*words[:-1], "4", "--resume"]) == 0
    assert "metrics.jsonl: damaged lines are left out" in capsys.readouterr().err
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [2, 3, 4]


def test_what_cannot_be_captured_ends_a_strict_run_in_one_block(
    capsys: pytest.CaptureFixture[str], data: list[str]
) -> None:
    words = [
        "train",
        "qwen3-tiny",
        *SMALL,
        *data,
        "--run.steps",
        "6",
        "--model.attention-backend",
        "naive",
    ]
    assert cli.main([*words, "--graph.strict"]) == 2
    text = capsys.readouterr().err
    assert "packgraph: error: " in text and "to do: " in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("size", "what"),
    [
        (20_000, r"step-0000000\d: could not be written: File too large"),
        (4000, "could not be written"),
        (1500, r"config\.json: could not be written: File too large"),
    ],
)
@pytest.mark.few(3)
def test_a_full_disk_is_one_block_and_leaves_no_part_of_a_checkpoint(
    tmp_path: Path, data: list[str], size: int, what: str
) -> None:
    def limit() -> None:  # no file of the process may grow beyond `size` bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    words = ["train", "qwen3-tiny", *SMALL, *data]
    more = ["--run.steps", "60", "--run.checkpoint-every", "5"]
    code, text = Forked(tmp_path, [*words, *more], limit).ended(100)
    assert code == 2 and "Traceback" not in text, text
    assert re.search(f"packgraph: error: .*{what}", text)
    assert not list((tmp_path / "runs" / "qwen3-tiny").glob("checkpoints/*"))


def test_a_loss_that_is_no_number_ends_with_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: list[str]
) -> None:
    words = [
        "train",
        "qwen3-tiny",
        *SMALL,
        *data,
        "--run.steps",
        "200",
        "--optimizer.learning-rate",
        "1e30",
        "--graph.enabled",
        "false",
    ]
    assert cli.main(words) == 1
    text = capsys.readouterr().err
    assert (
        "training failed: step" in text
        and "--optimizer.learning-rate" in text
        and "Traceback" not in text
    )


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU]
)
@pytest.mark.few(5)
def test_a_signal_ends_a_run_cleanly_with_a_checkpoint(
    tmp_path: Path, data: list[str], number: signal.Signals
) -> None:
    words = ["train", "qwen3-tiny", *SMALL, *data]
    more = ["--run.steps", "1000000", "--run.checkpoint-every", "1000000"]
    process = Forked(tmp_path, [*words, *more])
    metrics = tmp_path / "runs" / "qwen3-tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.is_running() and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, number)
    code, text = process.ended(30)
    assert code == 128 + number and "Traceback" not in text, text
    assert f"stopped by {number.name}" in text
    summary = json.loads((metrics.parent / "summary.json").read_text())
    assert (
        metrics.parent / "checkpoints" / "latest"
    ).read_text().strip() == f"step-{summary['steps']:08d}"


def test_a_time_limit_saves_and_ends_with_a_code_to_requeue_on_and_one_command_goes_on(
    tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "qwen3-tiny",
        *SMALL,
        *data,
        "--run.name",
        "el",
        "--run.steps",
        "1000000",
        "--run.checkpoint-every",
        "1000000",
        "--resume",
        "auto",
    ]
    reached = [0]
    for _ in range(2):
        assert cli.main([*words, "--run.max-minutes", "0.05"]) == 75
        text = capsys.readouterr().err
        assert "stopped by run.max_minutes = 0.05" in text and ("resumed from" in text) == (
            reached[-1] > 0
        )
        reached.append(json.loads((tmp_path / "runs" / "el" / "summary.json").read_text())["steps"])
    assert reached == sorted(set(reached))
    steps = words.index("1000000")
    # As many steps as are done: a scheduler shall not start this again.
    assert cli.main([*words[:steps], str(reached[-1]), *words[steps + 1 :]]) == 0
    text = capsys.readouterr().err
    assert "nothing to do" in text and "stopped" not in text
    words[words.index("1000000")] = str(reached[-1] + 2)
    assert cli.main(words) == 0
    assert cli.main(words) == 0  # nothing to do
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs" / "el" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == list(range(1, reached[-1] + 3))


@pytest.mark.parametrize("words", [["--resume", "qwen3-tiny"], ["qwen3-tiny", "--resume"]])
def test_resume_without_a_value_takes_no_preset_for_one(
    words: list[str], data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *words, *data, "--run.name", "none"]) == 2
    assert "--resume: there is no run" in capsys.readouterr().err


def test_a_restart_waits_for_the_process_that_is_still_saving(tmp_path: Path) -> None:
    config = preset("qwen3-tiny")
    config = dataclasses.replace(
        config, run=dataclasses.replace(config.run, folder=str(tmp_path), name="el", resume="auto")
    )
    folder = tmp_path / "el"
    begun = threading.Event()

    def save() -> None:
        with claimed(folder):
            begun.set()
            time.sleep(0.5)
            (folder / "checkpoints" / "step-00000003").mkdir(parents=True)

    assert not can_go_on(config)
    thread = threading.Thread(target=save)
    thread.start()
    begun.wait()
    assert can_go_on(config) and not thread.is_alive()
    thread.join()


def test_of_starts_at_the_same_time_one_waits_for_the_other(
    tmp_path: Path,
    data: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another start is quicker and ends meanwhile; or it goes on, and this one says so."""
    words = ["train", "qwen3-tiny", *SMALL, *data, "--run.steps", "3", "--graph.enabled", "false"]
    words += ["--run.name", "el", "--resume", "auto"]
    prepare, others = launch.prepare, [1]

    def slowly(*arguments: Any) -> Any:
        if others.pop():
            others.append(0)
            assert cli.main(words) == 0
        others.append(0)
        return prepare(*arguments)

    monkeypatch.setattr(launch, "prepare", slowly)
    assert cli.main(words) == 0
    assert "nothing to do: all 3 steps are done" in capsys.readouterr().err
    monkeypatch.setattr("packgraph.train.run_folder.PATIENCE", 0.1)
    with claimed(tmp_path / "runs" / "el"):
        assert cli.main(words) == 2
    assert "is being written by another process" in capsys.readouterr().err


def test_a_signal_at_the_last_step_is_no_interruption() -> None:
    request = StopRequest()
    assert not request and request.exit_code() == 143
    request.note(signal.SIGUSR1)
    assert request and request.exit_code() == 138
    late = StopRequest(max_minutes=1e-9)
    assert late and late.exit_code() == 75


@pytest.mark.parametrize("name", [["--run.name", "mine"], []])
@pytest.mark.few(2)
def test_a_run_that_was_made_meanwhile_is_not_destroyed(
    name: list[str],
    tmp_path: Path,
    data: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, prepare = tmp_path / "runs" / (name[1] if name else "qwen3-tiny"), launch.prepare

    def slowly(*arguments: Any) -> Any:
        (folder / "checkpoints" / "step-00000009").mkdir(parents=True)
        (folder / "summary.json").write_text("{}")
        return prepare(*arguments)

    monkeypatch.setattr(launch, "prepare", slowly)
    words = [
        "train",
        "qwen3-tiny",
        *SMALL,
        *data,
        "--run.steps",
        "3",
        "--graph.enabled",
        "false",
        *name,
    ]
    assert cli.main(words) == (2 if name else 0)
    text = capsys.readouterr().err
    assert ("was made by another process meanwhile" in text) == bool(name)
    assert (folder / "summary.json").read_text() == "{}" and sorted(
        p.name for p in folder.iterdir()
    ) == [".claim", "checkpoints", "summary.json"]
    assert name or (tmp_path / "runs" / "qwen3-tiny-2" / "summary.json").exists()


def test_more_documents_than_the_cap_run_eagerly(tmp_path: Path, data: list[str]) -> None:
    assert (
        cli.main(
            ["train", "qwen3-tiny", *SMALL, *data, "--graph.max-documents", "1", "--run.steps", "6"]
        )
        == 0
    )
    summary = json.loads((tmp_path / "runs" / "qwen3-tiny" / "summary.json").read_text())
    assert summary["fallbacks"]["more documents than any capacity"] > 0
