"""Verifying a run over several processes: graphs against eager on every rank, the run against one
process, and copies of a tensor against each other.

Every rank compares what it holds itself (`verify.py`), rank 0 also compares the
run with one process (`compare_with_one_process`). The invariant: what one rank finds all of them
know, so all end with the same verdict.

Does the run compute what one process computes, within rounding?

Rank 0 also holds the whole model, trained eagerly by itself: same first weights, same microbatches
of all replicas, no dropout. Sums over ranks are rounded in another order than sums in one process,
so equal bits cannot be asked for, and two trainings that differ in the last bit drift apart: Adam
divides a gradient by its own size, so an element that is hardly more than rounding moves by a full
step, in either direction; and a token whose scores for two experts are equal but for rounding may
go to another one. Hence the comparison goes step by step:

    same weights    ─▶ loss and gradients of both     compared; what may differ is what one step
                                                      rounds
    same gradients  ─▶ update of both                 compared; the single process has taken over
                                                      the run's gradients,
                                                      and now takes over its weights, biases and
                                                      optimizer state

The invariant: by induction over the steps, a report within its limits means that losses, gradients,
weights and optimizer state of the run are those of one process, up to rounding of a single step.

Do ranks that hold copies of a tensor, or of a part of it, hold the same bits (`copies`)?

Replicas have copies of all parameters, tensor parallel ranks of what is not split, pipeline stages
of what is tied. Whatever updates copies must give all of them the same bits: a difference in the
last one would grow unseen.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.ops.float8.linear import is_float8
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pieces import collect, parts_of
from packgraph.parallel.ranks import from_all, on_first
from packgraph.train.config.sections import ParallelConfig, TrainConfig
from packgraph.train.data.microbatches import Packs
from packgraph.train.progress import SILENT, Phases
from packgraph.verification.compare import Difference, bits
from packgraph.verification.compared_run import RANKS_KINDS, ComparedRun, steps_of
from packgraph.verification.verify import VerifyReport, verify, verify_sequential

FIRST_WEIGHTS, LOSS, NORM, GRADIENTS, PARAMETERS, COPIES, STATE = (
    "first weights",
    "loss",
    "gradient norm",
    "gradients",
    "parameters",
    "copies of parameters",
    "optimizer state",
)
# Largest allowed distances, relative to the size of what is compared; right runs of a few layers
# over two to four ranks stay below a fifth of them. One rounding is 6e-8 of a value in float32,
# 4e-3 in bfloat16. A loss is a mean over tokens, taken in float32, so little is left of them; a
# gradient adds up terms of either sign, so more is. The norm, which clipping divides by, is a
# float32 sum over all elements of the model. A code of float8 has three bits of mantissa, so a
# rounding before a cast may move an element by 6e-2; layouts that cut rows cast parts of them by
# scales of their own.
LIMITS: Mapping[str, Mapping[str, float]] = {
    "float32": {LOSS: 1e-5, NORM: 1e-4, GRADIENTS: 1e-4, PARAMETERS: 1e-5},
    "bfloat16": {LOSS: 1e-3, NORM: 2e-2, GRADIENTS: 2e-1, PARAMETERS: 5e-3},
    "float8": {LOSS: 2e-3, NORM: 5e-2, GRADIENTS: 3e-1, PARAMETERS: 5e-3},
}
# Float32 whatever the run's type is, made elementwise from equal gradients, but divided by the
# norm, squares twice.
STATE_LIMIT = 1e-3
EXACT = (FIRST_WEIGHTS, COPIES)  # their limit is 0
# A tensor whose gradient is less than this part of the whole one is compared with that part: it may
# be all rounding.
SMALLEST_SHARE = 1e-3


def copies(mesh: Mesh, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, bool]]:
    """Yields the name of every part of a tensor that several ranks hold, and whether all copies of
    it are equal.

    tensors: what this rank has, by name. Collective. What is compared is the sum of all bits as
    integers: two copies that differ by chance in more than one element and have equal sums would
    not be told apart.
    """
    mine = {
        (name, corner, tuple(part.shape)): int(bits(part).sum(dtype=torch.int64))
        for name, tensor in tensors.items()
        for corner, part in parts_of(tensor)
    }
    found: dict[Any, list[int]] = defaultdict(list)
    for sums in from_all(mesh, mine):
        for place, value in sums.items():
            found[place].append(value)
    for (name, _, _), values in found.items():
        if len(values) > 1:
            yield name, len(set(values)) == 1


@dataclass(frozen=True)
class Distance:
    """The largest distance of one kind, relative. name: of the tensor, empty for a number of the
    whole step."""

    step: int
    name: str
    size: float
    limit: float

    @property
    def good(self) -> bool:
        """True if it is within its limit; NaN is not."""
        return self.size <= self.limit


@dataclass
class OneProcessReport:
    """The comparison of a run with one process. dtype: the narrowest that values are rounded to, a
    key of `LIMITS`. distances: kind -> the largest one, in order of
    comparison. changed: what both sides do otherwise than the run that was asked for."""

    dtype: str
    steps: int = 0
    changed: str = ""
    distances: dict[str, Distance] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """True if something was compared and every distance is within its limit."""
        return self.steps > 0 and all(distance.good for distance in self.distances.values())

    def note(self, kind: str, step: int, name: str, size: float) -> None:
        """Keep the largest distance of a kind; the first one that is NaN or over the limit
        stays."""
        limit = 0.0 if kind in EXACT else LIMITS[self.dtype].get(kind, STATE_LIMIT)
        known = self.distances.get(kind)
        if known is None or (known.good and not size <= known.size):
            self.distances[kind] = Distance(step, name, size, limit)


def relative_distance(found: Tensor, expected: Tensor, smallest: float = 0.0) -> float:
    """Euclidean norm of the difference, as a part of `expected`'s norm or of `smallest` if that is
    larger.

    0 where the two are equal, infinite where only `expected` is zero or the shapes differ; NaN
    where a value is.
    """
    if found.shape != expected.shape:
        return float("inf")
    difference = float((found.double() - expected.double()).norm())
    scale = max(float(expected.double().norm()), smallest)
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else float("inf")


def compare_with_one_process(
    config: TrainConfig,
    packs: Packs,
    device: torch.device,
    mesh: Mesh,
    budget: Callable[[int], int] | None = None,
    progress: Phases = SILENT,
) -> OneProcessReport:
    """Compare `config.run.steps` steps of the run over `mesh` with one process, on rank 0, without
    dropout.

    packs: on the host, the same on every rank. budget: real tokens of a step (default:
    run.tokens_per_step). progress: told how far it is. Collective; all ranks return the report.
    Besides its own part, rank 0 needs memory for the whole model and its optimizer.
    """
    # The comparison stands between gradients and update, so the update cannot be in a graph with
    # them.
    model, graph = replace(config.model, dropout=0.0), replace(config.graph, optimizer=False)
    config = replace(config, model=model, graph=graph)
    report = OneProcessReport("float8" if is_float8(model.precision) else config.run.dtype)
    if config.optimizer.name == "adamw8bit":
        report.changed = "by adamw: each layout rounds state in eight bits in blocks of its own"
        config = replace(config, optimizer=replace(config.optimizer, name="adamw"))
    run = ComparedRun(config, device, mesh)
    eager = replace(graph, enabled=False, compile=False, granularity="layer")
    one = replace(config, parallel=ParallelConfig(), graph=eager)
    alone = ComparedRun(one, device) if mesh.rank == 0 else None
    try:
        _compare(FIRST_WEIGHTS, 0, run, alone, report, ComparedRun.stored)
        steps = steps_of(config, packs, lambda step: False, budget)
        for step in progress.of("against one process", config.run.steps, steps):
            _one_step(step.index, run, alone, step.batches, config.optimizer.learning_rate, report)
            report.steps = step.number
    finally:
        run.close()
    return on_first(mesh, lambda: report)


def _one_step(
    step: int,
    run: ComparedRun,
    alone: ComparedRun | None,
    batches: list[PackedBatch],
    learning_rate: float,
    report: OneProcessReport,
) -> None:
    number, whole = step + 1, 0.0
    share = run.gradients_of(step, batches, in_flight=False)
    # Every rank has the loss of its replica's share of packs and of its rows; stages and tensor
    # parallel ranks have the same.
    loss = share.clone() if run.mesh.tells_loss else torch.zeros_like(share)
    dist.all_reduce(loss)
    if alone is not None:
        expected = alone.gradients_of(step, batches, in_flight=False)
        report.note(LOSS, number, "", relative_distance(loss, expected))
        norms = [value.double().norm() for value in alone.optimizer.gradients().values()]
        whole = float(torch.stack(norms).norm())

    def gradients(side: ComparedRun) -> Mapping[str, Tensor]:
        return side.optimizer.gradients() if side is alone else side.reduced_gradients()

    _compare(GRADIENTS, number, run, alone, report, gradients, smallest=SMALLEST_SHARE * whole)
    norm = run.optimizer.step(learning_rate)
    if alone is not None:
        alone.optimizer.step(learning_rate)
        report.note(NORM, number, "", relative_distance(norm, torch.full_like(norm, whole)))
    _compare(PARAMETERS, number, run, alone, report, ComparedRun.stored)
    for name, equal in copies(run.mesh, run.stored()):
        report.note(COPIES, number, name, 0.0 if equal else float("inf"))
    _compare(STATE, number, run, alone, report, lambda side: side.optimizer.state_tensors())


@torch.no_grad()
def _compare(
    kind: str,
    step: int,
    run: ComparedRun,
    alone: ComparedRun | None,
    report: OneProcessReport,
    tensors_of: Callable[[ComparedRun], Mapping[str, Tensor]],
    smallest: float = 0.0,
) -> None:
    """Compare what `tensors_of` gives for both, tensor by tensor; then the single process goes on
    with the run's. Collective."""
    expected = {} if alone is None else dict(tensors_of(alone))
    for name, found in collect(run.mesh, tensors_of(run)):
        known = expected.pop(name, None)
        if known is None:
            report.note(kind, step, f"{name} (only in the run)", float("inf"))
            continue
        report.note(kind, step, name, relative_distance(found, known, smallest))
        if known.shape == found.shape:
            known.copy_(found)
    for name in expected:
        report.note(kind, step, f"{name} (not in the run)", float("inf"))


@dataclass(frozen=True)
class Found:
    """A difference, on which rank and of which kind."""

    rank: int
    kind: str
    difference: Difference

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.difference}"


@dataclass(frozen=True)
class RanksReport:
    """Results of a run's ranks. ranks: the report of each; one_process: None when it was not asked
    for."""

    title: str
    ranks: tuple[VerifyReport, ...]
    one_process: OneProcessReport | None

    @property
    def good(self) -> bool:
        """True if every rank is good, and the run is that of one process where that was
        compared."""
        return all(report.good for report in self.ranks) and (
            self.one_process is None or self.one_process.good
        )

    def found(self, kind: str | None = None) -> list[Found]:
        """The first difference of every rank (of `kind`, or of any), in the order in which they
        came up."""
        every = [
            Found(rank, name, difference)
            for rank, report in enumerate(self.ranks)
            for name, difference in report.differences.items()
            if kind in (None, name)
        ]
        return sorted(
            every, key=lambda one: (one.difference.step, RANKS_KINDS.index(one.kind), one.rank)
        )

    def silent_ranks(self) -> list[int]:
        """Lists the ranks that replayed hardly anything, so that nothing was shown there."""
        return [rank for rank, report in enumerate(self.ranks) if not report.shows]


def verify_ranks(
    title: str,
    config: TrainConfig,
    open_packs: Callable[[], Packs],
    device: torch.device,
    mesh: Mesh,
    *,
    one_process: bool = True,
    apart: bool = False,
    budget: Callable[[int], int] | None = None,
    progress: Phases = SILENT,
) -> RanksReport:
    """Compare `config.run.steps` steps; collective, every rank returns the same report.

    open_packs: the packs of the run from its beginning, the same on every rank. one_process: also
    compare with one process, for which rank 0 needs memory for the whole model. apart: make the
    eager run and the graph run one after the other. budget: real tokens of a step. progress: told
    how far this rank is.
    """
    more: dict[str, Any] = {"mesh": mesh, "budget": budget, "progress": progress}
    if apart:
        mine = verify_sequential(title, config, open_packs, device, **more)
    else:
        mine = verify(title, config, open_packs(), device, **more)
    alone = None
    if one_process:
        alone = compare_with_one_process(config, open_packs(), device, **more)
    return RanksReport(title, tuple(from_all(mesh, mine)), alone)
