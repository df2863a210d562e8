"""Whole runs: going on bitwise, stopping, failing without losing anything."""

import copy
import dataclasses
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit import CAPACITIES, CPU, RandomPacks, StopAfter, equal, ran, state_of, tiny, trainer

from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.train.build import build_model
from packgraph.train.checkpoint.writer import latest_checkpoint, load_state
from packgraph.train.data import (
    DataConfig,
    DataError,
    Microbatches,
    build_tokenizer,
    open_documents,
)
from packgraph.train.data.microbatches import take_step
from packgraph.train.data.source import DataChangedError
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.run_files import read_json
from packgraph.train.signals import StopRequest
from packgraph.train.spikes import NonFiniteLossError
from packgraph.train.strategies import accumulate
from packgraph.train.trainer import CHECKPOINTS, Trainer


def figures(folder: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "gradient_norm", "learning_rate", "tokens", "microbatches")
    return [tuple(row[key] for key in keys) for row in read_metrics(folder / METRICS)]


@pytest.mark.parametrize("graph", [False, True])
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(tmp_path: Path, graph: bool) -> None:
    config = tiny(graph)
    straight, _ = ran(tmp_path / "straight", config)
    expected = state_of(straight)
    stopped, summary = ran(tmp_path / "stopped", config, stop=StopAfter(3))
    assert summary["ended"] == "stopped by SIGINT" and summary["steps"] == 3
    torch.manual_seed(12345)
    resumed, summary = ran(tmp_path / "stopped", config, resume=True)
    assert summary["steps"] == 6
    equal(state_of(resumed), expected)
    assert figures(tmp_path / "stopped") == figures(tmp_path / "straight")
    states = [
        load_state(latest_checkpoint(tmp_path / name / CHECKPOINTS))
        for name in ("straight", "stopped")
    ]  # type: ignore[arg-type]
    graphs = [state.pop("graphs") for _, state in states]
    assert states[0] == states[1]
    if graph:
        assert summary["replayed"] > 0
        # Counts are those of both processes; the second one warms up and captures again.
        first, rows = stopped.executor.totals(), read_metrics(tmp_path / "stopped" / METRICS)
        assert (
            summary["captured"]
            == graphs[1]["captured"]
            == first["captured"] + resumed.executor.totals()["captured"]
        )
        assert (
            summary["fallbacks"]["warm-up"] > first["fallbacks"]["warm-up"] == rows[2]["fallbacks"]
        )
        assert rows[-1]["replayed"] == summary["replayed"] > first["replayed"]


def test_a_run_writes_all_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = trainer(folder, tiny(steps=8, checkpoint_every=2, keep_checkpoints=2))
    assert not folder.exists()
    summary = run.run(StopRequest())
    assert summary == read_json(folder / "summary.json")
    wanted = {
        "loss_first",
        "loss_last",
        "steps",
        "tokens",
        "tokens_per_second",
        "padding_fraction",
        "backend",
        "captured",
        "replayed",
        "fallbacks",
        "capture_seconds",
    }
    assert wanted <= summary.keys() and summary["ended"] == "all steps done"
    assert summary["loss_last"] < summary["loss_first"]
    assert sorted(path.name for path in (folder / CHECKPOINTS).glob("step-*")) == [
        "step-00000006",
        "step-00000008",
    ]
    assert len({row["microbatches"] for row in read_metrics(folder / METRICS)}) > 1


class HangingPacks(RandomPacks):
    """Packs that do not come any more, from one on, until nobody wants them; not even then without
    `can_end`."""

    def __init__(self, hanging: int, can_end: bool) -> None:
        super().__init__()
        self.can_end = can_end
        self.hanging, self.asked, self.over = hanging, threading.Event(), threading.Event()

    def __next__(self) -> Any:
        if self.position == self.hanging:
            self.asked.set()
            assert self.over.wait(60)
            raise DataError("interrupted")
        return super().__next__()

    def interrupt(self) -> None:
        if self.can_end:
            self.over.set()


@pytest.mark.parametrize("can_end", [True, False], ids=["a worker", "a file system"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_stop_is_heeded_while_data_do_not_come(
    tmp_path: Path, prefetch: int, can_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last whole step is saved, and who goes on from it ends as if never stopped."""
    monkeypatch.setattr("packgraph.train.feed.LONGEST", 0.5)
    config = dataclasses.replace(tiny(), data=DataConfig(prefetch=prefetch))
    ran(tmp_path / "straight", config)
    packs, stop = HangingPacks(9, can_end), StopRequest()

    def signalled() -> None:
        assert packs.asked.wait(60)
        time.sleep(0.5)  # all whole steps are made by then
        stop.note(signal.SIGTERM)

    scheduler = threading.Thread(target=signalled)
    scheduler.start()
    _, summary = ran(tmp_path / "run", config, packs, stop=stop)
    scheduler.join()
    hanging = [thread for thread in threading.enumerate() if thread.name.endswith("-data")]
    assert all(thread.daemon for thread in hanging)  # so that a process ends without them
    packs.over.set()
    assert summary["ended"] == "stopped by SIGTERM" and summary["exit_code"] == 143
    assert 0 < summary["steps"] < config.run.steps
    ran(tmp_path / "run", config, resume=True)
    assert figures(tmp_path / "run") == figures(tmp_path / "straight")


@pytest.mark.parametrize("stop", [StopRequest(), StopAfter(3)], ids=["to the end", "stopped"])
def test_a_run_without_checkpoints_writes_all_but_these(tmp_path: Path, stop: StopRequest) -> None:
    folders = {every: tmp_path / f"run-{every}" for every in (0, 2)}
    for every, folder in folders.items():
        ran(folder, tiny(graph=True, checkpoint_every=every), stop=copy.copy(stop))
        assert read_json(folder / "summary.json")["replayed"] > 0
    assert figures(folders[0]) == figures(folders[2])
    assert (folders[2] / CHECKPOINTS).exists() and not (folders[0] / CHECKPOINTS).exists()


def test_a_run_without_checkpoints_cannot_go_back_to_one() -> None:
    with pytest.raises(ValueError, match="on_spike = rollback goes back to a checkpoint"):
        tiny(on_spike="rollback", checkpoint_every=0)
    with pytest.raises(ValueError, match="checkpoint_every must not be negative, got -1"):
        tiny(checkpoint_every=-1)


def test_going_on_with_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    config = tiny(graph=True)
    _, summary = ran(tmp_path / "run", config)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert ran(tmp_path / "run", config, resume=True)[1] == summary
    assert {
        path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()
    } == before
    assert "nothing to do: all 6 steps are done" in (tmp_path / "log").read_text()
    (tmp_path / "run" / "summary.json").write_text("{")
    _, written = ran(tmp_path / "run", config, resume=True)
    of_a_process = {"pool_bytes", "memory"}
    assert {key: written[key] for key in summary.keys() - of_a_process} == {
        key: summary[key] for key in summary.keys() - of_a_process
    }


def test_the_first_loss_of_a_longer_run_stays_the_first(tmp_path: Path) -> None:
    _, first = ran(tmp_path / "run", tiny(steps=6))
    _, summary = ran(tmp_path / "run", tiny(steps=30), resume=True)
    assert summary["loss_first"] == first["loss_first"] and summary["steps"] == 30


def test_graphs_train_as_eager_does(tmp_path: Path) -> None:
    states = {}
    for graph in (False, True):
        run, summary = ran(tmp_path / str(graph), tiny(graph))
        states[graph] = state_of(run)
    assert summary["backend"] == "recorder" and summary["replayed"] > 0 and summary["captured"] > 0
    assert set(summary["fallbacks"]) == {"warm-up"}
    equal(states[True], states[False])
    assert figures(tmp_path / "False") == figures(tmp_path / "True")


def test_the_end_of_the_data_ends_the_run(tmp_path: Path) -> None:
    _, summary = ran(tmp_path / "run", tiny(), RandomPacks(end=4))
    assert summary["ended"] == "the data ended" and 0 < summary["steps"] < 6
    assert latest_checkpoint(tmp_path / "run" / CHECKPOINTS) is not None


def test_bad_data_on_the_way_lose_no_finished_step(tmp_path: Path) -> None:
    config = tiny(steps=12)
    expected = state_of(ran(tmp_path / "straight", config)[0])
    broken = trainer(tmp_path / "broken", config, RandomPacks(bad=17))
    with pytest.raises(DataError, match=r"file\.jsonl:7"):
        broken.run(StopRequest())
    assert 1 < broken.step < 12
    mended = trainer(tmp_path / "broken", config)
    mended.resume()
    assert mended.step == broken.step
    mended.run(StopRequest())
    equal(state_of(mended), expected)


def test_a_file_that_changes_is_not_read_again_and_loses_no_finished_step(tmp_path: Path) -> None:
    """Documents of the last step wait in the window, and stand in the file that has changed."""
    path, before = tmp_path / "data.jsonl", 12 * '{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}\n'

    class Changing(StopRequest):
        steps = 0

        def __bool__(self) -> bool:
            self.steps += 1
            if self.steps == 4:
                path.write_text(before.replace("10]", "11]"))
            return False

    def packs() -> Any:
        config = DataConfig(source="jsonl", path=str(path), window=4)
        return Microbatches(config, open_documents(config), build_tokenizer(config), CAPACITIES)

    # steps made ahead would have read the documents before they change
    config = dataclasses.replace(tiny(steps=12), data=DataConfig(prefetch=0))
    path.write_text(before)
    expected = state_of(ran(tmp_path / "straight", config, packs())[0])
    broken = trainer(tmp_path / "broken", config, packs())
    with pytest.raises(DataChangedError, match=r"data\.jsonl: changed since the run opened it"):
        broken.run(Changing())
    assert broken.step == 3
    path.write_text(before)
    mended = trainer(tmp_path / "broken", config, packs())
    mended.resume()
    assert mended.step == 3
    mended.run(StopRequest())
    equal(state_of(mended), expected)


@pytest.mark.parametrize("poison", ["loss", "weight"])
def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(
    tmp_path: Path, poison: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(steps=20, checkpoint_every=2)
    run = trainer(tmp_path / "run", config)
    # After step 5 the loss of step 6 shows it; after step 6 only the check of the weights before
    # its checkpoint can.
    monkeypatch.setattr(run.optimizer, "step", _poison_after(run, 5 if poison == "loss" else 6))
    with pytest.raises(NonFiniteLossError, match=r"the last good checkpoint is .*step-00000004"):
        run.run(StopRequest())
    assert (
        latest_checkpoint(tmp_path / "run" / CHECKPOINTS)
        == tmp_path / "run" / CHECKPOINTS / "step-00000004"
    )
    resumed = trainer(tmp_path / "run", config)
    resumed.resume()
    assert all(bool(value.isfinite().all()) for value in resumed.tensors().values())
    assert resumed.run(StopRequest())["steps"] == 20


def _poison_after(run: Trainer, step: int) -> Any:
    original = run.optimizer.step

    def stepped(rate: float, loss: torch.Tensor | None = None) -> torch.Tensor:
        norm = original(rate, loss)
        if run.step + 1 == step:
            with torch.no_grad():
                next(iter(run.model.parameters()))[0].fill_(float("nan"))
        return norm

    return stepped


def test_gradients_of_a_step_do_not_depend_on_its_packing() -> None:
    config = dataclasses.replace(tiny(), model=dataclasses.replace(tiny().model, dropout=0.0))
    documents = [[(7 * i + j) % 32 for j in range(3 + i)] for i in range(6)]
    gradients = []
    for capacities in ([Capacity(64, 8)], [Capacity(16, 2)]):
        model = build_model(config, CPU)
        packs = pack(documents, capacities)
        loss = accumulate(model, packs, CPU, in_flight=len(packs) > 1)
        gradients.append([loss.detach(), *(value.grad for value in model.parameters())])
    for left, right in zip(*gradients):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_a_step_takes_packs_until_its_tokens_are_reached() -> None:
    packs = iter(RandomPacks())
    for budget in (1, 50, 200):
        taken = take_step(packs, budget)
        total = sum(batch.num_tokens for batch in taken)
        assert total >= budget > total - taken[-1].num_tokens
    assert take_step(iter([]), 5) == []


class SomeUnlabelled(RandomPacks):
    """Packs of documents of one token, which have no label, at every place but `labelled`."""

    labelled = (0, 2)

    def __next__(self):
        if self.position in self.labelled:
            return super().__next__()
        self.position += 1
        return pack([[1], [2]], list(CAPACITIES))[0]


def test_a_step_without_labels_is_said_and_counts_nowhere(tmp_path, capsys):
    run, summary = ran(tmp_path, tiny(steps=4, tokens_per_step=1), packs=SomeUnlabelled())
    rows = read_metrics(tmp_path / METRICS)
    assert [row["loss"] is None for row in rows] == [False, True, False, True]
    assert [row.get("unlabelled", False) for row in rows] == [False, True, False, True]
    assert [step for step, *_ in run.spikes.window] == [1, 3]
    assert summary["loss_first_steps"] == [1] and summary["loss_last_steps"] == [3]


def test_a_run_without_any_label_ends_with_an_error(tmp_path):
    packs = SomeUnlabelled()
    packs.labelled = ()
    with pytest.raises(DataError, match="none of the 3 steps had a label"):
        ran(tmp_path, tiny(steps=3, tokens_per_step=1), packs=packs)
