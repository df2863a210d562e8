"""Times of the kernels that index by data: the loss, and the plan and moves of experts' rows.

    PYTHONPATH=src python benchmarks/kernel_times.py --label now >> rows.jsonl

Run it with the `src` of each tree that is compared, in turns. Median, 20th and 80th percentile of
`triton.testing.do_bench`, which empties the L2 cache before every launch. Needs a CUDA device.
"""

import argparse
import json
from collections.abc import Callable

import torch
from triton.testing import do_bench

from packgraph.moe.permute import combine_rows, gather_pairs, gather_rows, plan_rows
from packgraph.ops.loss import linear_cross_entropy

VOCABULARY, WIDTH = 151_936, 1024
EXPERTS, PLACES, EXPERT_WIDTH = 64, 6, 2048


def loss(tokens: int) -> Callable[[], object]:
    """Loss of a head of Qwen3's vocabulary, with the gradients that it makes at once."""
    hidden = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (tokens,), device="cuda")
    return lambda: linear_cross_entropy(hidden, weight, labels)


def rows(tokens: int) -> dict[str, Callable[[], object]]:
    """Moonlight's experts."""
    experts = torch.rand(tokens, EXPERTS, device="cuda").topk(PLACES).indices
    plan = plan_rows(experts, EXPERTS, tokens * PLACES)
    x = torch.randn(tokens, EXPERT_WIDTH, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(tokens, PLACES, device="cuda")
    gathered = gather_rows(x, plan)
    return {
        "plan of rows": lambda: plan_rows(experts, EXPERTS, tokens * PLACES),
        "gather of rows": lambda: gather_rows(x, plan),
        "combination of rows": lambda: combine_rows(gathered, plan),
        "gather of weights": lambda: gather_pairs(weights, plan),
    }


def main() -> None:
    """Print one JSON row for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--label", required=True, help="of the tree, in every row")
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    torch.manual_seed(0)
    for kernel, work in {"loss": loss(options.tokens), **rows(options.tokens)}.items():
        low, median, high = do_bench(work, warmup=50, rep=400, quantiles=[0.2, 0.5, 0.8])
        row = {
            "kernel": kernel,
            "tree": options.label,
            "tokens": options.tokens,
            "ms": median,
            "p20": low,
            "p80": high,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
