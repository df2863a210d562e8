"""Giving an engine to the layers of a chunk: every module with a mark `offload` gets one that knows its layer."""
import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.graphs.fingerprint import owners
from packgraph.offload.engine import Offload
from packgraph.offload.marks import Mark, nowhere

WHOLE = "layer"  # all that a compiled layer saves


class LayerMark:
    """The mark of one layer, whose modules hold it, so it holds them weakly: a model that nobody has any more goes at
    once. Code that torch.compile traces passes it by: there the whole piece is one group."""

    def __init__(self, engine: Offload, number: int, layer: nn.Module) -> None:
        self.engine, self.number, self._layer = engine, number, weakref.ref(layer)
        self._marked = weakref.WeakSet[nn.Module]()

    def give(self, module: nn.Module) -> None:
        """Let `module`, which lies in the layer, speak through this mark."""
        self._marked.add(module)
        vars(module)["offload"] = self

    def __call__(self, name: str, leave: Any = ()) -> contextlib.AbstractContextManager[None]:
        """The block of the group `name`, see `marks.Mark`."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() \
                or (name != WHOLE and name not in self.engine.modules):
            return contextlib.nullcontext()
        return self.engine.group(name, self.number, self._stays, leave)

    def __reduce__(self) -> tuple[Callable[[], Mark], tuple[()]]:
        """A copy of a module has no engine, and neither has what is read from a file."""
        return _unmarked, ()

    def _stays(self) -> Sequence[Tensor]:
        layer = self._layer()
        holders = [layer] if layer is not None else list(self._marked)  # taken out of a layer that is gone
        return [tensor for holder in holders for tensor in (*holder.parameters(), *holder.buffers())]


def _unmarked() -> Mark:
    return nowhere


def attach(engine: Offload | None, chunk: nn.Module) -> list[int]:
    """Let `engine` move what the layers of `chunk` save; None = nobody. The numbers of the layers that it got.

    A layer is what stands under a number in the names of modules (`layers.7`), beside others of its kind; everything in
    it with an attribute `offload` gets its mark. Where two have the same number (`encoder.layers.0`,
    `decoder.layers.0`) all are numbered in the order of the chunk. Graphs of the chunk are captured again. A layer
    that a forward uses several times begins a pass with each use. Raises ValueError when there is no such module.
    """
    named = dict(owners(chunk))
    marked = {name: module for name, module in named.items() if "offload" in vars(module)}
    if not marked:
        raise ValueError(f"{type(chunk).__name__} has no module with an attribute `offload`: nothing marks what could "
                         "be moved")
    layers = layer_names(list(marked))
    numbers = layer_numbers(layers)
    marks = {} if engine is None else {layer: LayerMark(engine, number, named[layer])
                                       for layer, number in numbers.items()}
    for layer, module in zip(layers, marked.values(), strict=True):
        if engine is None:
            vars(module)["offload"] = nowhere
        else:
            marks[layer].give(module)
    return sorted(numbers.values())


def layer_names(names: Sequence[str]) -> list[str]:
    """For each of these modules the name of its layer: up to the first number that others of them stand beside under
    another one, or else the first number at all; without a number the whole, ''."""
    beside: dict[str, set[str]] = defaultdict(set)
    for name in names:
        for parent, number in _numbers_in(name):
            beside[parent].add(number)
    found = []
    for name in names:
        places = _numbers_in(name)
        chosen = next((place for place in places if len(beside[place[0]]) > 1), places[0] if places else None)
        found.append("" if chosen is None else ".".join(filter(None, chosen)))
    return found


def layer_numbers(layers: Sequence[str]) -> dict[str, int]:
    """The number of each layer: its own, or where two have the same that of its place among all."""
    own = {layer: int(layer.rpartition(".")[2] or 0) for layer in layers}
    if len(set(own.values())) == len(own):
        return own
    return {layer: place for place, layer in enumerate(own)}


def _numbers_in(name: str) -> list[tuple[str, str]]:
    """(what stands before it, number) for every number in a dotted name."""
    parts = name.split(".")
    return [(".".join(parts[:place]), part) for place, part in enumerate(parts) if part.isdigit()]
