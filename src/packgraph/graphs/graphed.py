"""`packgraph.graph`: a module that replays captured graphs, and falls back to eager where it must.

A call goes one way: is there a reason to run eagerly? which key is it? is a slot free, with this key captured? capture
it if not; copy in, replay, clone out. Every branch that ends in eager execution is counted under its reason.
"""
import contextlib
import threading
import time
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from packgraph.graphs import fallback, saved_tensors, shared_gradients
from packgraph.graphs.backend import Backend
from packgraph.graphs.build import Variant
from packgraph.graphs.capture import Rehearsal, capture_variant, compile_ahead, rehearse
from packgraph.graphs.choose import choose_backend, choose_compiler
from packgraph.graphs.claim import Claim
from packgraph.graphs.errors import CaptureError, PackgraphWarning, user_line
from packgraph.graphs.exclusive import Calls
from packgraph.graphs.fallback import Stats
from packgraph.graphs.guard import capturing
from packgraph.graphs.module_state import Change, ModuleState
from packgraph.graphs.output_objects import open_objects
from packgraph.graphs.parameters import GradientBuffers, are_leaves, module_generators
from packgraph.graphs.program import Program
from packgraph.graphs.refusals import Refusal, inside_data_parallel, refusal
from packgraph.graphs.signature import Signature, signature, undeclared
from packgraph.graphs.slot import Slot, Slots, Ticket
from packgraph.graphs.steady import Steady
from packgraph.graphs.vote import Vote, alone, call_name
from packgraph.graphs.wrapper import Wrapper, as_in_training
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
    """Wrap `module` so that training calls replay captured graphs.

    module: any nn.Module; a module with stages (see `plan/stages.py`) can be captured in part. capacities: the shapes
    that graphs are captured for, one or several; None captures every shape that comes. backend: `cuda`, `recorder`
    (CPU) or `auto`. warmup: eager training calls before the first capture. slots: microbatches that may be in flight
    (forward done, backward not); None follows what the loop does. strict: raise CaptureError instead of falling
    back to eager. scope: names of the stages to capture (None = all). granularity: `layer` or `chunk`,
    where graphs are cut. compile: whether the stages that are captured go through torch.compile first, one piece of
    code per kind of layer and bucket; calls of captured shapes that run eagerly run the same code. A mapping holds
    options of Inductor, as torch.compile takes them; a string names another compiler (`aot_eager` for tests).

    Raises ValueError for an illegal scope, backend, compiler or count, with all reasons; CaptureError if `strict` and
    the module cannot be captured at all (DistributedDataParallel, fully sharded parameters, module hooks).
    """
    return GraphedModule(module, capacities, backend, warmup, slots, strict, scope, granularity, compile)


class GraphedModule(Wrapper):
    """What `packgraph.graph` returns: behaves as the module it wraps (parameters, state_dict, train and eval).

    stats: a `Stats`. close(): frees every graph and pool. lends: for a pipeline that owns its slots; outputs and the
    gradients of inputs are then handed out as static memory, valid until the slot is released, instead of clones. vote:
    asked after every capture of `build`, where other ranks must make the same ones; a failure of one is one of all.
    """

    def __init__(self, module: torch.nn.Module, capacities: Capacity | Iterable[Capacity] | None, backend: str,
                 warmup: int, slots: int | None, strict: bool, scope: Iterable[str] | None, granularity: str,
                 compile: bool | str | Mapping[str, Any] = False) -> None:
        super().__init__(module)
        if warmup < 0 or (slots is not None and slots < 1):
            raise ValueError(f"warmup must be >= 0 and slots >= 1 (or None), not warmup={warmup}, slots={slots}")
        self.capacities = () if capacities is None else read_capacities(capacities)
        self.strict = strict
        self.stats = Stats()
        self._program = Program(module, scope, granularity, choose_compiler(compile, self.stats))
        tensor = next(iter([*module.parameters(), *module.buffers()]), None)
        self.device = tensor.device if tensor is not None else torch.device("cpu")
        self._backend: Backend = choose_backend(backend, self.device, module_generators(module))
        self._slots = Slots(self._backend, self.device, slots)
        self._buffers_of_gradients = GradientBuffers()
        self._fingerprint: ModuleState | None = None
        self._warm_calls_left = warmup
        self._observed: dict[int, set[int]] = {}
        self._lock = threading.RLock()  # of what is written down here; nobody runs the module with it
        self._calls = Calls(self.device)
        self._rehearsed: dict[Hashable, Rehearsal] = {}
        self._failed: set[Hashable] = set()
        self._coded: set[Hashable] = set()
        self._closed = False
        self._steady: Steady | None = None
        self.lends = False
        self.vote: Vote = alone
        self.stats._pool_bytes = self._slots.nbytes  # not of `self`: only the garbage collector would free it then
        self._refusal: Refusal | None = None
        self._seal()
        self._ask_for_refusal()

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: by replay where possible, eagerly otherwise."""
        claim = self.claim(args, kwargs)
        if isinstance(claim, str):
            return self.fall_back(claim, args, kwargs)
        return claim.run(args, kwargs)

    def claim(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Claim | str:
        """A slot with graphs for a call with these arguments, or the reason why the call must run eagerly.

        Of tensors only the metadata is looked at, unless a capture is due. The claim counts as a replay.
        """
        with self._calls:
            if self._calls.shared and not self._slots.launches.shared:
                self._share()
            known = self._steady.recall(args, kwargs) if self._steady is not None else None
            reason = self._reason_for_eager(args, kwargs) if known is None else None
            if reason is not None:
                return reason
            claim = self._claim(known, args, kwargs)
            if claim is None:
                with self._calls.capture() as free:
                    claim = self._claim(known, args, kwargs) if free else None
            return fallback.BUSY if claim is None else claim

    def alone(self) -> contextlib.AbstractContextManager[bool]:
        """Within the block no other thread runs the module, for captures; gives False if they do not leave in time."""
        return self._calls.capture()

    def _share(self) -> None:
        """Several threads train with the module."""
        self._slots.launches.shared = self._buffers_of_gradients.shared = True
        shared_gradients.let_go(self._buffers_of_gradients.pairs(), self._slots.launches)

    def _claim(self, known: Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Claim | str | None:
        """As `claim`. None: a capture is due, which this thread may not make now."""
        with self._lock:
            return self._take(known, args, kwargs) if known is not None else self._look(args, kwargs)

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Claim | str | None:
        call = signature(args, kwargs, self.device)
        if call is None:
            return fallback.NO_KEY
        if call.key in self._failed and not self._may_capture_now():
            return fallback.CAPTURE_FAILED
        reason = self._check_fingerprint()
        if reason is not None:
            return reason
        if call.key not in self._rehearsed and len(self._rehearsed) >= MAX_KEYS:
            return fallback.TOO_MANY_KEYS
        claim = self._take(call, args, kwargs)
        if self._steady is not None and isinstance(claim, Claim):
            self._steady.learn(args, kwargs, call)
        return claim

    def _take(self, call: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Claim | str | None:
        ticket = self._slots.acquire(call.key)
        if ticket is None:
            return fallback.NO_SLOT
        if call.key not in ticket.slot.variants and not self._calls.may_capture():
            ticket.release()
            return None
        with contextlib.ExitStack() as on_error:
            on_error.callback(ticket.release)
            try:
                variant = self._variant(call, ticket.slot, args, kwargs)
            except CaptureError as error:
                self._failed.add(call.key)
                self._steady = self._steady and Steady(self.module, self.device.type)  # it knows this call as fine
                self._complain(error)
                return fallback.CAPTURE_FAILED
            on_error.pop_all()
        self.stats.replayed += 1
        return Claim(self._program, variant, ticket, self.lends, self.stats, self._calls, self._steady)

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """For a schedule: promise that in this block nothing about the module changes but the values of its tensors.

        What graphs have baked is then compared once, at the start, instead of at every call, and nobody replaces
        `.grad` of its parameters in between, as another graphed module with the same parameters would.
        """
        if self._fingerprint is not None and self._check_fingerprint() is None:
            self._steady = Steady(self.module, self.device.type)
        try:
            yield
        finally:
            self._steady = None

    def has_free_slot(self) -> bool:
        """Whether a claim would find a slot now."""
        return self._slots.has_free()

    def hold_slot(self) -> Ticket:
        """A slot for a microbatch that runs eagerly under a schedule, so that slots are counted as in a replay.

        Raises RuntimeError when all are in flight.
        """
        return self._slots.reserve(1)[0]

    @property
    def failures(self) -> int:
        """How many keys could not be captured."""
        return len(self._failed)

    def build(self, samples: Sequence[tuple[Any, ...]], slots: int | None = None) -> None:
        """Capture a declared bank before it is needed: every sample's key in `slots` slots, largest first.

        samples: one tuple of call arguments per key; their values are not trained on. slots: how many, default the
        module's `slots`, or one. Changes no training state. Failures are treated as in a call. Captures what training
        will call: a module in evaluation mode is switched for the time, gradients are on.
        """
        calls = []
        for args in samples:
            call = signature(args, {}, self.device)
            if call is None:
                raise ValueError("a sample to build graphs for has an argument that cannot be part of a key: pass "
                                 f"tensors on {self.device}, packed batches and constants")
            calls.append((call, args))
        calls.sort(key=lambda pair: pair[0].nbytes, reverse=True)
        with as_in_training(self.module), contextlib.ExitStack() as held:
            self._ask_for_refusal()
            if self._refusal is not None or self._check_fingerprint() is not None:
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

    def _try_variant(self, call: Signature, slot: Slot, args: tuple[Any, ...]) -> None:
        failed: CaptureError | None = None
        try:
            with self._calls.capture() as free:
                if not free:
                    raise CaptureError(fallback.BUSY, user_line(), "build graphs before other threads call the module")
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
        if self._steady is None and (self._refusal is not None or inside_data_parallel()
                                     or (self._fingerprint and self._fingerprint.hooked())):
            self._ask_for_refusal()
        if self._refusal is not None:
            return self._refusal.reason
        if saved_tensors.are_watched():
            return fallback.SAVED_TENSOR_HOOKS
        reason = undeclared(args, kwargs, self.capacities)
        if reason is None and self._warm_calls_left > 0:
            self._warm_calls_left -= 1
            return fallback.WARM_UP
        return reason

    def _ask_for_refusal(self) -> None:
        """Whether the module can be captured at all now; what was refused before may be fine again."""
        known, self._refusal = self._refusal, refusal(self.module)
        if self._refusal is not None and (self.strict or self._refusal != known):
            self._complain(CaptureError(self._refusal.what, user_line(), self._refusal.remedy))

    def fall_back(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call eagerly that could not be claimed, counted under `reason`."""
        with self._calls, self._lock:
            self.stats.fallbacks[reason] += 1
        result = self.run_eagerly(*args, **kwargs)
        if reason == fallback.WARM_UP:
            leaves = tree_flatten(open_objects(result))[0]
            seen = self._observed.setdefault(len(leaves), set())
            for number, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    if leaf.is_leaf:
                        seen.add(number)
                    else:
                        leaf.register_hook(lambda _, number=number: seen.add(number))
        return result

    def run_eagerly(self, *args: Any, **kwargs: Any) -> Any:
        """The call without graphs, uncounted: by compiled code where a replay runs that, else by the module itself."""
        if self._program.compiler is None or not self._has_code(args, kwargs):
            with self._calls:
                return self.module(*args, **kwargs)
        # Within a whole step this may be the first call, which nothing has compiled ahead and counted.
        with self._calls, self._program.compiler.counting() if capturing() else contextlib.nullcontext():
            return self._program.call(args, kwargs)

    def _has_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call's stages are compiled, which they are now if a replay of this call is possible at all."""
        if self._closed or self._refusal is not None or not (torch.is_grad_enabled() and self.module.training) \
                or undeclared(args, kwargs, self.capacities) is not None:
            return False
        with self._lock:
            call = signature(args, kwargs, self.device)
            if call is None or call.key in self._failed:
                return False
            if capturing():  # of a whole step: the module has aliases for parameters now, and nothing can be tried out
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
            compile_ahead(self._program, self._backend, self._observed, args, kwargs)
            self._coded.add(call.key)

    def _check_fingerprint(self) -> str | None:
        """Drop all graphs when a fact they baked about the module has changed; the call then captures again.

        Returns a reason to run this call eagerly, or None.
        """
        if self._steady is not None:
            return None
        change, before = (self._fingerprint.changed(), self._fingerprint.refused) if self._fingerprint else (None, None)
        if self._fingerprint is None or change is not None:
            if not are_leaves(self.module):
                return fallback.NOT_LEAVES
            if change is not None:
                self._start_again(change)
            self._program = self._program.rebuilt()
            self._fingerprint = ModuleState(self.module, self._program.volatile)
        refused = self._fingerprint.refused
        if refused is not None and (self.strict or refused != before):
            self._complain(CaptureError(refused.what, user_line(), refused.remedy))
        return None if refused is None else fallback.HIDDEN_STATE

    def _start_again(self, change: Change) -> None:
        self._refuse_another_device()
        if any(slot.variants for slot in self._slots.all):
            error = CaptureError(f"{change} after the graphs were captured", user_line(), change.remedy)
            if self.strict:
                raise error
            warnings.warn(f"capturing again: {error}", PackgraphWarning, stacklevel=6)
        if self._may_capture_now():
            self._failed.clear()
        self.stats.dropped("module changed", self._slots.clear())
        self._buffers_of_gradients = GradientBuffers()
        self._buffers_of_gradients.shared = self._slots.launches.shared
        self._rehearsed.clear()
        self._coded.clear()

    def _may_capture_now(self) -> bool:
        """Whether something about the module has changed that its own forward does not change in every call."""
        return self._fingerprint is None or self._fingerprint.changed(self._program.assigned) is not None

    def _refuse_another_device(self) -> None:
        tensor = next(iter([*self.module.parameters(), *self.module.buffers()]), None)
        if tensor is not None and tensor.device != self.device:
            raise RuntimeError(f"the module was moved from {self.device} to {tensor.device} after packgraph.graph "
                               "wrapped it: move it first, then wrap it")

    def _variant(self, call: Signature, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """The slot's graphs for this key, captured now if it has none. Raises CaptureError."""
        if call.key not in slot.variants:
            started = time.perf_counter()
            self.stats.dropped("a larger variant took the slot", slot.make_room(call.nbytes))
            with self._slots.launches.during_capture(self._backend.guard_device is None):
                self._compile(call, args, kwargs)
                if call.key not in self._rehearsed:
                    self._rehearsed[call.key] = rehearse(self._program, self._backend, self._observed, args, kwargs)
                variant = capture_variant(self._program, self._backend, slot, self._buffers_of_gradients,
                                          self._observed, self.lends, args, kwargs, self._rehearsed[call.key])
            slot.variants[call.key] = variant
            self.stats.dropped("a larger variant took the slot", slot.forget_smaller(call.key))
            self.stats.captured += len(variant.regions)
            self.stats.capture_seconds += time.perf_counter() - started
        return slot.variants[call.key]

    def _complain(self, error: CaptureError) -> None:
        """Raise in strict mode; otherwise warn, and training goes on eagerly."""
        if self.strict:
            raise error
        message = f"running eagerly from here on, because a capture failed: {error}"
        warnings.warn(message, PackgraphWarning, stacklevel=4)
