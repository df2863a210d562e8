"""Ranks of a run: how they meet, exchange facts of the host, and capture together.

    meet     `met`, `processes`             a store of this start alone, then groups and the mesh
    agree    `on_first`, `on_each`,         errors of one rank are raised on all; who waits longer
             `gather`, `everywhere`         than TIMEOUT ends
    capture  `StoreConsensus`, `unanimous`  all ranks capture a call or none does

What watches the ranks beside their collectives, and ends them together, is in `heartbeat.py`.

torchrun keeps one store for all starts of its ranks, and what an earlier start wrote there stays:
a beat of a rank that was killed, addresses of processes that are gone. TORCHELASTIC_RESTART_COUNT
does not tell starts apart: it stays as it is where nodes join or leave, and where one process
trains twice. So rank 0 draws a prefix for the keys of this start. Another rank finds it under a
random name that it has drawn itself, so what it reads is never of an earlier start:

    rank r  ── hello/r = NAME ──▶ ┌───────┐ ◀── welcome/NAME = PREFIX ──  rank 0
    rank r  ── PREFIX/here/r ───▶ └───────┘

Process groups run on NCCL, with gloo for host data, or on gloo alone. Graphs hold communicators, so
everything that holds graphs must be closed before the groups are destroyed. A process that fails
waits for nobody: it leaves at once, and its launcher ends the others.

Captures run the exchanges of a call (a dry run on CUDA, all of it on a CPU):

    rank 0   capture ─▶ good ──┐
    rank 1   capture ─▶ FAILS ─┼─▶ vote: "rank 1: ..." ─▶ all free the graphs, and run these calls
    rank 2   capture ─▶ good ──┘                          eagerly

A rank that fails in the middle may leave partners in an exchange, where they cannot hear of it.
They do not come to the vote then; after some patience those who did come end the run with one
message, that of the rank that failed. Votes go through the store: it needs no device and no
partner. A meeting comes before a capture that not all ranks may want (`graphs/agreement.py`). Its
verdict is that of the rank that comes last, or of the first that has waited long enough, whichever
the store has counted first. So all ranks capture or none does, and nobody waits for ever.
"""

import contextlib
import datetime
import gc
import os
import pickle
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from packgraph.graphs.agreement import EAGER, Consensus, alone, verdict
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.step import Agreement, Standing, own
from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import Mesh, make_mesh, single_process

Result = TypeVar("Result")
TIMEOUT = datetime.timedelta(minutes=10)
LOOK = 0.05  # seconds between two looks for ranks that come
PATIENCE = 120.0  # seconds that partners of a failed capture may still need for their own
SILENCE = 600.0  # the same where nobody has failed: one rank may compile longer than another
MEETING = 10.0  # seconds that a rank waits for others which may replay instead
PAUSE = 0.002
FATAL = "fatal"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the new name and the old one
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
REMEDY = "start all processes by torchrun, which sets these variables, or unset them for one alone"
ADDRESS = ("RANK", "MASTER_ADDR", "MASTER_PORT")  # by which several processes meet
_COUNT = re.compile(r"\d{1,9}").fullmatch
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


class LaunchError(ValueError):
    """Environment variables of a launcher that do not say where this process stands."""


class LostPartnersError(RuntimeError):
    """A capture failed on some rank and its partners do not answer: the run cannot go on."""


@dataclass(frozen=True)
class Launch:
    """Place of this process, as the launcher told it. world: number of processes; local_rank: its
    number on this host; local_world: number of processes on this host."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> "Launch":
        """The place that torchrun's environment variables give; that of a lone process without
        them. Raises LaunchError."""
        told = {name: environment[name] for name in NUMBERS if name in environment}
        wrong = [f"{name}={text[:40]!r}" for name, text in told.items() if not _COUNT(text)]
        if wrong:
            raise LaunchError(f"{', '.join(wrong)} is no number; {REMEDY}")
        rank, world, local, locals_ = (int(told.get(name, "WORLD" in name)) for name in NUMBERS)
        for of, place, count in (("", rank, world), ("LOCAL_", local, locals_)):
            if place >= count and f"{of}WORLD_SIZE" in (*told, "WORLD_SIZE"):
                raise LaunchError(
                    f"{of}RANK={place} is none of {of}WORLD_SIZE={count} processes; {REMEDY}"
                )
        return Launch(rank, world, local, locals_)


def check_address(environment: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchError unless it is known where several processes meet."""
    missing = [name for name in ADDRESS if not environment.get(name)]
    if missing:
        raise LaunchError(
            f"WORLD_SIZE={environment.get('WORLD_SIZE')} processes are to meet, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; {REMEDY}"
        )
    port = environment["MASTER_PORT"]
    if not (_COUNT(port) and 0 < int(port) < 2**16):
        raise LaunchError(f"MASTER_PORT={port[:40]!r} is no number of a port; {REMEDY}")


def set_nccl(environment: MutableMapping[str, str]) -> str | None:
    """Set the variables of NCCL that captured collectives need. Call it before NCCL is loaded.

    NCCL registers the buffers of captured collectives with the other ranks, for which memory of
    expandable segments is unfit (an illegal memory access): registration is off where the allocator
    has such segments. Multicast memory is always off, since it is not freed when graphs that used
    it are.

    Args:
        environment: Of this process; changed.

    Returns:
        What was turned off because of the allocator, for a person; None where nothing was.

    Raises:
        ValueError: The environment asks for expandable segments and for registration.
    """
    environment["NCCL_NVLS_ENABLE"] = "0"
    asking = [name for name in ALLOCATOR if _EXPANDABLE.search(environment.get(name, ""))]
    asked = environment.get("NCCL_GRAPH_REGISTER")
    if not asking or asked == "0":
        return None
    if asked is not None:
        raise ValueError(
            f"NCCL_GRAPH_REGISTER={asked} with expandable_segments:True in {asking[0]}: NCCL can "
            "register no memory of expandable segments that graphs use, and ends with an illegal "
            "memory access; set NCCL_GRAPH_REGISTER=0 or leave it out, or leave out "
            "expandable_segments"
        )
    environment["NCCL_GRAPH_REGISTER"] = "0"
    return (
        f"NCCL_GRAPH_REGISTER=0 was set, since {asking[0]} has expandable_segments:True, whose "
        "memory NCCL cannot register in graphs"
    )


@contextlib.contextmanager
def met(store: Any, launch: Launch) -> Iterator[Any]:
    """Within the block the ranks of `launch` share keys that no other start can read or write.

    Rank 0 does not wait: it welcomes the others beside what the block does.

    Args:
        store: Of all ranks, with a `clone`; keys of earlier starts may be in it.
        launch: This process's place among all.

    Yields:
        A store for the keys of this start.

    Raises:
        torch.distributed.DistError: If rank 0 does not come within the timeout of the store.
    """
    hall, over = dist.PrefixStore("packgraph/meeting", store), threading.Event()
    if launch.rank != 0:
        name = secrets.token_hex(16)
        hall.set(f"hello/{launch.rank}", name)
        prefix = _get(hall, f"welcome/{name}").decode()
        dist.PrefixStore(prefix, store).set(f"here/{launch.rank}", "here")
    else:
        prefix = f"packgraph/start-{secrets.token_hex(8)}"
        guests = store.clone(), prefix, launch.world, over
        name = "packgraph welcome"
        threading.Thread(target=_welcome, args=guests, daemon=True, name=name).start()
    try:
        yield dist.PrefixStore(prefix, store)
    finally:
        over.set()


def _welcome(store: Any, prefix: str, world: int, over: threading.Event) -> None:
    """Tell every rank that comes the prefix, until all are here or the block of rank 0 is left."""
    hall, own = dist.PrefixStore("packgraph/meeting", store), dist.PrefixStore(prefix, store)
    here = [f"here/{rank}" for rank in range(1, world)]
    # A store that is gone is seen by the heartbeat.
    with contextlib.suppress(dist.DistError, RuntimeError, OSError):
        while not (own.check(here) or over.wait(LOOK)):
            for rank in range(1, world):
                # What is there first may be the name of an earlier start, which nobody reads.
                if hall.check([f"hello/{rank}"]):
                    hall.set(f"welcome/{hall.get(f'hello/{rank}').decode()}", prefix)


def _get(store: Any, key: str) -> bytes:
    """Returns a store's value as soon as it is there; waiting within the store would hold signals
    back."""
    end = time.monotonic() + (limit := store.timeout.total_seconds())
    while not store.check([key]):
        if time.monotonic() > end:
            raise dist.DistError(f"rank 0 said nothing for {limit:.0f} s")
        time.sleep(LOOK)
    return store.get(key)


@contextlib.contextmanager
def processes(
    layout: Layout,
    device: torch.device,
    launch: Launch,
    timeout: datetime.timedelta = TIMEOUT,
    store: Any = None,
) -> Iterator[Mesh]:
    """Within the block all processes of `launch` are connected; yields the mesh. device: this
    process's own.

    timeout: how long a collective may wait for a process that does not come. store: where they have
    met already, None = they meet here. Raises ValueError with all reasons when the layout does not
    fit the number of processes, and as `set_nccl` does.
    """
    layout.resolved(launch.world)
    if launch.world == 1:
        yield single_process()
        return
    place = (
        {} if store is None else {"store": store, "rank": launch.rank, "world_size": launch.world}
    )
    if device.type == "cuda":
        set_nccl(os.environ)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device, **place)
    else:
        dist.init_process_group("gloo", timeout=timeout, **place)
    # NCCL connects ranks, and allocates, in a group's first collective, and torch's allocator gives
    # up no cached memory for it: in a first step that fills the device there would be none.
    dist.all_reduce(torch.zeros(1, device=device))
    yield make_mesh(layout, device)
    # Not in a `finally`: after an error others may wait in a collective for ever, and so would we.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    dist.destroy_process_group()


def beside(mesh: Mesh) -> Mesh:
    """The same mesh for a thread beside the main one: what ranks exchange there goes over a group
    of its own, on the host. Collective."""
    if mesh.world == 1:
        return mesh
    return replace(mesh, host_group=dist.new_group(backend="gloo", timeout=TIMEOUT))


def gather(group: dist.ProcessGroup | None, value: Result) -> list[Result]:
    """Values (picklable) of all ranks of `group`, in its order; None = this process alone.
    Collective."""
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def from_all(mesh: Mesh, value: Result) -> list[Result]:
    """Values (picklable) of all ranks, by rank. Collective."""
    return gather(mesh.host_group, value)


def gather_numbers(group: dist.ProcessGroup | None, numbers: Sequence[float]) -> list[list[float]]:
    """Numbers of all ranks of `group`, as many on each, as float64; None = this process alone. One
    collective on the host."""
    if group is None:
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return [row.tolist() for row in every]


def everywhere(group: dist.ProcessGroup | None, mine: bool) -> bool:
    """Tells whether something holds on all ranks of `group`; None = this process alone.
    Collective, on the host."""
    return all(told for (told,) in gather_numbers(group, [mine]))


def _outcome(
    action: Callable[[], Result], errors: tuple[type[Exception], ...]
) -> tuple[Result | None, Exception | None]:
    try:
        return action(), None
    except errors as error:
        return None, error


def _result(result: Any, failed: Exception | None) -> Any:
    if failed is not None:
        raise failed
    return result


def decided_by_first(
    store: Any, launch: Launch, decide: Callable[[], Result], *errors: type[Exception]
) -> Result:
    """Returns rank 0's decision, before processes are connected; one of `errors` is raised on all.

    Args:
        store: Of this start, for one decision; None = there is one process only.
        launch: This process's place among all.
        decide: Called by rank 0. Its result and errors must be picklable.
        errors: What it may raise.

    Raises:
        torch.distributed.DistError: If rank 0 does not decide within the timeout of the store.
    """
    if store is None:
        return decide()
    if launch.rank == 0:
        store.set("decided", pickle.dumps(_outcome(decide, errors)))
    return _result(*pickle.loads(_get(store, "decided")))  # of this run's own rank 0


def on_first(mesh: Mesh, action: Callable[[], Result], *errors: type[Exception]) -> Result:
    """Run `action` on rank 0 and give its result (picklable) to all; one of `errors` is raised on
    all.

    A collective call: the others wait for rank 0, so it is also a barrier.
    """
    if mesh.world == 1:
        return action()
    told: list[Any] = [_outcome(action, errors) if mesh.rank == 0 else None]
    dist.broadcast_object_list(told, src=0, group=mesh.host_group)
    return _result(*told[0])


def on_each(mesh: Mesh, action: Callable[[], Result], *errors: type[Exception]) -> Result:
    """Run `action` on every rank and give each its own result; one of `errors`, of any rank, is
    raised on all.

    A collective call: it waits for all of them. Errors must be picklable.
    """
    result, failed = _outcome(action, errors)
    first = next((told for told in from_all(mesh, failed) if told is not None), None)
    return _result(result, first)


def unanimous(group: dist.ProcessGroup | None) -> Agreement:
    """Standing of a step on this rank if it is the same on all of `group`, else eager: none of them
    replays or captures it. None = this rank decides alone. Collective, on the host."""
    if group is None:
        return own

    def agreed(standing: Standing) -> Standing:
        every = gather_numbers(group, [standing])
        return standing if all(told == [standing] for told in every) else Standing.EAGER

    return agreed


class StoreConsensus(Consensus):
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
        self._store.set(f"{here}/{self._rank}", "\n".join(wish))
        if self._store.add(f"{here}/came", 1) == len(self._ranks):
            told = [self._store.get(f"{here}/{rank}").decode() for rank in self._ranks]
            found = verdict([(kind, call) for kind, call in (text.split("\n") for text in told)])
        else:
            until, found = time.monotonic() + MEETING, EAGER
            while not self._store.check([f"{here}/verdict"]) and time.monotonic() < until:
                time.sleep(PAUSE)
        if self._store.add(f"{here}/decided", 1) == 1:  # no other rank has decided before
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


def stage_consensus(mesh: Mesh, patience: float = PATIENCE, *, sharded: bool = False) -> Consensus:
    """Among the ranks that this one exchanges data with while it runs its part of a model: those of
    its stage that share rows, matrices or experts with it, directly or through others. sharded: so
    do replicas that share the parts of layers."""
    place, blocks = mesh.place, mesh.layout.shard_ranks > 0
    ranks = _replica(mesh, blocks) if blocks or not sharded else range(mesh.world)
    return _vote(
        f"vote of stage {place['pp']}",
        [rank for rank in ranks if mesh.layout.coordinates(rank)["pp"] == place["pp"]],
        patience,
    )


def replica_consensus(
    mesh: Mesh, patience: float = PATIENCE, *, updates: bool = False
) -> Consensus:
    """The same for whole steps: also among the stages of a pipeline. updates: steps hold their
    update, which all replicas make together."""
    ranks = list(range(mesh.world)) if updates else _replica(mesh)
    return _vote("vote of replica", ranks, patience)


def _replica(mesh: Mesh, sharded: bool = False) -> list[int]:
    """The ranks of this replica, and of those that share experts with it; or layers."""

    def block(place: Mapping[str, int]) -> list[int]:
        others = [place[axis.name] for axis in mesh.layout.more if axis.own == "packs"]
        return [place["dp"] // mesh.layout.sharing_replicas(sharded=sharded), *others]

    mine, coordinates = block(mesh.place), mesh.layout.coordinates
    return [rank for rank in range(mesh.world) if block(coordinates(rank)) == mine]


def consensus_over(group: dist.ProcessGroup | None) -> Consensus:
    """Among the ranks of `group`; None = this one alone."""
    return _vote("captures", [] if group is None else dist.get_process_group_ranks(group))


def _vote(name: str, ranks: Sequence[int], patience: float = PATIENCE) -> Consensus:
    return alone if len(ranks) < 2 else StoreConsensus(name, ranks, patience)
