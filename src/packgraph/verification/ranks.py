"""Verifying a run over several processes: graphs against eager on every rank, and the run against
one process.

Every rank compares what it holds itself (`verify.py`, or `apart.py`), rank 0 also compares the run
with one process (`one_process.py`). The invariant: what one rank finds all of them know, so all end
with the same verdict.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from packgraph.parallel.mesh import Mesh
from packgraph.train.options import TrainConfig
from packgraph.train.step import Packs
from packgraph.verification.compare import Difference
from packgraph.verification.compare_points import RANKS_KINDS
from packgraph.verification.one_process import OneProcessReport, compare_with_one_process
from packgraph.verification.progress import SILENT, VerificationProgress
from packgraph.verification.sequential import verify_sequential
from packgraph.verification.verify import VerifyReport, verify


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
    """What the ranks of a run have found. ranks: the report of each; one_process: None when it was
    not asked for."""

    title: str
    ranks: tuple[VerifyReport, ...]
    one_process: OneProcessReport | None

    @property
    def good(self) -> bool:
        """Whether every rank is good, and the run is that of one process where that was
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
        """The ranks that replayed hardly anything, so that nothing was shown there."""
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
    pace: VerificationProgress = SILENT,
) -> RanksReport:
    """Compare `config.run.steps` steps; collective, every rank returns the same report.

    open_packs: the packs of the run from its beginning, the same on every rank. one_process: also
    compare with one process, for which rank 0 needs memory for the whole model. apart: make the
    eager run and the graph run one after the other. budget: real tokens of a step. pace: told how
    far this rank is.
    """
    mine = (
        verify_sequential(title, config, open_packs, device, mesh=mesh, budget=budget, pace=pace)
        if apart
        else verify(title, config, open_packs(), device, mesh=mesh, budget=budget, pace=pace)
    )
    every = of_every_rank(mine, mesh)
    alone = (
        compare_with_one_process(config, open_packs(), device, mesh, budget, pace)
        if one_process
        else None
    )
    return RanksReport(title, every, alone)


def of_every_rank(mine: VerifyReport, mesh: Mesh) -> tuple[VerifyReport, ...]:
    """The reports of all ranks; collective."""
    every = [mine] * mesh.world
    if mesh.world > 1:
        dist.all_gather_object(every, mine)
    return tuple(every)
