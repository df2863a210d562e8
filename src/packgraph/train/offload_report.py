"""What was planned of offloading, for people: a table of all ranks, and pictures of when copies
run.

    runs/NAME/offload/  table.txt  rank0.svg  rank1.svg ...  trace.json, for chrome://tracing and
    ui.perfetto.dev

Times are those that the plan predicts, from what warm-up and plain copies were measured to take,
then from what graphs and their copies did.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from packgraph.offloading.plan import OffloadPlan, OffloadTrace
from packgraph.offloading.simulate import OffloadTimeline, simulate_offload
from packgraph.parallel.mesh import Mesh
from packgraph.train.offloading import Planned, TrainerOffloading
from packgraph.train.run_files import writing
from packgraph.viz.offload import chrome_trace, draw_offload_svg, offload_figures, offload_table

FOLDER = "offload"


class Drawn(NamedTuple):
    """What a picture is of."""

    trace: OffloadTrace
    plan: OffloadPlan
    timeline: OffloadTimeline


def report_offloading(
    offloading: TrainerOffloading, mesh: Mesh, folder: Path, note: Callable[[str], None]
) -> None:
    """Write `folder`/offload and tell `note` the table, on rank 0. Collective: all ranks say what
    they have planned. Raises RunFileError."""
    mine = [planner.planned for planner in offloading.planners if planner.planned is not None]
    every: list[list[Planned]] = [mine]
    if mesh.everyone() is not None:
        every = [[] for _ in range(mesh.world)]
        dist.all_gather_object(every, mine, group=mesh.everyone())
    known = [
        (f"rank {rank}" + (f" chunk {chunk}" if len(chunks) > 1 else ""), planned)
        for rank, chunks in enumerate(every)
        for chunk, planned in enumerate(chunks)
    ]
    if mesh.rank == 0 and known:
        _write(folder / FOLDER, known, note, offloading.planned_by)


def _write(
    folder: Path, known: Sequence[tuple[str, Planned]], note: Callable[[str], None], by: str
) -> None:
    names = [name for name, _ in known]
    drawn = [
        Drawn(
            planned.measured,
            planned.plan,
            simulate_offload(planned.measured, planned.speed, planned.plan),
        )
        for _, planned in known
    ]
    table = offload_table([(name, offload_figures(*one)) for name, one in zip(names, drawn)])
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "table.txt").write_text(table, encoding="utf-8")
        events = chrome_trace([(name, one.trace, one.timeline) for name, one in zip(names, drawn)])
        (folder / "trace.json").write_text(events, encoding="utf-8")
        for name, one in zip(names, drawn):
            (folder / f"{name.replace(' ', '')}.svg").write_text(
                draw_offload_svg(*one, f"offloading on {name}"), encoding="utf-8"
            )
    note(f"offloading, as planned by the times of {by} ({folder}):\n{table.rstrip()}")
