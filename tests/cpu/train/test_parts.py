"""The parts of the trainer: schedule, optimizer, numbers of a step, folders, signals."""

import dataclasses
import json
import math
import os
import signal
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from packgraph.packing.capacity import Capacity
from packgraph.train.config.presets import PRESETS, preset
from packgraph.train.config.reading import ConfigError, ConfigLayer, read_config, to_dict
from packgraph.train.config.sections import (
    BucketConfig,
    GraphConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from packgraph.train.metrics import METRICS, MetricsLog, fetch_late, read_metrics, summarize
from packgraph.train.optimizer import Optimizer, learning_rate_of
from packgraph.train.run_files import RunFileError, write_json
from packgraph.train.run_folder import (
    CHECKPOINTS,
    CONFIG,
    check_same_run,
    choose_folder,
    claimed,
    is_running,
)
from packgraph.train.signals import stop_on_signals
from packgraph.train.validate import validate

CPU = torch.device("cpu")


@given(
    st.integers(0, 300),
    st.integers(0, 50),
    st.integers(1, 200),
    st.floats(0, 1),
    st.sampled_from(["cosine", "linear", "wsd"]),
)
def test_learning_rate_warms_up_then_falls_to_its_floor(
    step: int, warmup: int, decay: int, fraction: float, schedule: str
) -> None:
    def rate(at: int) -> float:
        options = OptimizerConfig(
            learning_rate=2.0,
            warmup_steps=warmup,
            min_learning_rate_fraction=fraction,
            schedule=schedule,  # type: ignore[arg-type]
        )
        return learning_rate_of(options, decay, at)

    assert 0 < rate(step) <= 2.0 or fraction == 0
    if step < warmup:
        assert rate(step) == 2.0 * (step + 1) / warmup
    else:
        assert rate(step + 1) <= rate(step)
    assert math.isclose(rate(max(warmup + 1, decay)), 2.0 * fraction, abs_tol=1e-12)


def test_learning_rates_of_all_schedules() -> None:
    def rates(schedule: str) -> list[float]:
        options = OptimizerConfig(
            learning_rate=1.0,
            warmup_steps=2,
            decay_steps=12,
            min_learning_rate_fraction=0.0,
            schedule=schedule,  # type: ignore[arg-type]
        )
        return [learning_rate_of(options, 100, step) for step in range(13)]

    assert rates("linear") == pytest.approx([0.5, 1, *(1 - step / 10 for step in range(11))])
    assert rates("wsd") == pytest.approx([0.5, *([1] * 10), 0.5, 0])
    assert rates("constant") == [0.5, *([1.0] * 12)]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def reference_steps(
    model: nn.Module, options: OptimizerConfig, rates: list[float], inputs: torch.Tensor
) -> None:
    """The same training by torch's plain AdamW."""
    decay = [value for value in model.parameters() if value.ndim >= 2]
    rest = [value for value in model.parameters() if value.ndim < 2]
    adam = torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": options.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ],
        lr=1.0,
        betas=options.betas,
        eps=options.eps,
        foreach=False,
        fused=False,
    )
    for rate in rates:
        adam.zero_grad()
        model(inputs).square().sum().backward()
        if options.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm, foreach=False)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e9])
def test_optimizer_equals_plain_adamw(clip_norm: float | None) -> None:
    options = OptimizerConfig(weight_decay=0.3, clip_norm=clip_norm)
    inputs, rates = torch.randn(6, 5), [1e-2, 5e-2, 1e-3]
    ours, theirs = small_model(), small_model()
    optimizer = Optimizer(ours.named_parameters(), options)
    for rate in rates:
        optimizer.zero_grad()
        ours(inputs).square().sum().backward()
        expected = torch.stack([value.norm() for value in optimizer.gradients().values()]).norm()
        torch.testing.assert_close(optimizer.step(rate), expected)
    reference_steps(theirs, options, rates, inputs)
    for left, right in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)


def test_gradient_buffers_stay_where_they_are() -> None:
    model = small_model()
    optimizer = Optimizer(model.named_parameters(), OptimizerConfig())
    places = {name: value.data_ptr() for name, value in optimizer.gradients().items()}
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step(1e-3)
    optimizer.zero_grad()
    assert {name: value.data_ptr() for name, value in optimizer.gradients().items()} == places
    assert not any(value.any() for value in optimizer.gradients().values())


def test_narrow_weights_keep_small_updates_in_their_masters() -> None:
    weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = Optimizer([("weight", weight)], OptimizerConfig(weight_decay=0.0, clip_norm=None))
    for _ in range(40):
        optimizer.zero_grad()
        weight.grad = torch.ones(8, 8)
        optimizer.step(1e-4)
    master = optimizer.state_tensors()["weight.master"]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full((8, 8), 1 - 40e-4), rtol=1e-4, atol=0)
    assert torch.equal(weight, master.bfloat16()) and bool((weight < 1).all())


def test_late_numbers_are_those_of_their_step() -> None:
    values = torch.tensor([1.0, 2.0])
    first = fetch_late(values)
    values.fill_(9)
    second = fetch_late(values)
    assert first() == [1.0, 2.0] and second() == [9.0, 9.0]


def test_a_flipped_bit_of_a_row_is_found(tmp_path: Path) -> None:
    """Every bit of a file: rows that are read are rows that were written, and all but those of the
    damaged line."""
    log = MetricsLog(tmp_path, last_step=0)
    for step in (1, 2, 3):
        log.write(row(step, gradient_norm=1.5))
    log.close()
    path = tmp_path / METRICS
    content, written = path.read_bytes(), read_metrics(path)
    assert written == [row(step, gradient_norm=1.5) for step in (1, 2, 3)]
    for place in range(len(content)):
        for bit in range(8):
            flipped = bytes([content[place] ^ 1 << bit])
            path.write_bytes(content[:place] + flipped + content[place + 1 :])
            read = read_metrics(path)
            assert all(entry in written for entry in read), (place, bit)
            assert 3 > len(read) >= (1 if content[place] == ord("\n") else 2)


def test_rows_without_checksums_are_of_older_versions(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_text("".join(json.dumps(row(step)) + "\n" for step in (1, 2)))
    assert read_metrics(path) == [row(1), row(2)]
    log = MetricsLog(tmp_path, last_step=2)
    log.write(row(3))
    log.close()
    assert not log.damaged and read_metrics(path) == [row(1), row(2), row(3)]
    # All have checksums now: a row without one is damaged.
    path.write_text(path.read_text().replace('"crc32"', '"crc33"', 1))
    assert [entry["step"] for entry in read_metrics(path)] == [2, 3]
    # Other tools write rows with other spaces and in another order.
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(
            json.dumps(dict(reversed(entry.items())), indent=None, separators=(",", ":")) + "\n"
            for entry in rows
        )
    )
    assert [entry["step"] for entry in read_metrics(path)] == [2, 3]


def row(step: int, **changes: float) -> dict[str, float]:
    figures = {
        "step": step,
        "loss": 10.0 - step,
        "tokens": 80,
        "places": 100,
        "seconds": 0.5,
        "starting": step == 1,
    }
    return figures | changes


def test_a_log_holds_no_rows_in_memory(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, last_step=0)
    log.write(row(1))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for step in range(2, 1001):
        log.write(row(step))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert [entry["step"] for entry in log.rows] == list(
        range(1, 1001)
    ) and grown < 100_000  # 272 KB as dictionaries
    log.close()
    assert len(log.rows) == 1000


def test_metrics_are_cut_to_the_checkpoint(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, last_step=0)
    for step in range(1, 6):
        log.write(row(step))
    log.close()
    with (tmp_path / METRICS).open("a") as stream:
        stream.write('{"step": 6, "lo')
    assert [entry["step"] for entry in read_metrics(tmp_path / METRICS)] == [1, 2, 3, 4, 5]
    log = MetricsLog(tmp_path, last_step=3)
    log.write(row(4, loss=0.5))
    log.close()
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [
        1,
        2,
        3,
        4,
    ]
    assert list((tmp_path / "tensorboard").iterdir())


def test_summary_of_rows() -> None:
    summary = summarize([row(step, seconds=100.0 if step == 1 else 0.5) for step in range(1, 9)])
    assert summary == {
        "loss_first": 8.5,
        "loss_last": 2.5,
        "loss_first_steps": [1, 2],
        "loss_last_steps": [7, 8],
        "loss_window": 2,
        "steps": 8,
        "tokens": 640,
        "tokens_per_second": 160.0,
        "padding_fraction": pytest.approx(0.2),
    }
    assert summarize([]) == {"steps": 0, "tokens": 0}


def config_at(folder: Path, **run: object) -> TrainConfig:
    tiny = preset("qwen3-tiny")
    return dataclasses.replace(tiny, run=dataclasses.replace(tiny.run, folder=str(folder), **run))


def test_derived_names_are_made_unique_and_resume_takes_the_last(tmp_path: Path) -> None:
    config = config_at(tmp_path / "runs")
    with pytest.raises(ConfigError, match="there is no run of qwen3-tiny"):
        choose_folder(config_at(tmp_path / "runs", resume=True))
    for name in ("qwen3-tiny", "qwen3-tiny-2", "qwen3-tiny-3"):
        assert choose_folder(config) == tmp_path / "runs" / name
        (tmp_path / "runs" / name / CHECKPOINTS / "step-00000001").mkdir(parents=True)
    assert (
        choose_folder(config_at(tmp_path / "runs", resume=True))
        == tmp_path / "runs" / "qwen3-tiny-3"
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("models/[odd]/../phi-2", "phi-2"),
        (f"hub/models--Qwen--Qwen3-0.6B/snapshots/{'0a' * 20}", "Qwen3-0.6B"),
    ],
)
def test_runs_of_models_of_transformers_are_called_like_these(
    tmp_path: Path, path: str, name: str
) -> None:
    folder = tmp_path / "runs"

    def chosen(**run: object) -> Path:
        config = config_at(folder, **run)
        live = dataclasses.replace(config.hf, path=str(tmp_path / path))
        return choose_folder(dataclasses.replace(config, preset="hf", hf=live))

    for earlier in ("hf", "hf-2"):
        (folder / earlier / CHECKPOINTS / "step-00000001").mkdir(parents=True)
    assert chosen(resume=True) == folder / "hf-2", "runs were called so before"
    assert chosen() == folder / name
    (folder / name / CHECKPOINTS / "step-00000001").mkdir(parents=True)
    assert chosen() == folder / f"{name}-2" and chosen(resume=True) == folder / name


def test_a_given_name_is_never_overwritten(tmp_path: Path) -> None:
    assert choose_folder(config_at(tmp_path, name="mine")) == tmp_path / "mine"
    with pytest.raises(ConfigError, match=r"--resume: there is no run .*mine"):
        choose_folder(config_at(tmp_path, name="mine", resume=True))
    (tmp_path / "mine" / CHECKPOINTS / "step-00000001").mkdir(parents=True)
    with pytest.raises(
        ConfigError,
        match=r"exists already; choose another --run\.name, or go on with it by --resume",
    ):
        choose_folder(config_at(tmp_path, name="mine"))
    assert choose_folder(config_at(tmp_path, name="mine", resume=True)) == tmp_path / "mine"


@pytest.mark.parametrize(
    "sizes",
    [{"cp_kind": "ulysses"}, {"dp": 4, "ep": 4}, {"tp": 2}, {"pp": 2, "chunks": 2}, {"cp": 2}],
    ids=lambda sizes: " ".join(sizes),
)
def test_a_run_may_go_on_at_another_layout(tmp_path: Path, sizes: dict[str, object]) -> None:
    config = config_at(tmp_path, name="mine")
    write_json(
        tmp_path / CONFIG, to_dict(dataclasses.replace(config, parallel=ParallelConfig(dp=2, ep=2)))
    )
    check_same_run(tmp_path, dataclasses.replace(config, parallel=ParallelConfig(**sizes)))  # type: ignore[arg-type]


def test_a_resumed_run_must_be_the_same(tmp_path: Path) -> None:
    config = config_at(tmp_path, name="mine")
    write_json(tmp_path / CONFIG, to_dict(config))
    check_same_run(tmp_path, config_at(tmp_path / "moved", name="other", resume=True, steps=999))
    other = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, eps=0.5))
    with pytest.raises(ConfigError, match=r"optimizer\.eps: the run has 1e-08, now it is 0\.5"):
        check_same_run(tmp_path, other)
    for content, problem in (
        ("{", "not valid JSON"),
        ("[]", "the top level must be"),
        (None, "cannot be read"),
        ('{"zzz": 1}', "zzz: unknown key"),
    ):
        (tmp_path / CONFIG).unlink()
        if content is not None:
            (tmp_path / CONFIG).write_text(content)
        with pytest.raises(ConfigError, match=rf"config\.json: {problem}"):
            check_same_run(tmp_path, config)
        (tmp_path / CONFIG).touch()


def changed(config: TrainConfig, **optimizer: object) -> TrainConfig:
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **optimizer))


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [("optimizer.learning_rate", "0.003", "1e-05"), ("data.on_bad", "stop", "skip")],
)
def test_some_options_change_on_the_way_only_when_asked(
    tmp_path: Path, name: str, before: str, now: str
) -> None:
    config = config_at(tmp_path, name="mine")
    write_json(tmp_path / CONFIG, to_dict(config))
    section, option = name.split(".")
    other = read_config(config, [ConfigLayer("options", {section: {option: now}}, text=True)])
    said = f"{name}: the run has '?{before}'?, .*say --{name.replace('_', '-')} {now}"
    with pytest.raises(ConfigError, match=said):
        check_same_run(tmp_path, other)
    (note,) = check_same_run(tmp_path, other, {name})
    assert f"{name} changes from {before} to {now}" in note
    with pytest.raises(ConfigError, match=r"optimizer\.eps"):
        check_same_run(tmp_path, changed(config, eps=0.1), {"optimizer.eps"})


def test_more_steps_change_the_decay_unless_its_end_is_said(tmp_path: Path) -> None:
    config = config_at(tmp_path, name="mine", steps=100)
    write_json(tmp_path / CONFIG, to_dict(config))
    longer = config_at(tmp_path, name="mine", steps=200)
    assert check_same_run(tmp_path, config) == []
    (note,) = check_same_run(tmp_path, longer)
    assert "now falls until step 200 instead of 100; --optimizer.decay-steps 100 keeps it" in note
    assert (
        check_same_run(tmp_path, changed(longer, decay_steps=100), {"optimizer.decay_steps"}) == []
    )
    (note,) = check_same_run(tmp_path, changed(longer, decay_steps=150), {"optimizer.decay_steps"})
    assert "optimizer.decay_steps changes from 100 to 150" in note
    with pytest.raises(ConfigError, match=r"decay_steps: the run has 100, now it is 150"):
        check_same_run(tmp_path, changed(longer, decay_steps=150))
    write_json(tmp_path / CONFIG, to_dict(changed(config, decay_steps=100)))
    assert check_same_run(tmp_path, changed(longer, decay_steps=100)) == []


@pytest.mark.parametrize("name", [None, "mine"])
def test_a_run_without_a_checkpoint_leaves_its_name_free_unless_it_is_running(
    tmp_path: Path, name: str | None
) -> None:
    config = config_at(tmp_path, name=name)
    folder = choose_folder(config)
    with claimed(folder):
        (folder / METRICS).write_text("")
        assert is_running(folder)
        with pytest.raises(ConfigError, match="being written by another process"), claimed(folder):
            pass
        with pytest.raises(ConfigError, match="being written by another process"):
            choose_folder(config_at(tmp_path, name=name, resume=True))
        if name is not None:
            with pytest.raises(ConfigError, match="being written by another process"):
                choose_folder(config)
        else:
            assert choose_folder(config) == tmp_path / "qwen3-tiny-2"
    assert not is_running(folder)
    assert choose_folder(config) == folder
    (folder / "notes.txt").write_text("the user's own")
    if name is not None:
        with pytest.raises(ConfigError, match="exists already"):
            choose_folder(config)
    else:
        assert choose_folder(config) == tmp_path / "qwen3-tiny-2"


def test_folders_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.folder = .*file: this is a file"):
        choose_folder(config_at(tmp_path / "file"))
    for parent in (tmp_path / "file" / "runs", Path("/proc/runs")):
        with (
            pytest.raises(RunFileError, match="runs/mine: could not be written: "),
            claimed(parent / "mine"),
        ):
            pass


def test_signals_are_noted_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop and stop.reason == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_documents_cap_splits_capturing_from_packing() -> None:
    graph = preset("qwen3-tiny").graph
    assert graph.captured_capacities() == graph.packing_capacities() == sorted(graph.capacities)
    capped = dataclasses.replace(graph, max_documents=10)
    assert [shape.documents for shape in capped.captured_capacities()] == [8, 10, 10]
    assert len(capped.packing_capacities()) == 5


def test_sections_refuse_what_is_wrong_in_them_all_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"learning_rate must be positive.*betas must lie.*clip_norm"
    ):
        OptimizerConfig(learning_rate=0, betas=(0.9, 1.0), clip_norm=-1)
    with pytest.raises(ValueError, match=r"learning_rate must be a float32, got 1e\+308"):
        OptimizerConfig(learning_rate=1e308)
    with pytest.raises(ValueError, match=r"warmup must be at least 1.*slots.*capacities must name"):
        GraphConfig(warmup=0, slots=0, capacities=())
    with pytest.raises(
        ValueError, match=r"steps must be.*name must be the name of one folder.*device must be"
    ):
        RunConfig(steps=0, name="../up", device="tpu")


def test_disagreements_between_sections_come_all_at_once() -> None:
    config = config_at(Path("runs"), steps=2)
    config = dataclasses.replace(
        config,
        graph=dataclasses.replace(config.graph, backend="cuda", warmup=2, scope=("atn", "moe")),
        model=dataclasses.replace(config.model, attention_backend="varlen"),
    )
    problems = "\n".join(validate(config, "cpu", vocabulary=10**9))
    assert problems.count("\n") == 5
    assert (
        "graph.scope: scope names 'atn', but the model has only the stages attn, embed, head, mlp: "
        "did you mean 'attn'?" in problems
    )
    assert (
        "graph.scope: scope names 'moe', but the model has only the stages attn, embed, head, mlp"
        in problems
    )
    assert "model.attention_backend = varlen needs a CUDA device" in problems
    assert validate(preset("qwen3-tiny"), "cpu", vocabulary=2) == []


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_themselves(name: str) -> None:
    assert preset(name).preset == name


@pytest.mark.parametrize(
    ("graph", "buckets", "text"),
    [
        (
            {"capacities": (Capacity(1, 1), Capacity(8, 2))},
            {},
            "graph.capacities: no label can remain in 1x1, since",
        ),
        ({"capacities": (Capacity(8, 2, longest=1),)}, {}, "no label can remain in 8x2, since"),
        ({"capacities": "auto"}, {"max_tokens": 1}, "buckets.max_tokens = 1 leaves no label"),
    ],
)
def test_a_capacity_without_room_for_a_label_is_refused(graph, buckets, text):
    config = dataclasses.replace(
        preset("qwen3-tiny"),
        graph=GraphConfig(enabled=False, **graph),
        buckets=BucketConfig(**buckets),
    )
    assert any(text in problem for problem in validate(config, "cpu"))
    fine = dataclasses.replace(
        config, graph=GraphConfig(enabled=False, capacities=(Capacity(2, 1),))
    )
    assert validate(fine, "cpu") == []
