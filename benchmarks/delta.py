"""The gated delta rule on packed documents: kernels, single operations, and the kernels of fla.

    PYTHONPATH=src python3 benchmarks/delta.py [--out FILE] [--seconds 200]
    [--tokens 4096 16384 65536] [--documents 1024 4096] [--pieces]

Prints one JSON line per finding, for 16 heads with keys and values of 128 columns in bfloat16, as
in a layer of Qwen3-Next. Lengths of documents are exponential with a mean of `--documents`, and
fill the row. A time is the median of several; `ratio` is by how much it exceeds ours, for the same
documents and timed alike. fla reads boundaries on the host, so it is timed by launches, and so are
we once more. Single operations are timed at 4,096 tokens only. `--pieces` times every kernel alone.
Without CUDA everything is tiny and single operations run, which shows that the script works and
nothing else.
"""

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from moe_experts import Row, Session
from ssd import launched
from torch import Tensor

from packgraph.mamba.gated_delta import chunked_gated_delta, gated_delta

HEADS, SIZE, CHUNK = 16, 128, 64
MOST_SINGLE = 4096  # tokens that single operations are timed at


class DeltaCase(NamedTuple):
    """Operands of one layer: q, k, v, g, beta. lengths: of the documents, which fill the row."""

    lengths: list[int]
    ids: Tensor
    operands: list[Tensor]
    grad: Tensor


def draw(session: Session, tokens: int, mean: int) -> DeltaCase:
    """Documents of exponential lengths, the last one cut; keys and queries of length one."""
    torch.manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = 1 + int(torch.empty(()).exponential_() * mean)
        lengths.append(min(drawn, tokens - sum(lengths)))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    heads, size = (HEADS, SIZE) if session.cuda else (2, 16)
    q, k, v, grad = torch.randn(4, tokens, heads, size).to(session.device, session.dtype).unbind()
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g, beta = torch.rand(2, tokens, heads).to(session.device)
    return DeltaCase(lengths, ids.to(session.device), [q, k, v, -0.1 * g, beta], grad)


def by_fla(case: DeltaCase) -> Callable[..., Tensor]:
    """fla's kernels. Raises ImportError."""
    chunked = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    ends = torch.tensor([0, *case.lengths], device=case.ids.device).cumsum(0)

    def run(*operands: Tensor) -> Tensor:
        q, k, v, g, beta = (x[None] for x in operands)
        found: Tensor = chunked(q, k, v, g=g, beta=beta, scale=1.0, cu_seqlens=ends)[0][0]
        return found

    return run


def timed(
    session: Session,
    case: DeltaCase,
    what: Row,
    function: Callable[..., Tensor],
    by_launches: bool,
    ours: dict[str, float],
) -> dict[str, float]:
    """Writes rows of forward, and of forward and backward; the microseconds of each, by part."""
    leaves = [x.detach().requires_grad_() for x in case.operands]
    found: dict[str, float] = {}

    def forward() -> object:
        with torch.no_grad():
            return function(*case.operands)

    def both() -> object:
        return torch.autograd.grad(function(*leaves), leaves, case.grad)

    def measure(part: str, work: Callable[[], object]) -> Row:
        time = launched(session, work) if by_launches else session.microseconds(work)
        found[part] = time
        row: Row = {"ms": round(time / 1e3, 3)}
        return row | ({"ratio": round(time / ours[part], 2)} if part in ours else {})

    timed_by = "launches" if by_launches else "replays"
    for part, work in (("forward", forward), ("forward_and_backward", both)):
        session.attempt(
            functools.partial(measure, part, work), **what, part=part, timed_by=timed_by
        )
    return found


def compare(session: Session, tokens: int, mean: int) -> None:
    """Rows of all ways for one pack of documents."""
    case = draw(session, tokens, mean)
    what = {"section": "delta", "tokens": tokens, "mean": mean, "documents": len(case.lengths)}

    def run(*operands: Tensor) -> Tensor:
        q, k, v, g, beta = operands
        return gated_delta(q, k, v, g, beta, case.ids, CHUNK)

    def single(*operands: Tensor) -> Tensor:
        q, k, v, g, beta = operands
        return chunked_gated_delta(q, k, v, g, beta, case.ids, CHUNK)

    ours = timed(session, case, what | {"way": "packgraph"}, run, False, {})
    if tokens <= MOST_SINGLE:
        timed(session, case, what | {"way": "single operations"}, single, False, ours)
    try:
        theirs = by_fla(case)
    except ImportError as error:
        session.write(**what, way="fla", reason=f"not installed: {error}")
        return
    ours = timed(session, case, what | {"way": "packgraph"}, run, True, {})
    timed(session, case, what | {"way": "fla"}, theirs, True, ours)
    session.attempt(lambda: near(run, theirs, case), **what, way="fla", part="check")


def near(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], case: DeltaCase) -> Row:
    """Relative distances of outputs and gradients of two ways."""
    results = []
    for function in (ours, theirs):
        leaves = [x.detach().requires_grad_() for x in case.operands]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, case.grad.to(out))])
    distances = [
        round(float((one.double() - other.double()).norm() / other.double().norm()), 6)
        for one, other in zip(*results, strict=True)
    ]
    names = ("y", "q", "k", "v", "g", "beta")
    return {"distances": dict(zip(names, distances, strict=True)), "ok": max(distances) < 0.02}


def check(session: Session) -> Row:
    """Outputs and gradients against single operations in float64."""
    case = draw(session, 1024 if session.cuda else 50, 200 if session.cuda else 20)

    def exact(*operands: Tensor) -> Tensor:
        q, k, v, g, beta = (x.double() for x in operands)
        return chunked_gated_delta(q, k, v, g, beta, case.ids, CHUNK)

    def ours(*operands: Tensor) -> Tensor:
        q, k, v, g, beta = operands
        return gated_delta(q, k, v, g, beta, case.ids, CHUNK)

    return near(ours, exact, case)


def time_pieces(session: Session, tokens: int, mean: int) -> None:
    """A row for every kernel alone, and for whole passes."""
    from packgraph.mamba import delta_backward as backward
    from packgraph.mamba import delta_forward as kernels

    case = draw(session, tokens, mean)
    q, k, v, g, beta = case.operands
    ids, dy, sizes = case.ids, case.grad, kernels.delta_sizes(k, v, CHUNK)
    ways = kernels.delta_ways(sizes, v.dtype)
    prepared = kernels.prepare(q, k, v, g, beta, ids, sizes, ways.prepare)
    ahead, back = kernels.chains_of(ids, sizes)
    pieces: dict[str, Callable[[], object]] = {
        "chains": lambda: kernels.chains_of(ids, sizes),
        "prepare": lambda: kernels.prepare(q, k, v, g, beta, ids, sizes, ways.prepare),
        "carry": lambda: kernels.carry(k, ids, prepared, ahead, sizes, ways.carry),
        "all of forward": lambda: kernels.forward(q, k, v, g, beta, ids, CHUNK),
        "carry back": lambda: backward.carry_back(q, k, dy, ids, prepared, back, sizes, ways.back),
        "all of backward": lambda: backward.backward(dy, q, k, v, g, beta, ids, CHUNK),
    }

    def milliseconds(work: Callable[[], object]) -> Row:
        return {"ms": round(session.microseconds(work) / 1e3, 4)}

    for name, work in pieces.items():
        session.attempt(
            functools.partial(milliseconds, work),
            section="pieces",
            tokens=tokens,
            mean=mean,
            piece=name,
        )


def main() -> int:
    """Returns how many checks found something wrong."""
    parser = argparse.ArgumentParser(description="Times of the gated delta rule.")
    parser.add_argument("--out", type=Path, help="a file that rows are added to")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--documents", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--pieces", action="store_true", help="time every kernel alone, too")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    session = Session(device, options.out, options.seconds)
    session.attempt(lambda: check(session), section="check")
    for tokens in options.tokens if session.cuda else [50]:
        for mean in options.documents if session.cuda else [20]:
            compare(session, tokens, mean)
            if options.pieces and session.cuda:
                time_pieces(session, tokens, mean)
    return session.bad


if __name__ == "__main__":
    sys.exit(main())
