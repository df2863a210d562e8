"""Small runs for tests of the trainer, on the CPU and on CUDA."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from packgraph.graphs.graphed import graph
from packgraph.graphs.parameters import local_tensor
from packgraph.models.decoder import DecoderConfig
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import PackReport, pack
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pieces import Pieces
from packgraph.train.config.sections import GraphConfig, OptimizerConfig, RunConfig, TrainConfig
from packgraph.train.data import DataError
from packgraph.train.data.microbatches import take_step
from packgraph.train.data.source import BadDocuments
from packgraph.train.progress import ProgressView
from packgraph.train.random_state import random_states
from packgraph.train.signals import StopRequest
from packgraph.train.trainer import Trainer

CPU = torch.device("cpu")
CAPACITIES = (Capacity(16, 2), Capacity(32, 4), Capacity(64, 8))


class RandomPacks:
    """An endless resumable source: pack number n depends on n alone."""

    def __init__(self, end: int = 10**9, bad: int = -1) -> None:
        self.position, self.end, self.bad_at = 0, end, bad
        self.bad, self.largest_id = BadDocuments(), (-1, "")
        self.report, self.empty_documents, self.unlabelled_documents = PackReport(), 0, 0

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def plan_step(self, tokens: int) -> list[PackedBatch]:
        return take_step(self, tokens)

    def __next__(self) -> PackedBatch:
        if self.position == self.end:
            raise StopIteration
        if self.position == self.bad_at:
            raise DataError("file.jsonl:7: bad document")
        draw = random.Random(self.position)
        self.position += 1
        lengths = [draw.randint(2, 20) for _ in range(draw.randint(1, 3))]
        return pack(
            [[draw.randrange(32) for _ in range(length)] for length in lengths], list(CAPACITIES)
        )[0]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def interrupt(self) -> None:
        """Nothing to end."""

    def close(self) -> None:
        """Nothing to end."""


class StopAfter(StopRequest):
    """Asks to stop once a step was begun `steps` times."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def __bool__(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self.reason = "SIGINT"
        return self.left < 0


class PacksOfOneCapacity(RandomPacks):
    """Other packs, all of one capacity."""

    def __next__(self):
        draw = random.Random(self.position)
        self.position += 1
        documents = [[draw.randrange(32) for _ in range(draw.randint(2, 20))] for _ in range(3)]
        return PackedBatch.build(documents, Capacity(64, 8))


def tiny(graph: bool = False, **run: Any) -> TrainConfig:
    return TrainConfig(
        preset="test",
        model=DecoderConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            dropout=0.1,
            tie_embeddings=True,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        graph=GraphConfig(
            enabled=graph, capacities=CAPACITIES, autotune=False
        ),  # tests count replays
        run=RunConfig(
            **{"steps": 6, "tokens_per_step": 60, "log_every": 1, "device": "auto"} | run
        ),
    )


def trainer(
    folder: Path,
    config: TrainConfig,
    packs: RandomPacks | None = None,
    device: torch.device = CPU,
    mesh: Mesh | None = None,
) -> Trainer:
    view = ProgressView(config.run.steps, 100, Console(file=(folder.parent / "log").open("w")))
    return Trainer(config, folder, packs or RandomPacks(), device, view, mesh)  # type: ignore[arg-type]


@contextlib.contextmanager
def finished(*arguments: Any, resume: bool = False, **options: Any) -> Iterator[Trainer]:
    """A trainer after its run, until the block ends. resume: from the newest checkpoint."""
    with contextlib.closing(trainer(*arguments, **options)) as run:
        if resume:
            run.resume()
        run.run(StopRequest())
        yield run


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Runs compile by torch's tracing compiler, not the one that generates code, which is slow."""

    def tracing(*modules: Any, compile: bool, **options: Any) -> Any:
        return graph(*modules, compile="aot_eager" if compile else False, **options)

    torch._dynamo.reset()
    with mock.patch("packgraph.train.strategies.graph", tracing):
        yield
    torch._dynamo.reset()


def ended(
    run: Trainer, stop: StopRequest | None = None, resume: bool = False
) -> tuple[Trainer, dict[str, Any]]:
    """A trainer after its run, closed, and its summary. resume: from the newest checkpoint."""
    with contextlib.closing(run):
        if resume:
            run.resume()
        return run, run.run(StopRequest() if stop is None else stop)


def ran(
    *arguments: Any, stop: StopRequest | None = None, resume: bool = False, **options: Any
) -> tuple[Trainer, dict[str, Any]]:
    """The same of the trainer of these arguments."""
    return ended(trainer(*arguments, **options), stop, resume)


def goes_on(folder: Path, config: TrainConfig, **options: Any) -> dict[str, torch.Tensor]:
    """The state after a run that never stopped: what a run that stops and goes on ends with, too,
    bit by bit."""
    whole = state_of(ran(folder / "whole", config, **options)[0])
    stopped, _ = ran(folder / "run", config, stop=StopAfter(3), **options)
    torch.manual_seed(12345)
    again, _ = ran(folder / "run", config, resume=True, **options)
    assert 0 < stopped.step < again.step
    equal(state_of(again), whole)
    return whole


def captured_as_eager(folder: Path, config: TrainConfig) -> None:
    """With the update in the graph of a step the run ends as an eager one, bit by bit."""
    eager, _ = ran(folder / "eager", config)
    expected = state_of(eager)
    graph = replace(config.graph, enabled=True, granularity="step", optimizer=True)
    captured, summary = ran(folder / "captured", replace(config, graph=graph))
    assert summary["replayed"] >= 3
    equal(state_of(captured), expected)


def state_of(run: Trainer) -> dict[str, torch.Tensor]:
    tensors = run.tensors() | {
        f"random.{name}": value for name, value in random_states(run.device).items()
    }
    return {name: value.clone() for name, value in tensors.items()}


def held_tensors(run: Trainer) -> dict[str, torch.Tensor]:
    """Copies of what this rank holds of the tensors of a run."""
    return {name: _held(value) for name, value in run.tensors().items()}


def _held(value: Any) -> torch.Tensor:
    if isinstance(value, Pieces):
        return torch.cat([torch.zeros(0), *(piece.detach().flatten() for _, piece in value.pieces)])
    return local_tensor(value.detach()).clone()


def equal(left, right):
    """The same tensors under the same names, bit by bit."""
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]


def close(found, expected):
    """Sums over ranks are rounded in another order than sums in one process."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: name + text
        )
