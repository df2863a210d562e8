"""`bench offload`: activations on the host from inside a chunk graph, against keeping
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
from typing import Annotated, ClassVar, Self

import torch
from bench_memory import Attention
from bench_models import (
    TimedPart,
    build_part,
    draw_batches,
    dtype_on,
    shape,
    twin,
    zero_gradients,
)
from bench_step import KILO, PART_HELP, Part, WorkArguments
from bench_ways import Graphed
from offload_measures import (
    HeldBytes,
    copy_ceiling,
    copy_times,
    free_bytes,
    free_host_bytes,
    kept_for_backward,
    most_tokens,
    pinned_bytes,
    pinned_peak_bytes,
    with_most_bytes,
)
from step_figures import attempt_alone, time_block
from torch.utils._pytree import tree_leaves

from packgraph.bench.comparison import Deadline, above, held_bytes, peak_bytes, room_for_code
from packgraph.bench.rows import Column, Row, Rows, figures, gibibytes, median, value
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.memory.allocator import free_memory
from packgraph.graphs.memory.trial import trial_memory
from packgraph.models.recompute import NONE, recompute
from packgraph.models.stack import DecoderStack
from packgraph.offloading.api import attach
from packgraph.offloading.plan import CopySpeed, OffloadKnobs, OffloadPlan, OffloadTrace
from packgraph.offloading.rules import MODULES
from packgraph.offloading.runtime import PARTS, OffloadRuntime, Policy
from packgraph.offloading.search import plan_by_knobs, plan_for_time
from packgraph.offloading.simulate import simulate_offload
from packgraph.packing.capacity import Capacity
from packgraph.train.config.reading import Count, option
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


@dataclass(frozen=True, kw_only=True)
class OffloadArguments(WorkArguments):
    """Activations on the host from inside a chunk graph, against kept ones.

    Shares `of kept for backward` are of what a forward has saved and is alive when it ends.
    """

    usual_models: ClassVar[tuple[str, str]] = ("qwen3-8b", "tiny")
    usual_tokens: ClassVar[tuple[int, ...]] = (8 * KILO, 16 * KILO)

    part: Part = option("layers", PART_HELP)
    documents: Count = option(64, "at most in one microbatch", metavar="N")
    ways: tuple[Annotated[str, OFFLOAD_WAYS], ...] = option(
        OFFLOAD_WAYS, "those to measure; ratios are of kept, where it is among them"
    )
    attention: Attention = option("auto", "attention of every way")
    modules: tuple[Annotated[str, MODULES], ...] = option(USUAL_MODULES, "what may move")
    recompute: str = option(
        NONE,
        "what the backward of every way computes again: none, selective, full, or stages; with it "
        "--modules layer_input moves what that begins with",
        metavar="WHAT",
    )
    lost: float = option(0.01, "share of the time that the way `planned` may lose", metavar="SHARE")
    in_flight: Count = option(2, "copies to the host at a time", metavar="N")
    min_bytes: Count = option(2**20, "bytes of the smallest tensor that moves", metavar="N")
    rounds: Count = option(9, "how often all ways take turns", metavar="N")
    calls: Count = option(4, "microbatches of a round", metavar="N")
    largest: int = option(
        0, "look for the most tokens that run, in steps of T; 0 = do not", metavar="T"
    )
    host_gib: float | None = option(
        None,
        "pinned memory that this search may take, in GiB, by what the measured rows took per token "
        "in their first passes, which move all that may move (default: half of what is free)",
        metavar="N",
    )
    draw: Path | None = option(None, "write pictures of the plans there", metavar="FOLDER")
    compile: bool = option(False, "graphs of compiled code")

    def knobs(self) -> OffloadKnobs:
        """Of the way `everything`."""
        return OffloadKnobs(min_bytes=self.min_bytes, in_flight=self.in_flight)

    def host_bytes(self) -> int:
        """Pinned memory that the search may take: torch may round it up to a power of two."""
        return free_host_bytes() // 2 if self.host_gib is None else int(self.host_gib * 2**30)


def bench_offload(
    options: OffloadArguments, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
    """One row for each way at each number of tokens, then for the largest numbers."""
    config = shape(str(options.model), options.layers)
    model = build_part(options.part, config, device, dtype_on(device))
    zero_gradients([model])
    recompute(model, options.recompute)
    known, takes = dict.fromkeys(OFFLOAD_WAYS, 0), dict.fromkeys(OFFLOAD_WAYS, HeldBytes())
    any_size = OffloadCase(options, model, device, 0, copy_ceiling(device))
    ways = [way for way in OFFLOAD_WAYS if way in options.ways]
    for tokens in options.tokens:
        kept: Row | None = None
        case = replace(any_size, tokens=tokens)
        for way in ways:
            with room_for_code():
                found, reason = attempt_alone(partial(case.measure, way), deadline)
            free_memory(device)
            kept = found if way == "kept" else kept
            if found is not None and tokens > known[way]:
                known[way] = tokens
                most = max(found["peak_bytes"] or 0, found["prepare_peak_bytes"] or 0)
                takes[way] = HeldBytes(most / tokens, (found["pinned_peak_bytes"] or 0) / tokens)
            row = case.identity(way, reason) | (found or {"figures": {}})
            rows.add(row | _ratios(found, kept))
    for way in ways:
        if options.largest and way != "planned":
            rows.add(_largest(any_size, way, deadline, known[way], takes[way]))


def _ratios(found: Row | None, kept: Row | None) -> Row:
    if found is None or kept is None:
        return {}
    which = "pool_bytes" if found["peak_bytes"] is None else "peak_bytes"
    saved, fell = kept["kept_for_backward_bytes"], kept[which] - found[which]
    row: Row = {
        "kept_for_backward_bytes": saved,
        "moved_of_kept_for_backward": round(found.get("moved_bytes", 0) / saved, 4)
        if saved
        else 0.0,
        "fell_of_kept_for_backward": round(fell / saved, 4) if saved else 0.0,
        "time_ratio": round(found["figures"]["ms"]["median"] / kept["figures"]["ms"]["median"], 5),
        "pool_ratio": round(found["pool_bytes"] / kept["pool_bytes"], 4),
        "fell_bytes": fell,
    }
    predicted = [of["predicted_pool_bytes"] for of in (kept, found)]
    if found is not kept and None not in predicted:
        row["predicted_fell_bytes"] = predicted[0] - predicted[1]
    return row


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


@dataclass(frozen=True)
class OffloadCase:
    """A model at one number of tokens. speed: of plain copies."""

    options: OffloadArguments
    model: DecoderStack
    device: torch.device
    tokens: int
    speed: CopySpeed

    def identity(self, way: str, reason: str | None) -> Row:
        """What was run. Copies in graphs depend on the number of connections."""
        options = self.options
        return {
            "benchmark": "offload",
            "way": way,
            "part": options.part,
            "model": options.model,
            "tokens": self.tokens,
            "layers": self.model.config.num_layers,
            "documents": options.documents,
            "modules": list(options.modules),
            "recompute": options.recompute,
            "compile": options.compile,
            "attention": self.model.attention_choice().name,
            "reason": reason,
            "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        }

    def measure(self, way: str) -> Row:
        """Time and memory of a way, what was planned for it, and how fast its copies were."""
        options, device = self.options, self.device
        policy, traced = self.policy(way)
        row: Row = {"kept_for_backward_bytes": self.kept_bytes()} if way == "kept" else {}
        free_memory(device)
        pinned_peak_bytes(device)
        before = held_bytes(device)
        with OffloadRun(self, policy, None if traced is None else traced.followed) as run:
            predicted, preparing = with_most_bytes(device, run.prepare_foretold)
            free_memory(device)
            peak = peak_bytes(device, run.calls)
            laps = [
                time_block(device, run.calls, run.calls)[0] / len(run.batches)
                for _ in range(options.rounds)
            ]
            plan = None if run.runtime is None else run.runtime.plan
            if run.runtime is not None and plan is not None:
                self._draw(way, traced or _Traced(run.runtime.trace, self.speed), plan)
            row |= {
                "figures": {"ms": figures(laps)},
                "pool_bytes": run.way.facts()["pool_bytes"],
                "predicted_pool_bytes": predicted,
                "pinned_bytes": pinned_bytes(device),
                "pinned_peak_bytes": pinned_peak_bytes(device),
                "prepare_peak_bytes": above(preparing, before),
                "peak_bytes": above(peak, before),
                "out_ceiling_gb_s": self.speed.to_host_bytes_per_us / 1000,
                "back_ceiling_gb_s": self.speed.to_device_bytes_per_us / 1000,
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
        return row if plan is None else row | _of_plan(plan, spent, len(run.batches))

    def policy(self, way: str) -> tuple[Policy | None, _Traced | None]:
        """What makes the plan of a way (None: nothing moves), and what it was measured on, if on
        another run's trace."""
        if way == "kept":
            return None, None
        if way == "everything":
            return (lambda trace: plan_by_knobs(trace, self.speed, self.options.knobs())), None
        traced = self._replayed(self.trace())
        assert traced.trace is not None
        plan = plan_for_time(traced.trace, traced.speed, self.options.lost)
        return None, replace(traced, plan=plan)

    def trace(self) -> OffloadTrace:
        """Eager microbatches that move nothing: the last one's times, since the first one makes
        what is made once."""
        options = self.options
        with OffloadRun(self, None, calls=1) as run:
            way, batch = run.way, run.batches[0]
            runtime = OffloadRuntime(
                options.modules,
                way.graphed.capture_backend.copy_streams,
                min_bytes=options.min_bytes,
                measures=True,
                parts=PARTS,
            )
            attach(runtime, run.model)
            for _ in range(3):
                torch.autograd.backward(
                    way.graphed.run_eagerly(*way.work.arguments(batch)), way.work.incoming(batch)
                )
            if runtime.trace is None:
                raise ValueError(f"nothing of {', '.join(options.modules)} is saved by this model")
            return runtime.trace

    def kept_bytes(self) -> int:
        """What the forward of an eager microbatch keeps for its backward."""
        with OffloadRun(self, None, calls=1) as run:
            given = run.way.work.arguments(run.batches[0])
            came_in = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            return kept_for_backward(
                lambda: run.way.graphed.run_eagerly(*given),
                [*run.model.parameters(), *run.model.buffers(), *came_in],
            )

    def run_once(self, way: str) -> bool:
        """Capture and run one microbatch; True. Raises where that has no room."""
        with OffloadRun(self, self.policy(way)[0], calls=1) as run:
            run.prepare()
            run.calls()
            return True

    def _replayed(self, eager: OffloadTrace) -> _Traced:
        """What graphs took that follow the plan made by eager microbatches. Raises RuntimeError
        where they are not known."""
        first = plan_for_time(eager, self.speed, self.options.lost)
        with OffloadRun(self, None, (eager, first), calls=1) as run:
            assert run.runtime is not None
            run.runtime.times_graphs = True
            run.prepare()
            for _ in range(TRIALS):
                run.calls()
            found = run.runtime.replayed(self.speed)
            if found is None:
                raise RuntimeError("no pass of the graphs holds all groups of the eager one")
            return _Traced(*found, eager.compute_us)

    def _draw(self, way: str, traced: _Traced, plan: OffloadPlan) -> None:
        """NAME.svg and NAME.trace.json, for chrome://tracing, of what the plan predicts."""
        folder, trace = self.options.draw, traced.trace
        if folder is None or trace is None:
            return
        name = f"{self.options.model}-{self.tokens}-{way}"
        timeline = simulate_offload(trace, traced.speed, plan)
        folder.mkdir(parents=True, exist_ok=True)
        svg = draw_offload_svg(trace, plan, timeline, name)
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
        events = chrome_trace([(name, trace, timeline)])
        (folder / f"{name}.trace.json").write_text(events, encoding="utf-8")


class OffloadRun:
    """One way, ready to run. Frees everything when it is closed."""

    def __init__(
        self,
        case: OffloadCase,
        policy: Policy | None,
        follows: tuple[OffloadTrace, OffloadPlan] | None = None,
        calls: int | None = None,
    ) -> None:
        """policy: makes the plan of what moves; follows: a plan of another run and its trace, None
        = neither. calls: microbatches; None is as many as the options say."""
        options, device = case.options, case.device
        calls = options.calls if calls is None else calls
        capacity = Capacity(case.tokens, options.documents)
        drawn = draw_batches(capacity, calls, case.model.config.vocab_size, **options.drawn)
        self.batches = [batch.to(device) for batch in drawn]
        self.model, self.device = twin(case.model, options.attention), device
        work = TimedPart(self.model, case.tokens, real=min(batch.num_tokens for batch in drawn))
        self.way = Graphed("chunk", work, [capacity], "chunk", options.compile)
        self.runtime: OffloadRuntime | None = None
        if policy is not None or follows is not None:
            self.runtime = OffloadRuntime(
                options.modules,
                self.way.graphed.capture_backend.copy_streams,
                min_bytes=options.min_bytes,
                in_flight=options.in_flight,
                policy=policy,
                parts=1 if follows is None else PARTS,
            )
            attach(self.runtime, self.model)
        if self.runtime is not None and follows is not None:
            self.runtime.follow(*follows)

    def __enter__(self) -> Self:
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
        try:
            largest_first = sorted(self.way.used.items(), reverse=True)
            samples = [self.way.work.arguments(batch) for _, batch in largest_first]
            return trial_memory(self.way.graphed, samples, 1).pools
        except CaptureError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                return None
            raise

    def calls(self) -> None:
        """All microbatches once."""
        with self.way.frozen():
            for batch in self.batches:
                self.way.run(batch)


def _of_plan(plan: OffloadPlan, spent: tuple[float, float] | None, calls: int) -> Row:
    """What was planned, and how fast the copies of `calls` microbatches were that `spent` is of:
    microseconds out and back."""
    row: Row = {
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
        moved = plan.moved_bytes * calls / 1000
        row |= {"out_gb_s": round(moved / spent[0], 2), "back_gb_s": round(moved / spent[1], 2)}
    return row


def _largest(
    any_size: OffloadCase, way: str, deadline: Deadline, known: int, takes: HeldBytes
) -> Row:
    """The row of the most tokens that run. known: so many do; takes: by a token of theirs."""
    device, options = any_size.device, any_size.options

    def runs(tokens: int) -> bool:
        case = replace(any_size, tokens=tokens)
        found, reason = attempt_alone(lambda: case.run_once(way), Deadline(None))
        free_memory(device)
        if found is None and not any(text in (reason or "") for text in OUT_OF_MEMORY):
            raise RuntimeError(f"at {tokens} tokens: {reason}")
        return found is not None

    there = HeldBytes(free_bytes(device), options.host_bytes())
    work = partial(most_tokens, runs, options.largest, deadline, known, takes, there)
    most, reason = attempt_alone(work, deadline)
    tokens, stopped = most or (known, None)
    kind = "largest" if stopped is None else "at least"
    row = replace(any_size, tokens=tokens).identity(f"{way}, {kind}", reason)
    return row | {"figures": {}, "stopped": stopped}
