"""Offloading in a run: one runtime per chunk, a plan when warm-up is over, and what is wrong with
what was asked for.

Warm-up steps move everything that may move, since they may not fit otherwise; the largest
microbatch among them is what the plan is made for, before anything is captured, with copies as fast
as plain ones are measured to be. Every rank plans for itself, and what cannot be planned on one of
them ends the run on all.

Eager microbatches may take longer than graphs, as the host holds them up, and a plan made by them
then counts on time that graphs do not have. So where a budget says what moves, graphs carry clocks
at first, and after `TRIAL` steps there is another plan, by what they took, and other graphs for it.

What was planned is reported (`report_offloading`): a table of all ranks, and pictures of when
copies run.

    runs/NAME/offload/  table.txt  rank0.svg  rank1.svg ...  trace.json, for chrome://tracing and
    ui.perfetto.dev

Times are those that the plan predicts, from what warm-up and plain copies were measured to take,
then from what graphs and their copies did.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from packgraph.graphs.checkpointed import LAYER_INPUT
from packgraph.graphs.choose import make_copy_streams
from packgraph.graphs.copy_streams import CopyStreams
from packgraph.graphs.stages import Run, Stage, cut_runs, scope_errors
from packgraph.models.config import DecoderConfig
from packgraph.models.decoder import ModelChunks, layer_kind, named_stages
from packgraph.models.recompute import FULL, NONE
from packgraph.offloading.api import attach
from packgraph.offloading.plan import CopySpeed, OffloadPlan, OffloadTrace
from packgraph.offloading.rules import why_not
from packgraph.offloading.runtime import PARTS, OffloadRuntime
from packgraph.offloading.search import knob_moves, plan_by_knobs, plan_for_bytes, plan_for_time
from packgraph.offloading.simulate import simulate_offload
from packgraph.offloading.timing import copy_speed
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pipeline.schedule import slot_counts
from packgraph.parallel.ranks import from_all, gather
from packgraph.train.config.reading import ConfigError, one_problem
from packgraph.train.config.sections import OffloadConfig, TrainConfig
from packgraph.train.features.recompute import AUTO, recomputed_stages
from packgraph.train.run_files import writing
from packgraph.viz.offload import chrome_trace, draw_offload_svg, offload_table

TRIAL = 2  # steps by the graphs of a first plan
FOLDER = "offload"


class Planner:
    """Plans for one chunk as the options of a run say. speed: of copies, as far as it is known.
    planned: what came of it, None before, and what it was planned by, with all microbatches in
    flight."""

    def __init__(
        self, options: OffloadConfig, rank: int, slots: int, one_pool: bool = True
    ) -> None:
        """rank: of the pipeline. slots: microbatches in flight at most. one_pool: forwards and
        backwards take memory from the same pool, so that one can have what the other does not need
        now."""
        self._options, self._rank, self._slots, self._one_pool = options, rank, slots, one_pool
        self.speed = CopySpeed()
        self.planned: tuple[OffloadTrace, CopySpeed, OffloadPlan] | None = None
        self.by_times = options.budget is not None or options.lost is not None

    def __call__(self, trace: OffloadTrace) -> OffloadPlan:
        """Raises ConfigError when what is asked for cannot be had."""
        measured, speed, options = replace(trace, slots=self._slots), self.speed, self._options
        if not self._one_pool:
            measured = replace(measured, forward_room=0, backward_room=())
        knobs, budget = options.knobs(), options.budget_bytes()
        moves = knob_moves(measured, knobs, self._rank)
        if options.lost is not None:
            plan = plan_for_time(measured, speed, options.lost, moves)
        elif budget is None:
            plan = plan_by_knobs(measured, speed, knobs, self._rank)
        else:
            try:
                plan = plan_for_bytes(measured, speed, budget, moves)
            except ValueError as error:
                raise one_problem(
                    f"offload.budget = {options.budget}: {error} (fraction, margin and min_bytes "
                    "of offload say what may)"
                ) from error
        self.planned = measured, speed, plan
        return plan


class TrainerOffloading:
    """The runtimes of a rank, one for each chunk with layers. when_planned: called when all of them
    have a plan, and again after the trial. planned_by: what took the times that plans count on.
    is_final: whether plans cannot change any more. trial_steps: by graphs, before the second
    plan."""

    def __init__(
        self,
        runtimes: Sequence[OffloadRuntime],
        planners: Sequence[Planner],
        warmup: int,
        device: torch.device,
        everyone: dist.ProcessGroup | None,
        captures: bool = True,
        modules: Sequence[str] = (),
    ) -> None:
        """planners: of the runtimes, which get them when `warmup` steps are over: nothing shall
        plan before. everyone: all ranks of the run, None = this process alone. captures: whether
        there will be graphs of whole passes. modules: that may move, however layers are
        recomputed."""
        self.runtimes, self.planners = list(runtimes), list(planners)
        self._warmup, self._device, self._modules = warmup, device, modules
        self._everyone = everyone
        self.planned_by = "eager microbatches"
        self.trial_steps = (
            TRIAL if captures and any(planner.by_times for planner in planners) else 0
        )
        self.is_final = not self.trial_steps
        self.when_planned: Callable[[TrainerOffloading], None] | None = None

    def __call__(self, steps_done: int) -> bool:
        """A step begins, with nothing in flight; whether graphs are to be captured anew. When
        warm-up is over: plan, before anything is captured; when graphs have been tried: plan by
        them. Collective then. Raises ConfigError on all ranks when one of them cannot have what is
        asked for."""
        for runtime in self.runtimes:
            runtime.end_step()
        changed = False
        if steps_done == self._warmup:
            self._first()
        elif steps_done == self._warmup + self.trial_steps and not self.is_final:
            self._again()
            self.is_final = changed = True
        if (steps_done == self._warmup or changed) and self.when_planned is not None:
            self.when_planned(self)
        return changed

    def _first(self) -> None:
        """Plan by eager microbatches."""
        problems, unplanned = list[str](), any(runtime.plan is None for runtime in self.runtimes)
        speed = copy_speed(self._device) if unplanned else CopySpeed()
        for runtime, policy in zip(self.runtimes, self.planners, strict=True):
            runtime.forget_replays()  # of graphs that have been given up since
            runtime.times_graphs = not self.is_final
            if runtime.plan is None:
                runtime.policy, policy.speed = policy, speed
            try:
                if runtime.trace is not None:
                    runtime.settle()
            except ConfigError as error:
                problems += error.problems
        self._agree(problems)

    def _again(self) -> None:
        """Plan by graphs, where these lie as the plan needs it. All are captured anew, without
        clocks."""
        problems, by_graphs = list[str](), False
        for runtime, planner in zip(self.runtimes, self.planners, strict=True):
            found = runtime.replayed(planner.speed)
            runtime.forget_replays()
            if found is None:
                continue
            (trace, planner.speed), by_graphs = found, True
            try:
                runtime.follow(trace, planner(trace))
            except ConfigError as error:
                problems += error.problems
        if any(self._agree(problems, by_graphs)):
            self.planned_by = "graphs"

    def _agree(self, problems: list[str], told: bool = False) -> list[bool]:
        """Gathers what all ranks tell. Raises ConfigError with the problems of all of them."""
        every = gather(self._everyone, (problems, told))
        if found := list(dict.fromkeys(itertools.chain(*(problems for problems, _ in every)))):
            raise ConfigError(found)
        return [told for _, told in every]

    def start_over(self, recompute: str) -> None:
        """Layers are recomputed otherwise, so that others of the modules save something: everything
        moves, and the next passes are planned by."""
        for runtime in self.runtimes:
            runtime.start_over(moved_modules(self._modules, recompute))

    def summary(self) -> dict[str, Any]:
        """Plan of each chunk: groups and bytes of a microbatch, the plan's predictions, and the
        speed of copies that it counts on: plain ones, or those in graphs."""
        plans = [
            (runtime.trace, runtime.plan, planner.speed)
            for runtime, planner in zip(self.runtimes, self.planners, strict=True)
        ]
        return {
            "offload": [
                {
                    "groups": len(plan.moves),
                    "moved": sum(plan.moves),
                    "bytes": trace.bytes,
                    "moved_bytes": plan.moved_bytes,
                    "host_bytes": plan.host_bytes,
                    "saved_bytes": plan.saved_bytes,
                    "exposed_ms": round(plan.exposed_us / 1000, 3),
                    "hidden_ms": round(plan.hidden_us / 1000, 3),
                    "lost": round(plan.lost, 5),
                    "to_host_gb_s": round(speed.to_host_bytes_per_us / 1000, 2),
                    "to_device_gb_s": round(speed.to_device_bytes_per_us / 1000, 2),
                }
                for trace, plan, speed in plans
                if trace is not None and plan is not None
            ]
        }


def make_offloading(
    model: ModelChunks,
    config: TrainConfig,
    copy_streams: Callable[[int], CopyStreams | None],
    device: torch.device,
    mesh: Mesh,
) -> TrainerOffloading | None:
    """Attach runtimes to the chunks of a rank; None where nothing is offloaded. copy_streams: that
    copy beside the graphs of a chunk, None where there are none."""
    options = config.offload
    if not options.modules:
        return None
    stages, rank = mesh.size("pp"), mesh.place["pp"]
    slots = slot_counts(stages, len(model.chunks))[rank]
    # Graphs with several slots keep what backwards need in a pool of its own.
    one_pool = not config.graph.enabled or stages > 1 or config.graph.slots == 1
    runtimes, planners = [], []
    is_auto = config.run.recompute == AUTO
    modules = moved_modules(options.modules, FULL) if is_auto else options.modules
    for number, (chunk, count) in enumerate(zip(model.chunks, slots, strict=True)):
        planner = Planner(options, rank, count, one_pool)
        runtime = OffloadRuntime(
            modules,
            copy_streams(number) or make_copy_streams(device),
            min_bytes=options.min_bytes,
            in_flight=options.in_flight,
            postpones=options.delay_until_replay and config.graph.enabled,
            parts=PARTS if planner.by_times else 1,
        )
        attach(runtime, chunk)
        runtimes.append(runtime)
        planners.append(planner)
    whole = config.graph.enabled and config.graph.granularity != "layer"
    return TrainerOffloading(
        runtimes, planners, config.graph.warmup, device, mesh.everyone(), whole, options.modules
    )


def offload_problems(config: TrainConfig) -> list[str]:
    """All reasons why what `config.offload` asks for cannot be."""
    options, graph = config.offload, config.graph
    if not options.modules:
        wishes = [name for name in ("budget", "lost") if getattr(options, name) is not None]
        return [
            f"offload.{name} says how much may move, and offload.modules says nothing may: name "
            "modules, such as "
            "qkv_linear,core_attn,mlp_act"
            for name in wishes
        ]
    stages = _every_stage(config.model)
    granularity = "chunk" if graph.granularity == "step" else graph.granularity
    if not graph.enabled or granularity == "step" or scope_errors(stages, graph.scope, granularity):
        runs: Sequence[Run] = [Run(0, len(stages), False)]
    else:
        runs = cut_runs(stages, graph.scope, granularity)
    kinds = {"": list(recomputed_stages(config))}
    asked = {"": options.modules}
    if config.run.recompute == AUTO:  # either of them moves, or the other
        kinds |= {NONE: []}
        asked = {kind: moved_modules(options.modules, kind or FULL) for kind in kinds}
    stashed = config.parallel.expert_stash > 0
    found = [
        problem
        for kind, recomputed in kinds.items()
        for problem in why_not(asked[kind], stages, runs, recomputed, stashed)
    ]
    if config.run.recompute == AUTO and graph.compile:
        found.append(
            "with graph.compile all that a layer saves moves, so that run.recompute = auto has "
            "nothing to choose by: choose none or full"
        )
    return [f"offload.modules: {problem}" for problem in dict.fromkeys(found)]


def moved_modules(modules: Sequence[str], recompute: str) -> tuple[str, ...]:
    """Selects the `modules` that save something where layers are recomputed: `none` or in any
    way."""
    return tuple(name for name in modules if (name == LAYER_INPUT) == (recompute != NONE))


def _every_stage(model: DecoderConfig) -> Sequence[Stage]:
    """The stages of all layers of a decoder, without its weights."""
    named = named_stages(model)  # of one layer of each kind
    of_kind: dict[tuple[tuple[str, ...], bool], list[Stage]] = {}
    for stage in named:
        if 0 <= stage.layer < model.depth:
            of_kind.setdefault(layer_kind(model, stage.layer), []).append(stage)
    inner = [
        replace(stage, layer=layer)
        for layer in range(model.depth)
        for stage in of_kind[layer_kind(model, layer)]
    ]
    return [
        *(stage for stage in named if stage.layer < 0),
        *inner,
        *(stage for stage in named if stage.layer >= model.depth),
    ]


def report_offloading(
    offloading: TrainerOffloading, mesh: Mesh, folder: Path, note: Callable[[str], None]
) -> None:
    """Write `folder`/offload and tell `note` the table, on rank 0. Collective: all ranks say what
    they have planned. Raises RunFileError."""
    mine = [planner.planned for planner in offloading.planners if planner.planned is not None]
    known = [
        (f"rank {rank}" + (f" chunk {chunk}" if len(chunks) > 1 else ""), planned)
        for rank, chunks in enumerate(from_all(mesh, mine))
        for chunk, planned in enumerate(chunks)
    ]
    if mesh.rank != 0 or not known:
        return
    named = [
        (name, (measured, plan, simulate_offload(measured, speed, plan)))
        for name, (measured, speed, plan) in known
    ]
    folder = folder / FOLDER
    table = offload_table([(name, *one) for name, one in named])
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "table.txt").write_text(table, encoding="utf-8")
        events = chrome_trace([(name, trace, timeline) for name, (trace, _, timeline) in named])
        (folder / "trace.json").write_text(events, encoding="utf-8")
        for name, one in named:
            (folder / f"{name.replace(' ', '')}.svg").write_text(
                draw_offload_svg(*one, f"offloading on {name}"), encoding="utf-8"
            )
    by = offloading.planned_by
    note(f"offloading, as planned by the times of {by} ({folder}):\n{table.rstrip()}")
