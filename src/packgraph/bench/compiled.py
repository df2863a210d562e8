"""The same decoder with its stages under torch.compile, and no graphs of ours: what eager users can
have.

Embedding, layers and head are compiled each for itself (regional compilation), by the library's own
way of doing it (graphs/compiled/compiler.py): all layers share one piece of code per shape.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch._dynamo
from torch import Tensor, nn

from packgraph.graphs.compiled.compiler import Compiler
from packgraph.graphs.fallback import Stats
from packgraph.graphs.stages import Stage, State, compile_units_of, run_stages
from packgraph.models.stack import DecoderStack


@contextlib.contextmanager
def no_silent_eager() -> Iterator[None]:
    """Within the block code that was recompiled too often raises RuntimeError, instead of running
    eagerly from then on.

    For warm-up calls: they see every shape, so what compiles there stays compiled.
    """
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


class CompiledStack(nn.Module):
    """Computes what `model` does, with its parameters, compiled for static shapes.

    backend, mode: as for torch.compile.
    """

    def __init__(
        self,
        model: DecoderStack,
        backend: str | Callable[..., Any] = "inductor",
        mode: str | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        own = backend == "inductor" and mode is None
        make = (
            None
            if own
            else partial(torch.compile, backend=backend, mode=mode, fullgraph=True, dynamic=False)
        )
        self._compiler = Compiler("inductor", Stats(), make)
        self._pieces = compile_units_of(model.stages())

    def begin(self, *args: Any, **kwargs: Any) -> State:
        return self.model.begin(*args, **kwargs)

    def stages(self) -> Sequence[Stage]:
        return [Stage("module", 0, self._run)]

    def end(self, state: State) -> Tensor:
        return self.model.end(state)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As DecoderStack.forward."""
        return run_stages(self, *args, **kwargs)

    def _run(self, state: State) -> State:
        return self._compiler.run(self._pieces, state)
