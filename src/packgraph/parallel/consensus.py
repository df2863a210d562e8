"""Captures that ranks make together: if any rank fails, all fall back, and waits are bounded.

    rank 0   capture ─▶ good ──┐
    rank 1   capture ─▶ FAILS ─┼─▶ consensus: "rank 1: ..." ─▶ all free the graphs, and run
    rank 2   capture ─▶ good ──┘                               these calls eagerly

A capture runs its exchanges (a dry run on CUDA, all of it on a CPU), so a rank that fails in the
middle may leave partners in one of them, where they cannot hear of it. They do not come to the vote
then; after some patience those who did come end the run with one message, that of the rank that
failed, and the launcher ends the rest. Votes go through the store in which the processes have met:
it needs no device and no partner.

A meeting comes before a capture that not all ranks may want (`graphs/agreement.py`). It ends in one
verdict: that of the rank that comes last, or of the first that has waited long enough, whichever
the store has counted first. So all ranks capture, or none does, and nobody waits for ever.
"""

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from packgraph.graphs.agreement import EAGER, Consensus, alone, verdict
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.step import Agreement, Standing, own
from packgraph.parallel.mesh import Mesh

PATIENCE = 120.0  # seconds that partners of a failed capture may still need for their own
SILENCE = 600.0  # the same where nobody has failed: one rank may compile longer than another
MEETING = 10.0  # seconds that a rank waits for others which may replay instead
PAUSE = 0.002
FATAL, _SEPARATOR = "fatal", "\n"


class LostPartnersError(RuntimeError):
    """A capture failed on some rank and its partners do not answer: the run cannot go on."""


class StoreConsensus:
    """Votes among `ranks`, all of which vote on the same things in the same order. name: of what
    they vote on."""

    def __init__(self, name: str, ranks: Sequence[int], patience: float = PATIENCE) -> None:
        self._ranks, self._patience = list(ranks), patience
        self._store, self._rank = _get_default_store(), dist.get_rank()
        # Circles of the same ranks are made by all of them in one order, so they give them the same
        # numbers.
        circle = f"{name} of {','.join(map(str, self._ranks))}"
        self._name = f"{circle}/{self._store.add(f'packgraph/{circle} by {self._rank}', 1)}"
        self._count = self._modules = 0

    def join(self) -> str:
        """See `Consensus.join`; all ranks call it for their modules in one order."""
        self._modules += 1
        return f"module {self._modules}"

    def meet(self, place: str, wish: tuple[str, str]) -> str:
        """See `Consensus.meet`. Waits for the device first: a rank whose host has run ahead would
        come to another call's meeting than its exchanges have come to."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        here = f"packgraph/{self._name}/meeting/{place}"
        self._store.set(f"{here}/{self._rank}", _SEPARATOR.join(wish))
        if self._store.add(f"{here}/came", 1) == len(self._ranks):
            told = [self._store.get(f"{here}/{rank}").decode() for rank in self._ranks]
            wishes = [(kind, call) for kind, call in (text.split(_SEPARATOR) for text in told)]
            return self._decide(here, verdict(wishes))
        until = time.monotonic() + MEETING
        while not self._store.check([f"{here}/verdict"]):
            if time.monotonic() > until:
                return self._decide(here, EAGER)
            time.sleep(PAUSE)
        return self._store.get(f"{here}/verdict").decode()

    def _decide(self, here: str, found: str) -> str:
        """The verdict of a meeting: `found`, unless another rank has decided before."""
        if self._store.add(f"{here}/decided", 1) == 1:
            self._store.set(f"{here}/verdict", found)
        return self._store.get(f"{here}/verdict").decode()

    def note(self, fact: str) -> None:
        """See `Consensus.note`."""
        self._store.set(f"packgraph/{self._name}/noted/{fact}/{self._rank}", "")

    def all_noted(self, fact: str) -> bool:
        """See `Consensus.all_noted`."""
        return self._store.check(
            [f"packgraph/{self._name}/noted/{fact}/{rank}" for rank in self._ranks]
        )

    def __call__(self, what: str, error: CaptureError | None) -> CaptureError | None:
        """None if `what` went well on all ranks; else this rank's `error`, or one that names the
        first rank that failed. Waits for all. Raises LostPartnersError when a rank failed and
        others do not come."""
        self._count += 1
        self._store.set(self._key(self._rank), "" if error is None else str(error))
        failed = self._failures(what)
        if not failed:
            return None
        rank = min(failed)
        return error or CaptureError(
            f"{what} could not be captured on rank {rank}, which shares its work with this one: "
            f"{failed[rank]}",
            user_line(),
            "see the message of that rank",
        )

    def _failures(self, what: str) -> dict[int, str]:
        """Failures by rank; waits for the votes of all."""
        waiting, failed = list(self._ranks), dict[int, str]()
        began = heard = time.monotonic()
        while waiting:
            if self._store.check([self._key(FATAL)]):
                raise LostPartnersError(self._store.get(self._key(FATAL)).decode())
            for rank in [rank for rank in waiting if self._store.check([self._key(rank)])]:
                waiting.remove(rank)
                text = self._store.get(self._key(rank)).decode()
                if text and not failed:
                    heard = time.monotonic()
                failed |= {rank: text} if text else {}
            patience, since = (self._patience, heard) if failed else (SILENCE, began)
            if waiting and time.monotonic() - since > patience:
                self._store.set(self._key(FATAL), _lost(what, failed, waiting, patience))
            elif waiting:
                time.sleep(PAUSE)
        return failed

    def _key(self, who: int | str) -> str:
        return f"packgraph/{self._name}/{self._count}/{who}"


def _lost(what: str, failed: dict[int, str], waiting: Sequence[int], patience: float) -> str:
    missing = ", ".join(map(str, waiting))
    if not failed:
        return (
            f"{what} is being captured, and rank {missing} did not say within {patience:g} s "
            "whether it has "
            "succeeded; look at what that rank is doing"
        )
    rank = min(failed)
    return (
        f"{what} could not be captured on rank {rank}, and rank {missing} did not come to vote on "
        "it within "
        f"{patience:g} s: it waits for rank {rank} in an exchange of that capture, so the run "
        "cannot go on. To go "
        f"on without graphs: --graph.enabled false. On rank {rank}: {failed[rank]}"
    )


def agreement_of_all(mesh: Mesh) -> Agreement:
    """Among all ranks, before a step that ends in their common update: what it is to each of them,
    if it is the same to all; else none replays or captures it. Collective, on the host."""
    if mesh.world == 1:
        return own

    def agreed(standing: Standing) -> Standing:
        ends = torch.tensor([int(standing), -int(standing)])
        dist.all_reduce(ends, dist.ReduceOp.MIN, group=mesh.host_group)
        least, most = ends.tolist()
        return standing if least == -most else Standing.EAGER

    return agreed


def stage_consensus(mesh: Mesh, patience: float = PATIENCE, *, sharded: bool = False) -> Consensus:
    """Among the ranks that this one exchanges data with while it runs its part of a model: those of
    its stage that share rows, matrices or experts with it, directly or through others. sharded: so
    do replicas that share the parts of layers."""
    place, blocks = mesh.place, mesh.layout.shard_ranks > 0
    ranks = _replica(mesh, blocks) if blocks or not sharded else range(mesh.world)
    return _vote(
        mesh,
        f"stage {place['pp']}",
        [rank for rank in ranks if mesh.layout.coordinates(rank)["pp"] == place["pp"]],
        patience,
    )


def replica_consensus(
    mesh: Mesh, patience: float = PATIENCE, *, updates: bool = False
) -> Consensus:
    """The same for whole steps: also among the stages of a pipeline. updates: steps hold their
    update, which all replicas make together."""
    ranks = list(range(mesh.world)) if updates else _replica(mesh)
    return _vote(mesh, "replica", ranks, patience)


def _replica(mesh: Mesh, sharded: bool = False) -> list[int]:
    """The ranks of this replica, and of those that share experts with it; or layers."""

    def block(place: Mapping[str, int]) -> list[int]:
        others = [place[axis.name] for axis in mesh.layout.more if axis.own == "packs"]
        return [place["dp"] // mesh.layout.sharing_replicas(sharded=sharded), *others]

    mine, coordinates = block(mesh.place), mesh.layout.coordinates
    return [rank for rank in range(mesh.world) if block(coordinates(rank)) == mine]


def consensus_over(group: dist.ProcessGroup | None) -> Consensus:
    """Among the ranks of `group`; None = this one alone."""
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    return alone if len(ranks) < 2 else StoreConsensus("captures", ranks)


def _vote(mesh: Mesh, name: str, ranks: Sequence[int], patience: float) -> Consensus:
    return alone if len(ranks) == 1 else StoreConsensus(f"vote of {name}", ranks, patience)
