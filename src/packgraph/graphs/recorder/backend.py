"""The CPU backend: records tensor operations on static storages and replays them bit-exactly.

It has the life cycle of CUDA graphs: a capture runs Python once, a replay never does; temporary
blocks are reused as the caching allocator would reuse them; what a replay did not write is NaN;
host syncs are refused at the user's line. So slot order, aliasing, sync, RNG and multi-rank bugs
fail on a laptop.

Unlike CUDA, capturing here executes the operations. The window undoes their effects when it closes:
tensors that existed before get their contents back (journal), and the captured results are poisoned
until the first replay.

Operands are remembered by name (block, offset, shape), not by reference: a recorder that kept its
operands alive would keep every block alive and hide reuse bugs. Tensors from outside (parameters,
static inputs) are held strongly.

Calls that never reach torch's dispatcher are part of a recorded program, too: setting the state of
the default generator, as recomputation does, and waiting for a transfer (`dist.Work.wait`). Both
happen at every replay, at their place. torch's functions are replaced once by functions that pass
everything on unless their thread records.

A block lives from the operation that made its storage until the last reference to that storage is
gone. When a variant is complete, its blocks are placed first-fit in the order of their births, each
at the lowest offset that is free for its whole life. Variants of one pool begin at offset zero.
"""

import bisect
import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from packgraph.graphs.backend import Graph, Result
from packgraph.graphs.checks.host_sync import (
    LEAVE_OUT,
    CodeWatcher,
    HostReads,
    Journal,
    refuse_unsafe,
    shapes_only,
)
from packgraph.graphs.checks.operations import (
    PLAIN_TENSORS,
    Operation,
    flat,
    operands_of,
    operation_of,
    storages,
)
from packgraph.graphs.checks.random_state import state_calls
from packgraph.graphs.copy_streams import HostMemories, capturing_copy_streams
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.fallback import within
from packgraph.graphs.key import with_bits
from packgraph.graphs.parameters import storage_of
from packgraph.graphs.recorder.copy_streams import EmulatedCopyStreams, RecordedCopyStreams, plain
from packgraph.torch_internals import (
    below_modes,
    gather_into,
    identity,
    reduce_into,
    set_grad_mode,
    wait_tensor,
)

POISON = 0xFF


@dataclass
class RecordedStorage:
    """One storage. birth, death: ticks of the window's clock (death None = still referenced).

    scratch: made by a capture after which nothing reads it.
    """

    nbytes: int
    birth: int
    storage: "weakref.ref[torch.UntypedStorage]"
    death: int | None = None
    scratch: bool = False


class RecorderPool:
    """Segments of host memory shared by all variants captured into the pool."""

    def __init__(self) -> None:
        self.segments: list[torch.Tensor] = []
        self.host = HostMemories(plain)  # of copies that its graphs hold

    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(segment.numel() for segment in self.segments)

    def poison(self) -> None:
        """Fill all segments with the NaN pattern."""
        for segment in self.segments:
            segment.fill_(POISON)
        self.host.arenas.poison()

    def place(self, blocks: list[RecordedStorage]) -> list[tuple[torch.Tensor, int] | None]:
        """(segment, offset) for every dead block, None for those still referenced; grows the pool
        as needed."""
        plans = [Segment(segment.numel()) for segment in self.segments] + [Segment(None)]
        chosen: list[tuple[int, int] | None] = []
        for block in blocks:
            found = None
            for index, plan in enumerate(plans if block.death is not None else ()):
                offset = plan.place(block)
                if offset is not None:
                    found = (index, offset)
                    break
            chosen.append(found)
        if plans[-1].top:
            self.segments.append(torch.full((plans[-1].top,), POISON, dtype=torch.uint8))
        return [None if c is None else (self.segments[c[0]], c[1]) for c in chosen]


ALIGNMENT = 64


@dataclass
class Segment:
    """Placement in one segment. size: bytes, None = as many as it takes. top: the highest byte in
    use so far.

    used: blocks as (offset, end, death), sorted by offset.
    """

    size: int | None
    used: list[tuple[int, int, int]] = field(default_factory=list)
    top: int = 0

    def place(self, block: RecordedStorage) -> int | None:
        """The offset of a dead block, or None where it does not fit. Blocks must come in the order
        of their births."""
        nbytes, death = max(ALIGNMENT, -(-block.nbytes // ALIGNMENT) * ALIGNMENT), block.death
        assert death is not None
        self.used = [other for other in self.used if other[2] > block.birth]
        offset = 0
        for start, end, _ in self.used:
            if offset + nbytes <= start:
                break
            offset = end
        if self.size is not None and offset + nbytes > self.size:
            return None
        bisect.insort(self.used, (offset, offset + nbytes, death))
        self.top = max(self.top, offset + nbytes)
        return offset


# Beside copy streams: gathers, reductions and receives run as late as they may.
TRANSFERS = "transfers"
_RECEIVE = torch.ops.c10d.recv_.default
_LATE = (
    gather_into.default,
    reduce_into.default,
    _RECEIVE,
)


class _Operand(NamedTuple):
    """A tensor inside the pool, by block number, layout, and the bits of lazy views."""

    block: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool


class _Node(NamedTuple):
    """One recorded operation.

    called_with: None for a step of the host; without a function that is a wait for the transfer
    whose number is the only output, or, where that is None, for all. kinds: per output `new` (copy
    into its block), `work` (a transfer, its number stands in outputs) or empty.
    """

    function: Any
    called_with: tuple[tuple[Any, ...], dict[str, Any]] | None
    outputs: list[Any]
    kinds: list[str]
    grad_mode: bool = False


class _Recording(CodeWatcher):
    """Executes and records the operations of one graph; compiled code is one operation."""

    supports_higher_order_operators = True

    def __init__(self, window: "RecorderWindow", nodes: list[_Node]) -> None:
        super().__init__()
        self.window, self.nodes = window, nodes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, window = kwargs or {}, self.window
        if types and not PLAIN_TENSORS.issuperset(types):
            return func(*args, **kwargs) if shapes_only(types) else NotImplemented
        if (
            func is torch.ops.aten.lift_fresh.default
        ):  # a tensor made of numbers: each replay has one of its own
            func = torch.ops.aten.clone.default
        operation = operation_of(func)
        if operation is None:
            raise CaptureError(
                f"the higher-order operator {func} cannot be recorded", user_line(), LEAVE_OUT
            )
        operands = operands_of(args, kwargs)
        refuse_unsafe(operation, args, kwargs, operands, None)
        for key, tensor in storages(operation.written_of(args, kwargs)).items():
            if key not in window.block_of:
                window.journal.before_write(tensor)
        inputs, named = storages(operands).keys(), _changed((args, kwargs), window.operand)
        result = (
            window.journal.call(operation, args, kwargs)
            if operation.may_draw
            else func(*args, **kwargs)
        )
        self._note(operation, named, inputs, flat((result,)))
        return result

    def _note(
        self, operation: Operation, named: Any, inputs: Set[int], made: Sequence[Any]
    ) -> None:
        """An operation has run. named: its operands. inputs: their storages. made: its results."""
        if shapes_only(map(type, made)):  # a factory has no operand that would have said so
            return
        window = self.window
        outputs: list[Any] = []
        kinds = []
        for out in made:
            kinds.append(self._kind(operation.function, out, inputs))
            if kinds[-1] == "new" and storage_of(out) not in window.block_of:
                window.own(out)  # compiled code may return several views of one block
            outputs.append(window.operand(out) if kinds[-1] == "new" else None)
            if kinds[-1] == "work":
                outputs[-1] = window.transfer(dist.Work.unbox(out))
        if operation.mutates or "new" in kinds or "work" in kinds:
            self.nodes.append(
                _Node(operation.function, named, outputs, kinds, torch.is_grad_enabled())
            )
        window.clock += 1

    @staticmethod
    def _kind(func: Any, out: Any, inputs: Set[int]) -> str:
        if not isinstance(out, torch.Tensor):
            return (
                "work" if isinstance(out, torch.ScriptObject) and func.namespace == "c10d" else ""
            )
        storage = out.untyped_storage()
        return "" if identity(storage) in inputs or storage.nbytes() == 0 else "new"


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to all leaves of an operation's argument."""
    if type(value) in (list, tuple, torch.Size):
        return type(value)([_changed(entry, change) for entry in value])
    if type(value) is dict:
        return {key: _changed(entry, change) for key, entry in value.items()}
    return change(value)


class _Static:
    """A tensor of the window; its memory is known once the window has closed."""

    def __init__(self, window: "RecorderWindow", operand: Any) -> None:
        self._window, self._operand = window, operand
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = self._window.resolve(self._operand)
        return self._tensor


class RecorderGraph(Graph):
    """A recorded program, bound to static memory when its window closes."""

    def __init__(
        self,
        nodes: list[_Node],
        copy_streams: RecordedCopyStreams,
        eager_streams: EmulatedCopyStreams,
    ) -> None:
        super().__init__(copy_streams, eager_streams)
        self.nodes, self._queues = nodes, eager_streams.queues
        self.program: list[tuple[Any, Any, Any, list[Any], list[str], bool]] | None = None

    def bind(self, window: "RecorderWindow") -> None:
        """Replace operands by tensors on the pool's memory."""
        program: list[Any] = []
        for node in self.nodes:
            if node.called_with is None:
                program.append((node.function, None, None, node.outputs, [], False))
                continue
            args, kwargs = _changed(node.called_with, window.resolve)
            outputs = [window.resolve(o) for o in node.outputs]
            program.append((node.function, args, kwargs, outputs, node.kinds, node.grad_mode))
        self.program, self.nodes = program, []

    @torch.no_grad()
    def _launch(self) -> None:
        if self.program is None:
            raise RuntimeError("this graph was reset or its capture has not finished")
        with torch.autocast("cpu", enabled=False):
            self._run(self.program)

    def _run(self, program: list[Any]) -> None:
        pending: dict[int, Any] = {}
        late = TRANSFERS in self._queues.late
        for function, args, kwargs, outputs, kinds, grad_mode in program:
            if args is None:
                _host_step(function, outputs, pending)
                continue
            if grad_mode != torch.is_grad_enabled():
                # Some operations (LSTM) make what their backward needs only in grad mode. No
                # operand needs a gradient.
                set_grad_mode(grad_mode)
            if late and function in _LATE:
                pending[outputs[kinds.index("work")]] = _LateTransfer(function, args, kwargs)
                continue
            result = function(*args, **kwargs)
            if "new" not in kinds and "work" not in kinds:
                continue
            leaves = (result,) if type(result) is torch.Tensor else flat((result,))
            for target, value, kind in zip(outputs, leaves, kinds, strict=True):
                if kind == "new":
                    if function.namespace.startswith("_c10d_f"):
                        value = wait_tensor(value)
                    target.copy_(value)
                elif kind == "work":
                    pending[target] = dist.Work.unbox(value)
        for work in pending.values():
            work.end() if isinstance(work, _LateTransfer) else work.wait()

    def reset(self) -> None:
        """Drop the program."""
        self.program, self.nodes = None, []


class _LateTransfer:
    """A transfer whose target is NaN until it is waited for, and for good if nobody in the graph
    waits. A collective runs when it is waited for. What a peer sends is received at once, into
    memory of its own, for the peer may wait for that.

    Attributes:
        group: Its process group, by name.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._received: tuple[torch.Tensor, torch.Tensor, Any] | None = None
        if function is _RECEIVE:
            (target,), group = args[:2]
            memory = torch.empty_like(target)
            work = function([memory], *args[1:], **kwargs)
            self._received = target, memory, dist.Work.unbox(work)
        else:
            target, source, group = args[:3]
            mine = source.clone()  # may be a part of the target
        target.fill_(float("nan"))
        if self._received is None:
            source.copy_(mine)
        self._called_with = function, args, kwargs
        self.group = dist.ProcessGroup.unbox(group).group_name

    def wait(self) -> None:
        """Its target has what was sent afterwards."""
        if self._received is not None:
            target, memory, work = self._received
            work.wait()
            target.copy_(memory)
            return
        function, args, kwargs = self._called_with
        _, work = function(*args, **kwargs)
        dist.Work.unbox(work).wait()

    def end(self) -> None:
        """Nobody waits for it any more."""
        if self._received is not None:
            self._received[2].wait()


def _host_step(step: Any, waited: list[Any], pending: dict[int, Any]) -> None:
    """A recorded effect on the host: moving RNG state, or (None) waiting for a transfer."""
    if step is not None:
        step()
    elif waited == [None]:
        while pending:
            pending.pop(min(pending)).wait()
    elif waited[0] in pending:
        transfer = pending.pop(waited[0])
        if isinstance(transfer, _LateTransfer):
            _run_earlier(transfer, waited[0], pending)
        transfer.wait()


def _run_earlier(transfer: _LateTransfer, number: int, pending: dict[int, Any]) -> None:
    """Run what was begun before `transfer` over the same group, which serves transfers in their
    order."""
    for earlier in sorted(key for key in pending if key < number):
        waiting = pending[earlier]
        if isinstance(waiting, _LateTransfer) and waiting.group == transfer.group:
            pending.pop(earlier).wait()


class RecorderWindow:
    """The capture of one variant: all its graphs share one clock of births and deaths."""

    def __init__(
        self,
        pool: RecorderPool,
        scratch: RecorderPool,
        journal: Journal,
        copy_streams: EmulatedCopyStreams,
    ) -> None:
        """copy_streams: of the backend's eager work."""
        self.pool, self.scratch, self.journal = pool, scratch, journal
        self.copy_streams = RecordedCopyStreams(self, pool.host, copy_streams.queues.late)
        self._eager_streams = copy_streams
        self._nodes: list[_Node] = []
        self._is_brief = False
        self.clock = 0
        self.blocks: list[RecordedStorage] = []
        self.block_of: dict[int, int] = {}
        self._external: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._graphs: list[RecorderGraph] = []
        self._transfers: list[Any] = []
        self._places: list[tuple[torch.Tensor, int] | torch.UntypedStorage | None] | None = None

    def own(self, tensor: torch.Tensor) -> None:
        """Start the life of a new block."""
        storage, number = tensor.untyped_storage(), len(self.blocks)
        cdata = identity(storage)

        def died(_: Any) -> None:
            if self.blocks[number].death is None:
                self.blocks[number].death = self.clock
            if self.block_of.get(cdata) == number:
                del self.block_of[cdata]

        self.blocks.append(
            RecordedStorage(
                storage.nbytes(), self.clock, weakref.ref(storage, died), scratch=self._is_brief
            )
        )
        self.block_of[cdata] = number

    def note(self, step: Callable[..., None], tensors: Sequence[torch.Tensor]) -> None:
        """Put `step` into the program: it is called with the memory of `tensors` at every
        replay."""
        self._nodes.append(_Node(step, (tuple(map(self.operand, tensors)), {}), [], []))
        self.clock += 1

    def transfer(self, work: Any) -> int:
        """A number for a collective under way; its wait is recorded under the same number."""
        tell_waits()
        self._transfers.append(work)
        return len(self._transfers) - 1

    def operand(self, tensor: Any) -> Any:
        """The symbolic name of `tensor`, or a strong reference when it comes from outside; what is
        none is left."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        number = self.block_of.get(storage_of(tensor))
        if number is None:
            if id(tensor) not in self._external:
                own = tensor
                if (
                    tensor.requires_grad
                ):  # and may have a graph behind it; whoever has not is counted by its users
                    with below_modes():
                        own = tensor.detach()
                self._external[id(tensor)] = (tensor, own)
            return self._external[id(tensor)][1]
        offset = int(tensor.storage_offset())
        return _Operand(
            number,
            tensor.dtype,
            offset,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def resolve(self, operand: Any) -> Any:
        """The tensor behind an operand, once the window has closed."""
        if not isinstance(operand, _Operand):
            return operand
        if self._places is None:
            raise RuntimeError(
                "the memory of a captured tensor is known only after its capture has finished"
            )
        place = self._places[operand.block]
        if isinstance(place, tuple):
            storage, base = place[0].untyped_storage(), place[1] // operand.dtype.itemsize
        else:
            storage, base = place, 0  # type: ignore[assignment]
        whole = torch.empty(0, dtype=operand.dtype)
        whole.set_(storage, base + operand.offset, operand.size, operand.stride)
        return with_bits(whole, operand.conjugate, operand.negative)

    def static(self, tensor: torch.Tensor) -> _Static:
        """A handle on `tensor` for replays."""
        return _Static(self, self.operand(tensor))

    def materialise(self) -> None:
        """Nothing to do: capturing has executed the operations."""

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Memory of the slot's pool in `like`'s form."""
        tensor = torch.empty_like(like)
        self.own(tensor)
        return tensor

    def capture(
        self, run: Callable[[], Result], scratch: bool = False
    ) -> tuple[RecorderGraph, Result]:
        """Run and record `run`. Raises CaptureError at the user's line for what a graph cannot
        hold."""
        nodes = self._nodes = list[_Node]()
        self._is_brief = scratch
        self.copy_streams.scope += 1

        def step(effect: Callable[[], Any]) -> None:
            nodes.append(_Node(effect, None, [], []))

        def waited(work: Any) -> None:
            numbers = (n for n, known in enumerate(self._transfers) if known is work)
            nodes.append(_Node(None, None, [next(numbers, None)], []))

        with (
            capturing_copy_streams(self.copy_streams),
            recorded_host(step, waited),
            HostReads(),
            _Recording(self, nodes),
            contextlib.ExitStack() as at_end,
        ):
            at_end.callback(
                self.copy_streams.join
            )  # also on errors: sources of copies under way are held until then
            result = run()
        self._is_brief = False

        graph = RecorderGraph(nodes, self.copy_streams, self._eager_streams)
        self._graphs.append(graph)
        return graph, result

    def close(self) -> None:
        """Place all blocks, bind the graphs to them, and poison what the capture has computed."""
        if any(block.death is None for block in self.blocks):
            gc.collect()
        # Held while blocks are placed: the threads of transfers let go of their tensors when they
        # like.
        held = [block.storage() if block.death is None else None for block in self.blocks]
        for block, storage in zip(self.blocks, held, strict=True):
            if storage is None and block.death is None:
                block.death = self.clock
        places: list[Any] = [None] * len(self.blocks)
        pool_of = {True: self.scratch, False: self.pool}
        for pool in dict.fromkeys((self.pool, self.scratch)):
            numbers = [
                number for number, block in enumerate(self.blocks) if pool_of[block.scratch] is pool
            ]
            for number, found in zip(
                numbers, pool.place([self.blocks[n] for n in numbers]), strict=True
            ):
                places[number] = found
        for number, storage in enumerate(held):
            if storage is not None:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)
                places[number] = storage
        self._places = places
        for graph in self._graphs:
            graph.bind(self)
        self._graphs, self._nodes, self._external, self._transfers = [], [], {}, []


class RecorderBackend:
    """Captures CPU modules by recording their tensor operations."""

    name = "recorder"
    device_type = "cpu"
    guard_device: str | None = None

    def __init__(self, extra_generators: Sequence[torch.Generator] = ()) -> None:
        self.extra_generators = list(extra_generators)
        self.copy_streams = EmulatedCopyStreams(set[str]())

    def new_pool(self) -> RecorderPool:
        """An empty pool."""
        return RecorderPool()

    @contextlib.contextmanager
    def window(
        self, pool: RecorderPool, scratch: RecorderPool, journal: Journal
    ) -> Iterator[RecorderWindow]:
        """See Backend."""
        window = RecorderWindow(pool, scratch, journal, self.copy_streams)
        yield window
        window.close()

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run once; the CPU itself has nothing to initialise before a capture."""
        run()

    def generators(self) -> list[torch.Generator]:
        """The CPU's default generator, and those the module holds."""
        return [torch.default_generator, *self.extra_generators]


_RECORDED: ContextVar[Callable[[Any], None] | None] = ContextVar(
    "packgraph_recorded_wait", default=None
)


@contextlib.contextmanager
def recorded_host(
    step: Callable[[Callable[[], Any]], None], waited: Callable[[Any], None]
) -> Iterator[None]:
    """Within the block effects of this thread are told: `step` what a replay has to do, such as to
    read and set the state of the default generator, too, `waited` for which transfer."""

    def state_call(function: Any, generator: torch.Generator, state: Any) -> Any:
        if state is not None:
            step(lambda: generator.set_state(state))
            return function()
        read = function()
        step(lambda: read.copy_(generator.get_state()))
        return read

    with within(_RECORDED, waited), state_calls(SimpleNamespace(state_call=state_call)):
        yield


def tell_waits() -> None:
    """Makes `dist.Work.wait` tell a recording thread of transfers that it waits for."""
    original = dist.Work.wait
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        waited = _RECORDED.get()
        if waited is None:
            return original(work, *args, **kwargs)
        waited(work)
        with below_modes():
            return original(work, *args, **kwargs)

    dist.Work.wait = wait  # type: ignore[method-assign, assignment]
