"""Ways to make every piece of SSD: which are right, and which is the fastest.

    PYTHONPATH=src python3 benchmarks/ssd_tiles.py [--out FILE] [--seconds 100] [--tokens 1024 4096
    16384]
                                                   [--heads 64] [--groups 8] [--chunk 128]

For heads of 64 columns and states of 128, as `ssd.py` draws them. First every way of
`ssd_tiles_candidates.py` is compiled, as one piece of a forward or backward whose other pieces are
the usual ones, and compared with the twin in float64, in several processes, so that one which fails
or hangs costs nothing but its row (`section` check: `ok`, or why not). A way must give the same
bits twice, zeros in padding that holds NaN, and the same bits for the other documents when one is
changed. Then what was right is timed (median over replays of a graph that holds the work several
times): the best five of each piece are printed (`section` best), and today's way with them. In the
end (`section` whole) forwards and backwards as a whole: today's, those of the best pieces, those
that write no states, those with chunks of other sizes in the forward, and mamba_ssm's; `ways` is
what to write into the table of mamba/ssd_forward.py. Printed are these and failures, --out keeps
all rows. Without CUDA everything is tiny and runs in Triton's interpreter (TRITON_INTERPRET=1),
which shows that the script works and nothing else.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from moe_experts import Row, Session, distance
from ssd import Case, by_mamba, draw
from ssd_tiles_candidates import candidates
from torch import Tensor
from trials import FAILED, check_apart, keep, report

from packgraph.bench.rows import why
from packgraph.mamba.ssd import chunked_ssd
from packgraph.mamba.ssd_backward import (
    backward,
    pair_gradients,
    shared_gradient,
    step_gradients,
    value_gradients,
)
from packgraph.mamba.ssd_forward import (
    EVERYWHERE,
    KernelConfigs,
    ScanLaunch,
    carry,
    forward,
    mix,
    scores_of,
    sizes_of,
    tables_of,
    ways_for,
)

RELATIVE = 0.015  # bfloat16: factors of products are rounded
WORKERS, CHECKING = 14, 0.65  # processes that check, and the part of the time they may take
BEST = 5
FORWARD = (
    "tables",
    "scores",
    "carry",
    "mix",
)  # of these pieces a forward is made, of all but `mix` a backward
Work = Callable[[], object]


def written(way: ScanLaunch | KernelConfigs) -> str:
    """A way as it would be written in the table, without what is usual."""
    fields = [
        (name, value) for name, value in way._asdict().items() if value != way._field_defaults[name]
    ]
    inside = ", ".join(
        f"{name}={written(value) if isinstance(value, tuple) else json.dumps(value)}"
        for name, value in fields
    )
    return f"{type(way).__name__}({inside})"


def results_of(case: Case, piece: str, ways: KernelConfigs) -> list[Tensor]:
    """What the piece has a part in: y, or all gradients, or both."""
    x, dt, a, b, c, d = case.operands
    found = [forward(x, dt, a, b, c, d, case.ids, case.chunk, ways)] if piece in FORWARD else []
    if piece != "mix":
        gradients = backward(case.grad, x, dt, a, b, c, d, case.ids, case.chunk, ways)
        found += [gradient for gradient in gradients if gradient is not None]
    return found


def expected(case: Case) -> dict[bool, list[Tensor]]:
    """The twin in float64: [y] under True, all gradients under False. Padding is zeroed for it, not
    NaN."""
    clean = [
        torch.where((case.ids >= 0).view(-1, *[1] * (value.dim() - 1)), value, 0)
        if value.shape[0] == case.tokens
        else value
        for value in case.operands
    ]
    leaves = [value.double().requires_grad_() for value in clean]
    out = chunked_ssd(*leaves, case.ids, 64)
    live = (case.ids >= 0)[:, None, None]
    gradients = torch.autograd.grad(out, leaves, torch.where(live, case.grad, 0).double())
    return {True: [out.detach()], False: list(gradients)}


def padded_case(session: Session, tokens: int, options: argparse.Namespace) -> Case:
    """A case whose last rows are padding that holds NaN."""
    case = draw(session, tokens, *shape_of(session, options))
    used = tokens - (100 if session.cuda else 5)
    case.ids[used:] = -1
    operands = [value.clone() if value.shape[0] == tokens else value for value in case.operands]
    for value in (*operands, case.grad):
        if value.shape[0] == tokens:
            value[used:] = float("nan")
    return case._replace(operands=operands)


def shape_of(session: Session, options: argparse.Namespace) -> tuple[int, int, int]:
    """Heads, groups, chunk."""
    return (options.heads, options.groups, options.chunk) if session.cuda else (4, 2, 16)


def check(case: Case, wanted: dict[bool, list[Tensor]], piece: str, way: ScanLaunch) -> Row:
    """A way against the twin; twice; with one document changed; nothing from padding."""
    ways = EVERYWHERE._replace(**{piece: way})
    first, second = (results_of(case, piece, ways) for _ in range(2))
    target = [
        value
        for forwards in (True, False)
        for value in wanted[forwards]
        if (piece in FORWARD if forwards else piece != "mix")
    ]
    far = [distance(ours, theirs) for ours, theirs in zip(first, target, strict=True)]
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))
    by_rows = [value for value in first if value.shape[0] == case.tokens]
    quiet = not any(bool(value[case.ids < 0].any()) for value in by_rows)
    changed = case.ids == case.ids[case.tokens // 2]
    x, dt, a, b, c, d = case.operands
    x, b = (torch.where(changed[:, None, None], 1.7 * value, value) for value in (x, b))
    dy = torch.where(changed[:, None, None], case.grad + 3, case.grad)
    other = results_of(case._replace(operands=[x, dt, a, b, c, d], grad=dy), piece, ways)
    alone = all(
        torch.equal(ours[~changed], theirs[~changed])
        for ours, theirs in zip(first, other, strict=True)
        if ours.shape[0] == case.tokens
    )
    return {
        "ok": max(far) < RELATIVE and same and quiet and alone,
        "distances": far,
        "same_bits": same,
        "padding_zero": quiet,
        "documents_alone": alone,
    }


def work_through(session: Session, options: argparse.Namespace) -> None:
    """A process that checks.

    Two sizes, because what Triton compiles depends on whether 16 divides the number of chunks.
    """
    ways = candidates(session.cuda)
    cases = [
        padded_case(session, tokens, options)
        for tokens in ((8 * options.chunk, 16 * options.chunk) if session.cuda else (40,))
    ]
    problems = [(case, expected(case)) for case in cases]

    def check_both(number: int) -> Row:
        rows = [check(case, wanted, *ways[number]) for case, wanted in problems]
        return {"ok": all(row["ok"] for row in rows), "found": rows}

    report(options.check, check_both)


def check_all(session: Session, options: argparse.Namespace) -> list[tuple[str, ScanLaunch]]:
    """Check every way; those that are right."""
    ways = candidates(session.cuda)
    shape = [f"--{name}={getattr(options, name)}" for name in ("heads", "groups", "chunk")]
    found = check_apart([__file__, *shape], len(ways), WORKERS, CHECKING, session)
    for (piece, way), row in zip(ways, found, strict=True):
        keep(session, not row["ok"], section="check", piece=piece, way=written(way), **row)
    return [pair for pair, row in zip(ways, found, strict=True) if row["ok"]]


def works_of(case: Case) -> dict[str, Callable[[ScanLaunch], Work]]:
    """For every piece what a way makes work of, alone, on what the other pieces made."""
    x, dt, a, b, c, d = case.operands
    ids, dy, sizes = case.ids, case.grad, sizes_of(x, b, case.chunk)
    tables, through = tables_of(dt, a, ids, sizes)
    scores = scores_of(b, c, ids, sizes)
    entering, _ = carry(x, b, ids, tables, through, sizes)
    of_leaving, carried = carry(dy, c, ids, tables, through, sizes, entering)
    of_scores, *sums = pair_gradients(x, dy, ids, tables, scores, sizes)
    _, entered = shared_gradient(dy, b, of_scores, entering, ids, tables, sizes, c)
    _, direct, left, _ = value_gradients(x, dy, b, c, d, ids, tables, scores, of_leaving, sizes)
    parts = (a, tables, *sums, entered, left, direct, carried, sizes, dt.dtype)

    def mixed(way: ScanLaunch) -> Work:
        return lambda: mix(x, b, c, d, ids, tables, entering, sizes, EVERYWHERE._replace(mix=way))

    return {
        "mix": mixed,
        "steps": lambda way: lambda: step_gradients(*parts, way),
        "tables": lambda way: lambda: tables_of(dt, a, ids, sizes, way),
        "scores": lambda way: lambda: scores_of(b, c, ids, sizes, way),
        "carry": lambda way: lambda: carry(x, b, ids, tables, through, sizes, way=way),
        "back": lambda way: lambda: carry(dy, c, ids, tables, through, sizes, entering, way),
        "pairs": lambda way: lambda: pair_gradients(x, dy, ids, tables, scores, sizes, way),
        "of_c": lambda way: (
            lambda: shared_gradient(dy, b, of_scores, entering, ids, tables, sizes, c, way)
        ),
        "of_b": lambda way: (
            lambda: shared_gradient(x, c, of_scores, of_leaving, ids, tables, sizes, None, way)
        ),
        "values": lambda way: (
            lambda: value_gradients(x, dy, b, c, d, ids, tables, scores, of_leaving, sizes, way)
        ),
    }


def timed(session: Session, make: Callable[[], Work]) -> Row:
    """Microseconds of some work, or why there are none."""
    if time.monotonic() > session.end:
        return {"reason": "not timed: the time was over"}
    try:
        return {"us": round(session.microseconds(make()), 1)}
    except FAILED as error:
        return {"error": why(error)}


def time_pieces(
    session: Session, case: Case, ways: list[tuple[str, ScanLaunch]]
) -> dict[str, list[ScanLaunch]]:
    """Rows of times for all ways; for each piece its ways, the fastest first."""
    works, ordered = works_of(case), {}
    for piece, make in works.items():
        usual = getattr(ways_for(case.tokens, 64, 128, case.chunk, case.grad.dtype), piece)
        rows = [
            (timed(session, lambda way=way, make=make: make(way)), way)
            for of, way in ways
            if of == piece
        ]
        for row, way in rows:
            keep(
                session,
                "us" not in row,
                section="time",
                tokens=case.tokens,
                piece=piece,
                way=written(way),
                **row,
            )
        best = sorted(
            (row["us"], place, way) for place, (row, way) in enumerate(rows) if "us" in row
        )
        for place, (microseconds, _, way) in enumerate(best, 1):
            keep(
                session,
                place <= BEST or way == usual,
                section="best",
                tokens=case.tokens,
                piece=piece,
                way=written(way),
                us=microseconds,
                place=place,
                today=way == usual,
            )
        ordered[piece] = [way for _, _, way in best]
    return ordered


def wholes(case: Case, ordered: dict[str, list[ScanLaunch]]) -> dict[str, KernelConfigs]:
    """Ways for everything: today's, the best pieces, and others to make y."""
    mixes = ordered["mix"]
    best = KernelConfigs(
        **{piece: ways[0] for piece, ways in ordered.items() if ways and piece != "mix"}
    )
    named = {"today": ways_for(case.tokens, 64, 128, case.chunk, case.grad.dtype)}
    named |= {
        f"best, mix {place}": best._replace(mix=way) for place, way in enumerate(mixes[:2], 1)
    }
    return named


def time_wholes(session: Session, case: Case, ordered: dict[str, list[ScanLaunch]]) -> None:
    """Rows of forward, and of forward and backward, of all `wholes` and of mamba_ssm."""
    x, dt, a, b, c, d = case.operands

    def of_forward(ways: KernelConfigs) -> Work:
        return lambda: forward(x, dt, a, b, c, d, case.ids, case.chunk, ways)

    def of_both(ways: KernelConfigs) -> Work:
        return lambda: (
            forward(x, dt, a, b, c, d, case.ids, case.chunk, ways),
            backward(case.grad, x, dt, a, b, c, d, case.ids, case.chunk, ways),
        )

    for name, ways in wholes(case, ordered).items():
        for part, make in (("forward", of_forward), ("forward_and_backward", of_both)):
            keep(
                session,
                True,
                section="whole",
                tokens=case.tokens,
                chunk=case.chunk,
                part=part,
                name=name,
                ways=written(ways),
                **timed(session, lambda make=make, ways=ways: make(ways)),
            )
    try:
        theirs = by_mamba(case)
    except ImportError as error:
        return keep(
            session, True, section="whole", name="mamba_ssm", reason=f"not installed: {error}"
        )
    leaves = [value.detach().requires_grad_() for value in case.operands]

    def their_forward() -> object:
        with torch.no_grad():
            return theirs(*case.operands)

    def their_both() -> object:
        return torch.autograd.grad(theirs(*leaves), leaves, case.grad, allow_unused=True)

    for part, work in (("forward", their_forward), ("forward_and_backward", their_both)):
        keep(
            session,
            True,
            section="whole",
            tokens=case.tokens,
            chunk=case.chunk,
            part=part,
            name="mamba_ssm",
            **timed(session, lambda work=work: work),
        )
    return None


def main() -> int:
    """Returns 1 if no way was right. One that fails is a finding, no fault of the script's."""
    parser = argparse.ArgumentParser(
        description="Pieces of SSD: all ways checked, the best five named."
    )
    parser.add_argument("--out", type=Path, help="a file that rows are added to")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 1024, 16384])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--check", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    session = Session(device, options.out, options.seconds)
    if options.check is not None:
        work_through(session, options)
        return 0
    ways = check_all(session, options)
    for tokens in options.tokens if session.cuda else [40]:
        case = draw(session, tokens, *shape_of(session, options))
        time_wholes(session, case, time_pieces(session, case, ways))
    return 0 if ways else 1


if __name__ == "__main__":
    sys.exit(main())
