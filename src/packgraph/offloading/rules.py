"""Rules of which modules may be offloaded together, in this model with these graphs: one function,
all reasons at once.

    attn_norm  qkv_linear  core_attn  attn_proj  |  mlp_norm  mlp_act  |  expert_fc1  moe_act
    [--------------- stage attn ---------------]    [--- mlp ---]         [-- moe_experts --]
                                                    [ moe_router ]
    mamba_norm  mamba_scan
    [--- stage mamba ----]

What stands against a set:
* attn_proj without core_attn: its input is the output of the attention, which that keeps for its
  own backward.
* A norm between two regions. It saves the hidden state that the layer's residual is added to. Where
  a region takes it in or hands it on, it lies in memory that the region's slot owns, and a copy of
  it frees nothing.
* A module whose activations somebody else already gets rid of: recomputation, or the stash of
  experts.
* layer_input without recomputation, which begins with it.
"""

import difflib
from collections.abc import Collection, Sequence

from packgraph.graphs.checkpointed import LAYER_INPUT
from packgraph.graphs.stages import Run, Stage

# The stages that a module is part of; a model has it if it has one of them.
STAGES_OF = {
    LAYER_INPUT: ("attn", "mamba", "mlp", "moe_router"),
    "attn_norm": ("attn",),
    "qkv_linear": ("attn",),
    "core_attn": ("attn",),
    "attn_proj": ("attn",),
    "mamba_norm": ("mamba",),
    "mamba_scan": ("mamba",),
    "mlp_norm": ("mlp", "moe_router"),
    "mlp_act": ("mlp", "moe_router"),
    "expert_fc1": ("moe_experts",),
    "moe_act": ("moe_experts",),
}
MODULES = tuple(STAGES_OF)
EXPERT_MODULES = ("expert_fc1", "moe_act")
# Norm -> pairs of the stage that reads the hidden state first and the one that adds to it last.
NORM_SPANS = {
    "attn_norm": (("attn", "attn"),),
    "mamba_norm": (("mamba", "mamba"),),
    "mlp_norm": (("mlp", "mlp"), ("moe_router", "moe_combine")),
}
NORM_SPANS[LAYER_INPUT] = tuple(span for spans in NORM_SPANS.values() for span in spans)


def why_not(
    modules: Collection[str],
    stages: Sequence[Stage],
    runs: Sequence[Run],
    recomputed: Collection[str] = (),
    stashed: bool = False,
) -> list[str]:
    """Every reason why these modules cannot be offloaded; empty when they can.

    stages: of one chunk, in order. runs: how they are cut (`graphs/stages.py`); one run that is
    not captured for eager training. recomputed: modules, or whole stages, that are computed again
    in the backward instead of saved. stashed: whether experts keep their rows in a stash.
    """
    if isinstance(modules, str):
        return [
            f"modules is a collection of names, not the string {modules!r}: write [{modules!r}]"
        ]
    asked = [name for name in MODULES if name in modules]
    errors = []
    for name in sorted(set(modules) - set(MODULES)):
        near = difflib.get_close_matches(name, MODULES, n=1)
        errors.append(
            f"there is no module {name!r}"
            + (f": did you mean {near[0]!r}?" if near else f", only {', '.join(MODULES)}")
        )
    present = {stage.name for stage in stages}
    for name in asked:
        layers = _between_regions(name, stages, runs)
        shown = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
        again = {
            f"is computed again in the backward (recomputation of {owner}), so there is nothing "
            "to move: leave one of the two out": name != LAYER_INPUT
            for owner in recomputed
            if owner == name or owner in STAGES_OF[name]
        }
        problems = {
            f"is part of {' or '.join(STAGES_OF[name])}, and the model has only the stages "
            f"{', '.join(sorted(present))}": present.isdisjoint(STAGES_OF[name]),
            "needs core_attn: its input is the output of the attention, which core_attn keeps on "
            "the device; add core_attn or leave attn_proj out": (
                name == "attn_proj" and "core_attn" not in asked
            ),
            "is what recomputation begins with: recompute stages, or leave it out": (
                name == LAYER_INPUT and not recomputed
            ),
            **again,
            "is in the stash of experts: leave it out, or train without a stash": (
                stashed and name in EXPERT_MODULES
            ),
            f"saves a hidden state that a region takes in or hands on (layers {shown}), in memory "
            "that its slot owns anyway: leave it out, capture the stages around it together "
            "(granularity chunk), or none of them": bool(layers),
        }
        errors += [f"{name} {problem}" for problem, is_there in problems.items() if is_there]
    return errors


def _between_regions(norm: str, stages: Sequence[Stage], runs: Sequence[Run]) -> list[int]:
    """Layers in which the hidden state that `norm` saves is made, or added to last, outside of the
    norm's region. The first stage of a chunk does not count: something has to come in somewhere."""
    run_of = [number for number, run in enumerate(runs) for _ in range(run.start, run.stop)]
    layers = []
    for first, last in NORM_SPANS.get(norm, ()):
        for index in (
            index for index, stage in enumerate(stages) if stage.name == first and index > 0
        ):
            end = next(
                (
                    place
                    for place in range(index, len(stages))
                    if stages[place].layer == stages[index].layer and stages[place].name == last
                ),
                index,
            )
            touched = {run_of[place] for place in (index - 1, index, end)}
            if len(touched) > 1 and any(runs[number].captured for number in touched):
                layers.append(stages[index].layer)
    return sorted(set(layers))
