"""Captures calls of one module, and drops the graphs when what they baked no longer holds.

check_state     has anything changed that graphs baked about the module? then they go
compile         torch.compile for what a key needs, before the first capture
capture         dry run, then the capture as a transaction: a variant is ready, or all is as before
reference       the first replay of a key is compared with a plain call (`reference.py`)
"""

import contextlib
from collections.abc import Callable, Hashable
from math import inf
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import dict_version

from packgraph.graphs import fallback
from packgraph.graphs.agreement import CAPTURE, EAGER, START_OVER
from packgraph.graphs.backend import Backend
from packgraph.graphs.build import VariantBuild
from packgraph.graphs.cache import GraphCache
from packgraph.graphs.checks.calls import DryRun
from packgraph.graphs.checks.host_sync import LEAVE_OUT, compiled_stages
from packgraph.graphs.dry_run import CapturedCall, compile_ahead, dry_run
from packgraph.graphs.errors import CaptureError, user_line, warn
from packgraph.graphs.fallback import Stats
from packgraph.graphs.gradients import GradientBuffers, let_go
from packgraph.graphs.guards import Change
from packgraph.graphs.key import Signature
from packgraph.graphs.notices import Notices
from packgraph.graphs.output_gradients import OutputGradients
from packgraph.graphs.parameters import aliased_parameters, are_leaves
from packgraph.graphs.program import Program
from packgraph.graphs.reference import Reference
from packgraph.graphs.replay import Ends, Variant
from packgraph.graphs.slots import Calls, Slot, Slots
from packgraph.graphs.undone import explained, undone
from packgraph.torch_internals import submodules_of

MAX_KEYS = 64
_MODULE_CHANGED = "module changed"
_DIFFERS = "a replay made something else than a call without graphs"


class Capturer:
    """Captures calls of one module into slots.

    Attributes:
        program: The module's stages as they are now, in its present mode.
        cache: The graphs, and the keys whose capture failed.
        lends: Whether outputs and gradients of inputs are handed out as static memory.
        training: Whether the module is in training mode: each mode has graphs of its own.
            Submodules may be in another mode.
        dry_runs: By key, of the calls that were captured.
        compiled: Keys of calls whose stages are compiled. Without them compiled code is tried out
            once more before the next capture.
    """

    def __init__(
        self,
        program: Program,
        backend: Backend,
        slots: Slots,
        calls: Calls,
        gradients: OutputGradients,
        stats: Stats,
        notices: Notices,
        compare_every: int = 0,
    ) -> None:
        """Args:
        program: Of the module.
        backend: Captures and replays.
        slots: Of the module.
        calls: Entered around runs of the module.
        gradients: What is known of the gradients of its outputs.
        stats: Of the graphed module.
        notices: Tell the user of failures.
        compare_every: Replays of a variant between one comparison and the next, 0 = only the first
            of a key is compared.
        """
        self.program, self.lends = program, False
        self._compare_every = compare_every
        self.cache = GraphCache(stats, slots.device)
        self._module, self._backend, self._slots, self._calls = (
            program.module,
            backend,
            slots,
            calls,
        )
        self._gradients, self._stats, self._notices = gradients, stats, notices
        self._homes: dict[int, Tensor] = {}
        self._buffers = GradientBuffers(slots.launches)
        self.training, self._looked = True, False
        self.dry_runs: dict[Hashable, DryRun] = {}
        self.compiled: set[Hashable] = set()
        # By key: the version that was compared, and where its outputs come from.
        self._compared: dict[Hashable, tuple[int, Ends]] = {}
        self._told_apart = set[str]()
        self._tables: list[Any] = []
        self._failed_at: list[int] = []

    def has_failed(self, key: Hashable) -> bool:
        """Returns whether calls of `key` run eagerly because a capture failed, and nothing has
        changed that might help."""
        if self.cache.failed and self.cache.joint.is_alone and self._failed_at != self._versions():
            self.cache.forgive()
        return key in self.cache.failed

    def check_state(
        self,
        key: Hashable = None,
        what: str | None = None,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str | None:
        """Drops all graphs if a fact has changed that they baked about the module; the next call is
        captured again.

        Where ranks capture together they stay unless all ranks agree to that now, and hold again
        when the fact does.

        Args:
            key: Of the call, whose graphs are looked at; None = all are, as for a call without.
            what: The call in words, by which ranks agree; None = they are not asked.
            args, kwargs: Of the call.

        Returns:
            The reason to run eagerly, if there is one.
        """
        change = self._change(key, args, kwargs)
        if self._looked and change is None and key in self.dry_runs:
            return None
        if not are_leaves(self._module):
            return fallback.NOT_LEAVES
        if change is not None:
            joint = self.cache.joint
            if what is None and not joint.is_alone:
                return fallback.APART
            if what is not None and joint.decide(START_OVER, what) == EAGER:
                self._tell_apart(
                    f"{change} on this rank, and other ranks have not captured again with it"
                )
                return fallback.APART
            self._refuse_another_device()
            if any(slot.variants for slot in self._slots.all):
                error = CaptureError(
                    f"{change} after the graphs were captured", user_line(), change.remedy
                )
                if self._notices.strict:
                    raise error
                warn(f"capturing again: {error}")
            self.cache.forgive()
            self.start_over(_MODULE_CHANGED)
        self.program, self._looked = self.program.rebuilt(), True
        return None

    def check_state_with_others(self) -> str | None:
        """As `check_state`, before captures that all ranks begin at the same time: if the module
        has changed on one of them, all drop their graphs."""
        change = self._change()
        error = None if change is None else CaptureError(change.what, user_line(), change.remedy)
        if self.cache.joint.consensus(type(self._module).__name__, error) is not None:
            self._refuse_another_device()
            self.cache.forgive()
            self.start_over(_MODULE_CHANGED)
        return self.check_state()

    def _change(
        self,
        key: Hashable = None,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Change | None:
        """What has changed about the module since it was captured. Of a key that is new nothing is
        known but what holds for all: other code may run in its mode."""
        if key in self.dry_runs:
            return self.dry_runs[key].guards.changed(args, kwargs)
        changes = (seen.guards.memory_changed() for seen in self.dry_runs.values())
        return next((change for change in changes if change is not None), None)

    def _tell_apart(self, what: str) -> None:
        if what not in self._told_apart:
            self._told_apart.add(what)
            error = CaptureError(what, user_line(), fallback.REASONS[fallback.APART].remedy)
            self._notices.complain(
                error, fallback.APART, "running eagerly, because ranks capture together"
            )

    def join_others(self, what: str) -> str:
        """CAPTURE if all ranks capture the call that is `what` in words, START_OVER if they do so
        after this one has dropped its graphs, else EAGER."""
        found = self.cache.joint.decide(CAPTURE, what)
        if found == START_OVER:
            self.start_over(_MODULE_CHANGED)
        elif found == EAGER:
            self._tell_apart(f"{what} has no graphs on this rank")
        return found

    def confirm(self) -> bool:
        """Returns whether all ranks begin the capture that they agreed on in this call."""
        failed = self.cache.joint.confirm()
        if failed is not None:
            self._tell_apart(failed.what)
        return failed is None

    def captured(
        self,
        call: Signature,
        slot: Slot,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        what: str | None,
        refused: CaptureError | None = None,
    ) -> Variant:
        """The slot's graphs for a call, captured now if there are none; the first of a key are
        compared with a plain call, and those for which that is due.

        what: the call in words, where other ranks capture it now, too; all of them or none have its
        graphs then. refused: why this rank cannot.

        Raises:
            CaptureError: The call cannot be captured; nothing has changed then.
        """
        gradients = self._gradients.of(call.key)
        before: Any = slot.variants.get(call.key)
        about = CapturedCall(self.program, self._backend, gradients, args, kwargs)
        version, ends = self._compared.get(call.key, (None, None))
        is_there = before is not None and before.version == gradients.version
        reference: Reference | None = None
        together = not self.cache.joint.is_alone
        if together or version != gradients.version or (is_there and before.replays_left <= 0):
            reference = Reference(
                about, self._slots, self._calls, self._buffers, ends, together=together
            )

        def capture() -> None:
            if refused is not None:
                raise refused
            if not is_there:
                self._stats.dropped(fallback.NEW_PATTERN, slot.drop(call.key))
                self.cache.capture(call, slot, lambda: self._capture(call, slot, about, reference))
            elif reference is not None:
                written, read = before.touched()
                reference.run_plainly(written, read, before.dry_run.draws)

        self._agreed(what, call, slot, capture)
        found: Variant = slot.variants[call.key]
        if reference is not None:
            self._agreed(what, call, slot, lambda: self._compare(reference, call, slot, what))
        # Ranks that capture together do not replay together: there later replays are not compared.
        found.replays_left = inf if together else self._compare_every or inf
        return found

    def note_failed(self) -> None:
        """Calls run eagerly, and may themselves change the module: what changes from here on might
        help."""
        self._failed_at = self._versions()

    def _versions(self) -> list[int]:
        """Of the attributes of the module's parts."""
        return list(map(dict_version, self._tables))

    def _agreed(
        self, what: str | None, call: Signature, slot: Slot, work: Callable[[], None]
    ) -> None:
        """Does `work`. what: as in `captured`.

        Raises:
            CaptureError: It has failed, on any rank.
        """
        failed: CaptureError | None = None
        try:
            work()
        except CaptureError as error:
            failed = error
            parts = [*self._module.modules()]
            tables = [*map(vars, parts), *map(submodules_of, parts)]
            self._tables = [table for table in tables if isinstance(table, dict)]
            self.note_failed()
        try:
            if what is not None:
                failed = self.cache.agree(what, call.key, slot, failed)
            if failed is not None:
                raise failed
        finally:
            failed = None  # its traceback holds this frame

    def _compare(self, reference: Reference, call: Signature, slot: Slot, what: str | None) -> None:
        variant: Variant = slot.variants[call.key]

        def anywhere(differs: str | None) -> bool:
            if what is None:
                return differs is not None
            error = None if differs is None else CaptureError(differs, user_line(), LEAVE_OUT)
            return self.cache.joint.consensus(what, error) is not None

        try:
            is_compared = reference.is_met_by(variant, slot, anywhere)
        except CaptureError:
            self._compared.pop(call.key, None)
            self._stats.dropped(_DIFFERS, slot.drop(call.key))
            raise
        if is_compared:
            self._stats.compared += 1
            self._compared[call.key] = variant.version, variant.ends

    def compile(self, call: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compiles what a key needs, unless that was done.

        Raises:
            CaptureError: It cannot be compiled.
        """
        if self.program.compiles and call.key not in self.compiled:
            gradients = self._gradients.of(call.key)
            compile_ahead(CapturedCall(self.program, self._backend, gradients, args, kwargs))
            self.compiled.add(call.key)

    def forget_all(self) -> int:
        """Frees the graphs of all slots, and the tensors kept for them; how many captures there
        were."""
        self.dry_runs.clear()
        self._compared.clear()
        return self._slots.clear()

    def place_gradients(self, homes: dict[int, Tensor]) -> None:
        """Lets graphs add gradients to this memory, by identity of the parameter. Graphs that add
        to other memory are freed."""
        self.forget_all()
        self._homes = homes
        self._buffers = GradientBuffers(self._slots.launches, homes)

    def _capture(
        self, call: Signature, slot: Slot, about: CapturedCall, reference: Reference | None
    ) -> Variant:
        # In memory that slots share? Then launches wait, and other backwards may add to `.grad`.
        executes, launches = self._backend.guard_device is None, self._slots.launches
        if executes and launches.shared:
            let_go(self._buffers.made.values(), launches)
        with launches:
            pass  # this stream follows
        with launches if executes else contextlib.nullcontext():
            self.compile(call, about.args, about.kwargs)
            seen = dry_run(about)
            if reference is not None:  # in between: a capture has room for itself alone
                reference.run_plainly(seen.written, seen.read, seen.draws)
            variant = capture_variant(about, slot, self._buffers, self._calls, self.lends, seen)
            self.dry_runs[call.key] = seen
        return variant

    def prepared(
        self, call: Signature, args: tuple[Any, ...]
    ) -> tuple[CapturedCall, GradientBuffers]:
        """A call to capture on trial, and the memory that its graphs add gradients to.

        Raises:
            CaptureError: It cannot be compiled.
        """
        self.compile(call, args, {})  # first by itself, as before a capture
        gradients = self._gradients.of(call.key)
        about = CapturedCall(self.program, self._backend, gradients, args, {})
        return about, GradientBuffers(self._slots.launches, self._homes)

    def start_over(self, reason: str) -> None:
        """Frees all graphs, counted under `reason`, and forgets what they hold for."""
        self._looked = False
        self._stats.dropped(reason, self.forget_all())
        self._buffers = GradientBuffers(self._slots.launches, self._homes)
        self._gradients.forget()
        self.compiled.clear()

    def _refuse_another_device(self) -> None:
        tensor = next(iter([*self._module.parameters(), *self._module.buffers()]), None)
        if tensor is not None and tensor.device != self._slots.device:
            raise RuntimeError(
                f"the module was moved from {self._slots.device} to {tensor.device} after "
                "packgraph.graph wrapped it: move it first, then wrap it"
            )


def capture_variant(
    call: CapturedCall,
    slot: Slot,
    buffers: GradientBuffers,
    calls: contextlib.AbstractContextManager[object],
    lends: bool,
    dry_run: DryRun,
) -> Variant:
    """Capture all regions of the call's program into `slot`.

    calls: entered around eager runs of the module. dry_run: of the same call. Raises CaptureError;
    nothing has changed then.
    """
    program, backend = call.program, call.backend
    if backend.guard_device is None:  # it keeps what it reads and writes itself
        dry_run.read.clear()
        dry_run.written.clear()
    with (
        explained(),
        undone(program.module, backend) as journal,
        aliased_parameters(program.module) as aliases,
        compiled_stages(program.compiles, fixed=True),
    ):
        backend.copy_streams.memories.let_go()
        with backend.window(slot.pool, slot.scratch, journal) as window:
            build = VariantBuild(
                program,
                slot,
                window,
                aliases,
                buffers,
                call.gradients,
                dry_run.guards.changed,
                calls,
                journal,
                lends,
                dry_run,
            )
            return build.capture(call.args, call.kwargs)
