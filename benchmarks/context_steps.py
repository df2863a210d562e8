"""The steps that `bench context` runs, and the ways of running them: the trainer's own step, eagerly
or by graphs, over the same documents in groups of one size and in groups of the sizes they need.

    documents, in order of arrival ─▶ plan of so many microbatches ─▶ packs of the way `dynamic`
                                  └─▶ the same documents in groups of one size ─▶ packs of the way
                                  `fixed`

Both ways learn from the same documents, so their losses must agree; what one of them has no room
for is left out of both. Plans follow from lengths and costs alone, so every rank makes them for
itself.
"""  # noqa: E501

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from bench_models import draw_lengths
from rank_comparison import BenchRanks, first_warning
from torch import Tensor

from packgraph.models.decoder import DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.plan import ContextPlan, RowGroup, plan_context
from packgraph.parallel.context.request import ContextRequest
from packgraph.parallel.mesh import Mesh
from packgraph.train.config.sections import GraphConfig
from packgraph.train.features.context import TimeRow, time_row
from packgraph.train.optimizer import Optimizer
from packgraph.train.strategies import MicrobatchExecutor

SPARE = 256  # documents behind those of a step, to fill its gaps with
FIXED, DYNAMIC = "fixed", "dynamic"
CONTEXT_WAYS = (
    "fixed",
    "dynamic",
    "fixed+graph",
    "dynamic+graph",
    "fixed+graph+compile",
    "dynamic+graph+compile",
)
USUAL_WAYS = CONTEXT_WAYS[:4]  # compiling takes minutes: a code for each of the buckets


@dataclass(frozen=True)
class PlannedStep:
    """One step. packs: by kind of groups, microstep by microstep and by first rank. plan: of the
    dynamic groups.

    tokens: real ones. loss_tokens: labels of the step. plan_ms: that the dynamic plan took on the
    host. fixed_us: what the fixed plan is predicted to take.
    """

    packs: dict[str, list[PackedBatch]]
    plan: ContextPlan
    tokens: int
    loss_tokens: int
    plan_ms: float
    fixed_us: float


def plan_steps(
    count: int,
    request: ContextRequest,
    fixed: int,
    vocabulary: int,
    *,
    longest: int,
    mean: float,
    sigma: float,
    seed: int,
) -> list[PlannedStep]:
    """`count` steps of different documents. request: of the dynamic groups; fixed: size of the
    others, one of its sizes. longest: tokens of a document at most."""
    assert request.microsteps is not None
    room = request.microsteps * request.world * request.tokens
    average = sum(draw_lengths(4000, longest, mean=mean, sigma=sigma, seed=seed)) / 4000
    lengths = draw_lengths(
        round(count * (2 * room / average + 2 * SPARE)), longest, mean=mean, sigma=sigma, seed=seed
    )
    generator, steps, start = np.random.default_rng(seed), list[PlannedStep](), 0
    for _ in range(count):
        step, taken = _step(lengths[start:], room, request, fixed, vocabulary, generator)
        steps.append(step)
        start += taken
    return steps


def _step(
    lengths: Sequence[int],
    room: int,
    request: ContextRequest,
    fixed: int,
    vocabulary: int,
    generator: np.random.Generator,
) -> tuple[PlannedStep, int]:
    """The next step, and how many documents it has looked at."""
    through = np.cumsum(lengths)
    taken = int(np.searchsorted(through, room)) + SPARE
    began = time.perf_counter()
    plan = plan_context(lengths[:taken], request)
    plan_ms = 1000 * (time.perf_counter() - began)
    placed = sorted(
        {
            document
            for microstep in plan.microsteps
            for group in microstep
            for document in group.documents
        }
    )
    other = plan_context(
        [lengths[document] for document in placed], replace(request, sizes=(fixed,))
    )
    gone = {placed[document] for document in other.left}
    documents = {
        document: generator.integers(vocabulary, size=lengths[document]) for document in placed
    }
    packs = {
        DYNAMIC: [_pack(group.documents, group.bucket, documents, gone) for group in _groups(plan)],
        FIXED: [
            _pack([placed[document] for document in group.documents], group.bucket, documents, gone)
            for group in _groups(other)
        ],
    }
    loss_tokens = sum(pack.num_loss_tokens for pack in packs[DYNAMIC])
    tokens = sum(pack.num_tokens for pack in packs[DYNAMIC])
    return PlannedStep(packs, plan, tokens, max(1, loss_tokens), plan_ms, other.step_us), taken


def _groups(plan: ContextPlan) -> list[RowGroup]:
    return [group for microstep in plan.microsteps for group in microstep]


def _pack(
    places: Sequence[int], bucket: Capacity, documents: dict[int, np.ndarray], gone: set[int]
) -> PackedBatch:
    kept = [documents[place] for place in places if place not in gone]
    return PackedBatch.build(kept, bucket) if kept else PackedBatch.empty(bucket)


class ContextWay:
    """One way of running the steps of this rank. name: one of CONTEXT_WAYS. capacities: rows that
    its plans have."""

    def __init__(
        self,
        name: str,
        model: DecoderModel,
        optimizer: Optimizer,
        capacities: Sequence[Capacity],
        mesh: Mesh,
        device: torch.device,
        granularity: str,
    ) -> None:
        self.name, self.groups, self._optimizer = name, name.partition("+")[0], optimizer
        self.graphs = "graph" in name
        options = GraphConfig(
            enabled=self.graphs,
            capacities=tuple(capacities),
            warmup=1,
            compile="compile" in name,
            granularity="layer" if granularity == "layer" else "chunk",
            autotune=False,
        )
        self.executor = MicrobatchExecutor(model, options, device)
        self.executor.everyone = mesh.everyone()

    def build(self, share: Sequence[PackedBatch]) -> str | None:
        """One step of warm-up, then capture; why something was not captured, or None.
        Collective."""
        self.step(share, 1)
        return first_warning(lambda: self.executor.before_step(1))

    def step(self, share: Sequence[PackedBatch], loss_tokens: int) -> tuple[Tensor, Tensor]:
        """Forward, backward, sums over ranks and AdamW with a learning rate of 0, so that the
        weights stay the same for all ways: the loss of this rank's rows and the norm of the whole
        gradient. Collective."""
        return self.executor.train_step(share, loss_tokens, self._optimizer, 0.0)

    def complaint(self) -> str | None:
        """Why the times are not those of this way: something else than the warm-up ran eagerly."""
        fallbacks = {
            reason: count
            for reason, count in self.executor.totals()["fallbacks"].items()
            if reason != "warm-up"
        }
        return f"microbatches ran eagerly: {fallbacks}" if self.graphs and fallbacks else None

    def facts(self) -> dict[str, Any]:
        """capture_seconds, captured and pool_bytes of this rank; None without graphs."""
        if not self.graphs:
            return {"capture_seconds": None, "captured": None, "pool_bytes": None}
        totals = self.executor.totals()
        return {
            "capture_seconds": round(totals["capture_seconds"], 3),
            "captured": totals["captured"],
            "pool_bytes": self.executor.pool_bytes(),
        }

    def close(self) -> None:
        """Free all graphs, before the process groups go."""
        self.executor.close()


def row_timer(way: ContextWay, company: BenchRanks, device: torch.device) -> TimeRow:
    """Times rows by `way`; the slowest rank counts. Collective."""
    return time_row(way.executor.run_step, device, lambda number: max(company.gather(number)))
