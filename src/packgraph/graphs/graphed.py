"""`packgraph.graph`: a module that replays captured graphs, and falls back to eager where it must.

A call goes one way: is there a reason to run eagerly? which key is it? is a slot free, with this
key captured? capture it if not; copy in, replay, clone out. Every branch that ends in eager
execution is counted under its reason.
"""

import contextlib
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, cast

import torch
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import TypeVar  # with `default`, which Python 3.13 has itself

from packgraph.graphs import fallback
from packgraph.graphs.agreement import EAGER, START_OVER, consensus_of
from packgraph.graphs.cache import call_name
from packgraph.graphs.capture import MAX_KEYS, Capturer
from packgraph.graphs.checks.host_sync import capturing
from packgraph.graphs.checks.unsupported import (
    Unsupported,
    find_unsupported,
    unsupported_error,
)
from packgraph.graphs.choose import choose_backend, choose_compiler
from packgraph.graphs.dry_run import CapturedCall
from packgraph.graphs.errors import CaptureError, described, user_line
from packgraph.graphs.fallback import Stats, is_traced, reason_around
from packgraph.graphs.gradients import GradientBuffers
from packgraph.graphs.key import Signature, call_key, call_size, signature, undeclared
from packgraph.graphs.memory.allocator import free_memory
from packgraph.graphs.memory.host_weights import HostWeights
from packgraph.graphs.notices import Notices, detail
from packgraph.graphs.output_gradients import OutputGradients
from packgraph.graphs.parameters import module_generators
from packgraph.graphs.program import Program, open_objects
from packgraph.graphs.replay import ReplayHandle, Variant
from packgraph.graphs.slots import Calls, SlotLease, Slots
from packgraph.graphs.trust import TrustingReader
from packgraph.graphs.wrapper import CONTROL, HOOKS_OF_ALL, Wrapper, as_in_training
from packgraph.packing.capacity import Capacity, read_capacities
from packgraph.torch_internals import ddp_module

P = ParamSpec("P")
Result = TypeVar("Result", covariant=True)
Module = TypeVar("Module", bound=torch.nn.Module)
Wrapped = TypeVar("Wrapped", covariant=True, default=torch.nn.Module)


def graph(
    module: Module,
    capacities: Capacity | Iterable[Capacity] | None = None,
    backend: str = "auto",
    warmup: int = 2,
    slots: int | None = None,
    strict: bool = False,
    scope: Iterable[str] | None = None,
    granularity: str = "chunk",
    compile: bool | str | Mapping[str, Any] = False,
    compare_every: int = 0,
    trust: bool = False,
) -> "GraphedModule[Module]":
    """Wraps a module so that its training calls replay captured graphs.

    A call is captured once its key (shapes, dtypes, constants) has been seen `warmup` times; what
    cannot be captured, or is not known to equal eager execution bit by bit, runs eagerly, is
    counted in `stats.fallbacks` and warned about once.

    Args:
        module: Any `torch.nn.Module`; one with stages (see `packgraph.Stage`) can be captured in
            part.
        capacities: The capacity or capacities that graphs are captured for. None captures every
            shape that comes.
        backend: `cuda`, `recorder` (CPU) or `auto`.
        warmup: Number of eager training calls before the first capture.
        slots: Number of microbatches that may be in flight (forward done, backward not). None
            follows what the loop does.
        strict: Raise instead of falling back to eager execution.
        scope: Names of the stages to capture. None captures every stage.
        granularity: Where graphs are cut: at every `layer`, or only where a `chunk` of captured
            stages ends.
        compile: Whether captured stages go through torch.compile first, one piece of code for each
            kind of layer and bucket; calls of captured shapes that run eagerly run the same code. A
            mapping holds options of Inductor, a string names another compiler.
        compare_every: The first replay of every key is compared bit by bit with a call of the
            module itself, gradients included; N > 0 repeats that after every N replays. What
            differs is an error that names it, and such calls run eagerly from then on. All that a
            comparison does is undone. Ranks that capture together compare first replays only.
        trust: The module is static, says its user: PyTorch's tracer need not be able to read it.
            Before a call only its submodules, parameters, buffers and training flags are looked
            at, beside the arguments; first replays are compared. What else forward reads stays as
            it was at capture, and what it does beside computing (counters, prints) is not done by
            replays. `stats.trusted` tells.

    Returns:
        The module with graphs.

    Raises:
        TypeError: If `module` is no module.
        ValueError: If the scope, backend, compiler or a count is illegal, with all reasons.
        CaptureError: If `strict` and the module cannot be captured at all
            (DistributedDataParallel, fully sharded parameters, module hooks).

    Examples:
        >>> capacity = packgraph.Capacity(tokens=64, documents=8)
        >>> graphed = packgraph.graph(torch.nn.Linear(8, 8), warmup=1)
        >>> for _ in range(3):
        ...     graphed(torch.randn(4, 8)).square().sum().backward()
        >>> graphed.stats.replayed
        2
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"packgraph.graph wraps a torch.nn.Module, not {described(module)}")
    if trust and compile:
        raise ValueError(
            "trust=True is for modules that PyTorch's tracer cannot read, and compile=True "
            "reads them: leave out one of the two"
        )
    if warmup < 0 or compare_every < 0 or (slots is not None and slots < 1):
        raise ValueError(
            "warmup and compare_every must be >= 0 and slots >= 1 (or None), not "
            f"warmup={warmup}, compare_every={compare_every}, slots={slots}"
        )
    options = warmup, slots, strict, scope, granularity, compile, compare_every, trust
    return GraphedModule(module, Control(module, capacities, backend, *options))


def control(graphed: torch.nn.Module) -> "Control":
    """The control of a graphed module, whatever names the module itself has.

    Args:
        graphed: Returned by `packgraph.graph`.

    Returns:
        The object with `stats`, `module`, `build`, `frozen`, `release`, `restore` and `close`.

    Raises:
        TypeError: If `graphed` was not returned by `packgraph.graph`.

    Examples:
        >>> graphed = packgraph.graph(torch.nn.Linear(8, 8))
        >>> packgraph.control(graphed).stats.replayed
        0
    """
    if not isinstance(graphed, GraphedModule):
        raise TypeError(
            "packgraph.control wants the module that packgraph.graph returned, not "
            f"an object of type {type(graphed).__name__}"
        )
    return cast(Control, vars(graphed)[CONTROL])


class _HasForward(Protocol[P, Result]):
    """A module, as far as its calls go."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> Result: ...


class _OwnNames(type):
    """Lists names of the class alone, as `enum` does: `help` leaves out the hundred methods of
    `nn.Module`, which are the wrapped module's."""

    def __dir__(cls) -> list[str]:
        return ["__call__", *(name for name in vars(cls) if not name.startswith("_"))]


class GraphedModule(Wrapper, Generic[Wrapped], metaclass=_OwnNames):
    """Returned by `packgraph.graph`: behaves as the module it wraps; training calls replay graphs.

    Attributes and methods are those of the wrapped module; setting and deleting always reaches it.
    Names that the module does not have are those of its control: `graphed.stats`,
    `graphed.close()`. `forward` is the module's own: replacing it takes effect at the next call,
    calling it runs the module without graphs.

    To type checkers it is generic in the module: a call takes and returns what the module's
    `forward` does, `graphed.module` has the module's type, and its other attributes are `Any`.

    Attributes:
        stats: Counts of what was captured, replayed and run eagerly.
        module: The wrapped module.

    Examples:
        >>> graphed = packgraph.graph(torch.nn.Linear(8, 8))
        >>> isinstance(graphed, packgraph.GraphedModule), graphed.in_features
        (True, 8)
    """

    stats: Stats
    module: Wrapped

    if TYPE_CHECKING:

        def __call__(
            self: "GraphedModule[_HasForward[P, Result]]", *args: P.args, **kwargs: P.kwargs
        ) -> Result: ...


class Control:
    """Control of a graphed module, returned by `packgraph.control`: counts, captures ahead, memory.

    Attributes:
        module: The wrapped module.
        stats: Counts of what was captured, replayed and run eagerly.
        capacities: The declared capacities, empty if every shape is captured.
        device: Device of the module.
        backend: Name of the backend: `cuda` or `recorder`.
        compiles: True if captured stages are compiled.
        slots: Slots of its microbatches, for a schedule that owns them.
        capturer: What was captured, for whoever captures with it.

    Examples:
        >>> own = packgraph.control(packgraph.graph(torch.nn.Linear(8, 8)))
        >>> own.build([(torch.ones(4, 8),), (torch.ones(2, 8),)])  # both shapes, before a loop
        >>> own.backend, own.stats.captured, own.strict
        ('recorder', 2, False)
        >>> own.close()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        capacities: Capacity | Iterable[Capacity] | None,
        backend: str,
        warmup: int,
        slots: int | None,
        strict: bool,
        scope: Iterable[str] | None,
        granularity: str,
        compile: bool | str | Mapping[str, Any],
        compare_every: int,
        trust: bool,
    ) -> None:
        """Takes the arguments of `graph`."""
        self.module = module
        self.capacities = () if capacities is None else read_capacities(capacities)
        self._notices = Notices(type(module).__name__, strict, warmup)
        tensor = next(iter([*module.parameters(), *module.buffers()]), None)
        self.device = tensor.device if tensor is not None else torch.device("cpu")
        # The backend itself is for others that capture on the same device.
        self.capture_backend = choose_backend(backend, self.device, module_generators(module))
        self.backend = self.capture_backend.name
        self.slots = Slots(self.capture_backend, self.device, slots)
        # Not by `self`, which only the garbage collector would free then.
        self.stats = Stats(
            trusted=trust,
            lines=self._notices.lines,
            _notice=self._notices.fell_back,
            _pool_bytes=self.slots.nbytes,
        )
        reader = TrustingReader(module) if trust else None
        program = Program(module, scope, granularity, choose_compiler(compile, self.stats), reader)
        self.compiles = program.compiles
        self._warm_calls_left = {True: warmup, False: warmup}  # with gradients, and without
        self._output_gradients = OutputGradients(
            partial(_count, self._notices, self.stats.fallbacks)
        )
        self._lock = threading.RLock()  # of what is noted here; not held while the module runs
        self._calls = Calls(self.device, _weakly(self.slots.in_flight_elsewhere))
        self.capturer = Capturer(
            program,
            self.capture_backend,
            self.slots,
            self._calls,
            self._output_gradients,
            self.stats,
            self._notices,
            compare_every,
        )
        self.capturer.cache.join(consensus_of(module))
        self._closed = False
        self._released: HostWeights | None = None
        # Keys that have held in this block, in which the module does not change; None = no block.
        self._frozen: set[Any] | None = None
        self._forward_of_class = getattr(type(module), "forward", None)
        weakref.finalize(self, self._notices.end)
        self._refusal: Unsupported | None = None
        self._ask_for_refusal()

    @property
    def strict(self) -> bool:
        """True if a call that would run eagerly, though nobody asked for that, raises
        CaptureError."""
        return self._notices.strict

    @strict.setter
    def strict(self, strict: bool) -> None:
        self._notices.strict = strict

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: by replay where possible, eagerly otherwise."""
        if is_traced():  # whatever follows is no part of what is traced
            if not fallback.READING:
                self.stats.fell_back(fallback.TRACED)
            return self.module(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            return self._call_for_inference(args, kwargs)
        with self._calls:
            handle = self._acquire(args, kwargs)
            if not isinstance(handle, str):
                return handle.replay(args, kwargs)
        return self.fall_back(handle, args, kwargs)

    def _call_for_inference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call in inference mode, by graphs that were captured with gradients off: they need
        tensors with versions. Eager code, which may ask for its mode, runs in inference mode."""
        self._refuse_released()
        with self._lock:
            self._turn()
            whole = all(run.captured for run in self.capturer.program.runs)
        if torch.is_grad_enabled() or not whole:
            return self.fall_back(fallback.INFERENCE, args, kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        with torch.inference_mode(False), torch.no_grad(), self._calls:
            copies = {id(leaf): leaf.clone() for leaf in given if leaf.is_inference()}
            own = tree_map(lambda leaf: copies.get(id(leaf), leaf), (args, kwargs))
            handle = self._acquire(*own)
            if not isinstance(handle, str):
                before = {id(copies[id(leaf)]): leaf for leaf in given if id(leaf) in copies}
                result = handle.replay(*own)
                return tree_map(lambda leaf: before.get(id(leaf), leaf), result)
        return self.fall_back(handle, args, kwargs)

    def acquire(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReplayHandle | str:
        """A slot with graphs for a call with these arguments, or the reason why the call must run
        eagerly.

        Of tensors only the metadata is looked at, unless a capture is due. The handle counts as a
        replay.
        """
        with self._calls:
            return self._acquire(args, kwargs)

    def _acquire(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReplayHandle | str:
        """Does the same as `acquire`, by a thread that is counted among the calls."""
        joint = self.capturer.cache.joint
        joint.calls += 1
        if self._calls.shared and not self.slots.launches.shared:
            with self.slots.launches as launches:
                launches.shared = True
        if self._released is not None:
            self._refuse_released()
        found: ReplayHandle | Signature | str | None = fallback.bypass_reason()
        try:
            found = found or (fallback.CLOSED if self._closed else reason_around())
            if found is None:
                with self._lock:
                    found = self._decide(args, kwargs)
            if isinstance(found, Signature):
                with self._calls.capture() as free, self._lock:
                    found = self._capture(found, args, kwargs) if free else fallback.BUSY
        except CaptureError as error:
            joint.confirm(error)
            raise
        assert found is not None and not isinstance(found, Signature), "who may capture does"
        if isinstance(found, str) and joint.owed is not None:
            joint.confirm(_error(found))
        return found

    def _decide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ReplayHandle | Signature | str:
        """A slot with graphs; the reason to run eagerly; or the signature of a call to capture."""
        capturer, frozen = self.capturer, self._turn()
        cache, key = capturer.cache, call_key(args, kwargs, self.device, capturer.training)
        seen, holds = capturer.dry_runs.get(key), False
        if seen is not None and frozen is not None and key in frozen:
            holds = seen.guards.take(args, kwargs)
        elif seen is not None:
            holds = seen.guards.holds(args, kwargs)
            if holds and frozen is not None:
                frozen.add(key)
        around = ddp_module() is not None or any(HOOKS_OF_ALL)
        if not holds or around or self._refusal is not None:
            refused = self._ask_for_refusal()
            if refused is not None:
                return refused
        if capturer.program.staged and self._is_patched():
            return fallback.PATCHED
        known = self._output_gradients.shared
        if known.twice or known.seen_inside:
            return fallback.TWICE if known.twice else fallback.SEEN_INSIDE
        undefined = undeclared(args, kwargs, self.capacities) if self.capacities else None
        if undefined is not None:
            return undefined
        grads = torch.is_grad_enabled()
        if self._warm_calls_left[True] > 0 and self._warm_calls_left[grads] > 0:
            self._warm_calls_left[grads] -= 1
            return fallback.WARM_UP
        if key is None:
            return fallback.NO_KEY
        if holds and not cache.failed and not cache.waiting:
            handle = self._ready(key)
            if handle is not None:
                return handle
        # Not a call like the one before: everything is looked at.
        if capturer.has_failed(key):
            return fallback.CAPTURE_FAILED
        call = Signature(key, call_size(args, kwargs))
        reason = capturer.check_state(key, self._in_words(call, args), args, kwargs)
        if reason is not None:
            return reason
        if cache.must_wait(key):
            return fallback.NO_MEMORY
        if key not in capturer.dry_runs:
            if len(capturer.dry_runs) >= MAX_KEYS:
                return fallback.TOO_MANY_KEYS
            self._notices.new_key(self.module.forward, args, kwargs, self.device)
        return self._ready(key) or (call if self.slots.has_free() else fallback.NO_SLOT)

    def _turn(self) -> set[Any] | None:
        """Take up the mode that the module is in now. Nothing is known to be frozen in another
        one; returns what is in this."""
        if self.module.training is not self.capturer.training:
            self.capturer.training, self._frozen = self.module.training, None
        return self._frozen

    def _ready(self, key: Any) -> ReplayHandle | None:
        """A free slot that has graphs of `key`, for a call that replays them; None if there is
        none."""
        ready = self.slots.acquire_captured(key)
        if ready is None:
            return None
        lease, variant = ready
        if variant.is_current:
            return self._handle(lease, variant)
        lease.release()
        return None

    def _handle(self, lease: SlotLease, variant: Variant) -> ReplayHandle:
        self.stats.replayed += 1
        variant.replays_left -= 1
        self._notices.replays = True
        capturer = self.capturer
        return ReplayHandle(
            capturer.program,
            variant,
            lease,
            capturer.lends,
            self.stats,
            self._calls,
            self._frozen,
        )

    def _capture(
        self, call: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ReplayHandle | str:
        """A slot with graphs that are captured now, unless another thread has done that; or the
        reason to run eagerly."""
        handle = self._ready(call.key)
        if handle is not None:
            return handle
        capturer, what = self.capturer, self._in_words(call, args)
        found, reason = None if what is None else capturer.join_others(what), None
        if found == EAGER:
            return fallback.APART
        if found == START_OVER:
            self._frozen = None if self._frozen is None else set()
            reason = capturer.check_state()
        lease = None if reason is not None else self.slots.acquire(call.key)
        if lease is None:
            return reason or fallback.NO_SLOT
        with contextlib.ExitStack() as unless_captured:
            unless_captured.callback(lease.release)
            if not capturer.confirm():
                return fallback.APART
            try:
                variant = capturer.captured(call, lease.slot, args, kwargs, what)
            except CaptureError as error:
                # Gradients are looked at once more.
                self._frozen = None if self._frozen is None else set()
                return self._give_up(call, error)
            unless_captured.pop_all()
        return self._handle(lease, variant)

    def _in_words(self, call: Signature, args: tuple[Any, ...]) -> str | None:
        """A call by which ranks agree about its capture; None where no others make it."""
        if self.capturer.cache.joint.is_alone:
            return None
        name, (grads, nbytes) = call_name(self.module, args), call.size
        mode = "training" if self.capturer.training else "evaluation"
        return f"{name} in {mode} mode, gradients {'on' if grads else 'off'}, {nbytes} bytes"

    def _give_up(self, call: Signature, error: CaptureError) -> str:
        """The reason to run a call eagerly whose capture has failed."""
        reason, is_news = self.capturer.cache.give_up(call.key, error)
        if reason == fallback.NO_MEMORY:
            self._notices.complain(
                error, reason, "running eagerly for now, because a capture found no memory"
            )
        elif is_news or self.strict:
            self._notices.complain(error)
        return reason

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Promises that in this block nothing about the module changes but the values of its
        tensors, so that calls are checked less.

        What graphs of a key have baked is compared once, at its first call in the block, and nobody
        may replace `.grad` of its parameters in between, as another graphed module with the same
        parameters would.

        Examples:
            >>> graphed = packgraph.graph(torch.nn.Linear(8, 8))
            >>> with packgraph.control(graphed).frozen():
            ...     for _ in range(4):  # microbatches of a step
            ...         graphed(torch.ones(4, 8)).sum().backward()
        """
        self._turn()
        if self._refusal is not None:
            self._ask_for_refusal()
        if self.capturer.check_state() is None:
            self._frozen = set()
        try:
            yield
        finally:
            self._frozen = None

    @property
    def failures(self) -> int:
        """Number of keys that could not be captured."""
        return len(self.capturer.cache.failed)

    def build(
        self,
        samples: Sequence[tuple[Any, ...]],
        slots: int | None = None,
        training: bool = True,
        watch: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    ) -> None:
        """Captures calls before they are needed, the largest first.

        Changes no training state and trains on no value. A capture that fails is treated as in a
        call: it warns, or is an error in strict mode.

        Args:
            samples: Arguments of calls, one tuple for each shape.
            slots: Number of slots to capture in. None takes those of `graph(slots=...)`, or one.
            training: Capture what training will call: gradients are on, and a module in evaluation
                mode is switched for the time. False captures forwards alone, of a module that is in
                evaluation mode.
            watch: Iterates over the captures, which it gets as a list, and may show how far they
                are.

        Raises:
            ValueError: If an argument cannot be part of a key.
        """
        self._refuse_released()
        calls = []
        for args in samples:
            if (call := self._signature(args, training, training)) is None:
                raise ValueError(
                    "a sample to build graphs for has an argument that cannot be part of a key: "
                    "pass "
                    f"tensors on {self.device}, packed batches and constants"
                )
            calls.append((call, args))
        calls.sort(key=lambda pair: pair[0].size, reverse=True)
        mode = as_in_training(self.module) if training else torch.no_grad()
        with mode, contextlib.ExitStack() as held:
            self._turn()
            reason = self._ask_for_refusal() or reason_around()
            if not self._may_build(reason or (fallback.PATCHED if self._is_patched() else None)):
                return
            leases = self.slots.reserve(slots or self.slots.limit or 1)
            for lease in leases:
                held.callback(lease.release)
            busy = _error(fallback.BUSY)
            for lease, (call, args) in watch(list(itertools.product(leases, calls))):
                if call.key in self.capturer.cache.failed:
                    continue
                try:
                    what = call_name(self.module, args)
                    with self._calls.capture() as free:
                        refused = None if free else busy
                        self.capturer.captured(call, lease.slot, args, {}, what, refused)
                except CaptureError as error:
                    self._notices.complain(error)

    def _may_build(self, reason: str | None) -> bool:
        """Tells whether all ranks that build together can. reason: why this one cannot, or None."""
        cache = self.capturer.cache
        if cache.joint.is_alone:
            return reason is None and self.capturer.check_state() is None
        changed = self.capturer.check_state_with_others()  # all ranks ask
        reason = reason or changed
        error = None if reason is None else _error(reason)
        failed = cache.joint.consensus(type(self.module).__name__, error)
        if failed is not None and error is None:
            self._notices.complain(failed, fallback.APART, "running eagerly for now")
        return failed is None

    def close(self) -> None:
        """Frees every graph and pool. Calls run eagerly afterwards."""
        self._closed, self._frozen = True, None
        self.slots.clear()
        self._notices.end()

    def release(self) -> int:
        """Frees all graphs and pools, and moves the module's weights to host memory, between steps:
        for another program on the same device, such as an inference engine.

        Parameters, buffers and their gradients become pinned tensors of the host; their device
        memory goes back to the driver. Other tensors stay: those of an optimizer, and those that
        modules keep without registering them. A call before `restore` is an error.

        Returns:
            Bytes of weights that left the device.

        Raises:
            RuntimeError: A microbatch is in flight, another thread is inside the module, or the
                weights are released already.
            ValueError: A tensor is distributed, or its memory is not torch's.
        """
        self._refuse_released()
        with self._calls.capture() as free:
            if not free or self.slots.in_flight():
                raise RuntimeError(
                    "release() between steps only: a microbatch waits for its backward, or another "
                    "thread is inside the module"
                )
            self._released, self._frozen = HostWeights(self.module), None
            self.capturer.start_over("weights were released")
        free_memory(self.device)
        return self._released.nbytes

    def restore(self) -> None:
        """Brings the weights back that `release` has moved, with the values that they have on the
        host now. Storages are those of before, so optimizers and tied weights see them; calls are
        captured again.

        Raises:
            RuntimeError: They are there.
            torch.OutOfMemoryError: The device has no memory for them; another try may follow.
        """
        if self._released is None:
            raise RuntimeError("the weights are there: restore() follows release()")
        self._released.put_back()
        self._released = None

    def _refuse_released(self) -> None:
        if self._released is not None:
            raise RuntimeError(
                "the weights were released and lie in host memory: call "
                "packgraph.control(graphed).restore() first"
            )

    def warm_up(self, calls: int) -> None:
        """Runs at least the next `calls` calls with gradients eagerly."""
        self._warm_calls_left[True] = max(self._warm_calls_left[True], calls)

    def forget(self, args: tuple[Any, ...]) -> int:
        """Free the graphs of calls like `args`, in whatever modes, in all slots; how many variants
        there were.

        The device must have ended what it was given. A later call captures again. The memory of a
        pool belongs to all graphs in it, so it is free when the slot's last variant is gone. Raises
        RuntimeError when a slot is in flight.
        """
        calls = [
            self._signature(args, *modes) for modes in itertools.product((True, False), repeat=2)
        ]
        return sum(self.slots.drop(call.key) for call in calls if call is not None)

    def _signature(
        self, args: tuple[Any, ...], training: bool = True, grads: bool = True
    ) -> Signature | None:
        """The signature of a call in these modes, whatever modes there are now."""
        with torch.inference_mode(False), torch.set_grad_enabled(grads):
            return signature(args, {}, self.device, training)

    @contextlib.contextmanager
    def trial(self, args: tuple[Any, ...]) -> Iterator[tuple[CapturedCall, GradientBuffers]]:
        """Around a capture of a call like `args` that is thrown away: no other thread is inside the
        module, and it is compiled. Gives what `Capturer.prepared` does.

        Raises CaptureError where a capture could not begin.
        """
        self._refuse_released()
        refused, call = unsupported_error(self.module), self._signature(args)
        if refused is not None:
            raise refused
        with as_in_training(self.module), self._calls.capture() as free:
            self._turn()
            reason = self.capturer.check_state() if free else fallback.BUSY
            if call is None or reason is not None:
                raise _error(reason or fallback.NO_KEY)
            yield self.capturer.prepared(call, args)

    def refused_with_others(self) -> CaptureError | None:
        """Returns the reason why the module cannot be captured at all as it is, or None, before a
        trial that all ranks make: if it has changed on one of them, all drop their graphs."""
        reason = None
        if not self.capturer.cache.joint.is_alone:
            with as_in_training(self.module):
                self._turn()
                reason = self.capturer.check_state_with_others()
        return unsupported_error(self.module) if reason is None else _error(reason)

    def _is_patched(self) -> bool:
        """Returns whether stages stand for another forward than the one that the module has."""
        return self.capturer.program.staged and (
            "forward" in vars(self.module)
            or getattr(type(self.module), "forward", None) is not self._forward_of_class
        )

    def _ask_for_refusal(self) -> str | None:
        """Finds out why the module cannot be captured at all now, None where it can; what was
        refused before may be fine again."""
        known, self._refusal = self._refusal, find_unsupported(self.module)
        if self._refusal is None:
            return None
        reason, what, remedy = self._refusal
        if self.strict or self._refusal != known:
            self._notices.complain(CaptureError(what, user_line(), remedy), reason)
        return reason

    def fall_back(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call eagerly that `acquire` gave a reason for, counted under `reason`."""
        with self._calls, self._lock:
            self.stats.fell_back(
                reason,
                lambda: detail(
                    reason, self.module.forward, args, kwargs, self.device, self.capacities
                ),
            )
        result = self.run_eagerly(*args, **kwargs)
        self.capturer.note_failed()
        if reason == fallback.WARM_UP:
            key = call_key(args, kwargs, self.device, self.module.training)
            self._output_gradients.watch(key, open_objects(result))
        return result

    def forward_backward(
        self, *args: Any, before: Callable[[torch.Tensor], None] | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Calls the module and runs the backward of the loss that it returns.

        Gradients are added to `.grad` as by `graphed(*args, **kwargs).backward()`, bit by bit. A
        replay takes less host time: autograd, which visits every parameter, has nothing to do.

        Args:
            *args: Of the call, whose only output is a loss of one element.
            before: Called with the loss between forward and backward; it sees an autograd graph.
            **kwargs: Of the call.

        Returns:
            The loss, detached.

        Raises:
            TypeError: If the module returns something else than a tensor.
            RuntimeError: If the loss has more elements than one, or needs no gradient.
        """
        handle = self.acquire(args, kwargs) if before is None else None
        if isinstance(handle, ReplayHandle) and handle.makes_one_number:
            loss = handle.forward(args, kwargs)
            handle.backward()
            return loss.clone()  # from the slot's memory, which the next call writes to
        if isinstance(handle, ReplayHandle):
            loss = handle.run(args, kwargs)
        else:
            loss = self(*args, **kwargs) if handle is None else self.fall_back(handle, args, kwargs)
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"forward_backward wants a module that returns a loss, not {described(loss)}"
            )
        if before is not None:
            before(loss)
        loss.backward()
        return loss.detach()

    def run_eagerly(self, *args: Any, **kwargs: Any) -> Any:
        """The call without graphs, uncounted: by compiled code where a replay runs that, else by
        the module itself."""
        compiler = self.capturer.program.compiler
        if (compiler is None and not capturing()) or not self._has_code(args, kwargs):
            with self._calls:
                return self.module(*args, **kwargs)
        # Within a whole step this may be the first call, which nothing has compiled ahead and
        # counted.
        counts = compiler.counting() if compiler and capturing() else contextlib.nullcontext()
        with self._calls, counts:
            return self.capturer.program.call(args, kwargs)

    def _has_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether the call's stages are compiled, which they are now if a replay of this
        call is possible at all."""
        if (
            self._closed
            or self._refusal is not None
            or self._is_patched()
            or torch.is_inference_mode_enabled()
            or undeclared(args, kwargs, self.capacities) is not None
        ):
            return False
        cache = self.capturer.cache
        with self._lock:
            if not capturing():
                self._turn()
            call = signature(args, kwargs, self.device, self.module.training)
            if call is None or call.key in cache.failed:
                return False
            # of a whole step: the module has aliases for parameters now, and nothing can be tried
            # out
            if capturing():
                return True
            if self.capturer.check_state(call.key, None, args, kwargs) is not None:
                return False
            if call.key in self.capturer.compiled:
                return True
        with self._calls.capture() as free:
            if not free:
                return False
            try:
                self.capturer.compile(call, args, kwargs)
            except CaptureError as error:
                cache.failed.add(call.key)
                self._notices.complain(error)
                return False
            return True


def _error(reason: str) -> CaptureError:
    """A reason to run eagerly as an error at the user's line."""
    return CaptureError(reason, user_line(), fallback.reason_of(reason).remedy)


def _count(notices: Notices, fallbacks: Counter[str], reason: str) -> None:
    """`Stats.fell_back` of a module, without the rest of its stats, which hold the graphs'
    memory."""
    notices.fell_back(reason)
    fallbacks[reason] += 1


def _weakly(method: Callable[[], bool]) -> Callable[[], bool]:
    """A method of an object that this does not keep alive; False when it is gone."""
    held = weakref.WeakMethod(method)
    return lambda: (found := held()) is not None and found()
