"""A trace of some steps of a run (`run.profile`), for Perfetto and chrome://tracing.

runs/NAME/profile/rank-0.json    steps that replay, once graphs are captured
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile, schedule

from packgraph.train.run_files import writing
from packgraph.train.trainer import Trainer

FOLDER = "profile"
SETTLING = 3  # steps after the warm-up that capture graphs, compare replays and fill queues


@contextmanager
def profiled_steps(trainer: Trainer) -> Iterator[Callable[[], object]]:
    """Yields what is to be called after every step; the trace is written when its steps are done,
    or when the block ends among them. Of a run that is shorter, the last steps are traced.

    Raises:
        RunFileError: If the trace cannot be written.
    """
    config, step = trainer.config, trainer.step
    steps, left = config.run.profile, config.run.steps - step
    if min(steps, left) < 1:
        yield bool
        return
    settling = config.graph.warmup + SETTLING if config.graph.enabled else SETTLING
    first = max(0, min(settling, left - steps))  # of the steps that are left, from 0
    path = trainer.folder / FOLDER / f"rank-{trainer.mesh.rank}.json"

    def write(profiler: profile) -> None:
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
        trainer.view.note(
            f"steps {step + first + 1} to {step + first + min(steps, left)} traced in {path}"
        )

    on_device = [ProfilerActivity.CUDA] if trainer.device.type == "cuda" else []
    wait = max(0, first - 1)
    plan = schedule(wait=wait, warmup=first - wait, active=min(steps, left), repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU, *on_device], schedule=plan, on_trace_ready=write
    ) as profiler:
        yield profiler.step
