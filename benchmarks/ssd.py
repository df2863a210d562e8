"""Convolution, SSD and gated norm of a Mamba-2 layer: times, rates, floors, and the kernels of
others.

    PYTHONPATH=src python3 benchmarks/ssd.py [--out FILE] [--seconds 55] [--tokens 1024 4096 16384]
    [--chunk 128]
                                             [--heads 64] [--groups 8] [--pieces]

Prints one JSON line per finding, for H heads of 64 columns and G groups with states of 128: the
shape of a layer in a hybrid of 1 to 2 billion parameters. Documents are lognormal, the row is full.
A time is the median over replays of a graph that holds the work several times; `floor_us` is what
the bytes that must be moved (inputs, outputs and gradients, each once) take at 4.3 TB/s, or the
products at 797 TFLOP/s, whichever is longer. `--pieces` times every kernel alone. mamba_ssm,
causal_conv1d and fla get rows where they are installed; fla reads boundaries on the host, so it is
timed by launches, not by replays, and says so. Without CUDA everything is tiny and runs by the
clock, which shows that the script works and nothing else.
"""

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from moe_experts import Row, Session
from torch import Tensor

from packgraph.mamba.conv import packed_causal_conv
from packgraph.mamba.gated_norm import gated_rms_norm
from packgraph.mamba.ssd import chunked_ssd, ssd

BYTES_PER_US, FLOPS_PER_US = 4.3e6, 797e6  # measured on an H200
SIZE, STATE = 64, 128


class Case(NamedTuple):
    """One layer's operands. lengths: of the documents, which fill the row."""

    tokens: int
    heads: int
    groups: int
    chunk: int
    lengths: list[int]
    ids: Tensor
    operands: list[Tensor]
    grad: Tensor


def draw(session: Session, tokens: int, heads: int, groups: int, chunk: int) -> Case:
    """Documents of lognormal lengths, the last one cut; inputs as a layer has them: x, b and c
    slices of one tensor."""
    torch.manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = max(1, int(torch.randn(()).mul(1.0).add(6.0).exp()))
        lengths.append(min(drawn, tokens - sum(lengths)))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    size, state = (SIZE, STATE) if session.cuda else (4, 4)
    mixed = torch.randn(tokens, heads * size + 2 * groups * state).to(session.device, session.dtype)
    x, b, c = mixed.split([heads * size, groups * state, groups * state], 1)
    dt, a, d = 0.1 * torch.rand(tokens, heads), -torch.linspace(1, 16, heads), torch.ones(heads)
    b, c = (side.unflatten(1, (groups, state)) for side in (b, c))
    operands = [
        value.to(session.device) for value in (x.unflatten(1, (heads, size)), dt, a, b, c, d)
    ]
    return Case(
        tokens,
        heads,
        groups,
        chunk,
        lengths,
        ids.to(session.device),
        operands,
        torch.randn(operands[0].shape).to(operands[0]),
    )


def work_of(case: Case) -> dict[str, tuple[int, int]]:
    """Bytes and operations of forward, and of forward and backward, for rows within chunks; each
    byte counted once."""
    x, dt, b = case.operands[0], case.operands[1], case.operands[3]
    size, state = x.shape[2], b.shape[2]
    values, keys, steps = x.numel() * x.element_size(), b.numel() * b.element_size(), dt.nbytes
    scores = (
        case.tokens * case.chunk * case.groups * state
    )  # half of the pairs, two operations each
    pairs = case.tokens * case.chunk * case.heads * size
    through = 2 * case.tokens * case.heads * size * state  # rows into states, or states into rows
    forward = (2 * values + 2 * keys + steps, scores + pairs + 2 * through)
    both = (forward[0] + 3 * values + 4 * keys + 2 * steps, 4 * scores + 3 * pairs + 8 * through)
    return {"forward": forward, "forward_and_backward": both}


def with_floor(microseconds: float, moved: int, flops: int) -> Row:
    """A time beside the least that the bytes or the operations take."""
    floor = max(moved / BYTES_PER_US, flops / FLOPS_PER_US)
    return {
        "us": round(microseconds, 1),
        "floor_us": round(floor, 1),
        "of_floor": round(floor / microseconds, 3),
        "mbytes": round(moved / 1e6, 1),
        "gflops": round(flops / 1e9, 2),
    }


def timed(
    session: Session,
    case: Case,
    name: str,
    function: Callable[..., Tensor],
    by_launches: bool = False,
) -> None:
    """Rows of forward, and of forward and backward, of one way."""
    leaves = [value.detach().requires_grad_() for value in case.operands]
    measure = (lambda work: launched(session, work)) if by_launches else session.microseconds
    what = {
        "section": "ssd",
        "tokens": case.tokens,
        "heads": case.heads,
        "groups": case.groups,
        "chunk": case.chunk,
        "documents": len(case.lengths),
        "way": name,
        "timed_by": "launches" if by_launches else "replays",
    }

    def forward() -> object:
        with torch.no_grad():
            return function(*case.operands)

    def both() -> object:
        return torch.autograd.grad(function(*leaves), leaves, case.grad, allow_unused=True)

    for part, work in (("forward", forward), ("forward_and_backward", both)):
        session.attempt(
            lambda w=work, p=part: with_floor(measure(w), *work_of(case)[p]), **what, part=part
        )


def launched(session: Session, work: Callable[[], object]) -> float:
    """Microseconds per call of several calls in a row, launches and waits included."""
    if not session.cuda:
        return session.microseconds(work)
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(8):
            work()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / 8)
    return statistics.median(times[2:])


def by_mamba(case: Case) -> Callable[..., Tensor]:
    """mamba_ssm's Triton kernels. Raises ImportError."""
    combined = importlib.import_module(
        "mamba_ssm.ops.triton.ssd_combined"
    ).mamba_chunk_scan_combined
    return lambda x, dt, a, b, c, d: combined(
        x[None], dt[None], a, b[None], c[None], case.chunk, D=d, seq_idx=case.ids[None]
    )[0]


def by_fla(case: Case) -> Callable[..., Tensor]:
    """fla's gated linear attention with one decay per head, which is SSD with a group per head.
    Raises ImportError."""
    chunked = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    ends = torch.tensor([0, *case.lengths], device=case.grad.device).cumsum(0)
    repeats = case.heads // case.groups

    def run(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        query, key = (side.repeat_interleave(repeats, 1)[None] for side in (c, b))
        value = (x * dt[..., None].to(x.dtype))[None]
        out = chunked(query, key, value, (dt * a)[None], scale=1.0, cu_seqlens=ends)[0][0]
        return out + x * d[:, None].to(x.dtype)

    return run


def time_others(session: Session, case: Case) -> None:
    """Rows of libraries, or why there are none."""
    for name, make, by_launches in (("mamba_ssm", by_mamba, False), ("fla", by_fla, True)):
        try:
            function = make(case)
        except ImportError as error:
            session.write(
                section="ssd", way=name, tokens=case.tokens, reason=f"not installed: {error}"
            )
            continue
        timed(session, case, name, function, by_launches)


def time_neighbours(session: Session, case: Case) -> None:
    """Rows of the convolution and of the gated norm, ours and causal_conv1d's."""
    size, state = case.operands[0].shape[2], case.operands[3].shape[2]
    inner, channels = case.heads * size, case.heads * size + 2 * case.groups * state
    projected = torch.randn(case.tokens, inner + channels + case.heads).to(case.grad)
    gate, x = projected[:, :inner], projected[:, inner : inner + channels]
    weight, bias = torch.randn(channels, 4).to(case.grad), torch.randn(channels).to(case.grad)
    ways: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "conv": (lambda *leaves: packed_causal_conv(*leaves, case.ids), [x, weight, bias]),
        "gated_norm": (
            lambda *leaves: gated_rms_norm(*leaves, 1e-5, case.groups),
            [case.grad.flatten(1), gate, torch.ones(inner).to(case.grad)],
        ),
    }
    try:
        theirs = importlib.import_module("causal_conv1d").causal_conv1d_fn
    except ImportError as error:
        session.write(
            section="conv",
            way="causal_conv1d",
            tokens=case.tokens,
            reason=f"not installed: {error}",
        )
    else:
        ways["causal_conv1d"] = (
            lambda x, weight, bias: theirs(
                x.t()[None], weight, bias, seq_idx=case.ids[None], activation="silu"
            )[0].t(),
            [x, weight, bias],
        )
    for name, (function, operands) in ways.items():
        leaves = [value.detach().requires_grad_() for value in operands]
        moved = 2 * leaves[0].numel() * leaves[0].element_size() + (
            leaves[1].nbytes if name == "gated_norm" else 0
        )
        grad = torch.randn_like(function(*leaves))
        what = {"section": "neighbours", "tokens": case.tokens, "way": name}

        def both(function: Any = function, leaves: Any = leaves, grad: Tensor = grad) -> object:
            return torch.autograd.grad(function(*leaves), leaves, grad)

        def forward(function: Any = function, operands: Any = operands) -> object:
            with torch.no_grad():
                return function(*operands)

        session.attempt(
            lambda w=forward, m=moved: with_floor(session.microseconds(w), m, 0),
            **what,
            part="forward",
        )
        session.attempt(
            lambda w=both, m=moved: with_floor(session.microseconds(w), 5 * m // 2, 0),
            **what,
            part="forward_and_backward",
        )


def time_pieces(session: Session, case: Case) -> None:
    """A row for every kernel of SSD alone."""
    from packgraph.mamba import ssd_backward as backward
    from packgraph.mamba import ssd_forward as kernels

    x, dt, a, b, c, d = case.operands
    ids, dy, sizes = (
        case.ids,
        case.grad,
        kernels.sizes_of(case.operands[0], case.operands[3], case.chunk),
    )
    tables, through = kernels.tables_of(dt, a, ids, sizes)
    scores = kernels.scores_of(b, c, ids, sizes)
    entering, _ = kernels.carry(x, b, ids, tables, through, sizes)
    of_leaving, _ = kernels.carry(dy, c, ids, tables, through, sizes, entering)
    of_scores = backward.pair_gradients(x, dy, ids, tables, scores, sizes)[0]
    pieces: dict[str, Callable[[], object]] = {
        "tables": lambda: kernels.tables_of(dt, a, ids, sizes),
        "scores": lambda: kernels.scores_of(b, c, ids, sizes),
        "carry": lambda: kernels.carry(x, b, ids, tables, through, sizes),
        "all of forward": lambda: kernels.forward(x, dt, a, b, c, d, ids, case.chunk),
        "carry back": lambda: kernels.carry(dy, c, ids, tables, through, sizes, entering),
        "pairs": lambda: backward.pair_gradients(x, dy, ids, tables, scores, sizes),
        "shared, c": lambda: backward.shared_gradient(
            dy, b, of_scores, entering, ids, tables, sizes, query=c
        ),
        "shared, b": lambda: backward.shared_gradient(
            x, c, of_scores, of_leaving, ids, tables, sizes
        ),
        "values": lambda: backward.value_gradients(
            x, dy, b, c, d, ids, tables, scores, of_leaving, sizes
        ),
        "all of backward": lambda: backward.backward(dy, x, dt, a, b, c, d, ids, case.chunk),
    }
    for name, work in pieces.items():
        session.attempt(
            lambda w=work: {"us": round(session.microseconds(w), 1)},
            section="pieces",
            tokens=case.tokens,
            heads=case.heads,
            groups=case.groups,
            chunk=case.chunk,
            piece=name,
        )


def check(session: Session, case: Case) -> Row:
    """Outputs and gradients against plain operations in float64 (chunks of another size)."""
    results = []
    for function, kind in (
        (lambda *leaves: ssd(*leaves, case.ids, case.chunk), None),
        (lambda *leaves: chunked_ssd(*leaves, case.ids, 64), torch.float64),
    ):
        leaves = [
            value.detach().to(kind or value.dtype).requires_grad_() for value in case.operands
        ]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, case.grad.to(out))])
    distances = [
        round(float((ours.double() - theirs.double()).norm() / theirs.double().norm()), 6)
        for ours, theirs in zip(*results, strict=True)
    ]
    return {
        "distances": dict(zip(("y", "x", "dt", "a", "b", "c", "d"), distances, strict=True)),
        "ok": max(distances) < 0.015,
    }


def main() -> int:
    """Returns how many checks found something wrong."""
    parser = argparse.ArgumentParser(
        description="Times of convolution, SSD and gated norm of a Mamba-2 layer."
    )
    parser.add_argument("--out", type=Path, help="a file that rows are added to")
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 1024, 16384])
    parser.add_argument("--chunk", type=int, nargs="+", default=[128])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--pieces", action="store_true", help="time every kernel alone, too")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    session = Session(device, options.out, options.seconds)
    heads, groups, chunks = (
        (options.heads, options.groups, options.chunk) if session.cuda else (4, [2], [16])
    )
    session.attempt(
        lambda: check(
            session, draw(session, 1024 if session.cuda else 50, heads, groups[0], chunks[0])
        ),
        section="check",
    )
    for tokens in options.tokens if session.cuda else [50]:
        for count in groups:
            for chunk in chunks:
                case = draw(session, tokens, heads, count, chunk)
                timed(
                    session, case, "packgraph", lambda *leaves, c=case: ssd(*leaves, c.ids, c.chunk)
                )
                time_others(session, case)
                if options.pieces and session.cuda:
                    time_pieces(session, case)
        time_neighbours(session, case)
    return session.bad


if __name__ == "__main__":
    sys.exit(main())
