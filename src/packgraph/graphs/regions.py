"""Which stages become which graphs: scopes colour stages, runs of coloured stages become regions.

Pure decisions on names and layer numbers; the only place where scope and granularity are read.

    stages   embed | attn mlp | attn mlp | head          scope {attn, mlp}
    layer            [------]   [------]                 two regions, cut at every layer
    chunk            [-----------------]                 one region; embed and head stay eager

A scope is any collection of names of the model's own stages; the first part of a name stands for
all stages that begin with it (`moe` for `moe_router`, `moe_experts` and so on). A stage that can
never be captured says why (`Stage.eager`): without a scope it stays eager, naming it is an error.
"""

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

GRANULARITIES = ("layer", "chunk")


class NamedStage(Protocol):
    """What this module needs of a stage: its name, the layer it belongs to, and why it cannot be
    captured, if so."""

    @property
    def name(self) -> str: ...

    @property
    def layer(self) -> int: ...

    @property
    def eager(self) -> str: ...


@dataclass(frozen=True)
class Run:
    """Consecutive stages `start` to `stop` (exclusive) that are captured together, or run eagerly
    together."""

    start: int
    stop: int
    captured: bool


def in_scope(name: str, scope: Collection[str] | None) -> bool:
    """Whether `scope` colours the stage `name`; None colours every stage."""
    return scope is None or any(name == asked or name.startswith(f"{asked}_") for asked in scope)


def scope_errors(
    stages: Sequence[NamedStage], scope: Iterable[str] | None, granularity: str
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
    stages: Sequence[NamedStage], scope: Iterable[str] | None, granularity: str
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
