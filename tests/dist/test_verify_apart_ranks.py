"""Verify over several ranks, with one run in memory at a time: the verdict of the lockstep, on
every rank."""

import dataclasses
import os
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
from distkit import CPU, run_ranks
from verifykit import BROKEN, break_gradient

from packgraph.parallel.mesh import Layout
from packgraph.verification import compared_run as side
from packgraph.verification.compare import DIFFERS
from packgraph.verification.matrix import budget_of, config_for, random_packs
from packgraph.verification.ranks import verify_ranks

DP2, PP2, EP2 = Layout(dp=2), Layout(dp=1, pp=2), Layout(dp=2, ep=2)


def config(layout, granularity, steps=4, **parallel):
    made = config_for(layout, granularity, steps)
    return dataclasses.replace(
        made,
        parallel=dataclasses.replace(made.parallel, **parallel),
        graph=dataclasses.replace(made.graph, strict=True, granularity=granularity),
    )


def packs():
    return random_packs(seed=1)


def both(mesh, settings):
    """The reports of the lockstep and of one run after the other; how much of its eager run was
    left."""
    lockstep = verify_ranks("run", settings, packs, CPU, mesh, one_process=False, budget=budget_of)
    original, made, left = side.make_optimizer, [], []

    def make(*arguments, **options):
        left.append(sum(reference() is not None for reference in made))
        optimizer = original(*arguments, **options)
        made.extend(weakref.ref(span.parameters) for span in optimizer.flat.spans)
        return optimizer

    with mock.patch.object(side, "make_optimizer", make):
        apart = verify_ranks(
            "run", settings, packs, CPU, mesh, one_process=False, apart=True, budget=budget_of
        )
    return lockstep, apart, left


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (DP2, config(DP2, "chunk")),
        (PP2, config(PP2, "step")),
        (EP2, config(EP2, "chunk", 3, expert_room=1.0)),
    ],
    ids=["replicas", "pipeline", "made again"],
)
def test_right_runs_have_the_report_of_the_lockstep(layout, settings):
    first, second = run_ranks(both, 2, settings, layout=layout)
    assert first == second
    lockstep, apart, left = first
    assert apart == lockstep and apart.good and left == [0, 0]
    assert (apart.ranks[0].made_again > 0) == (layout == EP2)


def disturbed_on_the_second_rank(mesh, settings):
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 1:
            break_gradient(patch)
        return [
            verify_ranks(
                "disturbed",
                settings,
                packs,
                CPU,
                mesh,
                one_process=False,
                apart=apart,
                budget=budget_of,
            )
            for apart in (False, True)
        ]


@pytest.mark.dist
def test_the_rank_whose_graphs_are_wrong_is_named():
    (lockstep, apart), second = run_ranks(
        disturbed_on_the_second_rank, 2, config(DP2, "layer"), layout=DP2
    )
    assert [lockstep, apart] == second and not apart.good
    assert str(apart.found()[0]) == f"rank 1: step 3: {BROKEN}: {DIFFERS}"
    known, found = (
        [(one.rank, one.kind, one.difference.step, one.difference.name) for one in report.found()]
        for report in (lockstep, apart)
    )
    assert known == found and any(kind == "summed gradients" for _, kind, *_ in found)


@pytest.mark.dist
@pytest.mark.slow
def test_torchrun_makes_one_run_after_the_other(tmp_path):
    (tmp_path / "documents.txt").write_text(Path(__file__).read_text())
    words = f"""verify qwen3-tiny --steps 4 --data.source text --data.path {tmp_path}/documents.txt
        --run.device cpu --run.tokens-per-step 512 --model.num-layers 2
        --graph.capacities 128x4,256x8 --parallel.tp 2 --apart
        --skip-one-process""".split()
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    good = subprocess.run(
        [*launcher, "-m", "packgraph.cli", *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert good.returncode == 0, good.stderr
    assert (
        "1 of 1 runs bitwise equal on every rank" in good.stdout
        and "against one process" not in good.stdout
    )
