"""Giving an engine to the layers of a chunk: every module with a mark `offload` gets one that knows its layer."""
import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.offload.engine import Offload
from packgraph.offload.marks import nowhere

WHOLE = "layer"  # all that a compiled layer saves


class LayerMark:
    """The mark of one layer. Code that torch.compile traces passes it by: there the whole piece is one group."""

    def __init__(self, engine: Offload, number: int, layer: nn.Module) -> None:
        self.engine, self.number, self._layer = engine, number, [layer]

    def __call__(self, name: str, leave: Any = ()) -> contextlib.AbstractContextManager[None]:
        """The block of the group `name`, see `marks.Mark`."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() \
                or (name != WHOLE and name not in self.engine.modules):
            return contextlib.nullcontext()
        return self.engine.group(name, self.number, self._stays, leave)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of a module has no engine."""
        return nowhere

    def _stays(self) -> Sequence[Tensor]:
        return [*self._layer[0].parameters(), *self._layer[0].buffers()]


def attach(engine: Offload | None, chunk: nn.Module) -> list[int]:
    """Let `engine` move what the layers of `chunk` save; None = nobody. The numbers of the layers that it got.

    A layer is what stands under a number in the names of modules (`layers.7`); everything in it with an attribute
    `offload` gets its mark. Graphs of the chunk are captured again. Raises ValueError when there is no such module.
    """
    marks: dict[int, Any] = {}
    for name, module in chunk.named_modules():
        if "offload" not in vars(module):
            continue
        number, layer = _layer_of(chunk, name)
        if number not in marks:
            marks[number] = nowhere if engine is None else LayerMark(engine, number, layer)
        module.offload = marks[number]
    if not marks:
        raise ValueError(f"{type(chunk).__name__} has no module with an attribute `offload`: nothing marks what could "
                         "be moved")
    return sorted(marks)


def _layer_of(chunk: nn.Module, name: str) -> tuple[int, nn.Module]:
    parts = name.split(".")
    for end, part in enumerate(parts, 1):
        if part.isdigit():
            return int(part), chunk.get_submodule(".".join(parts[:end]))
    return 0, chunk
