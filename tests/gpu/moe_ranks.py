"""Run by torchrun: dispatchers over NCCL and over symmetric memory against each other, eagerly and
by CUDA graphs.

    PYTHONPATH=src:tests/helpers torchrun --nproc-per-node 4 tests/gpu/moe_ranks.py

Every rank sends the same rows by an all-to-all of exact splits, padded, and over symmetric memory:
outputs and gradients must be equal bit for bit, at every one of several routings, eagerly and by
replay of one graph. Prints one JSON line per rank with what was wrong, and one per dispatcher with
the microseconds, of the slowest rank, of its parts. Each part is a graph of its own that is
replayed again and again, for experts that are drawn alike (`--timed-factor` times a balanced load
of room); next to them two equal all-to-alls of NCCL of as many rows, replayed as well. `--kernels`
also prints what single kernels take.
"""

import argparse
import json
from unittest import mock

import torch
import torch.distributed as dist

from packgraph.moe import peer_read as pull_kernel
from packgraph.moe.dispatch.dispatcher import Routing
from packgraph.moe.dispatch.over_ranks import make_dispatcher
from packgraph.moe.peer_read import SymmetricBuffers, meet
from packgraph.parallel.layout import Layout
from packgraph.parallel.ranks import Launch, processes

HIDDEN, EXPERTS = 2048, 64


def draw(seed, tokens, places, device, busy=EXPERTS):
    """Hidden states, experts, weights and a gradient; a part of the tokens is padding."""
    generator = torch.Generator(device).manual_seed(seed)
    skew = torch.rand(EXPERTS, generator=generator, device=device).square()
    skew[busy:] = -1
    scores = torch.rand(tokens, EXPERTS, generator=generator, device=device) * skew
    experts = scores.topk(places).indices.int()
    weights = torch.rand(tokens, places, generator=generator, device=device)
    experts[tokens - tokens // 8 :], weights[tokens - tokens // 8 :] = -1, 0
    x, grad = (
        torch.randn(tokens, HIDDEN, generator=generator, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    return x, experts, weights, grad


def there(dispatcher, x, experts, weights):
    """What the tokens get back of experts that only multiply by the weight: no product's rounding
    is in it."""
    routing = Routing(experts, weights)
    plan = dispatcher.preprocess(routing)
    rows = dispatcher.dispatch(x, routing, plan)
    return dispatcher.combine(
        rows.values * rows.weights[:, None].to(x.dtype), plan
    ), dispatcher.overflow(plan)


def there_and_back(dispatcher, x, experts, weights, grad):
    """Output, both gradients, overflow."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    out, overflow = there(dispatcher, x, experts, weights)
    return [out.detach(), *torch.autograd.grad(out, (x, weights), grad), overflow]


def captured(function, inputs):
    """A function that copies inputs, replays and returns copies of the results."""
    static = [tensor.clone() for tensor in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function(*static)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = function(*static)

    def replay(*given):
        for buffer, tensor in zip(static, given, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        return [result.clone() for result in results]

    return graph, replay


def microseconds(run, times=50):
    """Of one call, on the slowest rank: an upper bound that all ranks agree on."""
    for _ in range(5):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    dist.barrier()
    torch.cuda.synchronize()
    events[0].record()
    for _ in range(times):
        run()
    events[1].record()
    torch.cuda.synchronize()
    slowest = torch.tensor([1000 * events[0].elapsed_time(events[1]) / times], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest), 1)


def replayed(run, times=50):
    """Microseconds of a replay of `run`, which takes nothing and returns tensors."""
    graph, _ = captured(run, [])
    return microseconds(graph.replay, times)


def make(name, group, ranks, factor, pairs, device):
    buffers = (
        SymmetricBuffers(group, pairs, factor, HIDDEN, torch.bfloat16, device)
        if name == "symmetric"
        else None
    )
    return make_dispatcher(name, EXPERTS, group, factor, buffers)


def check(mesh, device, options):
    """What differs, by name."""
    group, ranks, pairs = mesh.group("ep"), mesh.size("ep"), options.tokens * options.places
    names = {"host_splits": 1.0, "padded": float(ranks)} | (
        {"symmetric": min(3.0, float(ranks))} if options.symmetric else {}
    )
    dispatchers = {
        name: make(name, group, ranks, factor, pairs, device) for name, factor in names.items()
    }
    first = draw(mesh.rank, options.tokens, options.places, device)
    graphs = {
        name: captured(lambda *given, d=dispatcher: there_and_back(d, *given), first)
        for name, dispatcher in dispatchers.items()
        if not dispatcher.why_not
    }
    wrong, overflows = [], []
    for step in range(options.steps):
        given = draw(
            1000 * step + mesh.rank,
            options.tokens,
            options.places,
            device,
            busy=EXPERTS if step % 4 else EXPERTS // 2,
        )
        expected = there_and_back(dispatchers["host_splits"], *given)
        for name, (_, replay) in graphs.items():
            eager, again = there_and_back(dispatchers[name], *given), replay(*given)
            overflows.append(int(eager[3]))
            for what, a, b, c in zip(
                ("out", "x", "weights", "overflow"), expected, eager, again, strict=True
            ):
                # The sum over a row's columns, of which the weights' gradient is made, may depend
                # on the rows.
                same = (
                    torch.allclose(a, b, rtol=1e-2, atol=1e-2)
                    if what == "weights"
                    else torch.equal(a, b)
                )
                wrong += [f"step {step}: {name} {what}"] * (not overflows[-1] and not same)
                wrong += [f"step {step}: {name} {what} in a replay"] * (not torch.equal(b, c))
    print(
        json.dumps(
            {
                "rank": mesh.rank,
                "ranks": ranks,
                "tokens": options.tokens,
                "places": options.places,
                "hidden": HIDDEN,
                "wrong": wrong[:8],
                "overflows": sum(map(bool, overflows)),
            }
        ),
        flush=True,
    )
    del graphs
    return wrong


@torch.no_grad()
def measure(mesh, device, options):
    """Microseconds of the parts of a forward, and of NCCL's all-to-alls of as many rows."""
    group, ranks, pairs = mesh.group("ep"), mesh.size("ep"), options.tokens * options.places
    generator = torch.Generator(device).manual_seed(mesh.rank)
    experts = (
        torch.rand(options.tokens, EXPERTS, generator=generator, device=device)
        .topk(options.places)
        .indices.int()
    )
    x = torch.randn(
        options.tokens, HIDDEN, generator=generator, device=device, dtype=torch.bfloat16
    )
    routing = Routing(
        experts, torch.rand(options.tokens, options.places, generator=generator, device=device)
    )
    block = torch.randn(
        pairs // ranks * ranks, HIDDEN, generator=generator, device=device, dtype=torch.bfloat16
    )
    got = torch.empty_like(block)

    def equal_parts():
        dist.all_to_all_single(got, block, group=group)
        dist.all_to_all_single(got, block, group=group)
        return [got]

    nccl = replayed(equal_parts)
    for name in ("padded", "symmetric") if options.symmetric else ("padded",):
        dispatcher = make(name, group, ranks, options.timed_factor, pairs, device)
        plan = dispatcher.preprocess(routing)
        rows = dispatcher.dispatch(x, routing, plan)
        lacking = dispatcher.overflow(plan).clone()
        dist.all_reduce(lacking, dist.ReduceOp.MAX)
        times = {
            "plan": replayed(lambda d=dispatcher: d.preprocess(routing)),
            "dispatch": replayed(lambda d=dispatcher, p=plan: d.dispatch(x, routing, p)),
            "combine": replayed(lambda d=dispatcher, p=plan, r=rows: [d.combine(r.values, p)]),
        }
        moves = times["dispatch"] + times["combine"]
        if mesh.rank == 0:
            print(
                json.dumps(
                    {
                        "dispatcher": name,
                        "ranks": ranks,
                        "tokens": options.tokens,
                        "places": options.places,
                        "hidden": HIDDEN,
                        "factor": options.timed_factor,
                        "rows_lacking": int(lacking),
                        "microseconds": times,
                        "dispatch_and_combine": round(moves, 1),
                        "two_equal_all_to_alls_of_nccl": nccl,
                        "share_of_nccl": round(nccl / moves, 3),
                    }
                ),
                flush=True,
            )


@torch.no_grad()
def measure_kernels(mesh, device, options):
    """Microseconds of what a dispatch and a combine over symmetric memory consist of, for several
    tiles of the two kernels that read from peers. What they read means nothing; where and how much
    is that of a balanced routing."""
    group, ranks, pairs = mesh.group("ep"), mesh.size("ep"), options.tokens * options.places
    dispatcher = make("symmetric", group, ranks, options.timed_factor, pairs, device)
    buffers, rows = dispatcher.buffers, dispatcher.room(pairs)
    generator = torch.Generator(device).manual_seed(mesh.rank)
    experts = (
        torch.rand(options.tokens, EXPERTS, generator=generator, device=device)
        .topk(options.places)
        .indices.int()
    )
    plan = dispatcher.preprocess(Routing(experts, torch.ones(experts.shape, device=device)))
    x, y = (
        torch.randn(size, HIDDEN, device=device, dtype=torch.bfloat16)
        for size in (options.tokens, rows)
    )
    weights, none = torch.rand(experts.shape, device=device), torch.empty(0, device=device)

    def told(what, run, **more):
        time = replayed(lambda: run() or ())
        if mesh.rank == 0:
            print(
                json.dumps({"kernel": what, "ranks": ranks, "microseconds": time} | more),
                flush=True,
            )

    told("barrier", lambda: meet(buffers.memory, buffers.group))
    told("publish tokens", lambda: pull_kernel.publish(x, weights, buffers.memory, buffers.rows))
    told(
        "publish rows",
        lambda: pull_kernel.publish(y, none, buffers.memory, buffers.rows, plan.offsets),
    )
    for columns, warps in ((512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8)):
        with mock.patch.multiple(
            pull_kernel,
            SPREAD_COLUMNS=columns,
            COLLECT_COLUMNS=columns,
            SPREAD_WARPS=warps,
            COLLECT_WARPS=warps,
        ):
            told(
                "spread",
                lambda: pull_kernel.spread(
                    buffers.peers,
                    plan.row_of_pair,
                    plan.offsets,
                    x,
                    True,
                    rows,
                    buffers.rows,
                    buffers.rank,
                ),
                columns=columns,
                warps=warps,
            )
            told(
                "collect",
                lambda: pull_kernel.collect(
                    buffers.peers, plan.place_of_pair, y, False, rows, buffers.rows
                ),
                columns=columns,
                warps=warps,
            )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--places", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timed-factor", type=float, default=1.25)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--no-symmetric", dest="symmetric", action="store_false")
    options = parser.parse_args()
    launch = Launch.read()
    device = torch.device("cuda", launch.local_rank)
    with processes(Layout(ep=launch.world), device, launch) as mesh:
        wrong = check(mesh, device, options)
        measure(mesh, device, options)
        if options.kernels and options.symmetric:
            measure_kernels(mesh, device, options)
        assert not wrong, "dispatchers or replays differ"


if __name__ == "__main__":
    main()
