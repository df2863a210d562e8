"""Times of the products of Qwen3's linear layers in float8, and of the casts before them.

    PYTHONPATH=src python benchmarks/fp8_products.py --shape 4b --tokens 16384 >> rows.jsonl

One JSON row for each matrix and kernel: the product in bfloat16, in float8 with and without fast
accumulation, casts of rows and of columns, products with the casts of their weights, and the
gradient of weights both ways: in float8 it needs casts by columns of x and grad, and is added to
what there is. Further rows have the relative distance (`error`) of gradients of weights to that of
float32 numbers, and of those in float8 to the float32 product of the same codes (`error_of_sums`):
what the device loses in sums over all tokens. Medians of
`triton.testing.do_bench`, which empties the L2 cache before every launch. Needs a GPU with float8.
"""

import argparse
import json
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from triton.testing import do_bench

from packgraph.ops.float8.cast import columns_to_float8, from_float8, rows_to_float8
from packgraph.ops.float8.linear import (
    add_float8_weight_gradient,
    float8_product,
    float8_rows_gradient,
)

SHAPES = {  # hidden size, columns of q, of k and v, of the feed-forward block
    "0.6b": (1024, 2048, 1024, 3072),
    "4b": (2560, 4096, 1024, 9728),
    "8b": (4096, 4096, 1024, 12288),
}


def matrices(shape: str) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each layer."""
    hidden, queries, keys, width = SHAPES[shape]
    return {
        "q": (hidden, queries),
        "k": (hidden, keys),
        "o": (queries, hidden),
        "gate": (hidden, width),
        "down": (width, hidden),
    }


def scaled(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], *, fast: bool
) -> Callable[[], Tensor]:
    """The product of what is cast already."""
    return lambda: torch._scaled_mm(
        left[0],
        right[0].t(),
        scale_a=left[1],
        scale_b=right[1].t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def kernels(
    x: Tensor, weight: Tensor, grad: Tensor
) -> Iterator[tuple[str, bool, Callable[[], object]]]:
    """Name, whether it is a product, and what is timed. x: [T, I]; weight: [O, I]; grad: [T, O]."""
    rows, matrix = rows_to_float8(x), rows_to_float8(weight)
    grad_rows = rows_to_float8(grad)
    x_columns, grad_columns = columns_to_float8(x), columns_to_float8(grad)

    yield "bf16", True, lambda: x @ weight.t()
    yield "fp8, fast accumulation", True, scaled(rows, matrix, fast=True)
    yield "fp8, float32 accumulation", True, scaled(rows, matrix, fast=False)
    yield "forward with the weight's cast", True, lambda: float8_product(*rows, weight)
    yield "backward with the weight's cast", True, lambda: float8_rows_gradient(*grad_rows, weight)
    yield "gradient of the weight, bf16", True, lambda: grad.t() @ x
    columns = *grad_columns, *x_columns, x.dtype
    yield "gradient of the weight, fp8", True, scaled(grad_columns, x_columns, fast=True)
    float32 = scaled(grad_columns, x_columns, fast=False)
    yield "gradient of the weight, fp8, float32 accumulation", True, float32
    total = torch.zeros_like(weight)
    yield "gradient of the weight, bf16, added", True, lambda: total.addmm_(grad.t(), x)
    yield (
        "gradient of the weight, fp8, added",
        True,
        lambda: add_float8_weight_gradient(total, *columns),
    )
    taken = torch.ones(x.shape[0], 1, device=x.device, dtype=torch.bool)
    yield "cast of x by columns, of rows that take part", False, lambda: columns_to_float8(x, taken)
    yield "cast of x by columns", False, lambda: columns_to_float8(x)
    yield "cast of grad by columns", False, lambda: columns_to_float8(grad)
    yield "cast of x by rows", False, lambda: rows_to_float8(x)
    yield "cast of grad by rows", False, lambda: rows_to_float8(grad)
    yield "cast of the weight by rows", False, lambda: rows_to_float8(weight)
    yield "cast of the weight by columns", False, lambda: columns_to_float8(weight)


def errors(x: Tensor, grad: Tensor) -> Iterator[dict[str, object]]:
    """How far gradients of the weight [O, I] are from exact ones. x: [T, I]; grad: [T, O]."""
    exact = grad.float().t() @ x.float()
    yield {"kernel": "gradient of the weight, bf16", "error": distance(grad.t() @ x, exact)}
    left, right = columns_to_float8(grad), columns_to_float8(x)
    of_codes = from_float8(*left) @ from_float8(*right).t()
    for fast in (True, False):
        found = scaled(left, right, fast=fast)()
        yield {
            "kernel": f"gradient of the weight, fp8, {'fast' if fast else 'float32'} accumulation",
            "error": distance(found, exact),
            "error_of_sums": distance(found, of_codes),
        }


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return ((found.float() - expected).norm() / expected.norm()).item()


def main() -> None:
    """Print one JSON row for each kernel of each matrix."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="4b")
    parser.add_argument("--tokens", type=int, default=16384)
    options = parser.parse_args()
    torch.manual_seed(0)
    for matrix, (inputs, outputs) in matrices(options.shape).items():
        x = torch.randn(options.tokens, inputs, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        grad = torch.randn(options.tokens, outputs, device="cuda", dtype=torch.bfloat16)
        about = {
            "benchmark": "fp8_products",
            "shape": options.shape,
            "matrix": matrix,
            "sizes": [inputs, outputs],
            "tokens": options.tokens,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        for row in errors(x, grad):
            print(json.dumps(about | row), flush=True)
        for kernel, multiplies, work in kernels(x, weight, grad):
            low, median, high = do_bench(work, warmup=20, rep=100, quantiles=[0.2, 0.5, 0.8])
            flops = 2 * options.tokens * inputs * outputs
            row = about | {
                "kernel": kernel,
                "ms": median,
                "p20": low,
                "p80": high,
                "tflops": round(flops / median / 1e9, 1) if multiplies else None,
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
