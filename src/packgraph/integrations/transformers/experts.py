"""Experts of transformers' models as packgraph's grouped products: one implementation for its
interface of experts.

    hidden [T, H] -- rows by expert -- first product -- gate -- second product -- sum per token

No host sync, all shapes follow from T. Rows of hidden that are exactly zero, as padding is where
nothing has a bias, are routed nowhere: most experts map zero to zero, and the gradients that such a
row takes part in are zero, too. Where they do not (`zero_in_zero_out`) padding is routed like
tokens; its gradients are zero.
"""

from typing import Any

import torch
from torch import Tensor, nn

from packgraph.moe.experts import activate_and_multiply
from packgraph.moe.permute import RowPlan, combine_rows, gather_pairs, gather_rows, plan_rows
from packgraph.ops.linear import autocast, product


def run_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden: [T, H]; top_k_index: int [T, k]; top_k_weights: [T, k]. Returns [T, H]."""
    experts = top_k_index.int()
    if zero_in_zero_out(module):
        experts = experts.masked_fill(~(hidden != 0).any(-1, keepdim=True), -1)
    first = module.gate_up_proj if module.has_gate else module.up_proj
    plan = plan_rows(experts, first.shape[0], experts.numel())
    weights = gather_pairs(top_k_weights.float(), plan)
    rows, first = autocast(gather_rows(hidden, plan), first)
    h = product(rows, first, plan.offsets, not module.is_transposed)
    if is_swiglu(module):
        made = activate_and_multiply(h, weights, module.down_proj, plan.offsets)
    else:
        made = _by_operations(module, h, weights, plan)
    return combine_rows(made, plan).to(hidden.dtype)


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


def _by_operations(module: Any, h: Tensor, weights: Tensor, plan: RowPlan) -> Tensor:
    """Applies the activation and the product after it: [R, H], weights applied."""
    expert = None
    if module.has_bias:
        last = plan.offsets.shape[0] - 1
        row = torch.arange(h.shape[0], device=h.device, dtype=torch.int32)
        expert = torch.searchsorted(plan.offsets, row, right=True).clamp(max=last)
        bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        h = h + bias.to(h.dtype)[expert]
    act = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    act, down = autocast(act, module.down_proj)
    made = product(act, down, plan.offsets, not module.is_transposed)
    if expert is not None:
        made = made + module.down_proj_bias.to(made.dtype)[expert]
    return (made * weights[:, None]).to(made.dtype)
