"""Threads that share a graphed module: who may launch, who may call, and who may capture.

    launches   copy in, replay, clone out      one thread at a time: slots share memory for
                                               backwards
    calls      a call of the module            any number of threads, but none while the module is
                                               captured
    captures   dry run, capture, undo          one in the process, when no thread is inside the
                                               module

Locks are taken in the order captures, calls, launches. A launch only queues work (on the CPU:
computes) and calls neither user code nor the autograd engine, so whoever waits for it waits for a
moment. A capture runs user code and the engine. On CUDA backwards of all threads run in one thread
of the engine, which the capture needs too: there a capture does not hold up launches (it executes
nothing in memory that slots share), and a backward never waits for a capture. Nor could one that
runs its forward again, so the capture waits for the backwards of other threads before it begins.

Slots: the static memory of one in-flight microbatch, and the lease that owns it.

    acquire -> forward replays -> ... other microbatches in their own slots ... -> backward replays
    -> release

A slot has one private pool for what its forwards leave to its backwards, and buffers outside it for
what is copied in from eager code. Its variants exclude each other, because one microbatch owns the
slot from its first forward to its last backward; so all variants share the pool and the buffers,
and memory is that of the largest. A larger variant than any before makes room by dropping the
others: they are captured again at their next use.

    slot 0   [what forwards leave]       shared by all slots   [what backwards use while they run]
    slot 1   [what forwards leave]

Backwards run one after another on one stream, so their temporary memory, gradients of whole weight
matrices among it, is needed once. A single slot keeps it in its own pool, where it can reuse what
its forwards have freed.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from math import inf
from types import TracebackType
from typing import Any

import torch

from packgraph.graphs.backend import Backend, Pool
from packgraph.graphs.key import Layout, contiguous_strides, own_strides, with_bits
from packgraph.torch_internals import backward_task, keeps_graph, raw_stream

LONGEST_WAIT_S = (
    10.0  # for other threads to leave the module before a capture; then the call runs eagerly
)
LONGEST_WAIT_FOR_BACKWARDS_S = (
    2.0  # of other threads; then the capture begins, since they may wait for this thread
)
_LOOK_S = 0.001  # for slots given back, of which nobody tells


_CAPTURE_LOCK = threading.RLock()
_capturing_thread: int | None = None


@contextlib.contextmanager
def one_capture() -> Iterator[None]:
    """The one capture of the process: waits for those of other modules. A capture may begin within
    a capture of the same thread."""
    global _capturing_thread
    with _CAPTURE_LOCK:
        before, _capturing_thread = _capturing_thread, threading.get_ident()
        try:
            yield
        finally:
            _capturing_thread = before


class Launches:
    """Exclusive use of what the slots of a module share: memory of backwards, and gradient buffers.

    shared: several threads train with the module. It is set within the lock and stays: what a
    backward does because it is not set, it does within the same `with launches:`. There the current
    stream follows the stream of the launches before: what shares memory must not overlap on the
    device either.
    """

    def __init__(self, device: torch.device) -> None:
        self.shared = False
        self._lock = threading.RLock()
        self._index = None
        if device.type == "cuda":
            self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream: torch.cuda.Stream | None = None
        self._number: int | None = None

    def __enter__(self) -> "Launches":
        self._lock.acquire()
        if self._index is not None and raw_stream(self._index) != self._number:
            try:  # the current stream waits for all that was launched on the last one
                stream = torch.cuda.current_stream(self._index)
                if self._stream is not None:
                    stream.wait_stream(self._stream)
                self._stream, self._number = stream, stream.cuda_stream
            except BaseException:
                self._lock.release()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


class Calls:
    """The threads inside a module, and the one that captures it: `with calls:` around every call.

    device: of the module. shared: whether a thread has come in to train while another one that does
    lived. elsewhere: tells whether microbatches of other threads than the current one wait for
    their backwards.
    """

    def __init__(self, device: torch.device, elsewhere: Callable[[], bool]) -> None:
        self.shared = False
        self._cuda = device.type == "cuda"
        self._elsewhere = elsewhere
        self._begun = False
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._inside: dict[int, int] = {}
        self._capturer: int | None = None
        self._trainer: int | None = None

    def __enter__(self) -> "Calls":
        thread = threading.get_ident()
        with self._lock:
            if self._capturer is not None and not self._may_enter(thread):
                if self._in_engine():
                    raise RuntimeError(
                        "a backward calls a graphed module again (recomputation) while another "
                        "thread captures graphs of it: let one thread call the module alone until "
                        "its graphs are captured"
                    )
                self._turn.wait_for(lambda: self._may_enter(thread))
            self._inside[thread] = self._inside.get(thread, 0) + 1
        if thread != self._trainer and not self.shared and torch.is_grad_enabled():
            self._another(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        thread = threading.get_ident()
        with self._lock:
            count = self._inside.pop(thread) - 1
            if count:
                self._inside[thread] = count
            elif self._capturer is not None:
                self._turn.notify_all()

    def _may_enter(self, thread: int) -> bool:
        """A thread in the capture of another module may: this module's capture has not begun then.
        So may a backward that the capture waits for."""
        return (
            self._capturer in (None, thread)
            or _capturing_thread == thread
            or (not self._begun and self._in_engine())
        )

    def _another(self, thread: int) -> None:
        """A thread trains that is not the one before. One after another is as one: the first must
        live."""
        with self._lock:
            before, self._trainer = self._trainer, thread
            lives = before is not None and any(
                other.ident == before for other in threading.enumerate()
            )
            self.shared = self.shared or lives

    @contextlib.contextmanager
    def capture(self) -> Iterator[bool]:
        """Within the block no other thread is inside the module, and none captures another one.
        Gives False, and excludes nobody, when they do not leave in time. The caller runs no code of
        the module when this begins."""
        thread = threading.get_ident()
        if self._capturer == thread:
            yield True
            return
        own, free = 0, False
        try:
            with self._lock:
                own = self._inside.pop(thread, 0)
                free = self._close(thread, 0.0 if self._in_engine() else LONGEST_WAIT_S)
            if free:
                with one_capture():
                    yield True
            else:
                yield False
        finally:
            with self._lock:
                if own:
                    self._inside[thread] = own
                if free:
                    self._capturer, self._begun = None, False
                self._turn.notify_all()

    def _close(self, thread: int, seconds: float) -> bool:
        """Let nobody in, and wait for those inside."""
        self._turn.notify_all()
        if not self._turn.wait_for(lambda: self._capturer is None, seconds):
            return False
        self._capturer = thread
        try:
            # Backwards of other threads may have to run their forward again.
            until = time.monotonic() + LONGEST_WAIT_FOR_BACKWARDS_S
            while self._cuda and seconds and self._elsewhere() and time.monotonic() < until:
                self._turn.wait(_LOOK_S)
            self._begun = self._turn.wait_for(lambda: not self._inside, seconds)
        finally:  # Ctrl-C, too
            if not self._begun:
                self._capturer = None
        return self._begun

    def _in_engine(self) -> bool:
        """Returns whether this is the thread that runs all backwards of the device: a capture of
        any thread needs it."""
        return self._cuda and backward_task() != -1


class Slot:
    """Static buffers, one pool, and the variants captured into them."""

    def __init__(
        self, index: int, backend: Backend, device: torch.device, shared: Pool | None = None
    ) -> None:
        """shared: where backwards keep what they need while they run; None = in the slot's own
        pool."""
        self.index, self.backend, self.device, self._shared = index, backend, device, shared
        self.pool: Pool = backend.new_pool()
        self.variants: dict[Hashable, Any] = {}
        self.largest = (False, 0)
        self.outgrown = False
        self.retired = False
        self.thread: int | None = None  # whose microbatch has it, or had it last
        self._buffers: dict[Hashable, torch.Tensor] = {}

    @property
    def scratch(self) -> Pool:
        """The pool for memory that nobody reads after the replay that wrote it."""
        return self.pool if self._shared is None else self._shared

    def buffer(
        self, role: Hashable, like: torch.Tensor, layout: Layout | None = None
    ) -> torch.Tensor:
        """A static tensor of `like`'s shape and dtype for `role`, shared by all variants of the
        slot.

        layout: of the tensor; None = as `own_strides` says of `like`, with its conjugate and
        negative bits.

        When the memory kept for `role` is too small it is replaced and `outgrown` is set: variants
        bound to the old memory must go.
        """
        nbytes = like.numel() * like.element_size()
        kept = self._buffers.get(role)
        if kept is None or kept.numel() < nbytes:
            self.outgrown = self.outgrown or kept is not None
            kept = torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=self.device)
            self._buffers[role] = kept
        whole = torch.empty(0, dtype=like.dtype, device=self.device)
        strides = (
            layout
            or (own_strides(like) if layout is None else None)
            or contiguous_strides(like.shape)
        )
        whole.set_(kept.untyped_storage(), 0, tuple(like.shape), strides)
        return whole if layout is not None else with_bits(whole, like.is_conj(), like.is_neg())

    def buffer_bytes(self) -> int:
        """Bytes that the slot holds outside of pools."""
        return sum(kept.numel() for kept in self._buffers.values())

    def make_room(self, size: tuple[bool, int]) -> int:
        """Drop all variants if a call of this size is larger than any that the slot has held; how
        many were dropped. size: see `Signature`."""
        if size <= self.largest:
            return 0
        self.largest = size
        return self.clear() if self.variants else 0

    def forget_smaller(self, key: Hashable) -> int:
        """Drops, after building `key`, the variants whose buffers were replaced meanwhile; returns
        how many were dropped."""
        if not self.outgrown:
            return 0
        self.outgrown = False
        return sum(self.drop(other) for other in [*self.variants] if other != key)

    def drop(self, key: Hashable) -> bool:
        """Free the variant of `key`; returns whether there was one."""
        variant = self.variants.pop(key, None)
        if variant is not None:
            variant.reset()
        return variant is not None

    def clear(self) -> int:
        """Free all variants, buffers and the pool, with its host memory; how many variants were
        dropped."""
        dropped = sum(map(self.drop, [*self.variants]))
        self._buffers.clear()
        self.outgrown = False
        self.pool.host.let_go()
        self.pool = self.backend.new_pool()
        return dropped

    def poison(self) -> None:
        """Fill pools and buffers with NaN patterns (tests)."""
        self.pool.poison()
        self.scratch.poison()
        for kept in self._buffers.values():
            kept.fill_(0xFF)


class Slots:
    """The slots of one graphed module, handed out by a free list.

    limit: how many slots may exist; None lets their number follow the microbatches in flight.
    """

    def __init__(self, backend: Backend, device: torch.device, limit: int | None) -> None:
        self.backend, self.device, self.limit = backend, device, limit
        self.launches = Launches(device)
        self.shared: Pool | None = None if limit == 1 else backend.new_pool()
        self.all: list[Slot] = []
        self._free: list[Slot] = []

    def acquire(self, key: Hashable) -> "SlotLease | None":
        """Claim a slot, one that has `key` captured if there is one; None when all are in
        flight."""
        captured = self.acquire_captured(key)
        if captured is not None:
            return captured[0]
        if self._free:
            return self._lease(self._free.pop())
        if self.limit is None or len(self.all) < self.limit:
            slot = Slot(len(self.all), self.backend, self.device, self.shared)
            self.all.append(slot)
            return self._lease(slot)
        return None

    def acquire_captured(self, key: Hashable) -> tuple["SlotLease", Any] | None:
        """Claim a slot that has `key` captured: its lease and the variant; None if none is free."""
        for slot in reversed(self._free):
            variant = slot.variants.get(key)
            if variant is not None:
                self._free.remove(slot)
                return self._lease(slot), variant
        return None

    def _lease(self, slot: Slot) -> "SlotLease":
        slot.thread = threading.get_ident()
        return SlotLease(self, slot)

    def release(self, slot: Slot) -> None:
        """Return a slot. Raises RuntimeError when it is free already: two microbatches believed
        they owned it."""
        if slot.retired:
            slot.clear()
            return
        if slot in self._free:
            raise RuntimeError(f"slot {slot.index} was released twice")
        self._free.append(slot)

    def clear(self) -> int:
        """Free all slots; those in flight when their microbatch is done. How many variants are
        gone."""
        dropped = sum(len(slot.variants) for slot in self.all)
        for slot in self.all:  # first: another thread may give one back now
            slot.retired = True
        free, self.all, self._free = self._free, [], []
        for slot in free:
            slot.clear()
        self.shared = None if self.limit == 1 else self.backend.new_pool()
        return dropped

    def drop(self, key: Hashable) -> int:
        """Free the variants of `key`, and all memory if no other is left; how many are gone.

        Raises RuntimeError while a slot is in flight: its graphs may be needed yet.
        """
        if self.in_flight():
            raise RuntimeError(
                f"{self.in_flight()} slots are in flight: graphs can be given up between steps only"
            )
        found = sum(slot.drop(key) for slot in self.all)
        if found and not any(slot.variants for slot in self.all):
            self.clear()
        return found

    def nbytes(self) -> int:
        """Bytes reserved for all pools."""
        shared = 0 if self.shared is None else self.shared.nbytes()
        return shared + sum(slot.pool.nbytes() for slot in self.all)

    def has_free(self) -> bool:
        """Returns whether `acquire` would find a slot now."""
        return bool(self._free) or self.limit is None or len(self.all) < self.limit

    def in_flight(self) -> int:
        """Number of slots that a microbatch owns now."""
        return len(self.all) - len(self._free)

    def in_flight_elsewhere(self) -> bool:
        """Returns whether microbatches of other threads that live own slots now."""
        others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        return any(
            slot.thread in others and not any(free is slot for free in self._free)
            for slot in list(self.all)
        )

    def reserve(self, count: int) -> list["SlotLease"]:
        """Claim `count` slots at once, to build them. Raises RuntimeError when fewer can be had."""
        leases: list[SlotLease] = []
        for _ in range(count):
            lease = self.acquire(None)
            if lease is None:
                raise RuntimeError(f"{count} slots were asked for, but only {len(leases)} are free")
            leases.append(lease)
        return leases


class SlotLease:
    """A slot leased by one microbatch, owned by its autograd nodes.

    The slot goes back when the last of `pending` backwards has run, or when the nodes are gone
    without a backward. kept: somebody else (a pipeline with sends under way) says when, by
    `release`.
    """

    def __init__(self, slots: Slots, slot: Slot) -> None:
        self.slots, self.slot = slots, slot
        self.pending: set[int] = set()
        self.released = False
        self.kept = False
        self.first_spent = inf  # region: it and later ones have no saved activations any more

    def start_backward(self, region: int) -> None:
        """Check that `region` may run its backward now: once, and while the slot is still this
        microbatch's."""
        if self.released or region not in self.pending:
            raise RuntimeError(
                "backward through a captured region a second time: its saved activations are gone "
                "after the first, unless that has retain_graph=True (outputs of one call need one "
                "common backward). Add "
                "the losses before backward, call the module again, or run it under "
                "packgraph.eager(...)"
            )
        # Later regions were captured to go first: what follows here may reuse their saved
        # activations.
        self.first_spent = min(self.first_spent, region)
        if len(self.pending) > 1 and not _is_graph_kept():
            self.pending = {other for other in self.pending if other <= region}

    def finish_backward(self, region: int) -> None:
        """Note that `region` is done, unless its graph is kept for another backward; the last one
        releases the slot."""
        if _is_graph_kept():
            return
        self.pending.discard(region)
        if not self.pending and not self.kept:
            self.release()

    def release(self) -> None:
        """Give the slot back now."""
        if not self.released:
            self.released = True
            self.slots.release(self.slot)

    def __del__(self) -> None:
        if not self.released:
            self.release()


def _is_graph_kept() -> bool:
    """Returns whether the running backward has `retain_graph=True`."""
    return backward_task() >= 0 and keeps_graph()
