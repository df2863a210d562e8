"""Ways to make the grouped products of experts: which are right, and which is the fastest.

    PYTHONPATH=src python3 benchmarks/moe_grouped.py [--out FILE] [--seconds 100] [--tokens 1024
    4096 16384]

For experts of Moonlight's shape (64, of which each token goes to 6, hidden size 2048, 1408 wide):
gradients of both matrices added to what is there, and the four products of rows with matrices.
First every way of `moe_grouped_candidates.py` is compiled and compared with its naive twin, in
several processes, so that one which fails or hangs costs nothing but its row (`section` check:
`ok`, or why not). A way by descriptors must give the same bits twice and in a replayed graph with
other offsets. Then what was right is timed (median over replays of a graph that holds the work
several times), and the best five of each product are printed as JSON lines (`section` best), with
the rate in TFLOP/s of live rows and in GB/s of what is read and written at least once; under them
what the best of each kernel took that is not among the five. Printed are these and failures, --out
keeps all rows (`section` time, too). Without CUDA everything is tiny and runs in Triton's
interpreter (TRITON_INTERPRET=1), which shows that the script works and nothing else.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from moe_experts import MOONLIGHT, Row, Session, Shape, capture, distance
from moe_grouped_candidates import added, multiplied
from torch import Tensor
from trials import FAILED, check_apart, keep, report

from packgraph.bench.rows import why
from packgraph.ops.grouped_gemm import (
    Added,
    Multiplied,
    add_by_descriptors,
    add_products,
    multiply_by_descriptors,
    programs_at_once,
)
from packgraph.ops.linear import matrices_gradient, product

TINY = Shape(32, 24, 3, 2)
RELATIVE = 0.01  # bfloat16
WORKERS, CHECKING = 8, 0.6  # processes that check, and the part of the time they may take
BEST = 5
Way = Added | Multiplied


class Product(NamedTuple):
    """A product of one layer. added: total [E, I, J] += [R, I]^T [R, J]; else rows [R, I] -> [R,
    J], and `transposed` says that the matrices are [E, J, I]."""

    name: str
    added: bool
    of_left: int
    of_right: int
    transposed: bool = False


class Problem(NamedTuple):
    """Inputs of a product: left [R, I]; right [R, J] (gradients) or matrices; offsets int32 [E];
    how many rows live."""

    left: Tensor
    right: Tensor
    offsets: Tensor
    used: int


def products(shape: Shape) -> list[Product]:
    """Those of forward and backward, gradients of matrices first."""
    up, down, hidden = 2 * shape.width, shape.width, shape.hidden
    return [
        Product("up_added", True, up, hidden),
        Product("down_added", True, hidden, down),
        Product("up", False, hidden, up, True),
        Product("down", False, down, hidden, True),
        Product("up_of_rows", False, up, hidden),
        Product("down_of_rows", False, hidden, down),
    ]


def candidates(cuda: bool) -> list[Way]:
    """All ways; the number of a way in this list is its name between processes."""
    return (
        [*added(), *multiplied()]
        if cuda
        else [added()[0], added()[-1], *added()[15:17], *multiplied()[:2]]
    )


def written(way: Way) -> str:
    """A way in one line."""
    return " ".join(
        f"{name}={value}" if name != "kernel" else value for name, value in way._asdict().items()
    )


def draw(session: Session, counts: Tensor, spare: int, which: Product) -> Problem:
    """A problem with so many rows per expert and `spare` rows after them, which are NaN."""
    used = int(counts.sum())
    offsets = counts.cumsum(0).int().to(session.device)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=session.device).to(session.dtype)

    left = normal(used + spare, which.of_left)
    left[used:] = float("nan")
    if which.added:
        right = normal(used + spare, which.of_right)
        right[used:] = float("nan")
    else:
        sizes = (
            (which.of_right, which.of_left) if which.transposed else (which.of_left, which.of_right)
        )
        right = normal(counts.shape[0], *sizes)
    return Problem(left, right, offsets, used)


def counts_of(tokens: int, shape: Shape) -> Tensor:
    """Rows per expert, where experts are of unequal popularity."""
    popularity = 0.2 + torch.rand(shape.experts)
    return (
        torch.multinomial(popularity.expand(tokens, -1), shape.places)
        .flatten()
        .bincount(minlength=shape.experts)
    )


def make(way: Way, which: Product, problem: Problem, total: Tensor | None) -> Tensor:
    """Make a product in a way: what is added goes to `total` in place."""
    device = problem.left.device
    programs = programs_at_once(device, way.programs) if device.type == "cuda" else 2
    if isinstance(way, Added):
        assert total is not None
        if way.kernel == "descriptors":
            add_by_descriptors(total, problem.left, problem.right, problem.offsets, way, programs)
        else:
            add_products(total, problem.left, problem.right, problem.offsets, way)
        return total
    if way.kernel == "descriptors":
        return multiply_by_descriptors(
            problem.left, problem.right, problem.offsets, which.transposed, way, programs
        )
    if device.type != "cuda":
        return product(problem.left, problem.right, problem.offsets, which.transposed)
    return F.grouped_mm(
        problem.left, problem.right.mT if which.transposed else problem.right, offs=problem.offsets
    )


def expected(which: Product, problem: Problem, total: Tensor | None) -> Tensor:
    """The naive twin, one product after the other in float32."""
    ends = problem.offsets.tolist()
    spans = list(zip([0, *ends], ends))
    if which.added:
        assert total is not None
        sums = [
            problem.left[start:end].float().mT @ problem.right[start:end].float()
            for start, end in spans
        ]
        return total.float() + torch.stack(sums)
    matrices = problem.right.mT if which.transposed else problem.right
    return torch.cat(
        [
            problem.left[start:end].float() @ matrix.float()
            for (start, end), matrix in zip(spans, matrices)
        ]
    )


def check(session: Session, way: Way) -> Row:
    """A way against its twin: widths that no tile divides, experts without rows, NaN in the tail;
    twice; replayed."""
    torch.manual_seed(0)
    is_added = isinstance(way, Added)
    sizes = torch.tensor([0, 1, 130, 0, 300, 64, *range(58)] if session.cuda else [0, 1, 20])
    widths = (
        (336, 272) if session.cuda else (40, 24)
    )  # of 16, as all that is timed: Triton compiles for that
    found = {}
    for transposed in (False,) if is_added else (False, True):
        which = Product("check", is_added, *widths, transposed)
        problem = draw(session, sizes, 20, which)
        before = (
            torch.randn(len(sizes), *widths, device=session.device).to(session.dtype)
            if is_added
            else None
        )
        results = []
        for _ in range(2):
            there = None if before is None else before.clone()
            results.append(
                make(way, which, problem, there)[slice(None) if is_added else slice(problem.used)]
            )
        far = distance(results[0], expected(which, problem, before))
        same = torch.equal(results[0], results[1])
        kept = before is None or torch.equal(results[0][0], before[0])
        replayed = not session.cuda or check_replay(session, way, which, problem, before)
        found[f"transposed_{transposed}"] = {
            "distance": far,
            "same_bits": same,
            "empty_kept": kept,
            "replayed": replayed,
        }
    right = all(
        one["distance"] <= RELATIVE and one["same_bits"] and one["empty_kept"] and one["replayed"]
        for one in found.values()
    )
    return {"ok": right, "found": found}


def check_replay(
    session: Session, way: Way, which: Product, problem: Problem, before: Tensor | None
) -> bool:
    """Whether a replay with other offsets and rows has the bits of an eager call."""
    total = None if before is None else before.clone()
    static: list[Tensor] = []
    captured = capture(lambda: (static.clear(), static.append(make(way, which, problem, total))))
    counts = problem.offsets.diff(prepend=problem.offsets.new_zeros(1))
    problem.offsets.copy_(counts.flip(0).cumsum(0))
    problem.left[: problem.used].normal_()
    if total is not None and before is not None:
        problem.right[: problem.used].normal_()
        total.copy_(before)
    captured.replay()
    again = make(way, which, problem, None if before is None else before.clone())
    live = slice(None if which.added else problem.used)
    return torch.equal(static[0][live], again[live])


def check_all(session: Session) -> list[Way]:
    """Check every way; those that are right."""
    ways = candidates(session.cuda)
    found = check_apart([__file__], len(ways), WORKERS, CHECKING, session)
    for way, row in zip(ways, found, strict=True):
        keep(
            session,
            not row["ok"],
            section="check",
            form=type(way).__name__,
            way=written(way),
            **row,
        )
    return [way for way, row in zip(ways, found, strict=True) if row["ok"]]


def rates(which: Product, problem: Problem, microseconds: float) -> Row:
    """What a time makes of operations and bytes."""
    experts = int((problem.offsets.diff(prepend=problem.offsets.new_zeros(1)) > 0).sum())
    matrices = experts * which.of_left * which.of_right
    rows = problem.used * (which.of_left + which.of_right)
    moved = ((2 if which.added else 1) * matrices + rows) * problem.left.element_size()
    operations = 2 * problem.used * which.of_left * which.of_right
    return {
        "us": round(microseconds, 1),
        "tflops": round(operations / microseconds * 1e-6, 1),
        "gbps": round(moved / microseconds * 1e-3, 1),
    }


def timed(session: Session, which: Product, problem: Problem, work: Callable[[], object]) -> Row:
    """Figures of some work, or why there are none."""
    if time.monotonic() > session.end:
        return {"reason": "not timed: the time was over"}
    try:
        return rates(which, problem, session.microseconds(work))
    except FAILED as error:
        return {"error": why(error)}


def time_product(
    session: Session, which: Product, problem: Problem, ways: list[Way], tokens: int
) -> None:
    """Rows of times for all ways, then the best of them."""
    what = {"product": which.name, "tokens": tokens, "live_rows": problem.used}
    experts, rows = problem.offsets.shape[0], []
    total = problem.left.new_zeros(experts, which.of_left, which.of_right) if which.added else None
    if which.added:

        def usual() -> None:
            total.add_(matrices_gradient(problem.right, problem.left, problem.offsets, False))

        rows.append(
            {
                "kernel": "addition",
                "way": "gradient, then addition",
                **timed(session, which, problem, usual),
            }
        )
    for way in ways:
        if isinstance(way, Added) == which.added:
            found = timed(session, which, problem, lambda way=way: make(way, which, problem, total))
            rows.append({"kernel": way.kernel, "way": written(way), **found})
    for row in rows:
        keep(session, "us" not in row, section="time", **what, **row)
    shown: list[str] = []
    for place, row in enumerate(
        sorted((row for row in rows if "us" in row), key=lambda row: row["us"]), 1
    ):
        keep(
            session,
            place <= BEST or row["kernel"] not in shown,
            section="best",
            **what,
            place=place,
            **row,
        )
        shown.append(row["kernel"])


def main() -> int:
    """Returns 1 if no way was right. One that fails is a finding, no fault of the script's."""
    parser = argparse.ArgumentParser(
        description="Grouped products of experts: all ways checked, the best five named."
    )
    parser.add_argument("--out", type=Path, help="a file that rows are added to")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--check", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    session = Session(device, options.out, options.seconds)
    if options.check is not None:
        checked = candidates(session.cuda)
        report(options.check, lambda number: check(session, checked[number]))
        return 0
    torch.manual_seed(0)
    ways = check_all(session)
    shape = MOONLIGHT if session.cuda else TINY
    for tokens in options.tokens if session.cuda else [8]:
        counts = counts_of(tokens, shape)
        for which in products(shape):
            time_product(session, which, draw(session, counts, 0, which), ways, tokens)
    return 0 if ways else 1


if __name__ == "__main__":
    sys.exit(main())
