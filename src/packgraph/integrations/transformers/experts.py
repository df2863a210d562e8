"""Experts of transformers' models as packgraph's grouped products: one implementation for its
interface of experts.

    hidden [T, H] -- rows by expert -- first product -- gate -- second product -- sum per token

Each module has a dispatcher (`dispatching`), local at first: rows by expert may be those of other
ranks, too (`packgraph.parallel.expert.split_experts`).

No host sync, all shapes follow from T. Rows of hidden that are exactly zero, as padding is where
nothing has a bias, are routed nowhere: most experts map zero to zero, and the gradients that such a
row takes part in are zero, too. Where they do not (`zero_in_zero_out`) padding is routed like
tokens; its gradients are zero.
"""

from typing import Any

import torch
from torch import Tensor, nn

from packgraph.moe.dispatch.dispatcher import Dispatching, ExpertRows, Routing
from packgraph.moe.experts import activate_and_multiply
from packgraph.ops.linear import autocast, product
from packgraph.parallel.pieces import part_of


def run_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden: [T, H]; top_k_index: int [T, k]; top_k_weights: [T, k]. Returns [T, H].

    Collective over the ranks that share the experts.
    """
    experts = top_k_index.int()
    if zero_in_zero_out(module):
        experts = experts.masked_fill(~(hidden != 0).any(-1, keepdim=True), -1)
    first = module.gate_up_proj if module.has_gate else module.up_proj
    dispatcher, routing = module.dispatching.dispatcher, Routing(experts, top_k_weights.float())
    plan = module.dispatching.plan(routing)
    rows = dispatcher.dispatch(hidden, routing, plan)
    values, first = autocast(rows.values, first)
    h = product(values, first, rows.offsets, not module.is_transposed)
    if is_swiglu(module):
        made = activate_and_multiply(h, rows.weights, module.down_proj, rows.offsets)
    else:
        made = _by_operations(module, h, rows)
    found: Tensor = dispatcher.combine(made, plan)
    return found.to(hidden.dtype)


def experts_of(model: nn.Module) -> list[Any]:
    """Modules whose forward goes through transformers' interface of experts."""
    # hasattr of a module that lacks a name costs every replay a call of Python
    return [module for module in model.modules() if "is_concatenated" in vars(module)]


def give_dispatchers(model: nn.Module) -> None:
    """Give all experts of `model` that have no dispatcher a local one."""
    for module in experts_of(model):
        if not hasattr(module, "dispatching"):
            stack = module.down_proj
            module.dispatching = Dispatching(stack.shape[0]).to(stack.device)


def waits(layer: nn.Module) -> str:
    """Why a layer cannot be captured: a dispatcher of its experts waits for the host; else
    empty."""
    reasons = [
        reason
        for module in experts_of(layer)
        for reason in module.dispatching.dispatcher.why_not.values()
    ]
    return next(iter(reasons), "")


def exchanged_width(model: nn.Module) -> int:
    """Numbers of a row that ranks exchange: the most that experts of `model` take; 0 without."""
    sizes = [
        module.down_proj.shape[2 if module.is_transposed else 1] for module in experts_of(model)
    ]
    return max(sizes, default=0)


def expert_split_problems(model: nn.Module, ranks: int) -> list[str]:
    """Every reason why so many ranks cannot share the experts of a model of transformers, each
    having an equal part of the stacks [E, ...]."""
    experts = experts_of(model)
    if not experts:
        return ["it has no experts that run through transformers' interface"]
    problems = []
    for module in experts:
        count, name = module.num_experts, type(module).__name__
        other = [
            key
            for key, stack in module.named_parameters()
            if (stack if (part := part_of(stack)) is None else part).shape[:1] != (count,)
        ]
        found = {
            f"{', '.join(other)} of {name} is no stack of its {count} experts": bool(other),
            f"{ranks} ranks cannot share the {count} experts of {name} equally": count % ranks > 0,
            f"{name} has buffers, which would stay whole": any(
                True for _ in module.buffers(recurse=False)
            ),
        }
        problems += [problem for problem, is_there in found.items() if is_there]
    around = [getattr(module, "base_layer", None) for module in model.modules()]
    if any(one is module for one in around for module in experts):
        problems.append("adapters of its experts would stay whole")
    return list(dict.fromkeys(problems))


def zero_in_zero_out(module: Any) -> bool:
    """Returns whether a row of zeros gives zeros and takes part in no gradient: silu(gate) * up, or
    the squared ReLU, without biases."""
    squared = type(getattr(module, "act_fn", None)).__name__ == "ReLUSquaredActivation"
    return is_swiglu(module) or (squared and not module.has_gate and not module.has_bias)


def is_swiglu(module: Any) -> bool:
    """Returns whether the experts are silu(gate) * up, gate first, without biases."""
    own_gate = type(module)._apply_gate.__module__ != "transformers.integrations.moe"
    return (
        module.has_gate
        and module.is_concatenated
        and not module.is_transposed
        and not module.has_bias
        and not own_gate
        and isinstance(getattr(module, "act_fn", None), nn.SiLU)
    )


def expert_problems(module: Any) -> list[str]:
    """Every reason why `run_experts` would not be what the module itself does."""
    problems = {
        "its experts end with a norm": getattr(module, "has_post_expert_norm", False),
        "its experts are spread over ranks by transformers": (
            getattr(module, "_is_expert_parallel", False)
        ),
    }
    return [problem for problem, is_there in problems.items() if is_there]


def _by_operations(module: Any, h: Tensor, rows: ExpertRows) -> Tensor:
    """Applies the activation and the product after it: [R, H], weights applied."""
    if module.has_bias:
        h = h + _of_rows(
            module.gate_up_proj_bias if module.has_gate else module.up_proj_bias, h, rows
        )
    act = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    act, down = autocast(act, module.down_proj)
    made = product(act, down, rows.offsets, not module.is_transposed)
    if module.has_bias:
        made = made + _of_rows(module.down_proj_bias, made, rows)
    return (made * rows.weights[:, None]).to(made.dtype)


def _of_rows(bias: Tensor, like: Tensor, rows: ExpertRows) -> Tensor:
    """The bias [E, I] of the expert of each row: [R, I]. Rows behind the last expert's, whose
    gradients are undefined, take part in none."""
    row = torch.arange(like.shape[0], device=like.device, dtype=torch.int32)
    expert = torch.searchsorted(rows.offsets, row, right=True)
    live = (expert < bias.shape[0])[:, None]
    return torch.where(live, bias.to(like.dtype)[expert.clamp(max=bias.shape[0] - 1)], 0)
