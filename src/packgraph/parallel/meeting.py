"""Meeting of the ranks of one start: keys of their own in a store that may outlive them.

torchrun keeps one store for all starts of its ranks, and what an earlier start wrote there stays:
a beat of a rank that was killed, the reason why a run ended, addresses of processes that are gone.
`TORCHELASTIC_RESTART_COUNT` does not tell starts apart: it stays as it is where nodes join or
leave, and where one process trains twice.

So rank 0 draws a prefix for the keys of this start. Another rank finds it under a random name that
it has drawn itself, so what it reads is never of an earlier start:

    rank r  ── hello/r = NAME ──▶ ┌───────┐ ◀── welcome/NAME = PREFIX ──  rank 0
    rank r  ── PREFIX/here/r ───▶ └───────┘
"""

import contextlib
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch.distributed as dist

from packgraph.parallel.processes import Launch

Result = TypeVar("Result")
LOOK = 0.05  # seconds between two looks for ranks that come


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
    hall = dist.PrefixStore("packgraph/meeting", store)
    if launch.rank != 0:
        name = secrets.token_hex(16)
        hall.set(f"hello/{launch.rank}", name)
        own = dist.PrefixStore(_get(hall, f"welcome/{name}").decode(), store)
        own.set(f"here/{launch.rank}", "here")
        yield own
        return
    prefix = f"packgraph/start-{secrets.token_hex(8)}"
    over = threading.Event()
    host = threading.Thread(
        target=_welcome,
        args=(store.clone(), prefix, launch.world, over),
        daemon=True,
        name="packgraph welcome",
    )
    host.start()
    try:
        yield dist.PrefixStore(prefix, store)
    finally:
        over.set()


def _welcome(store: Any, prefix: str, world: int, over: threading.Event) -> None:
    """Tell every rank that comes the prefix, until all are here or the block of rank 0 is left."""
    hall, own = dist.PrefixStore("packgraph/meeting", store), dist.PrefixStore(prefix, store)
    missing, told = set(range(1, world)), dict[int, bytes]()
    # A store that is gone is seen by the heartbeat.
    with contextlib.suppress(dist.DistError, RuntimeError, OSError):
        while missing and not over.is_set():
            for rank in sorted(missing):
                if own.check([f"here/{rank}"]):
                    missing.discard(rank)
                elif hall.check([f"hello/{rank}"]):
                    # What is there first may be the name of an earlier start, which nobody reads.
                    name = hall.get(f"hello/{rank}")
                    if told.get(rank) != name:
                        hall.set(f"welcome/{name.decode()}", prefix)
                        told[rank] = name
            over.wait(LOOK)


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
        outcome: tuple[Any, Exception | None]
        try:
            outcome = decide(), None
        except errors as error:
            outcome = None, error
        store.set("decided", pickle.dumps(outcome))
    result, failed = pickle.loads(_get(store, "decided"))  # of this run's own rank 0
    if failed is not None:
        raise failed
    return cast(Result, result)


def _get(store: Any, key: str) -> bytes:
    """Returns a store's value as soon as it is there; waiting within the store would hold signals
    back."""
    limit = store.timeout.total_seconds()
    end = time.monotonic() + limit
    while not store.check([key]):
        if time.monotonic() > end:
            raise dist.DistError(f"rank 0 said nothing for {limit:.0f} s")
        time.sleep(LOOK)
    return cast(bytes, store.get(key))
