"""A whole optimizer step in one graph: forward and backward of all microbatches, in the order of
the schedule.

    eager   F0 B0 F1 B1 ... optimizer        every one a row of launches
    step    [F0 B0 F1 B1 ... optimizer]      one launch; a small bank over the shapes of the
                                             microbatches

The function that runs the step is captured as it stands: it calls forward and backward as a
training loop does, sends and receives where there is a pipeline, and leaves gradients in `.grad`.
Unlike region graphs nothing of autograd is left outside, so gradients of shared parameters are
summed exactly as in eager. The price is that the number of microbatches and the shape of each are
part of the key.

A step may end in work that ranks do together: the reduction of gradients and the update. It is
given as `finish`. A dry run does not begin it before every rank has come so far; the capture
behind that may begin it early, so that reductions run beside the last backward:

    rank 0   F0 B0 F1 B1 ─▶ meet ─┬─▶ finish ─▶ meet ─▶ capture F0 B0 F1 B1 + finish ─▶ vote
    rank 1   F0 FAILS ───▶ vote ──┴─▶ nobody reduces, all run this step eagerly

A replay and an eager step send the same collectives in the same order. So a rank whose module has
changed since runs eagerly, while the others replay; a capture is of all ranks or of none. Ranks of
a pipeline agree on the host before each step anyway: `agreement` says then what all of them do.
"""

import contextlib
import enum
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from packgraph.graphs import fallback
from packgraph.graphs.backend import (
    Backend,
    Graph,
    Static,
    range_name,
    sizes_in_short,
)
from packgraph.graphs.cache import GraphCache
from packgraph.graphs.checks.host_sync import CaptureChecker, compiled_stages
from packgraph.graphs.checks.unsupported import unsupported_error
from packgraph.graphs.copy_streams import CopyStreams
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.fallback import Stats
from packgraph.graphs.gradients import GradientBuffer, GradientBuffers, attach, settle
from packgraph.graphs.guards import Guards, refuse_host_memory
from packgraph.graphs.key import Signature, signature
from packgraph.graphs.parameters import aliased_parameters, has_hooks
from packgraph.graphs.program import hide_lengths, reading, reading_calls
from packgraph.graphs.slots import Slot
from packgraph.graphs.undone import explained, undone

MAX_STEP_KEYS = 16
WHOLE = "a whole step"
Step = Callable[..., torch.Tensor]
Finish = Callable[[torch.Tensor], torch.Tensor]


class Standing(enum.IntEnum):
    """Standing of a step on one rank: not to be a graph, to be captured, captured, or captured
    before the module changed."""

    EAGER = 0
    NEW = 1
    CAPTURED = 2
    STALE = 3


# this rank's own standing -> that of all ranks
Agreement = Callable[[Standing], Standing]


def own(standing: Standing) -> Standing:
    """The agreement of ranks that may run one step in different ways."""
    return standing


class FailedTogetherError(CaptureError):
    """Raised in a capture that another rank has given up, so that there is nothing to vote on."""


class StepVariant:
    """One captured step."""

    segments = 1

    def __init__(
        self,
        graph: Graph,
        inputs: list[torch.Tensor],
        result: Static,
        owned: list[GradientBuffer],
        read: list[torch.Tensor],
    ) -> None:
        self.graph, self.inputs, self.result, self.owned, self.read = (
            graph,
            inputs,
            result,
            owned,
            read,
        )

    def reset(self) -> None:
        """Free the graph."""
        self.graph.reset()


class GraphedStep:
    """Runs `run(*args)` as one graph, or eagerly with a counted reason.

    modules: everything whose parameters the step trains. run: forward and backward of a step; takes
    tensors and packed batches, returns one tensor (the loss). It is called eagerly in warm-up, and
    captured once per key: the shapes of all arguments. limit: keys that may be captured, beyond
    them steps run eagerly. compiled: whether `run` calls compiled stages, by
    `GraphedModule.run_eagerly`. copy_streams: of eager work of `run`, None = the backend's.
    finish: makes the result of a step of what `run` returned, by collectives of all ranks that
    vote; None = that is the result. Where it is given, `run` takes `is_dry_run`: whether others may
    not get to its end, so that it must not begin those collectives itself.

    Attributes:
        agreement: Asked before each step, where all ranks must run it in one way.
        all_agree: Whether all ranks that vote on captures are asked by `agreement`, so that they
            can capture a step again together when its modules have changed on all of them.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        run: Step,
        backend: Backend,
        device: torch.device,
        limit: int = MAX_STEP_KEYS,
        compiled: bool = False,
        copy_streams: Sequence[CopyStreams] | None = None,
        finish: Finish | None = None,
    ) -> None:
        self.modules, self.run, self.limit, self.compiled = (
            torch.nn.ModuleList(modules),
            run,
            limit,
            compiled,
        )
        self._finish = finish
        self._backend, self._device = backend, device
        self._eager_copy_streams = (
            [backend.copy_streams] if copy_streams is None else list(copy_streams)
        )
        slot = self._slot = Slot(0, backend, device)
        self._buffers = GradientBuffers()
        self._guards: dict[Hashable, Guards] = {}
        self._stale: set[Hashable] = set()
        self.agreement: Agreement = own
        self.all_agree = False
        self.stats = Stats(_pool_bytes=lambda: slot.pool.nbytes())
        self.cache = GraphCache(self.stats, device)

    def __call__(self, *args: Any) -> torch.Tensor:
        """One step. Returns its result; gradients are added to `.grad`."""
        reason = fallback.bypass_reason() or self.reason_against(*args)
        if reason is not None:
            self.stats.fallbacks[reason] += 1
            return self._all(args)
        return self.replay(*args)

    def replay(self, *args: Any) -> torch.Tensor:
        """A step that nothing is against, from its graph. Returns its result."""
        call = signature(args, {}, self._device)
        assert call is not None, "steps without a key are no replays"
        variant: StepVariant = self._slot.variants[call.key]
        tensors = [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor)]
        for buffer, tensor in zip(variant.inputs, tensors, strict=True):
            buffer.copy_(tensor)
        aside = attach(variant.owned)
        variant.graph.replay()
        settle(aside)
        self.stats.replayed += 1
        return variant.result.tensor.clone()

    def reason_against(self, *args: Any) -> str | None:
        """Returns the reason why a step with these arguments is no replay, or None; captures it if
        it is new.

        With communication inside this is collective: every rank must ask for the same step.

        Raises:
            CaptureError: If it could not be captured on any rank, or the module has changed since
                several ranks captured it.
        """
        call = signature(args, {}, self._device)
        standing = self._standing(call)
        agreed = self.agreement(standing)
        if agreed is Standing.CAPTURED:
            return None
        if agreed is Standing.STALE:
            self._drop_captured()
        if call is None:
            return fallback.NO_KEY
        # What a larger step has dropped here it has dropped on all ranks, which capture it again.
        if call.key in self._stale and call.key in self._slot.variants:
            raise CaptureError(
                "the module has changed since all ranks captured this step together",
                user_line(),
                "leave the module as it is, or change it before the first step is captured",
            )
        if agreed is Standing.EAGER:
            if call.key in self.cache.failed:
                return fallback.CAPTURE_FAILED
            mine = standing is Standing.EAGER
            return fallback.TOO_MANY_KEYS if mine else fallback.OTHER_RANK
        failed: CaptureError | None = None
        try:
            self.cache.capture(call, self._slot, lambda: self._captured(call.key, args))
        except FailedTogetherError:
            self.cache.failed.add(call.key)
            raise
        except CaptureError as error:
            failed = error
        failed = self.cache.agree(WHOLE, call.key, self._slot, failed)
        if failed is not None:
            raise failed
        self._stale.discard(call.key)
        return None

    def _standing(self, call: Signature | None) -> Standing:
        """Returns this rank's standing of the step. Graphs of a changed module are not replayed any
        more.

        Ranks that captured together may not have seen a change. They would not capture again with
        this one, so it keeps its graphs, as they do theirs, and runs these steps eagerly.
        """
        if call is None:
            return Standing.EAGER
        if call.key in self._guards and not self._guards[call.key].holds():
            if self.cache.joint.is_alone:
                self._drop_captured()
            else:
                self._stale.update(self._slot.variants)
                self._guards.clear()
        if call.key in self._slot.variants:
            if call.key not in self._stale:
                return Standing.CAPTURED
            return Standing.STALE if self.all_agree else Standing.EAGER
        full = len(self._slot.variants) >= self.limit
        return Standing.EAGER if full or call.key in self.cache.failed else Standing.NEW

    def others_replay(self, *args: Any) -> bool:
        """Returns whether other ranks replay this step, which this one runs eagerly."""
        call = signature(args, {}, self._device)
        return call is not None and call.key in self._stale

    def close(self) -> None:
        """Free all graphs."""
        self._slot.clear()
        self._stale.clear()
        self._guards.clear()

    def _drop_captured(self) -> None:
        self.stats.dropped("module changed", len(self._slot.variants))
        self.close()
        self._buffers = GradientBuffers()

    def _all(self, args: Sequence[Any], *, is_dry_run: bool = False) -> torch.Tensor:
        """The whole step. is_dry_run: whether all ranks get to its end is not known."""
        if self._finish is None:
            return self.run(*args)
        result = self.run(*args, is_dry_run=is_dry_run)
        if is_dry_run:
            self._meet()
        return self._finish(result)

    def _meet(self) -> None:
        """Wait for all ranks, if a step ends in work with them. Raises FailedTogetherError if one
        of them has failed."""
        failed = None if self._finish is None else self.cache.joint.consensus(WHOLE, None)
        if failed is not None:
            raise FailedTogetherError(failed.what, failed.where, failed.remedy)

    def _captured(self, key: Hashable, args: tuple[Any, ...]) -> StepVariant:
        """The step's graph. Raises CaptureError for modules that cannot be captured at all, once
        the slot has let go of what any capture drops: ranks hold the same keys."""
        refused = unsupported_error(self.modules)
        if refused is not None:
            raise refused
        for name, parameter in self.modules.named_parameters():
            if has_hooks(parameter):
                raise CaptureError(
                    f"parameter {name!r} has a hook, which a graph of a whole step would not call",
                    user_line(),
                    "capture layers or chunks: their graphs hand gradients to hooks",
                )
        self._meet()  # before exchanges within the step, too, in which others would wait
        used: list[tuple[Any, Any]] = []
        with reading(used):
            variant = self._capture(args)
        refuse_host_memory(used, self._backend.guard_device)
        self._guards[key] = Guards(used, dict(self.modules.named_parameters()))
        return variant

    def _capture(self, args: tuple[Any, ...]) -> StepVariant:
        leaves, spec = tree_flatten([hide_lengths({"": arg})[""] for arg in args])
        inputs = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                buffer = self._slot.buffer(("input", position), leaf)
                buffer.copy_(leaf)
                inputs.append(buffer)
                leaves[position] = buffer
        shown = tree_unflatten(leaves, spec)
        with (
            explained(),
            undone(self.modules, self._backend) as journal,
            contextlib.ExitStack() as stack,
        ):
            aliases = stack.enter_context(aliased_parameters(self.modules))
            owned, read = [], list[torch.Tensor]()
            for alias in [p for p in self.modules.parameters() if p.requires_grad]:
                parameter = aliases.parameter_of[id(alias)]
                if parameter.grad is None and isinstance(parameter, DTensor):
                    raise CaptureError(
                        "a parameter that is a DTensor has no gradient yet: the first backward "
                        "decides its placements",
                        user_line(),
                        "run a step eagerly, and set gradients to zero in place",
                    )
                owned.append(self._buffers.buffer(parameter))
                alias.grad = owned[-1].tensor
            with compiled_stages(self.compiled), reading_calls(self.modules):
                self._backend.warm_up(lambda: self._run_dry(shown, journal, read))
            self._meet()  # a capture may exchange, too
            stack.enter_context(compiled_stages(self.compiled, fixed=True))
            for copy_streams in self._eager_copy_streams:
                copy_streams.memories.let_go()
            with self._backend.window(self._slot.pool, self._slot.pool, journal) as window:
                graph, result = window.capture(lambda: self._all(shown).detach())
                static = window.static(result)
                del result
            graph.name = range_name("step", f"slot {self._slot.index}", sizes_in_short(args))
            return StepVariant(graph, inputs, static, owned, read)

    def _run_dry(self, shown: Sequence[Any], journal: Any, read: list[torch.Tensor]) -> None:
        """Runs the step watched. read: gets the tensors from outside."""
        device = self._backend.guard_device
        with CaptureChecker(journal, refuse=True, device=device) as watch:
            self._all(shown, is_dry_run=True)
        read.extend(tensor.detach() for tensor in watch.external.values())
