"""Stages: how a model says what it is made of, and which of them become which graphs.

A model is a list of named stages over an explicit state (a dict, used as a pytree of tensors,
packed batches and constants). Each stage returns a new dict; nothing is stashed on modules between
stages. Whoever runs the stages may run some of them eagerly and replay the others.

    begin(args) -> state -> embed -> attn 0 -> mlp 0 -> ... -> head -> end(state) -> outputs

A scope colours stages by name; consecutive coloured stages become runs that are captured together.
This is the only place where scope and granularity are read.

    stages   embed | attn mlp | attn mlp | head          scope {attn, mlp}
    layer            [------]   [------]                 two segments, cut at every layer
    chunk            [-----------------]                 one segment; embed and head stay eager

A scope is any collection of names of the model's own stages; the first part of a name stands for
all stages that begin with it (`moe` for `moe_router`, `moe_experts` and so on). A stage that can
never be captured says why (`Stage.eager`): without a scope it stays eager, naming it is an error.

torch.compile gets the stages of one layer together (`compile_units_of`), so that all like layers
share one piece of code. Stages of one layer that are recomputed in the backward (`Stage.recompute`)
are recomputed together, as far as they run together.
"""

import contextlib
import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils._pytree import tree_leaves

from packgraph.graphs.checkpointed import FULL, SELECTIVE, checkpointed

State = dict[str, Any]


@dataclass(frozen=True, eq=False)  # torch 2.11 traces a call by a hash that has no fields yet
class Stage:
    """One named piece of a module that can be captured in parts.

    A module is made of stages if it has `begin(*args)`, which returns a state (a dict), `stages()`,
    and `end(state)`, which returns the outputs.

    Args:
        name: Any name, by which `packgraph.graph(scope=...)` chooses the stage.
        layer: Index of its layer; -1 before the first layer, the number of layers after the last.
        run: Maps the state to the next state. It must not change the dict it is given.
        eager: Why the stage can never be captured, such as a wait for the host; empty if it can.
        recompute: `full`: the backward computes the stage again from its input; `selective`: only
            what is cheap per byte (no products, no attention); empty: all is kept. Random numbers
            are never drawn again. What else the stage does to tensors that are there before (a
            counter) is done twice.
        opaque: The stage runs as it is where stages are compiled: torch.compile could not take what
            it does, such as an exchange with other ranks that goes on behind it. Nor does the
            tracer read it: a graph goes on with the attributes that it had at capture.
        owner: The module that `run` takes before the state, for a function that is no method.

    Raises:
        ValueError: If `recompute` is something else.

    Examples:
        >>> def run(state):
        ...     return {**state, "hidden": state["hidden"].relu()}
        >>> packgraph.Stage("relu", 0, run).name
        'relu'
    """

    name: str
    layer: int
    run: Callable[..., State]
    eager: str = ""
    recompute: str = ""
    opaque: bool = False
    owner: Any = None

    def __call__(self, state: State) -> State:
        """The next state."""
        return self.run(state) if self.owner is None else self.run(self.owner, state)

    @property
    def method(self) -> tuple[Any, Callable[..., State]]:
        """The module that the stage belongs to, and a function of it and the state; None, and a
        function of the state."""
        owner, method = getattr(self.run, "__self__", None), getattr(self.run, "__func__", None)
        if self.owner is not None:
            return self.owner, self.run
        if isinstance(owner, torch.nn.Module) and method is not None:
            return owner, method
        return None, self.run

    def __post_init__(self) -> None:
        if self.recompute not in ("", FULL, SELECTIVE):
            raise ValueError(
                f"recompute of stage {self.name!r} must be '', {FULL!r} or {SELECTIVE!r}, not "
                f"{self.recompute!r}"
            )


@runtime_checkable
class Staged(Protocol):
    """A module made of stages. `begin` and `end` only pack and pick: they launch no work."""

    def begin(self, *args: Any, **kwargs: Any) -> State: ...

    def stages(self) -> Sequence[Stage]: ...

    def end(self, state: State) -> Any: ...


def run_stages(module: Staged, *args: Any, **kwargs: Any) -> Any:
    """Run all stages of `module` in order: what `forward` of a staged module does."""
    return module.end(run_in_order(module.stages(), module.begin(*args, **kwargs)))


def run_in_order(stages: Sequence[Stage], state: State) -> State:
    """Run these stages as they are, those of one layer together where they are recomputed."""
    together: list[Stage] = []  # of one layer, to be recomputed in one
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        if not stage.recompute:
            state = stage(state)
            continue
        together.append(stage)
        kind = following and (following.layer, following.recompute)
        if kind != (stage.layer, stage.recompute):
            mark = getattr(together[0].method[0], "offload", None)
            state = checkpointed(_in_turn(together), state, stage.recompute, mark=mark)
            together = []
    return state


def _in_turn(stages: Sequence[Stage]) -> Callable[[State], State]:
    def run(state: State) -> State:
        for stage in stages:
            state = stage(state)
        return state

    return run


class CompileUnit(NamedTuple):
    """Consecutive stages of one layer that are compiled together.

    owner: the module whose methods they are, or None. methods: what to call: functions of (owner,
    state), or of state. recompute, opaque: see Stage.
    """

    owner: Any
    methods: tuple[Callable[..., State], ...]
    name: str
    recompute: str = ""
    opaque: bool = False


def compile_units_of(stages: Sequence[Stage]) -> tuple[CompileUnit, ...]:
    """Cut consecutive stages where the layer, the owner or recomputation changes, and around those
    that are not compiled."""
    pieces: list[CompileUnit] = []
    last: int | None = None
    for stage in stages:
        owner, method = stage.method
        how, before = (owner, stage.recompute, stage.opaque), pieces[-1] if pieces else None
        alike = before and (before.owner, before.recompute, before.opaque) == how
        if before and alike and last == stage.layer and not stage.opaque:
            name = f"{before.name}, {stage.name}"
            pieces[-1] = CompileUnit(owner, (*before.methods, method), name, stage.recompute)
        else:
            pieces.append(CompileUnit(owner, (method,), stage.name, *how[1:]))
        last = stage.layer
    return tuple(pieces)


def saving(piece: CompileUnit, state: State) -> contextlib.AbstractContextManager[None]:
    """The block that the piece's compiled code is to run in: the mark `offload` of its owner, if it
    has one, for all that the code saves. What needs no gradient of the state is shared by all
    layers and stays.
    """
    mark = getattr(piece.owner, "offload", None)
    if mark is None:
        return contextlib.nullcontext()
    return mark(
        "layer",
        leave=[
            leaf
            for leaf in tree_leaves(state)
            if isinstance(leaf, torch.Tensor) and not leaf.requires_grad
        ],
    )


GRANULARITIES = ("layer", "chunk")


@dataclass(frozen=True)
class Run:
    """Consecutive stages `start` to `stop` (exclusive) that are captured together, or run eagerly
    together."""

    start: int
    stop: int
    captured: bool


def in_scope(name: str, scope: Collection[str] | None) -> bool:
    """Returns whether `scope` colours the stage `name`; None colours every stage."""
    return scope is None or any(name == asked or name.startswith(f"{asked}_") for asked in scope)


def scope_errors(
    stages: Sequence[Stage], scope: Iterable[str] | None, granularity: str
) -> list[str]:
    """Every reason why this scope and granularity cannot be captured for these stages; empty when
    legal."""
    errors = []
    if granularity == "step":
        errors.append(
            "granularity 'step' captures a whole optimizer step, of which packgraph.graph sees one "
            "call: use "
            "'chunk' here, or `packgraph train --graph.granularity step`"
        )
    elif granularity not in GRANULARITIES:
        errors.append(
            f"unknown granularity {granularity!r}: use one of {', '.join(map(repr, GRANULARITIES))}"
        )
    if scope is None:
        return errors
    if isinstance(scope, str):
        return [
            *errors,
            f"scope is a collection of stage names, not the string {scope!r}: write [{scope!r}]",
        ]
    asked, present = set(scope), {stage.name for stage in stages}
    if not asked:
        errors.append(
            "scope is empty: nothing would be captured; leave it out to capture every stage"
        )
    for name in sorted(asked):
        if not any(in_scope(stage, [name]) for stage in present):
            near = difflib.get_close_matches(name, present, n=1)
            errors.append(
                f"scope names {name!r}, but the model has only the stages "
                f"{', '.join(sorted(present))}" + (f": did you mean {near[0]!r}?" if near else "")
            )
        errors += [
            f"{name!r} already means every {name}_* stage: give either {name!r} or the single "
            "stages"
            for part in asked
            if part != name and in_scope(part, [name])
        ][:1]
    if "moe_preprocess" in asked and "moe_router" not in asked:
        errors.append("'moe_preprocess' needs 'moe_router': it reads the router's captured outputs")
    for name in sorted(asked):
        reasons = dict.fromkeys(
            f"{stage.name}: {stage.eager}"
            for stage in stages
            if stage.eager and in_scope(stage.name, [name])
        )
        errors.extend(f"{name!r} cannot be captured here: {reason}" for reason in reasons)
    return errors


def cut_runs(
    stages: Sequence[Stage], scope: Iterable[str] | None, granularity: str
) -> tuple[Run, ...]:
    """Cut `stages` into runs, in order and without gaps.

    Raises ValueError with all reasons at once when the combination is illegal.
    """
    errors = scope_errors(stages, scope, granularity)
    if errors:
        raise ValueError("this capture scope is not possible:\n  - " + "\n  - ".join(errors))
    asked = scope if scope is None else set(scope)
    runs: list[Run] = []
    for index, stage in enumerate(stages):
        captured = in_scope(stage.name, asked) and not stage.eager
        same_layer = granularity == "chunk" or index == 0 or stages[index - 1].layer == stage.layer
        if runs and runs[-1].captured == captured and (same_layer or not captured):
            runs[-1] = Run(runs[-1].start, index + 1, captured)
        else:
            runs.append(Run(index, index + 1, captured))
    return tuple(runs)
