"""Stages: how a model says what it is made of, without knowing about graphs.

A model is a list of named stages over an explicit state (a dict, used as a pytree of tensors,
packed batches and constants). Each stage returns a new dict; nothing is stashed on modules between
stages. Whoever runs the stages may run some of them eagerly and replay the others.

    begin(args) -> state -> embed -> attn 0 -> mlp 0 -> attn 1 -> ... -> head -> end(state) ->
    outputs
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

State = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One named piece of a module that can be captured in parts.

    A module is made of stages if it has `begin(*args)`, which returns a state (a dict), `stages()`,
    and `end(state)`, which returns the outputs.

    Args:
        name: Any name, by which `packgraph.graph(scope=...)` chooses the stage.
        layer: Index of its layer; -1 before the first layer, the number of layers after the last.
        run: Maps the state to the next state. It must not change the dict it is given.
        eager: Why the stage can never be captured, such as a wait for the host; empty if it can.

    Example:
        >>> def run(state):
        ...     return {**state, "hidden": state["hidden"].relu()}
        >>> packgraph.Stage("relu", 0, run).name
        'relu'
    """

    name: str
    layer: int
    run: Callable[[State], State]
    eager: str = ""


@runtime_checkable
class Staged(Protocol):
    """A module made of stages. `begin` and `end` only pack and pick: they launch no work."""

    def begin(self, *args: Any, **kwargs: Any) -> State: ...

    def stages(self) -> Sequence[Stage]: ...

    def end(self, state: State) -> Any: ...


def run_stages(module: Staged, *args: Any, **kwargs: Any) -> Any:
    """Run all stages of `module` in order: what `forward` of a staged module does."""
    state = module.begin(*args, **kwargs)
    for stage in module.stages():
        state = stage.run(state)
    return module.end(state)
