"""Giving a runtime to the layers of a chunk: every module with a mark `offload` gets one that knows
its layer."""

import contextlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.graphs.checks.unsupported import owners
from packgraph.graphs.saved_tensors import are_others, are_watched_by_others
from packgraph.offloading.marks import HoldsMemory, Mark, offload_block
from packgraph.offloading.runtime import OffloadRuntime

WHOLE = "layer"  # all that a compiled layer saves


class OffloadedLayer:
    """A layer with marked modules, which hold it and which it holds weakly, as marks do: a model
    that nobody has any more goes at once."""

    def __init__(self, number: int, module: nn.Module) -> None:
        self.number, self._module = number, weakref.ref(module)
        self._users: defaultdict[str, list[int]] = defaultdict(
            list
        )  # of a name, in the order of their first blocks

    def called(self, name: str, user: int) -> str:
        """The group's name of a block that marked module number `user` opens: another one for the
        second module that does so (self-attention, and attention to the encoder)."""
        users = self._users[name]
        if user not in users:
            users.append(user)
        place = users.index(user)
        return f"{name} {place + 1}" if place else name

    def stays(self, part: nn.Module | None) -> Sequence[Tensor]:
        """Parameters, buffers and what parts hold besides (`HoldsMemory`), of `part` alone where
        that was taken out of a layer that is gone."""
        module = self._module()
        module = part if module is None else module
        if module is None:
            return []
        held = [part.held_memory() for part in module.modules() if isinstance(part, HoldsMemory)]
        return [*module.parameters(), *module.buffers(), *itertools.chain(*held)]


class LayerMark:
    """The mark of one module in a layer. Code that torch.compile traces passes it by: there the
    whole piece is one group."""

    BAKED = True

    def __init__(
        self, runtime: OffloadRuntime, layer: OffloadedLayer, user: int, module: nn.Module
    ) -> None:
        self.runtime, self.layer, self.user, self._module = (
            runtime,
            layer,
            user,
            weakref.ref(module),
        )

    def __call__(self, name: str, leave: Any = ()) -> contextlib.AbstractContextManager[None]:
        """The block of the group `name`, see `marks.Mark`."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        self.runtime.met.add(name)
        if name != WHOLE and name not in self.runtime.modules:
            return contextlib.nullcontext()
        if are_others():
            if are_watched_by_others():
                self.runtime.pass_by(name)
            return contextlib.nullcontext()
        return self.runtime.group(
            self.layer.called(name, self.user), self.layer.number, self._stays, leave
        )

    def __reduce__(self) -> tuple[Callable[[], Mark], tuple[()]]:
        """A copy of a module has no runtime, and neither has what is read from a file."""
        return _unmarked, ()

    def _stays(self) -> Sequence[Tensor]:
        return self.layer.stays(self._module())


def _unmarked() -> Mark:
    return offload_block


def attach(runtime: OffloadRuntime | None, chunk: nn.Module) -> list[int]:
    """Let `runtime` move what the layers of `chunk` save; None = nobody. The numbers of the layers
    that it got.

    A layer is what stands under a number in the names of modules (`layers.7`), beside others of its
    kind; everything in it with an attribute `offload` gets a mark. Where they do not stand in one
    list (`encoder.layers.0`, `decoder.layers.0`) all are numbered in the order of the chunk. Graphs
    of the chunk are captured again. A layer that a forward uses several times begins a pass with
    each use. Raises ValueError when there is no such module.
    """
    named = dict(owners(chunk))
    marked = {
        name: module
        for name, module in named.items()
        if _is_mark(vars(module).get("offload", False))
    }
    if not marked:
        raise ValueError(
            f"{type(chunk).__name__} has no module with an attribute `offload` that marks blocks "
            "(packgraph.offload_block): nothing says what could be moved"
        )
    names = layer_names(list(marked))
    numbers = layer_numbers(names)
    layers = {name: OffloadedLayer(number, named[name]) for name, number in numbers.items()}
    for user, (name, module) in enumerate(zip(names, marked.values(), strict=True)):
        vars(module)["offload"] = (
            offload_block if runtime is None else LayerMark(runtime, layers[name], user, module)
        )
    return sorted(numbers.values())


def detach(runtime: OffloadRuntime, chunk: nn.Module) -> None:
    """Let `runtime` move nothing of `chunk` any more; marks of another one stay."""
    for module in chunk.modules():
        mark = vars(module).get("offload")
        if isinstance(mark, LayerMark) and mark.runtime is runtime:
            vars(module)["offload"] = offload_block


def is_attached(chunk: nn.Module) -> bool:
    """Returns whether a runtime moves something of `chunk`."""
    return any(isinstance(vars(module).get("offload"), LayerMark) for module in chunk.modules())


def _is_mark(value: Any) -> bool:
    """Returns whether an attribute can be a mark: a flag of the user's may have that name, too."""
    return value is None or (callable(value) and not isinstance(value, nn.Module))


def layer_names(names: Sequence[str]) -> list[str]:
    """Returns the name of the layer of each of these modules: up to the last number that others of
    them stand beside under another one, or else the first number at all; without a number the
    whole, ''."""
    beside: dict[str, set[str]] = defaultdict(set)
    for name in names:
        for parent, number in _numbers_in(name):
            beside[parent].add(number)
    found = []
    for name in names:
        places = _numbers_in(name)
        chosen = next(
            (place for place in reversed(places) if len(beside[place[0]]) > 1),
            places[0] if places else None,
        )
        found.append("" if chosen is None else ".".join(filter(None, chosen)))
    return found


def layer_numbers(layers: Sequence[str]) -> dict[str, int]:
    """The number of each layer: its own where all stand in one list, else that of its place among
    all."""
    parts = {layer: layer.rpartition(".") for layer in layers}
    if len({parent for parent, _, _ in parts.values()}) == 1:
        return {layer: int(number or 0) for layer, (_, _, number) in parts.items()}
    return {layer: place for place, layer in enumerate(parts)}


def _numbers_in(name: str) -> list[tuple[str, str]]:
    """(what stands before it, number) for every number in a dotted name."""
    parts = name.split(".")
    return [(".".join(parts[:place]), part) for place, part in enumerate(parts) if part.isdigit()]
