"""The ways of `bench context`, and what rows cost them: the trainer's own step, eagerly or by
graphs."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packgraph.bench.models import FreshModel
from packgraph.bench.ranks import BenchRanks
from packgraph.graphs.errors import PackgraphWarning
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Mesh
from packgraph.train.executor import Executor
from packgraph.train.optimizer import Optimizer
from packgraph.train.options import GraphConfig
from packgraph.train.row_timing import TimeRow, time_row
from packgraph.train.runner import MicrobatchRunner

CONTEXT_WAYS = (
    "fixed",
    "dynamic",
    "fixed+graph",
    "dynamic+graph",
    "fixed+graph+compile",
    "dynamic+graph+compile",
)
USUAL_WAYS = CONTEXT_WAYS[:4]  # compiling takes minutes: a code for each of the buckets


class ContextWay:
    """One way of running the steps of this rank. name: one of CONTEXT_WAYS. capacities: rows that
    its plans have."""

    def __init__(
        self,
        name: str,
        model: FreshModel,
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
        self.executor = Executor(MicrobatchRunner(model, options, device), options, device)
        self.executor.everyone = mesh.everyone()

    def build(self, share: Sequence[PackedBatch]) -> str | None:
        """One step of warm-up, then capture; why something was not captured, or None.
        Collective."""
        self.step(share, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PackgraphWarning)
            self.executor.before_step(1)
        texts = [
            str(warning.message)
            for warning in caught
            if issubclass(warning.category, PackgraphWarning)
        ]
        return " ".join(texts[0].split()) if texts else None

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
    return time_row(way.executor, device, lambda number: max(company.gather(number)))
