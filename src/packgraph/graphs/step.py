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
"""

import contextlib
from collections.abc import Callable, Sequence
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
from packgraph.graphs.cache import Consensus, GraphCache
from packgraph.graphs.checks.host_sync import CaptureChecker, HostSyncCheck
from packgraph.graphs.checks.module_state import ModuleState
from packgraph.graphs.copy_streams import CopyStreams
from packgraph.graphs.dry_run import compiled_code, explained, undone
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.fallback import Stats
from packgraph.graphs.gradients import GradientBuffer, GradientBuffers, attach, settle
from packgraph.graphs.key import signature
from packgraph.graphs.parameters import aliased_parameters
from packgraph.graphs.program import hide_lengths
from packgraph.graphs.replay import ProfiledGraph
from packgraph.graphs.slots import Slot

MAX_STEP_KEYS = 16
Step = Callable[..., torch.Tensor]


class StepVariant:
    """One captured step."""

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

    @property
    def segments(self) -> int:
        """Number of graphs."""
        return 1

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
    ) -> None:
        self.modules, self.run, self.limit, self.compiled = (
            torch.nn.ModuleList(modules),
            run,
            limit,
            compiled,
        )
        self._backend, self._device = backend, device
        self._eager_copy_streams = (
            [backend.copy_streams] if copy_streams is None else list(copy_streams)
        )
        slot = self._slot = Slot(0, backend, device)
        self._buffers = GradientBuffers()
        self._state: ModuleState | None = None
        self.stats = Stats()
        self._cache = GraphCache(self.stats, device)
        self.stats.measure_pools(lambda: slot.pool.nbytes())

    @property
    def consensus(self) -> Consensus:
        """Asked after every capture, where other ranks capture the same steps."""
        return self._cache.consensus

    @consensus.setter
    def consensus(self, consensus: Consensus) -> None:
        self._cache.consensus = consensus

    def __call__(self, *args: Any) -> torch.Tensor:
        """One step. Returns what `run` returns; gradients are added to `.grad`."""
        reason = fallback.bypass_reason()
        call = signature(args, {}, self._device)
        if reason is None and call is None:
            reason = fallback.NO_KEY
        if reason is None and not self.ready(*args):
            reason = (
                fallback.CAPTURE_FAILED
                if call and self._cache.has_failed(call.key)
                else fallback.TOO_MANY_KEYS
            )
        if reason is not None or call is None:
            self.stats.fallbacks[reason or fallback.NO_KEY] += 1
            return self.run(*args)
        variant: StepVariant = self._slot.variants[call.key]
        tensors = [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor)]
        for buffer, tensor in zip(variant.inputs, tensors, strict=True):
            buffer.copy_(tensor)
        aside = attach(variant.owned)
        variant.graph.replay()
        settle(aside)
        self.stats.replayed += 1
        return variant.result.tensor.clone()

    def ready(self, *args: Any) -> bool:
        """Whether a step with these arguments can be replayed; captures it if it is new.

        With communication inside `run` this is collective: every rank must ask for the same step.
        """
        call = signature(args, {}, self._device)
        if call is None:
            return False
        if self._state is not None and self._state.changed() is not None:
            self.stats.dropped("module changed", self._slot.clear())
            self._state, self._buffers = None, GradientBuffers()
        if call.key in self._slot.variants:
            return True
        if self._cache.has_failed(call.key) or len(self._slot.variants) >= self.limit:
            return False
        state = self._state = self._state or ModuleState(self.modules)
        failed: CaptureError | None = None
        try:
            if state.refused is not None:
                raise CaptureError(state.refused.what, user_line(), state.refused.remedy)
            self._cache.capture(call, self._slot, lambda: self._capture(args))
        except CaptureError as error:
            failed = error
        failed = self._cache.agree("a whole step", call.key, self._slot, failed)
        if failed is not None:
            raise failed
        return True

    def close(self) -> None:
        """Free all graphs."""
        self._slot.clear()

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
            owned = []
            for parameter in [p for p in self.modules.parameters() if p.requires_grad]:
                owned.append(self._buffer(aliases.parameter_of[id(parameter)]))
                parameter.grad = owned[-1].tensor
            with compiled_code(self.compiled):
                read = self._rehearse(shown, journal)
            stack.enter_context(compiled_code(self.compiled, fixed=True))
            for copy_streams in self._eager_copy_streams:
                copy_streams.memories.let_go()
            with self._backend.window(self._slot.pool, self._slot.pool, journal) as window:
                graph, result = window.capture(lambda: self.run(*shown).detach())
                static = window.static(result)
                del result
            name = range_name("step", f"slot {self._slot.index}", sizes_in_short(args))
            return StepVariant(ProfiledGraph(name, graph), inputs, static, owned, read)

    def _buffer(self, parameter: torch.nn.Parameter) -> GradientBuffer:
        if parameter.grad is None and isinstance(parameter, DTensor):
            raise CaptureError(
                "a parameter that is a DTensor has no gradient yet: the first backward decides its "
                "placements",
                user_line(),
                "run a step eagerly, and set gradients to zero in place",
            )
        return self._buffers.buffer(parameter)

    def _rehearse(self, shown: Sequence[Any], journal: Any) -> list[torch.Tensor]:
        read: list[torch.Tensor] = []

        def watched() -> None:
            device = self._backend.guard_device
            with (
                HostSyncCheck(device),
                CaptureChecker(journal, refuse=True, device=device) as watch,
            ):
                self.run(*shown)
            read.extend(tensor.detach() for tensor in watch.external.values())

        if (
            self.compiled or self._backend.guard_device is not None
        ):  # else nothing has to be there before a capture
            self._backend.warm_up(watched)
        return read
