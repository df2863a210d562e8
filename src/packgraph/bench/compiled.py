"""The same decoder with every layer under torch.compile: what eager users can have without graphs.

Layers are compiled one by one (regional compilation): they share one piece of compiled code per shape, since their
parameters are inputs of it, and nothing in it may depend on the number of the layer. The head stays eager; it is a
custom autograd function around three matrix products.
"""
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch._dynamo
from torch import Tensor, nn

from packgraph.models.stack import DecoderStack
from packgraph.plan.stages import Stage, State, run_stages


@contextlib.contextmanager
def no_silent_eager() -> Iterator[None]:
    """Within the block code that was recompiled too often raises RuntimeError, instead of running eagerly from then on.

    For warm-up calls: they see every shape, so what compiles there stays compiled.
    """
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


class Layer(nn.Module):
    """A decoder layer as one function of tensors. Its stages run methods of the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        # By name: a stage knows the number of its layer, which compiled code would take for a constant.
        self.methods = [stage.run.__name__ for stage in layer.stages()]  # type: ignore[operator]

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attention: Any) -> Tensor:
        """hidden: [T, H]; rotary, attention: as in the decoder's state. Returns [T, H]."""
        state: State = {"hidden": hidden, "rotary": rotary, "attention": attention}
        for method in self.methods:
            state = getattr(self.layer, method)(state)
        return state["hidden"]


class CompiledStack(nn.Module):
    """Computes what `model` does, with its parameters, each layer compiled for static shapes.

    backend, mode: as for torch.compile.
    """

    def __init__(self, model: DecoderStack, backend: str | Callable[..., Any] = "inductor", mode: str | None = None
                 ) -> None:
        super().__init__()
        self.model = model
        self.compiled = nn.ModuleList(Layer(layer) for layer in model.layers.values())
        for layer in self.compiled:
            layer.compile(backend=backend, mode=mode, dynamic=False)

    def begin(self, *args: Any, **kwargs: Any) -> State:
        return self.model.begin(*args, **kwargs)

    def stages(self) -> Sequence[Stage]:
        own = self.model.stages()
        inner = [Stage("layer", number, self._stage(layer)) for number, layer in enumerate(self.compiled)]
        return [own[0], *inner, *([own[-1]] if self.model.last else [])]

    def end(self, state: State) -> Tensor:
        return self.model.end(state)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As DecoderStack.forward."""
        return run_stages(self, *args, **kwargs)

    def _stage(self, layer: nn.Module) -> Any:
        return lambda state: {**state, "hidden": layer(state["hidden"], state["rotary"], state["attention"])}
