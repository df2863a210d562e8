"""Experts of one Moonlight layer, piece by piece: time, rate and correctness.

    PYTHONPATH=src python3 benchmarks/moe_experts.py [--out FILE] [--seconds 55] [--tokens 1024 4096
    16384]

Prints one JSON line per finding: first whether things are right (against loops over experts in
float32; replays with changing routings bitwise against eager), then times for T tokens of which
each goes to 6 of 64 experts, hidden size 2048, 1408 wide. A time is the median over replays of a
graph that holds the work several times; the matrices of a layer are larger than the cache. `tflops`
counts live rows; `gbps` counts each byte read or written once. Rows with `padding` have a part of
the tokens routed nowhere, which should cost nothing. Without CUDA everything is tiny and runs by
the clock, which shows that the script works and nothing else.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from result_rows import commit_of_source
from torch import Tensor

from packgraph.bench.rows import facts
from packgraph.moe.dispatch.dispatcher import LocalDispatcher, Routing
from packgraph.moe.experts import Experts, activation, activation_backward, naive_experts
from packgraph.moe.permute import (
    combine_rows,
    gather_pairs,
    gather_rows,
    naive_plan_rows,
    plan_rows,
)
from packgraph.ops.linear import add_matrices_gradient, grouped_mm, matrices_gradient, product

Row = dict[str, Any]
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, ImportError)
CALLS, ROUNDS = 4, 15
RELATIVE = 0.02  # bfloat16


class Shape(NamedTuple):
    """Sizes of a layer."""

    hidden: int
    width: int
    experts: int
    places: int


MOONLIGHT, TINY = Shape(2048, 1408, 64, 6), Shape(16, 8, 4, 2)


class Session:
    """Writes rows, and knows how much time is left."""

    def __init__(self, device: torch.device, out: Path | None, seconds: float) -> None:
        self.device, self.out, self.end = device, out, time.monotonic() + seconds
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.shared, self.bad = facts(device, commit_of_source()), 0

    def write(self, **row: Any) -> None:
        """Print a row; the file has the device and the versions in it, too."""
        self.bad += row.get("ok") is False or "error" in row
        print(json.dumps(row), flush=True)
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | self.shared) + "\n")

    def attempt(self, work: Callable[[], Row], **what: Any) -> None:
        """Write what `work` finds, or why it found nothing."""
        if time.monotonic() > self.end:
            self.write(**what, reason="not measured: the time was over before")
            return
        try:
            found = work()
        except FAILURES as error:
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
        self.write(**what, **found)

    def microseconds(self, work: Callable[[], object]) -> float:
        """Median time of `work`; on CUDA in a replayed graph, without what launching costs."""
        if not self.cuda:
            work()
            begin = time.perf_counter()
            work()
            return 1e6 * (time.perf_counter() - begin)

        def several() -> None:
            for _ in range(CALLS):
                work()

        captured = capture(several)
        times = []
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            captured.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / CALLS)
        return statistics.median(times)


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`work` as a graph, run once before."""
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(captured, stream=stream):
        work()
    return captured


def draw(session: Session, shape: Shape, tokens: int, padding: float) -> Routing:
    """A routing with experts of unequal popularity; the last tokens are padding."""
    popularity = 0.2 + torch.rand(shape.experts)
    experts = torch.multinomial(popularity.expand(tokens, -1), shape.places).int()
    weights = torch.rand(tokens, shape.places)
    live = int(tokens * (1 - padding))
    experts[live:], weights[live:] = -1, 0
    return Routing(experts.to(session.device), weights.to(session.device))


def layer(session: Session, shape: Shape) -> Experts:
    """Fresh experts."""
    torch.manual_seed(0)
    return Experts(shape.experts, shape.hidden, shape.width).to(session.device, session.dtype)


def through(experts: Experts, x: Tensor, routing: Routing) -> Tensor:
    """Tokens through a layer of experts: [T, H] -> [T, H]."""
    dispatcher = LocalDispatcher(experts.down_proj.shape[0])
    plan = dispatcher.preprocess(routing)
    return dispatcher.combine(experts(*dispatcher.dispatch(x, routing, plan)), plan)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative distance; infinite when ours is not finite."""
    if not torch.isfinite(ours).all():
        return float("inf")
    ours, theirs = ours.detach().float(), theirs.detach().float()
    return round(float((ours - theirs).norm() / theirs.norm().clamp(min=1e-9)), 5)


def check_plan(session: Session, shape: Shape) -> Row:
    """Plans against loops, with too few rows and with too many."""
    found = []
    for rows in (150, 200 * shape.places, 250 * shape.places):
        routing = draw(session, shape, 200, 0.3)
        expected = naive_plan_rows(routing.experts.cpu(), shape.experts, rows)
        plan = plan_rows(routing.experts, shape.experts, rows)
        found.append(all(torch.equal(a.cpu(), b) for a, b in zip(plan, expected, strict=True)))
    return {"same": found, "ok": all(found)}


def check_experts(session: Session, shape: Shape) -> Row:
    """Outputs and gradients against loops in float32, with NaN in every tail."""
    experts, rows = layer(session, shape), 40 * shape.experts
    counts = torch.randint(0, 40, (shape.experts,))
    counts[::5] = 0
    offsets = counts.cumsum(0).int().to(session.device)
    used = int(offsets[-1])
    values, grad = (
        torch.randn(rows, shape.hidden, device=session.device).to(session.dtype) for _ in range(2)
    )
    weights = torch.rand(rows, device=session.device)
    leaves = [
        x.detach().to(torch.float32, copy=True).requires_grad_()
        for x in (values, weights, *experts.parameters())
    ]
    expected = naive_experts(leaves[0], leaves[1], offsets, *leaves[2:])
    expected.backward(grad.float())
    for x in (values, weights, grad):
        x[used:] = float("nan")
    values, weights = values.requires_grad_(), weights.requires_grad_()
    out = experts(values, weights, offsets)
    out.backward(grad)
    pairs = {
        "out": (out[:used], expected[:used]),
        "values": (values.grad[:used], leaves[0].grad[:used]),
        "weights": (weights.grad, leaves[1].grad),
    }
    for leaf, (name, parameter) in zip(leaves[2:], experts.named_parameters(), strict=True):
        pairs[name] = (parameter.grad, leaf.grad)
    found = {name: distance(one, other) for name, (one, other) in pairs.items()}
    unused = all(not parameter.grad[::5].any() for parameter in experts.parameters())
    return {
        "distances": found,
        "unused_are_zero": unused,
        "ok": unused and max(found.values()) <= RELATIVE,
    }


def check_replays(session: Session, shape: Shape, tokens: int) -> Row:
    """A captured forward and backward under new routings, bitwise against eager, and no sync in
    eager."""
    if not session.cuda:
        return {"reason": "graphs of CUDA only; tests/cpu does it with the recorder"}
    experts, routing = layer(session, shape), draw(session, shape, tokens, 0.1)
    x = torch.randn(tokens, shape.hidden, device=session.device).to(session.dtype).requires_grad_()
    routing.weights.requires_grad_()
    leaves = [x, routing.weights, *experts.parameters()]

    def work() -> list[Tensor]:
        out = through(experts, x, routing)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    static: list[Tensor] = []
    captured = capture(lambda: (static.clear(), static.extend(work())))
    same = []
    for padding in (0.5, 0.0, 1.0, 0.9, 0.1):
        new = draw(session, shape, tokens, padding)
        with torch.no_grad():
            routing.experts.copy_(new.experts)
            routing.weights.copy_(new.weights)
            x.normal_()
        for tensor in static:
            tensor.fill_(float("nan"))
        captured.replay()
        same.append(all(torch.equal(a, b) for a, b in zip(static, work(), strict=True)))
    return {"same_bits": same, "syncs": 0, "ok": all(same)}


def time_pieces(session: Session, shape: Shape, tokens: int, padding: float) -> None:
    """Rows of times for each piece of forward and backward, and for all of it."""
    experts, routing = layer(session, shape), draw(session, shape, tokens, padding)
    hidden, width = shape.hidden, shape.width
    x, grad = (
        torch.randn(tokens, hidden, device=session.device).to(session.dtype) for _ in range(2)
    )
    plan = plan_rows(routing.experts, shape.experts, routing.experts.numel())
    rows, offsets, used = plan.pair_of_row.shape[0], plan.offsets, int(plan.offsets[-1])
    gate_up, down = (parameter.detach() for parameter in experts.parameters())
    values, weights = gather_rows(x, plan), gather_pairs(routing.weights, plan)
    h = grouped_mm(values, gate_up.mT, offsets)
    act = activation(h, weights, offsets)
    y = grouped_mm(act, down.mT, offsets)
    of_y = gather_rows(grad, plan)
    of_act = product(of_y, down, offsets, False)
    of_h, of_weights, _ = activation_backward(of_act, h, weights, offsets)
    gate_up_total, down_total = torch.zeros_like(gate_up), torch.zeros_like(down)
    row, size = x[:1].nbytes, x.element_size()
    up, second = 4 * used * hidden * width, 2 * used * hidden * width  # operations
    pieces: dict[str, tuple[Callable[[], object], int, int]] = {  # work, operations, bytes
        "plan_rows": (lambda: plan_rows(routing.experts, shape.experts, rows), 0, 0),
        "gather_rows": (lambda: gather_rows(x, plan), 0, (tokens + rows) * row),
        "gather_pairs": (lambda: gather_pairs(routing.weights, plan), 0, 0),
        "grouped_up": (lambda: grouped_mm(values, gate_up.mT, offsets), up, 0),
        "activation": (lambda: activation(h, weights, offsets), 0, 3 * used * width * size),
        "grouped_down": (lambda: grouped_mm(act, down.mT, offsets), second, 0),
        "combine_rows": (lambda: combine_rows(y, plan), 0, (tokens + used) * row),
        "combine_backward": (lambda: gather_rows(grad, plan), 0, (tokens + rows) * row),
        "grouped_down_of_rows": (lambda: product(of_y, down, offsets, False), second, 0),
        "activation_backward": (
            lambda: activation_backward(of_act, h, weights, offsets),
            0,
            6 * used * width * size,
        ),
        "grouped_down_of_matrices": (
            lambda: matrices_gradient(of_y, act, offsets, True),
            second,
            0,
        ),
        "grouped_up_of_rows": (lambda: product(of_h, gate_up, offsets, False), up, 0),
        "grouped_up_of_matrices": (lambda: matrices_gradient(of_h, values, offsets, True), up, 0),
        "grouped_down_added": (
            lambda: add_matrices_gradient(down_total, of_y, act, offsets, True),
            second,
            0,
        ),
        "grouped_up_added": (
            lambda: add_matrices_gradient(gate_up_total, of_h, values, offsets, True),
            up,
            0,
        ),
        "gather_backward": (lambda: combine_rows(of_h[:, :hidden], plan), 0, (tokens + used) * row),
        "weights_backward": (
            lambda: torch.ops.packgraph.pick(
                of_weights, plan.row_of_pair.reshape(-1), plan.pair_of_row
            ),
            0,
            0,
        ),
    }
    what = {"section": "time", "tokens": tokens, "padding": padding, "live_rows": used}
    for name, (work, flops, moved) in pieces.items():
        session.attempt(
            lambda work=work, flops=flops, moved=moved: rates(
                session.microseconds(work), flops, moved
            ),
            **what,
            piece=name,
        )
    leaves = [leaf.detach().requires_grad_() for leaf in (x, routing.weights)]
    bound = Routing(routing.experts, leaves[1])

    def everything() -> object:
        out = through(experts, leaves[0], bound)
        return torch.autograd.grad(out, [*leaves, *experts.parameters()], grad)

    with torch.no_grad():
        session.attempt(
            lambda: rates(
                session.microseconds(lambda: through(experts, x, routing)), up + second, 0
            ),
            **what,
            piece="forward",
        )
    session.attempt(
        lambda: rates(session.microseconds(everything), 3 * (up + second), 0),
        **what,
        piece="forward_and_backward",
    )


def rates(microseconds: float, flops: int, moved: int) -> Row:
    """A time, and what it makes of operations and bytes."""
    found: Row = {"us": round(microseconds, 2)}
    if flops:
        found["tflops"] = round(flops / microseconds * 1e-6, 1)
    if moved:
        found["gbps"] = round(moved / microseconds * 1e-3, 1)
    return found


def time_dense(session: Session, shape: Shape, tokens: int) -> Row:
    """The products of the same size with one matrix for all rows: what grouped products could reach
    at most."""
    rows = tokens * shape.places
    a = torch.randn(rows, shape.hidden, device=session.device).to(session.dtype)
    b = torch.randn(2 * shape.width, shape.hidden, device=session.device).to(session.dtype)
    return rates(session.microseconds(lambda: a @ b.t()), 4 * rows * shape.hidden * shape.width, 0)


def main() -> int:
    """Returns how many checks found something wrong."""
    parser = argparse.ArgumentParser(description="Time and correctness of experts, piece by piece.")
    parser.add_argument("--out", type=Path, help="a file that rows are added to")
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 1024, 16384])
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    session = Session(device, options.out, options.seconds)
    torch.manual_seed(0)
    shape = MOONLIGHT if session.cuda else TINY
    session.attempt(lambda: check_plan(session, shape), section="check", what="plan")
    session.attempt(lambda: check_experts(session, shape), section="check", what="experts")
    session.attempt(lambda: check_replays(session, shape, 1024), section="check", what="replays")
    for tokens in options.tokens if session.cuda else [24]:
        session.attempt(
            lambda tokens=tokens: time_dense(session, shape, tokens),
            section="time",
            tokens=tokens,
            piece="dense_up",
        )
        time_pieces(session, shape, tokens, 0.0)
    time_pieces(session, shape, options.tokens[0] if session.cuda else 24, 0.5)
    return session.bad


if __name__ == "__main__":
    sys.exit(main())
