"""`packgraph bench offload`: activations on the host from inside a chunk graph, against keeping
them.

    kept       nothing moves
    everything all groups that may move do, but the last of each module
    planned    what the planner moves for a loss of at most --lost of the time (default 1 %): first
               by a trace of eager
               microbatches, then by what the graphs of that plan took, which is the plan that is
               measured

Each way runs by itself: forward and backward of one microbatch at a time, by one graph each. Bytes
are those of the graphs' pool and of everything held at the peak, parameters and gradients left out;
pinned bytes of the host are those of the graphs (pinned_bytes) and the most (pinned_peak_bytes):
before there is a plan all that may move does. Until the graphs are there tensors took
prepare_peak_bytes at the most, eager passes and trials included. `kept for backward` is what an
eager forward has saved and is alive when it ends, the most that could move; pools hold temporaries
of the backward, too.

What a plan is to save is told twice. `plan: saved` (planned_saved_bytes) is by how much *live*
bytes fall at the most. `plan: fell` (predicted_fell_bytes) is by how much the *pool* is to fall,
which holds what lives and has other holes in every way: by the pool of a trial capture that follows
the plan (predicted_pool_bytes, to be compared with pool_bytes; `graphs/memory/trial.py`). That
capture is over, and its memory free, before anything is measured.

The copies' speed comes from a profile of one more replay, their ceiling from plain copies of pinned
memory. With --largest the most tokens are looked for with which the first and the second way still
run, beginning with what should fit by what the longest measured row took; what is known when the
time is up, or the host's memory, is told as "at least". With --draw FOLDER plans are drawn as SVG
and as Chrome traces.
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from packgraph.bench.comparison import attempt_alone
from packgraph.bench.models import (
    TimedPart,
    build_part,
    draw_batches,
    dtype_on,
    shape,
    twin,
    zero_gradients,
)
from packgraph.bench.offload_measures import (
    HeldBytes,
    copy_ceiling,
    copy_times,
    kept_for_backward,
    most_tokens,
)
from packgraph.bench.rows import Column, Row, Rows, figures, gibibytes, median, value
from packgraph.bench.timing import (
    Deadline,
    free_bytes,
    held_bytes,
    peak_bytes,
    pinned_bytes,
    pinned_peak_bytes,
    time_block,
    with_most_bytes,
)
from packgraph.bench.variants import Graphed, room_for_code
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.memory.allocator import free_memory
from packgraph.graphs.memory.trial import trial_memory
from packgraph.models.stack import DecoderStack
from packgraph.offloading.attach import attach
from packgraph.offloading.knobs import OffloadKnobs, plan_by_knobs
from packgraph.offloading.plan import CopySpeed, OffloadPlan, OffloadTrace
from packgraph.offloading.runtime import PARTS, OffloadRuntime, Policy
from packgraph.offloading.search import plan_for_time
from packgraph.offloading.simulate import simulate_offload
from packgraph.packing.capacity import Capacity
from packgraph.viz.offload import chrome_trace, draw_offload_svg

OFFLOAD_WAYS = ("kept", "everything", "planned")
USUAL_MODULES = ("qkv_linear", "core_attn", "attn_proj", "mlp_act", "expert_fc1", "moe_act")
TRIALS = 3  # replays of a first plan, the last of which tells the times for the second
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "pinned host memory")

COLUMNS: list[Column] = [
    ("tokens", value("tokens")),
    ("way", value("way")),
    ("ms", median("ms")),
    ("of kept", value("time_ratio", ".4f")),
    ("pool GiB", gibibytes("pool_bytes")),
    ("of kept", value("pool_ratio", ".3f")),
    ("peak GiB", gibibytes("peak_bytes")),
    ("moved GiB", gibibytes("moved_bytes")),
    ("fell GiB", gibibytes("fell_bytes")),
    ("of kept for backward", value("fell_of_kept_for_backward", ".3f")),
    ("plan: saved GiB", gibibytes("planned_saved_bytes")),
    ("plan: fell GiB", gibibytes("predicted_fell_bytes")),
    ("plan: exposed ms", value("exposed_ms", ".2f")),
    ("out GB/s", value("out_gb_s", ".1f")),
    ("ceiling", value("out_ceiling_gb_s", ".1f")),
    ("back GB/s", value("back_gb_s", ".1f")),
    ("ceiling", value("back_ceiling_gb_s", ".1f")),
]


@dataclass(frozen=True)
class OffloadOptions:
    """What to measure. ways: beside `kept`, which the others are compared with. modules: names that
    may move; those the model has not are left out. lost: share of the time that the planned way may
    lose. largest: step in tokens of the search for the most that fit, 0 = no search. host_bytes: of
    pinned memory that the search may take. draw: a folder for pictures of the plans."""

    model: str
    layers: int | None
    part: str
    tokens: tuple[int, ...]
    ways: tuple[str, ...] = OFFLOAD_WAYS
    documents: int = 64
    modules: tuple[str, ...] = USUAL_MODULES
    lost: float = 0.01
    in_flight: int = 2
    min_bytes: int = 2**20
    rounds: int = 9
    calls: int = 4
    largest: int = 0
    host_bytes: int = 2**50
    draw: Path | None = None
    compile: bool | str = False
    attention: str = "auto"
    mean: float = 1024.0
    sigma: float = 1.5
    seed: int = 0

    def knobs(self) -> OffloadKnobs:
        """Of the way `everything`."""
        return OffloadKnobs(min_bytes=self.min_bytes, in_flight=self.in_flight)


def bench_offload(
    options: OffloadOptions, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
    """One row for each way at each number of tokens, then for the largest numbers."""
    model = build_part(options.part, shape(options.model, options.layers), device, dtype_on(device))
    zero_gradients([model])
    speed, known, takes = (
        copy_ceiling(device),
        dict.fromkeys(OFFLOAD_WAYS, 0),
        dict.fromkeys(OFFLOAD_WAYS, HeldBytes()),
    )
    ways = [way for way in OFFLOAD_WAYS if way == "kept" or way in options.ways]
    for tokens in options.tokens:
        kept: Row | None = None
        for way in ways:
            with room_for_code():
                found, reason = attempt_alone(
                    partial(_measure, options, model, device, tokens, way, speed), deadline
                )
            free_memory(device)
            kept = found if way == "kept" else kept
            if found is not None and tokens > known[way]:
                known[way] = tokens
                most = max(found["peak_bytes"] or 0, found["prepare_peak_bytes"] or 0)
                takes[way] = HeldBytes(most / tokens, (found["pinned_peak_bytes"] or 0) / tokens)
            rows.add(
                _identity(options, model, tokens, way, reason)
                | (found or {"figures": {}})
                | _ratios(found, kept)
            )
    for way in ways:
        if options.largest and way != "planned":
            rows.add(_largest(options, model, device, way, speed, deadline, known[way], takes[way]))


def _identity(
    options: OffloadOptions, model: DecoderStack, tokens: int, way: str, reason: str | None
) -> Row:
    return {
        "benchmark": "offload",
        "way": way,
        "part": options.part,
        "model": options.model,
        "tokens": tokens,
        "layers": model.config.num_layers,
        "documents": options.documents,
        "modules": list(options.modules),
        "compile": bool(options.compile),
        "attention": model.attention_choice().name,
        "reason": reason,
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
    }  # copies in graphs depend on it


def _ratios(found: Row | None, kept: Row | None) -> Row:
    if found is None or kept is None:
        return {}
    which = "pool_bytes" if found["peak_bytes"] is None else "peak_bytes"
    saved = kept["kept_for_backward_bytes"]
    row: Row = {
        "kept_for_backward_bytes": saved,
        "moved_of_kept_for_backward": round(found.get("moved_bytes", 0) / saved, 4)
        if saved
        else 0.0,
        "fell_of_kept_for_backward": round((kept[which] - found[which]) / saved, 4)
        if saved
        else 0.0,
        "time_ratio": round(found["figures"]["ms"]["median"] / kept["figures"]["ms"]["median"], 5),
        "pool_ratio": round(found["pool_bytes"] / kept["pool_bytes"], 4),
        "fell_bytes": kept[which] - found[which],
    }
    predicted = [of["predicted_pool_bytes"] for of in (kept, found)]
    if found is not kept and None not in predicted:
        row["predicted_fell_bytes"] = predicted[0] - predicted[1]
    return row


class _Run:
    """One way, ready to run. Frees everything when it is closed."""

    def __init__(
        self,
        options: OffloadOptions,
        model: DecoderStack,
        device: torch.device,
        tokens: int,
        policy: Policy | None,
        follows: tuple[OffloadTrace, OffloadPlan] | None = None,
    ) -> None:
        """policy: makes the plan of what moves; follows: a plan of another run and its trace, None
        = neither."""
        capacity = Capacity(tokens, options.documents)
        drawn = draw_batches(
            capacity,
            options.calls,
            model.config.vocab_size,
            mean=options.mean,
            sigma=options.sigma,
            seed=options.seed,
        )
        self.batches = [batch.to(device) for batch in drawn]
        self.model, self.device = twin(model, options.attention), device
        work = TimedPart(self.model, tokens, real=min(batch.num_tokens for batch in drawn))
        self.way = Graphed("chunk", work, [capacity], "chunk", options.compile)
        self.engine: OffloadRuntime | None = None
        if policy is not None or follows is not None:
            self.engine = OffloadRuntime(
                options.modules,
                self.way.graphed.capture_backend.copy_streams,
                min_bytes=options.min_bytes,
                in_flight=options.in_flight,
                policy=policy,
                parts=1 if follows is None else PARTS,
            )
            attach(self.engine, self.model)
        if self.engine is not None and follows is not None:
            self.engine.follow(*follows)

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.way.close()
        free_memory(self.device)

    def prepare(self) -> None:
        """Trace, plan and capture."""
        self.way.prepare(self.batches)

    def prepare_foretold(self) -> int | None:
        """As `prepare`; the bytes of the pool that were predicted before the capture."""
        self.way.warm_up(self.batches)
        predicted = self._predicted_pool()
        free_memory(self.device)
        self.way.capture(self.batches)
        return predicted

    def _predicted_pool(self) -> int | None:
        """What the capture to come will take, with all that moves by the plan, which is made here
        at the latest; None where a trial of it has no room."""
        graphed = self.way.graphed
        try:
            largest_first = sorted(self.way.used.items(), reverse=True)
            samples = [self.way.work.arguments(batch) for _, batch in largest_first]
            return trial_memory(graphed, samples, 1).pools
        except CaptureError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                return None
            raise

    def calls(self) -> None:
        """All microbatches once."""
        with self.way.frozen():
            for batch in self.batches:
                self.way.run(batch)


def _measure(
    options: OffloadOptions,
    model: DecoderStack,
    device: torch.device,
    tokens: int,
    way: str,
    speed: CopySpeed,
) -> Row:
    policy, traced = _policy(options, model, device, tokens, way, speed)
    known = (
        {}
        if way != "kept"
        else {"kept_for_backward_bytes": _kept_bytes(options, model, device, tokens)}
    )
    free_memory(device)
    pinned_peak_bytes(device)
    before = held_bytes(device)
    with _Run(
        options, model, device, tokens, policy, traced.followed if traced is not None else None
    ) as run:
        predicted, preparing = with_most_bytes(device, run.prepare_foretold)
        free_memory(device)
        peak = peak_bytes(device, run.calls)
        laps = [
            time_block(device, run.calls, run.calls)[0] / options.calls
            for _ in range(options.rounds)
        ]
        plan = run.engine.plan if run.engine is not None else None
        if run.engine is not None:
            _draw(
                options,
                f"{options.model}-{tokens}-{way}",
                traced or _Traced(run.engine.trace, speed),
                plan,
            )
        row: Row = known | {
            "figures": {"ms": figures(laps)},
            "pool_bytes": run.way.facts()["pool_bytes"],
            "predicted_pool_bytes": predicted,
            "pinned_bytes": pinned_bytes(device),
            "pinned_peak_bytes": pinned_peak_bytes(device),
            "prepare_peak_bytes": _above(preparing, before),
            "peak_bytes": _above(peak, before),
        }
        spent = copy_times(device, run.calls) if plan is not None and plan.moved_bytes else None
        if traced is not None and traced.trace is not None:
            row |= {
                "forward_room_bytes": traced.trace.forward_room,
                "eager_compute_ms": round(traced.eager_us / 1000, 3),
                "graph_compute_ms": round(traced.trace.compute_us / 1000, 3),
                "planned_out_gb_s": round(traced.speed.to_host_bytes_per_us / 1000, 2),
                "planned_back_gb_s": round(traced.speed.to_device_bytes_per_us / 1000, 2),
            }
        return row | _of_plan(options, plan, spent, speed)


def _above(peak: int | None, before: int | None) -> int | None:
    return None if peak is None or before is None else peak - before


@dataclass(frozen=True)
class _Traced:
    """What a plan was made by. trace: None where nothing was traced. eager_us: compute of the
    first, eager trace. plan: of another run."""

    trace: OffloadTrace | None
    speed: CopySpeed
    eager_us: float = 0.0
    plan: OffloadPlan | None = None

    @property
    def followed(self) -> tuple[OffloadTrace, OffloadPlan] | None:
        """What a run of the same work is to follow."""
        return None if self.trace is None or self.plan is None else (self.trace, self.plan)


def _draw(options: OffloadOptions, name: str, traced: _Traced, plan: OffloadPlan | None) -> None:
    """NAME.svg and NAME.trace.json, for chrome://tracing, of what the plan predicts."""
    trace = traced.trace
    if options.draw is None or trace is None or plan is None:
        return
    timeline = simulate_offload(trace, traced.speed, plan)
    options.draw.mkdir(parents=True, exist_ok=True)
    (options.draw / f"{name}.svg").write_text(
        draw_offload_svg(trace, plan, timeline, name), encoding="utf-8"
    )
    (options.draw / f"{name}.trace.json").write_text(
        chrome_trace([(name, trace, timeline)]), encoding="utf-8"
    )


def _of_plan(
    options: OffloadOptions,
    plan: OffloadPlan | None,
    spent: tuple[float, float] | None,
    speed: CopySpeed,
) -> Row:
    """What was planned, and how fast the copies were that `spent` is of: microseconds out and
    back."""
    row: Row = {
        "out_ceiling_gb_s": speed.to_host_bytes_per_us / 1000,
        "back_ceiling_gb_s": speed.to_device_bytes_per_us / 1000,
    }
    if plan is None:
        return row
    row |= {
        "groups": len(plan.moves),
        "groups_moved": sum(plan.moves),
        "moved_bytes": plan.moved_bytes,
        "host_bytes": plan.host_bytes,
        "planned_saved_bytes": plan.saved_bytes,
        "lost": round(plan.lost, 5),
        "exposed_ms": round(plan.exposed_us / 1000, 3),
        "hidden_ms": round(plan.hidden_us / 1000, 3),
    }
    if spent is not None and all(spent):
        moved = plan.moved_bytes * options.calls / 1000
        row |= {"out_gb_s": round(moved / spent[0], 2), "back_gb_s": round(moved / spent[1], 2)}
    return row


def _policy(
    options: OffloadOptions,
    model: DecoderStack,
    device: torch.device,
    tokens: int,
    way: str,
    speed: CopySpeed,
) -> tuple[Policy | None, _Traced | None]:
    """What makes the plan of a way (None: nothing moves), and what it was measured on, if on
    another run's trace."""
    if way == "kept":
        return None, None
    if way == "everything":
        return (lambda trace: plan_by_knobs(trace, speed, options.knobs())), None
    eager = _trace(options, model, device, tokens)
    traced = _replayed(options, model, device, tokens, eager, speed)
    assert traced.trace is not None
    return None, replace(traced, plan=plan_for_time(traced.trace, traced.speed, options.lost))


def _replayed(
    options: OffloadOptions,
    model: DecoderStack,
    device: torch.device,
    tokens: int,
    eager: OffloadTrace,
    speed: CopySpeed,
) -> _Traced:
    """What graphs took that follow the plan made by eager microbatches. Raises RuntimeError where
    they are not known."""
    first = plan_for_time(eager, speed, options.lost)
    with _Run(replace(options, calls=1), model, device, tokens, None, (eager, first)) as run:
        assert run.engine is not None
        run.engine.times_graphs = True
        run.prepare()
        for _ in range(TRIALS):
            run.calls()
        found = run.engine.replayed(speed)
        if found is None:
            raise RuntimeError("no pass of the graphs holds all groups of the eager one")
        return _Traced(*found, eager.compute_us)


def _trace(
    options: OffloadOptions, model: DecoderStack, device: torch.device, tokens: int
) -> OffloadTrace:
    """Eager microbatches that move nothing: the last one's times, since the first one makes what is
    made once."""
    with _Run(replace(options, calls=1), model, device, tokens, None) as run:
        way, batch = run.way, run.batches[0]
        engine = OffloadRuntime(
            options.modules,
            way.graphed.capture_backend.copy_streams,
            min_bytes=options.min_bytes,
            measures=True,
            parts=PARTS,
        )
        attach(engine, run.model)
        for _ in range(3):
            torch.autograd.backward(
                way.graphed.run_eagerly(*way.work.arguments(batch)), way.work.incoming(batch)
            )
        if engine.trace is None:
            raise ValueError(f"nothing of {', '.join(options.modules)} is saved by this model")
        return engine.trace


def _kept_bytes(
    options: OffloadOptions, model: DecoderStack, device: torch.device, tokens: int
) -> int:
    """What the forward of an eager microbatch keeps for its backward."""
    with _Run(replace(options, calls=1), model, device, tokens, None) as run:
        given = run.way.work.arguments(run.batches[0])
        came_in = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        return kept_for_backward(
            lambda: run.way.graphed.run_eagerly(*given),
            [*run.model.parameters(), *run.model.buffers(), *came_in],
        )


def _largest(
    options: OffloadOptions,
    model: DecoderStack,
    device: torch.device,
    way: str,
    speed: CopySpeed,
    deadline: Deadline,
    known: int,
    takes: HeldBytes,
) -> Row:
    """The row of the most tokens that run. known: so many do; takes: by a token of theirs."""

    def runs(tokens: int) -> bool:
        found, reason = attempt_alone(
            partial(_run_once, options, model, device, tokens, way, speed), Deadline(None)
        )
        free_memory(device)
        if found is None and not any(text in (reason or "") for text in OUT_OF_MEMORY):
            raise RuntimeError(f"at {tokens} tokens: {reason}")
        return found is not None

    there = HeldBytes(free_bytes(device), options.host_bytes)
    work = partial(most_tokens, runs, options.largest, deadline, known, takes, there)
    most, reason = attempt_alone(work, deadline)
    tokens, stopped = most or (known, None)
    kind = "largest" if stopped is None else "at least"
    return _identity(options, model, tokens, f"{way}, {kind}", reason) | {
        "figures": {},
        "stopped": stopped,
    }


def _run_once(
    options: OffloadOptions,
    model: DecoderStack,
    device: torch.device,
    tokens: int,
    way: str,
    speed: CopySpeed,
) -> bool:
    policy, _ = _policy(options, model, device, tokens, way, speed)
    with _Run(replace(options, calls=1), model, device, tokens, policy) as run:
        run.prepare()
        run.calls()
        return True
