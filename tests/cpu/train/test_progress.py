"""What a run says: figures that fit, lines with elapsed time and ETA, run.log, MFU."""

import io
import itertools
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from trainkit import CPU, RandomPacks, tiny
from tuningkit import tiny_model, train

from packgraph.models.branches import head_weights, token_weights
from packgraph.train import throughput
from packgraph.train.config.presets import preset
from packgraph.train.config.reading import ConfigLayer, read_config
from packgraph.train.features.live import live_layer
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.progress import RUN_LOG, Phases, ProgressView, progress_bars
from packgraph.train.throughput import Throughput, peak_flops, training_operations

ROW = {
    "step": 20,
    "loss": 3.71671,
    "tokens": 2000,
    "places": 2048,
    "seconds": 0.5,
    "data_wait": 0.005,
    "replayed": 69,
    "fallbacks": 6,
    "mfu": 0.4125,
    "peak_memory": 12 * 2**30,
    "eta_seconds": 83.4,
}
FIGURES = (
    "ETA 0:01:23  loss 3.7167  4,000 tokens/s  MFU 41.2%  peak 12.00 GiB  data wait 1.0%  "
    "padding 2.3%  replays 69  fallbacks 6"
)


def console(width: int, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal)


def said(view: ProgressView) -> str:
    assert isinstance(view.console.file, io.StringIO)
    return view.console.file.getvalue()


@pytest.mark.parametrize(
    ("width", "last", "days"),
    [
        (48, "ETA 0:01:23", 0),
        (80, "tokens/s", 0),
        (80, "tokens/s", 2),
        (120, "data wait 1.0%", 0),
        (200, "", 0),
    ],
)
def test_a_bar_leaves_out_what_has_no_room_and_never_step_and_eta(
    width: int, last: str, days: int
) -> None:
    view = ProgressView(160, 10, console(width, terminal=True))
    view._began -= days * 86_400
    view._bars.tasks[0].start_time = view._bars.get_time() - days * 86_400
    with view:
        view.show(ROW)
    lines = [line for line in said(view).splitlines() if "step 20/160 " in line]
    kept = FIGURES[: FIGURES.index(last) + len(last)] if last else FIGURES
    bare = "".join(itertools.chain(*(part.partition("m")[2:] for part in lines[-1].split("\x1b"))))
    assert bare.rstrip().endswith(kept) and len(bare.rstrip()) <= width


def test_a_log_has_elapsed_time_and_eta() -> None:
    view = ProgressView(160, 10, console(300))
    view._began -= 100.0
    for step in (1, 2, 20):
        view.show(ROW | {"step": step})
    assert said(view).splitlines() == [f"step {n}/160  0:01:40  {FIGURES}" for n in (1, 20)]


def test_everything_said_is_in_run_log(tmp_path: Path) -> None:
    view = ProgressView(9, 1, console(200))

    def fail() -> None:
        with view:
            view.note("  model  8 [b]parameters")
            view.open_log(tmp_path)
            view.note("a note")
            warnings.warn("look twice", UserWarning, stacklevel=1)
            view.show(ROW | {"step": 1})
            raise ValueError("in vain")

    with pytest.warns(UserWarning, match="twice"), pytest.raises(ValueError, match="in vain"):
        fail()
    assert warnings.showwarning is not view._show_warning
    texts = [line[26:] for line in (tmp_path / RUN_LOG).read_text().splitlines()]
    assert texts[:3] == ["  model  8 [b]parameters", "a note", "UserWarning: look twice"]
    assert texts[3].startswith("step 1/9  0:00:0") and texts[4:] == ["ValueError: in vain"]
    assert "  model  8 [b]parameters" in said(view) and "in vain" not in said(view)


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    view = ProgressView(9, 1, console(400))
    view.open_log(tmp_path / "none")
    view.note("first")
    view.note("second")
    assert said(view).count("gets no more lines, the run goes on: No such file") == 1
    quiet = ProgressView(9, 1, Console(quiet=True))
    quiet.open_log(tmp_path)
    quiet.note("of another rank")
    assert not list(tmp_path.iterdir()) or (tmp_path / RUN_LOG).read_text() == ""


def test_phases_are_bars_on_a_terminal() -> None:
    screen = console(80, terminal=True)
    told: list[str] = []
    with progress_bars(screen) as bars:
        phases = Phases(told.append, itertools.count().__next__, bars=bars)
        for _ in phases.of("a name " * 20, 3, range(3), "graph"):
            bars.refresh()
        with phases.during("saving"):
            bars.refresh()
        assert not bars.tasks
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert "graph 2 of 3 (67%)  ETA 0:00:0" in text and "saving" in text and not told


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_peaks_are_of_devices_that_are_known(
    name: str, tflops: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = peak_flops(torch.device("cuda", 0))
    assert found == (None if tflops is None else tflops * 1e12) and peak_flops(CPU) is None


def test_operations_are_those_of_the_model(tmp_path: Path) -> None:
    config = tiny()
    weights = token_weights(config.model) + head_weights(config.model)
    # Two layers of two heads of 8 columns: 4 operations a column and pair, and twice in the
    # backward.
    assert training_operations(config) == (6 * weights, 3 * 2 * 2 * 4 * 8)
    path = str(tiny_model(tmp_path / "model"))
    given = ConfigLayer("path", {"hf": {"path": path}})
    live = read_config(preset("hf"), [given, live_layer(path)])
    of_token, of_pair = training_operations(live) or (0, 0)
    own = training_operations(replace(live, hf=config.hf)) or (0, 0)
    assert own[0] < of_token < 1.02 * own[0] and of_pair == own[1], "norms count as weights"
    adapters = training_operations(replace(live, lora=replace(live.lora, rank=4))) or (0, 0)
    assert adapters == (of_token * 2 // 3, of_pair), "no gradients of frozen weights"


def test_rows_have_rate_mfu_and_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "peak_flops", lambda device: 1e6)
    config, packs = tiny(), [next(RandomPacks()) for _ in range(2)]
    of_run = Throughput(config, CPU, 2)
    clock = iter([10.0, 20.0, 22.0, 24.0, 30.0, 31.0])
    monkeypatch.setattr(throughput.time, "perf_counter", clock.__next__)
    found = [of_run.figures(step, packs, 2.0, starting=step == 2) for step in (1, 2, 3, 4, 3, 4)]
    tokens = sum(pack.num_tokens for pack in packs)
    of_token, of_pair = training_operations(config) or (0, 0)
    operations = of_token * tokens + of_pair * sum(pack.num_pairs for pack in packs)
    assert found[0] == {"tokens_per_second": tokens / 2, "mfu": operations / 2 / 2e6}
    assert "eta_seconds" not in found[1], "it is a start"
    left = [one.get("eta_seconds") for one in found[2:]]
    assert left == [6.0, 4.0, None, 2.0], "the run has gone back to step 3"


def test_a_run_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(tmp_path / "Tiny-0.1B")
    capsys.readouterr()
    run = train(tmp_path, model, "--lora.rank", "4", steps=3)
    text = capsys.readouterr().err
    wanted = [
        "Tiny-0.1B on cpu, written to",
        "of them trained (adapters)",
        "documents; ",
        "precision  float32",
        "1 process",
        "none, offload none",
        "predicted at the peak",
    ]
    assert [words for words in wanted if words not in text] == []
    log = (run / RUN_LOG).read_text()
    assert "  model      " in log and "step 3/3  0:00:" in log and "to go on:" in log
    rows = read_metrics(run / METRICS)
    assert all(row["tokens_per_second"] > 0 and "mfu" not in row for row in rows)
