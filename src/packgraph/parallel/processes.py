"""Process groups of a run: started as torchrun says, ended in an order that cannot hang.

The same code runs on GPUs (NCCL, with gloo for host data) and on CPUs (gloo). The invariant at the
end: graphs hold communicators, so everything that holds graphs must be closed inside the block;
only then are the groups destroyed. A process that fails does not wait for the others: it leaves at
once, and its launcher ends them.
"""

import contextlib
import datetime
import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from packgraph.parallel.mesh import Layout, Mesh, make_mesh, single_process

Result = TypeVar("Result")
TIMEOUT = datetime.timedelta(minutes=10)
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the new name and the old one


NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
REMEDY = "start all processes by torchrun, which sets these variables, or unset them for one alone"
_COUNT = re.compile(r"\d{1,9}").fullmatch
ADDRESS = ("RANK", "MASTER_ADDR", "MASTER_PORT")  # by which several processes meet


class LaunchError(ValueError):
    """Environment variables of a launcher that do not say where this process stands."""


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


_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


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
    _connect(device)
    yield make_mesh(layout, device)
    # Not in a `finally`: after an error others may wait in a collective for ever, and so would we.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    dist.destroy_process_group()


def _connect(device: torch.device) -> None:
    """Have the group of all processes take its memory on `device` now: NCCL connects ranks, and
    allocates, in a group's first collective, and torch's allocator gives up no cached memory for
    it. In a first step that fills the device there would be none."""
    dist.all_reduce(torch.zeros(1, device=device))


def beside(mesh: Mesh) -> Mesh:
    """The same mesh for a thread beside the main one: what ranks exchange there goes over a group
    of its own, on the host. Collective."""
    if mesh.world == 1:
        return mesh
    return replace(mesh, host_group=dist.new_group(backend="gloo", timeout=TIMEOUT))


def on_first(mesh: Mesh, action: Callable[[], Result], *errors: type[Exception]) -> Result:
    """Run `action` on rank 0 and give its result (picklable) to all; one of `errors` is raised on
    all.

    A collective call: the others wait for rank 0, so it is also a barrier.
    """
    if mesh.world == 1:
        return action()
    outcome: list[Any] = [None, None]
    if mesh.rank == 0:
        try:
            outcome[0] = action()
        except errors as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=mesh.host_group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def from_all(mesh: Mesh, value: Result) -> list[Result]:
    """The values (picklable) of all ranks, by rank. A collective call: it waits for all of them."""
    if mesh.world == 1:
        return [value]
    found: list[Any] = [None] * mesh.world
    dist.all_gather_object(found, value, group=mesh.host_group)
    return found


def on_each(mesh: Mesh, action: Callable[[], Result], *errors: type[Exception]) -> Result:
    """Run `action` on every rank and give each its own result; one of `errors`, of any rank, is
    raised on all.

    A collective call: it waits for all of them. Errors must be picklable.
    """
    if mesh.world == 1:
        return action()
    result: Any = None
    failed: Exception | None = None
    try:
        result = action()
    except errors as error:
        failed = error
    for told in from_all(mesh, failed):
        if told is not None:
            raise told
    return result
