"""The ways of running forward and backward of one microbatch, all on the same values and the same
gradients.

What a way runs its documents in is part of it. Code that may meet any shape gets the documents as
they are; what was made for one shape gets them in that shape:

    eager, compile                       as many places for documents as there are documents, their
                                         own longest one
    reduce-overhead, graphed-callables,
    layer, chunk                         one capacity: the most tokens and documents that the packer
                                         makes
    whole-padded                         one capacity with 256 places for documents, as those who
                                         cannot know them take
    auto                                 the smallest of the buckets that the planner chose

Ways with +fp8 or +fp8_weight_gradients multiply in float8 (ops/float8) in all layers: those alone
are the middle of a model.
Further ways for models with experts: bench/moe_variants.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from packgraph.bench.compiled import CompiledStack, LayerStack, compiled_layers
from packgraph.bench.models import TimedPart, twin
from packgraph.graphs.graphed import control, forward_backward, graph
from packgraph.graphs.replay import ReplayHandle
from packgraph.models.branches import head_sizes
from packgraph.models.layers.moe import moe_blocks
from packgraph.models.stack import DecoderStack
from packgraph.ops.attention.varlen import varlen_problems
from packgraph.ops.float8.linear import (
    FLOAT8,
    FLOAT8_GRADIENTS,
    float8_problems,
    is_float8,
    multiply_by,
)
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity, CapacitySet

OWN_ATTENTION = ("layer", "chunk", "auto", "partial", "host-splits", "transformers")
# of these ways is what the library chooses, not torch's
REMAINING_CALLS = 2


@dataclass(frozen=True)
class Setting:
    """Settings that all ways of one comparison share.

    work: to be done, by `model`. capacity: holds every microbatch. buckets: for the ways called
    auto, ascending. attention: own for what a way's own stack has (torch's kernel, for ours what
    the library chooses), or the backend of all. compiler: of ways that compile.
    """

    work: TimedPart
    model: DecoderStack
    capacity: Capacity
    buckets: tuple[Capacity, ...]
    attention: str = "own"
    compiler: str = "inductor"

    def attention_of(self, name: str) -> str:
        """The backend that the way called `name` asks its model for."""
        config, weight = self.model.config, next(self.model.parameters())
        if self.attention != "own":
            return self.attention
        torch_has_none = varlen_problems(weight.device, weight.dtype, *head_sizes(config))
        return "auto" if torch_has_none or name.partition("+")[0] in OWN_ATTENTION else "varlen"

    def model_of(self, name: str) -> DecoderStack:
        """A model of its own for the way called `name`, over the same values and gradients. Raises
        ValueError where its layers cannot multiply as the way does."""
        model = twin(self.model, self.attention_of(name))
        for precision in filter(is_float8, name.split("+")):
            weight, blocks = next(model.parameters()), moe_blocks([model])
            problems = float8_problems(weight.device, weight.dtype, bool(blocks))
            problems += multiply_by(model.layers, precision)
            for block in blocks:
                block.experts.by = precision
            if problems:
                raise ValueError(f"{name}: {'; '.join(problems)}")
        return model

    def work_of(self, name: str) -> TimedPart:
        """The work by that model."""
        return self.work.by(self.model_of(name))

    def needs_cuda(self, name: str) -> None:
        """Raises ValueError on a CPU."""
        if next(self.model.parameters()).device.type != "cuda":
            raise ValueError(f"{name} makes CUDA graphs: there is none on a CPU")


class Way:
    """One way of running microbatches; this one eagerly."""

    def __init__(self, name: str, work: TimedPart, capacities: Sequence[Capacity] = ()) -> None:
        """capacities: the only ones that it can run; none = it runs documents as they are."""
        self.name, self.work, self.capacities = name, work, tuple(capacities)
        self.call: Callable[..., Tensor] = work.model

    def capacity(self, batch: PackedBatch) -> Capacity:
        """The shape that this way runs the documents of `batch` in. Raises ValueError when it has
        none for them."""
        if not self.capacities:
            return Capacity(batch.capacity.tokens, batch.num_documents, max(batch.lengths))
        return CapacitySet(self.capacities).smallest(
            batch.num_tokens, batch.num_documents, max(batch.lengths)
        )

    def prepare(self, batches: Sequence[PackedBatch]) -> None:
        """Run the first microbatches: with most and with fewest documents, whatever is compiled
        sees what changes."""
        ordered = sorted(batches, key=lambda batch: (batch.num_documents, batch.num_tokens))
        for batch in (ordered[-1], ordered[0], *batches[:REMAINING_CALLS]):
            self.run(batch)

    def run(self, batch: PackedBatch) -> Tensor:
        """Forward and backward of a microbatch in this way's shape; the output, which the next call
        may overwrite."""
        out = self.call(*self.work.arguments(batch))
        torch.autograd.backward(out, self.work.incoming(batch))
        return out.detach()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """A block of calls in which nothing about the model changes but values."""
        yield

    def facts(self) -> dict[str, Any]:
        """Returns the costs of getting ready: seconds of capture, bytes of pools, pieces of
        compiled code, buckets."""
        return {
            "capture_seconds": None,
            "capture_layer_seconds": None,
            "pool_bytes": None,
            "compiled": None,
            "shapes": [f"{shape.tokens}x{shape.documents}" for shape in self.capacities] or "own",
        }

    def complaint(self) -> str | None:
        """Returns why the times are not those of this way, if microbatches ran otherwise."""
        return None

    def close(self) -> None:
        """Free everything that was made."""
        del self.call


class Compiled(Way):
    """Code of torch.compile, called from Python. overwrites: whether a call may overwrite what the
    last returned."""

    def __init__(
        self,
        name: str,
        work: TimedPart,
        capacities: Sequence[Capacity],
        call: Callable[..., Tensor],
        overwrites: bool = False,
    ) -> None:
        super().__init__(name, work, capacities)
        self.call, self.overwrites, self.recompiled = call, overwrites, 0

    def run(self, batch: PackedBatch) -> Tensor:
        if self.overwrites:
            torch.compiler.cudagraph_mark_step_begin()
        return super().run(batch)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        before = counters["stats"]["unique_graphs"]
        yield
        self.recompiled += counters["stats"]["unique_graphs"] - before

    def complaint(self) -> str | None:
        return (
            f"code was compiled {self.recompiled} times while it was timed"
            if self.recompiled
            else None
        )


class Graphed(Way):
    """Graphs of this library: a bank that is captured before it is needed, replayed as the trainer
    does it.

    scope: stages that are captured, None for all.
    """

    def __init__(
        self,
        name: str,
        work: TimedPart,
        capacities: Sequence[Capacity],
        granularity: str,
        compile: bool | str,
        scope: Sequence[str] | None = None,
    ) -> None:
        super().__init__(name, work, capacities)
        self.call = self.graphed = graph(
            work.model,
            capacities=self.capacities,
            granularity=granularity,
            warmup=0,
            slots=1,
            strict=True,
            scope=scope,
            compile=compile,
        )
        # As a pipeline does: gradients of hidden states stay in the slot.
        control(self.graphed).lends = work.hidden is not None
        self.used: dict[Capacity, PackedBatch] = {}
        self.by_autograd = 0

    def prepare(self, batches: Sequence[PackedBatch]) -> None:
        self.warm_up(batches)
        self.capture(batches)

    def warm_up(self, batches: Sequence[PackedBatch]) -> None:
        """Steps before any capture, one for each shape; what is to be compiled is compiled here."""
        self.used = {batch.capacity: batch for batch in batches}
        for batch in self.used.values():
            torch.autograd.backward(
                self.graphed.run_eagerly(*self.work.arguments(batch)), self.work.incoming(batch)
            )

    def capture(self, batches: Sequence[PackedBatch]) -> None:
        """Capture all shapes and run the first microbatches. After `warm_up`."""
        self.graphed.build([self.work.arguments(batch) for batch in self.used.values()])
        control(
            self.graphed
        ).strict = False  # from here on `complaint` says what ran eagerly, when all ranks are done
        super().prepare(batches)

    def run(self, batch: PackedBatch) -> Tensor:
        arguments, incoming = self.work.arguments(batch), self.work.incoming(batch)
        if incoming is None:
            return forward_backward(self.graphed, *arguments)
        handle = self.graphed.acquire(arguments, {})
        if isinstance(handle, ReplayHandle) and handle.is_direct:
            out = handle.forward(arguments, {})
            handle.backward(incoming)
            return out
        self.by_autograd += 1
        replays = isinstance(handle, ReplayHandle)
        out = (
            handle.run(arguments, {}) if replays else self.graphed.fall_back(handle, arguments, {})
        )
        torch.autograd.backward(out, incoming)
        return out.detach()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        with self.graphed.frozen():
            yield

    def facts(self) -> dict[str, Any]:
        stats = self.graphed.stats
        return (
            super().facts()
            | per_layer(stats.capture_seconds, self.work, len(self.used))
            | {
                "pool_bytes": stats.pool_bytes,
                "compiled": stats.compiled,
                "by_autograd": self.by_autograd,
            }
        )

    def complaint(self) -> str | None:
        fallbacks = dict(self.graphed.stats.fallbacks)
        return f"microbatches ran eagerly: {fallbacks}" if fallbacks else None

    def close(self) -> None:
        self.graphed.close()
        super().close()


def per_layer(seconds: float, work: TimedPart, buckets: int) -> dict[str, Any]:
    """capture_seconds, and the same per layer and bucket."""
    return {
        "capture_seconds": round(seconds, 3),
        "capture_layer_seconds": round(seconds / work.config.num_layers / max(1, buckets), 5),
    }


def _compile(name: str, setting: Setting) -> Way:
    model = setting.model_of(name)
    stack = LayerStack(model, compiled_layers(model, setting.compiler))
    return Compiled(name, setting.work.by(stack), (), stack)


def _reduce_overhead(name: str, setting: Setting) -> Way:
    setting.needs_cuda(name)
    stack = CompiledStack(setting.model_of(name), mode="reduce-overhead")
    return Compiled(name, setting.work.by(stack), (setting.capacity,), stack, overwrites=True)


def _graphed(name: str, setting: Setting) -> Way:
    kind, *further = name.split("+")
    return Graphed(
        name,
        setting.work_of(name),
        setting.buckets if kind == "auto" else (setting.capacity,),
        "layer" if kind == "layer" else "chunk",
        compile=setting.compiler if "compile" in further else False,
    )


Maker = Callable[[str, Setting], Way]
OURS = ("layer", "chunk", "layer+compile", "chunk+compile", "auto", "auto+compile")
IN_FLOAT8 = tuple(
    f"{kind}+{precision}"
    for precision in (FLOAT8, FLOAT8_GRADIENTS)
    for kind in ("chunk", "chunk+compile")
)
WAYS: Mapping[str, Maker] = MappingProxyType(
    {
        "eager": lambda name, setting: Way(name, setting.work_of(name)),
        "compile": _compile,
        "reduce-overhead": _reduce_overhead,
        **dict.fromkeys(OURS, _graphed),
    }
)
FLOAT8_WAYS: Mapping[str, Maker] = MappingProxyType(dict.fromkeys(IN_FLOAT8, _graphed))
