"""`packgraph.graph`: a module that replays captured graphs, and falls back to eager where it must.

A call goes one way: is there a reason to run eagerly? which key is it? is a slot free, with this
key captured? capture it if not; copy in, replay, clone out. Every branch that ends in eager
execution is counted under its reason.
"""

import contextlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from packgraph.graphs import fallback
from packgraph.graphs.arguments import detail
from packgraph.graphs.backend import Backend
from packgraph.graphs.build import Variant
from packgraph.graphs.capture import capture_variant, compile_ahead, dry_run, dry_run_again
from packgraph.graphs.choose import choose_backend, choose_compiler
from packgraph.graphs.consensus import Vote, alone, call_name
from packgraph.graphs.dry_run import DryRun
from packgraph.graphs.errors import CaptureError, described, forget_frames, user_line, warn
from packgraph.graphs.exclusive import Calls
from packgraph.graphs.fallback import Stats
from packgraph.graphs.frozen_module import FrozenModule
from packgraph.graphs.gradients import GradientBuffers
from packgraph.graphs.host_sync import capturing
from packgraph.graphs.memory.allocator import free_memory
from packgraph.graphs.module_state import Change, ModuleState
from packgraph.graphs.notices import Notices
from packgraph.graphs.output_gradients import KeyGradients, OutputGradients
from packgraph.graphs.output_objects import open_objects
from packgraph.graphs.parameters import are_leaves, module_generators
from packgraph.graphs.program import Program
from packgraph.graphs.replay_handle import ReplayHandle
from packgraph.graphs.retries import Retries, is_out_of_memory
from packgraph.graphs.shared_gradients import let_go
from packgraph.graphs.signature import Signature, signature, undeclared
from packgraph.graphs.slots import Slot, SlotLease, Slots
from packgraph.graphs.surroundings import is_traced, reason_around
from packgraph.graphs.unsupported import Unsupported, find_unsupported, inside_data_parallel
from packgraph.graphs.wrapper import Wrapper, as_in_training, control_of
from packgraph.packing.capacity import Capacity, read_capacities

MAX_KEYS = 64


def graph(
    module: torch.nn.Module,
    capacities: Capacity | Iterable[Capacity] | None = None,
    backend: str = "auto",
    warmup: int = 2,
    slots: int | None = None,
    strict: bool = False,
    scope: Iterable[str] | None = None,
    granularity: str = "chunk",
    compile: bool | str | Mapping[str, Any] = False,
) -> "GraphedModule":
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

    Returns:
        The module with graphs.

    Raises:
        TypeError: If `module` is no module.
        ValueError: If the scope, backend, compiler or a count is illegal, with all reasons.
        CaptureError: If `strict` and the module cannot be captured at all
            (DistributedDataParallel, fully sharded parameters, module hooks).

    Example:
        >>> capacity = packgraph.Capacity(tokens=64, documents=8)
        >>> graphed = packgraph.graph(torch.nn.Linear(8, 8), warmup=1)
        >>> for _ in range(3):
        ...     graphed(torch.randn(4, 8)).square().sum().backward()
        >>> graphed.stats.replayed
        2
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"packgraph.graph wraps a torch.nn.Module, not {described(module)}")
    return GraphedModule(
        module,
        Control(module, capacities, backend, warmup, slots, strict, scope, granularity, compile),
    )


def control(graphed: torch.nn.Module) -> "Control":
    """The control of a graphed module, whatever names the module itself has.

    Args:
        graphed: Returned by `packgraph.graph`.

    Returns:
        The object with `stats`, `build`, `steady`, `reset` and `close`.

    Raises:
        TypeError: If `graphed` was not returned by `packgraph.graph`.

    Example:
        >>> graphed = packgraph.graph(torch.nn.Linear(8, 8))
        >>> packgraph.control(graphed).stats.replayed
        0
    """
    if not isinstance(graphed, GraphedModule):
        raise TypeError(
            "packgraph.control wants the module that packgraph.graph returned, not "
            f"an object of type {type(graphed).__name__}"
        )
    found: Control = control_of(graphed)
    return found


class GraphedModule(Wrapper):
    """Returned by `packgraph.graph`: behaves as the module it wraps; training calls replay graphs.

    Attributes and methods are those of the wrapped module; setting and deleting always reaches it.
    Names that the module does not have are those of its control: `graphed.stats`,
    `graphed.close()`. `forward` is the module's own: replacing it takes effect at the next call,
    calling it runs the module without graphs.

    Example:
        >>> graphed = packgraph.graph(torch.nn.Linear(8, 8))
        >>> isinstance(graphed, packgraph.GraphedModule), graphed.in_features
        (True, 8)
    """


class Control:
    """What stands behind a graphed module: its slots, graphs and counts. Calling it is calling the
    graphed module.

    stats: a `Stats`. close(): frees every graph and pool. lends: for a pipeline that owns its
    slots; outputs and the gradients of inputs are then handed out as static memory, valid until the
    slot is released, instead of clones. vote: asked after every capture of `build`, where other
    ranks must make the same ones; a failure of one is one of all.
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
        compile: bool | str | Mapping[str, Any] = False,
    ) -> None:
        self.module = module
        if warmup < 0 or (slots is not None and slots < 1):
            raise ValueError(
                f"warmup must be >= 0 and slots >= 1 (or None), not warmup={warmup}, slots={slots}"
            )
        self.capacities = () if capacities is None else read_capacities(capacities)
        self._notices = Notices(type(module).__name__, strict, warmup)
        self.stats = Stats(_notice=self._notices.fell_back)
        self._program = Program(module, scope, granularity, choose_compiler(compile, self.stats))
        tensor = next(iter([*module.parameters(), *module.buffers()]), None)
        self.device = tensor.device if tensor is not None else torch.device("cpu")
        self._backend: Backend = choose_backend(backend, self.device, module_generators(module))
        self._slots = Slots(self._backend, self.device, slots)
        self._buffers_of_gradients = GradientBuffers(self._slots.launches)
        self._fingerprint: ModuleState | None = None
        self._moved: Change | None = None  # by the last capture
        self._moves = set[tuple[Hashable, str]]()  # by captures, of each key
        self._warm_calls_left = warmup
        self._output_gradients = OutputGradients(_counting(self.stats.fallbacks, self._notices))
        self._lock = (
            threading.RLock()
        )  # of what is written down here; nobody runs the module with it
        self._calls = Calls(self.device, _weakly(self._slots.in_flight_elsewhere))
        self._rehearsed: dict[Hashable, DryRun] = {}
        self._failed: set[Hashable] = set()
        self._coded: set[Hashable] = set()
        self._closed = False
        self._steady: FrozenModule | None = None
        self.lends = False
        self.vote: Vote = alone
        self._forward_of_class = getattr(type(module), "forward", None)
        self._retries = Retries()
        weakref.finalize(self, self._notices.end)
        self.stats.measure_pools(
            self._slots.nbytes
        )  # not by `self`: only the garbage collector would free it then
        self._refusal: Unsupported | None = None
        self._ask_for_refusal()

    @property
    def strict(self) -> bool:
        """Whether a call that would run eagerly, though nobody asked for that, raises
        CaptureError."""
        return self._notices.strict

    @strict.setter
    def strict(self, strict: bool) -> None:
        self._notices.strict = strict

    @property
    def capture_backend(self) -> Backend:
        """The backend itself, for others that capture on the same device."""
        return self._backend

    @property
    def compiles(self) -> bool:
        """Whether captured stages are compiled."""
        return self._program.compiler is not None

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return self._backend.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: by replay where possible, eagerly otherwise."""
        if is_traced():  # whatever follows is no part of what is traced
            self.stats.fell_back(fallback.TRACED)
            return self.module(*args, **kwargs)
        claim = self.claim(args, kwargs)
        if isinstance(claim, str):
            return self.fall_back(claim, args, kwargs)
        return claim.run(args, kwargs)

    def claim(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReplayHandle | str:
        """A slot with graphs for a call with these arguments, or the reason why the call must run
        eagerly.

        Of tensors only the metadata is looked at, unless a capture is due. The claim counts as a
        replay.
        """
        with self._calls:
            if self._calls.shared and not self._slots.launches.shared:
                self._slots.launches.share()
            known = self._steady.recall(args, kwargs) if self._steady is not None else None
            reason = self._reason_for_eager(args, kwargs) if known is None else None
            if reason is not None:
                return reason
            with self._lock:
                call = self._look(args, kwargs) if known is None else known
                found = call if isinstance(call, str) else self._take(call, args, kwargs)
            if isinstance(call, str):
                return call
            if found is None:
                with self._calls.capture() as free, self._lock:
                    found = self._take(call, args, kwargs) if free else fallback.BUSY
            assert found is not None, "who may capture does"
            if known is None and self._steady is not None and isinstance(found, ReplayHandle):
                self._steady.learn(args, kwargs, call)
            return found

    def alone(self) -> contextlib.AbstractContextManager[bool]:
        """Within the block no other thread runs the module, for captures; gives False if they do
        not leave in time."""
        return self._calls.capture()

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature | str:
        call = signature(args, kwargs, self.device)
        if call is None:
            return fallback.NO_KEY
        if call.key in self._failed and (
            self._retries.is_hopeless(call.key) or not self._may_capture_now()
        ):
            return fallback.CAPTURE_FAILED
        reason = self._check_fingerprint()
        if reason is not None:
            return reason
        if self._retries.must_wait(call.key):
            return fallback.NO_MEMORY
        if call.key not in self._rehearsed:
            if len(self._rehearsed) >= MAX_KEYS:
                return fallback.TOO_MANY_KEYS
            self._notices.new_key(self.module.forward, args, kwargs, self.device)
        return call

    def _take(
        self, call: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ReplayHandle | str | None:
        """None: a capture is due, which this thread may not make now."""
        ticket = self._slots.acquire(call.key)
        if ticket is None:
            return fallback.NO_SLOT
        if not self._is_captured(call, ticket.slot) and not self._calls.may_capture():
            ticket.release()
            return None
        with contextlib.ExitStack() as on_error:
            on_error.callback(ticket.release)
            try:
                variant = self._variant(call, ticket.slot, args, kwargs)
            except CaptureError as error:
                # What it remembers says that this call is fine.
                self._steady = self._steady and FrozenModule(self.module, self.device.type)
                return self._give_up(call, error)
            on_error.pop_all()
        self.stats.replayed += 1
        self._notices.replays = True
        return ReplayHandle(
            self._program, variant, ticket, self.lends, self.stats, self._calls, self._steady
        )

    def _give_up(self, call: Signature, error: CaptureError) -> str:
        """The reason to run a call eagerly whose capture has failed: for good, or until there is
        more memory. Other ranks would not try again with this one, so where captures are voted on
        it is for good."""
        if (
            self.vote is alone
            and is_out_of_memory(error.__cause__)
            and self._retries.wait(call.key)
        ):
            self._complain(
                error,
                fallback.NO_MEMORY,
                "running eagerly for now, because a capture found no memory",
            )
            return fallback.NO_MEMORY
        self._failed.add(call.key)
        if self._retries.is_news(call.key, error) or self.strict:
            self._complain(error)
        return fallback.CAPTURE_FAILED

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """For a schedule: promise that in this block nothing about the module changes but the
        values of its tensors.

        What graphs have baked is then compared once, at the start, instead of at every call, and
        nobody replaces `.grad` of its parameters in between, as another graphed module with the
        same parameters would.
        """
        if self._fingerprint is not None and self._check_fingerprint() is None:
            self._steady = FrozenModule(self.module, self.device.type)
        try:
            yield
        finally:
            self._steady = None

    def has_free_slot(self) -> bool:
        """Whether a claim would find a slot now."""
        return self._slots.has_free()

    def hold_slot(self) -> SlotLease:
        """A slot for a microbatch that runs eagerly under a schedule, so that slots are counted as
        in a replay.

        Raises RuntimeError when all are in flight.
        """
        return self._slots.reserve(1)[0]

    @property
    def has_one_slot(self) -> bool:
        """Whether there is never more than one slot."""
        return self._slots.limit == 1

    @property
    def failures(self) -> int:
        """How many keys could not be captured."""
        return len(self._failed)

    def build(self, samples: Sequence[tuple[Any, ...]], slots: int | None = None) -> None:
        """Capture a declared bank before it is needed: every sample's key in `slots` slots, largest
        first.

        samples: one tuple of call arguments per key; their values are not trained on. slots: how
        many, default the module's `slots`, or one. Changes no training state. Failures are treated
        as in a call. Captures what training will call: a module in evaluation mode is switched for
        the time, gradients are on.
        """
        calls = []
        for args in samples:
            call = signature(args, {}, self.device)
            if call is None:
                raise ValueError(
                    "a sample to build graphs for has an argument that cannot be part of a key: "
                    "pass "
                    f"tensors on {self.device}, packed batches and constants"
                )
            calls.append((call, args))
        calls.sort(key=lambda pair: pair[0].nbytes, reverse=True)
        with as_in_training(self.module), contextlib.ExitStack() as held:
            self._ask_for_refusal()
            if (
                self._refusal is not None
                or reason_around()
                or self._is_patched()
                or self._check_fingerprint()
            ):
                return
            tickets = self._slots.reserve(slots or self._slots.limit or 1)
            for ticket in tickets:
                held.callback(ticket.release)
            for ticket in tickets:
                for call, args in calls:
                    if call.key not in self._failed:
                        self._try_variant(call, ticket.slot, args)

    def close(self) -> None:
        """Free every graph and pool. Calls run eagerly afterwards."""
        self._closed, self._steady = True, None
        self._slots.clear()
        self._notices.end()

    def warm_up(self, calls: int) -> None:
        """At least the next `calls` calls run eagerly."""
        self._warm_calls_left = max(self._warm_calls_left, calls)

    def forget(self, args: tuple[Any, ...]) -> int:
        """Free the graphs of calls like `args` in all slots; how many variants there were.

        The device must have ended what it was given. A later call captures again. The memory of a
        pool belongs to all graphs in it, so it is free when the slot's last variant is gone. Raises
        RuntimeError when a slot is in flight.
        """
        call = signature(args, {}, self.device)
        return 0 if call is None else self._slots.drop(call.key)

    def forget_all(self) -> int:
        """As `forget`, for all calls. Unlike after `close`, what is compiled stays in use for eager
        calls."""
        self._rehearsed.clear()  # the tensors that graphs use, kept for them
        return self._slots.clear()

    def forget_code(self) -> None:
        """Whatever is compiled is tried out once more before the next capture: on another rank that
        has failed, and ranks that exchange data in it must all begin at the same point again."""
        self._coded.clear()

    @contextlib.contextmanager
    def trial(self, args: tuple[Any, ...]) -> Iterator[tuple[Program, KeyGradients]]:
        """Around a capture of a call like `args` that is thrown away: no other thread is inside the
        module, and it is compiled, as before a capture. Gives what is captured, and what is known
        of gradients of its outputs.

        Raises CaptureError where a capture could not begin.
        """
        refused, call = find_unsupported(self.module), signature(args, {}, self.device)
        if refused is not None:
            raise CaptureError(refused.what, user_line(), refused.remedy)
        if call is None:
            raise CaptureError(
                "an argument cannot be part of a key",
                user_line(),
                f"pass tensors on {self.device}, packed batches and constants",
            )
        with as_in_training(self.module), self.alone() as free:
            if not free:
                raise CaptureError(
                    "another thread is inside the module",
                    user_line(),
                    "trace memory before it begins",
                )
            reason = self._check_fingerprint()
            if reason is not None:
                raise CaptureError(
                    reason, user_line(), "graphs add to the gradients of leaf parameters"
                )
            self._compile(call, args, {})  # first by itself, as before a capture
            yield self._program, self._output_gradients.of(call.key)

    def _try_variant(self, call: Signature, slot: Slot, args: tuple[Any, ...]) -> None:
        failed: CaptureError | None = None
        try:
            with self._calls.capture() as free:
                if not free:
                    raise CaptureError(
                        fallback.BUSY,
                        user_line(),
                        "build graphs before other threads call the module",
                    )
                self._variant(call, slot, args, {})
        except CaptureError as error:
            failed = error
        failed = self.vote(call_name(self.module, args), failed)
        if failed is not None:
            self._failed.add(call.key)
            if call.key in slot.variants:  # it is another rank that failed
                slot.variants.pop(call.key).reset()
            try:
                self._complain(failed)
            finally:
                failed = None  # its traceback holds this frame, and what it was about to capture

    def _reason_for_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why this call cannot be a replay, from host facts alone."""
        bypass = fallback.bypass_reason()
        if bypass is not None:
            return bypass
        if self._closed:
            return fallback.CLOSED
        if capturing():
            return fallback.INSIDE
        if not torch.is_grad_enabled():
            return fallback.NO_GRAD
        if not self.module.training:
            return fallback.EVALUATION
        reason = reason_around()
        if reason is not None:
            return reason
        if self._steady is None and (
            self._refusal is not None
            or inside_data_parallel()
            or (self._fingerprint and self._fingerprint.hooked())
        ):
            self._ask_for_refusal()
        if self._refusal is not None:
            return self._refusal.reason
        if self._is_patched():
            return fallback.PATCHED
        if self._output_gradients.twice:
            return fallback.TWICE
        if self._output_gradients.seen_inside:
            return fallback.SEEN_INSIDE
        reason = undeclared(args, kwargs, self.capacities)
        if reason is None and self._warm_calls_left > 0:
            self._warm_calls_left -= 1
            return fallback.WARM_UP
        return reason

    def _is_patched(self) -> bool:
        """Whether the module has stages, and another forward than the one that these stand for."""
        return self._program.staged and (
            "forward" in vars(self.module)
            or getattr(type(self.module), "forward", None) is not self._forward_of_class
        )

    def _ask_for_refusal(self) -> None:
        """Whether the module can be captured at all now; what was refused before may be fine
        again."""
        known, self._refusal = self._refusal, find_unsupported(self.module)
        if self._refusal is not None and (self.strict or self._refusal != known):
            self._complain(
                CaptureError(self._refusal.what, user_line(), self._refusal.remedy),
                self._refusal.reason,
            )

    def fall_back(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call eagerly that could not be claimed, counted under `reason`."""
        with self._calls, self._lock:
            self.stats.fell_back(
                reason,
                lambda: detail(
                    reason, self.module.forward, args, kwargs, self.device, self.capacities
                ),
            )
        result = self.run_eagerly(*args, **kwargs)
        if reason == fallback.WARM_UP:
            call = signature(args, kwargs, self.device)
            self._output_gradients.watch(None if call is None else call.key, open_objects(result))
        return result

    def run_eagerly(self, *args: Any, **kwargs: Any) -> Any:
        """The call without graphs, uncounted: by compiled code where a replay runs that, else by
        the module itself."""
        if self._program.compiler is None or not self._has_code(args, kwargs):
            with self._calls:
                return self.module(*args, **kwargs)
        # Within a whole step this may be the first call, which nothing has compiled ahead and
        # counted.
        with (
            self._calls,
            self._program.compiler.counting() if capturing() else contextlib.nullcontext(),
        ):
            return self._program.call(args, kwargs)

    def _has_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call's stages are compiled, which they are now if a replay of this call is
        possible at all."""
        if (
            self._closed
            or self._refusal is not None
            or self._is_patched()
            or not (torch.is_grad_enabled() and self.module.training)
            or undeclared(args, kwargs, self.capacities) is not None
        ):
            return False
        with self._lock:
            call = signature(args, kwargs, self.device)
            if call is None or call.key in self._failed:
                return False
            # of a whole step: the module has aliases for parameters now, and nothing can be tried
            # out
            if capturing():
                return True
            if self._check_fingerprint() is not None:
                return False
            if call.key in self._coded:
                return True
        with self._calls.capture() as free:
            if not free:
                return False
            try:
                self._compile(call, args, kwargs)
            except CaptureError as error:
                self._failed.add(call.key)
                self._complain(error)
                return False
            return True

    def _compile(self, call: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile what this key needs, unless that was done. Raises CaptureError."""
        if self._program.compiler is not None and call.key not in self._coded:
            compile_ahead(
                self._program, self._backend, self._output_gradients.of(call.key), args, kwargs
            )
            self._coded.add(call.key)

    def _check_fingerprint(self) -> str | None:
        """Drop all graphs when a fact they baked about the module has changed; the call then
        captures again, or runs eagerly for the returned reason."""
        if self._steady is not None:
            return None
        change, before = (
            (self._fingerprint.changed(), self._fingerprint.refused)
            if self._fingerprint
            else (None, None)
        )
        change = change or self._moved
        if self._fingerprint is None or change is not None:
            if not are_leaves(self.module):
                return fallback.NOT_LEAVES
            if change is not None:
                self._start_again(change)
            self._program = self._program.rebuilt()
            self._fingerprint = ModuleState(self.module, self._program.volatile)
            self._moved = None
        refused = self._fingerprint.refused
        if refused is not None and (self.strict or refused != before):
            self._complain(
                CaptureError(refused.what, user_line(), refused.remedy),
                fallback.HIDDEN_STATE,
                "running eagerly, because the module's state cannot be watched",
            )
        return None if refused is None else fallback.HIDDEN_STATE

    def _start_again(self, change: Change) -> None:
        self._refuse_another_device()
        if any(slot.variants for slot in self._slots.all):
            error = CaptureError(
                f"{change} after the graphs were captured", user_line(), change.remedy
            )
            if self.strict:
                raise error
            warn(f"capturing again: {error}")
        if self._may_capture_now():
            self._failed = set(filter(self._retries.is_hopeless, self._failed))
        self.stats.dropped("module changed", self._slots.clear())
        self._buffers_of_gradients = GradientBuffers(self._slots.launches)
        self._output_gradients.forget()
        self._rehearsed.clear()
        self._coded.clear()

    def _may_capture_now(self) -> bool:
        """Whether something about the module has changed that its own forward does not change in
        every call."""
        return (
            self._fingerprint is None
            or self._fingerprint.changed(self._program.assigned) is not None
        )

    def _refuse_another_device(self) -> None:
        tensor = next(iter([*self.module.parameters(), *self.module.buffers()]), None)
        if tensor is not None and tensor.device != self.device:
            raise RuntimeError(
                f"the module was moved from {self.device} to {tensor.device} after packgraph.graph "
                "wrapped it: move it first, then wrap it"
            )

    def _is_captured(self, call: Signature, slot: Slot) -> bool:
        """Whether the slot has graphs for this key, with a backward for all that is known of its
        gradients."""
        variant = slot.variants.get(call.key)
        return (
            variant is not None and variant.version == self._output_gradients.of(call.key).version
        )

    def _variant(
        self, call: Signature, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Variant:
        """The slot's graphs for this key, captured now if it has none. Raises CaptureError."""
        gradients = self._output_gradients.of(call.key)
        if not self._is_captured(call, slot):
            if call.key in slot.variants:
                slot.variants.pop(call.key).reset()
                self.stats.dropped(fallback.NEW_PATTERN, 1)
            started = time.perf_counter()
            if self._retries.is_due(call.key):
                free_memory(self.device)
            self.stats.dropped("a larger variant took the slot", slot.make_room(call.nbytes))
            executes = self._backend.guard_device is None
            if (
                executes and self._slots.launches.shared
            ):  # backwards of others may be adding to `.grad`
                let_go(self._buffers_of_gradients.all(), self._slots.launches)
            with self._slots.launches.during_capture(executes):
                self._compile(call, args, kwargs)
                rehearsal = self._rehearsed[call.key] = self._rehearse(
                    call, gradients, args, kwargs
                )
                changed = self._fingerprint.changed if self._fingerprint is not None else _nothing
                variant = capture_variant(
                    self._program,
                    self._backend,
                    slot,
                    self._buffers_of_gradients,
                    gradients,
                    changed,
                    self._calls,
                    self.lends,
                    args,
                    kwargs,
                    rehearsal,
                )
                rehearsal.calls.shorten()
                self._refuse_repeated_moves(call.key, variant)
            slot.variants[call.key] = variant
            self.stats.dropped("a larger variant took the slot", slot.forget_smaller(call.key))
            self.stats.captured += len(variant.regions)
            self.stats.capture_seconds += time.perf_counter() - started
        return slot.variants[call.key]

    def _refuse_repeated_moves(self, key: Hashable, variant: Variant) -> None:
        """Look at what the capture has changed in Python outside of the module, by running its
        code: a cache that it has filled, say. Graphs hold for the state after it, which is where
        the next call begins, or captures again.

        Raises CaptureError where an earlier capture for this key has changed the same: whoever puts
        it back wants every call to change it.
        """
        state = self._fingerprint
        self._moved = None if state is None else state.changed(self._program.assigned)
        if self._moved is None:
            return
        if (key, self._moved.what) in self._moves:
            variant.reset()
            raise CaptureError(
                f"{self._moved} in forward, where a replay would not change it, and was put back "
                "between calls",
                user_line(),
                "return the value, or set it outside of forward",
            )
        self._moves.add((key, self._moved.what))

    def _rehearse(
        self,
        call: Signature,
        gradients: KeyGradients,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> DryRun:
        earlier = self._rehearsed.get(call.key)
        if earlier is None:
            return dry_run(self._program, self._backend, gradients, args, kwargs)
        return dry_run_again(self._program, self._backend, gradients, args, kwargs, earlier)

    def _complain(
        self,
        error: CaptureError,
        reason: str = fallback.CAPTURE_FAILED,
        so: str = "running eagerly from here on, because a capture failed",
    ) -> None:
        """Raise in strict mode; otherwise warn, and calls run eagerly for `reason`."""
        forget_frames(error)
        if self.strict:
            raise error
        self._notices.is_told(reason, error.remedy)
        warn(f"{so}: {error}")


def _counting(fallbacks: Counter[str], notices: Notices) -> Callable[[str], None]:
    """`Stats.fell_back` of a module, without the rest of its stats, which hold the graphs'
    memory."""

    def fell_back(reason: str) -> None:
        notices.fell_back(reason)
        fallbacks[reason] += 1

    return fell_back


def _weakly(method: Callable[[], bool]) -> Callable[[], bool]:
    """A method of an object that this does not keep alive; False when it is gone."""
    held = weakref.WeakMethod(method)
    return lambda: (found := held()) is not None and found()


def _nothing() -> None:
    """No fact has changed."""
