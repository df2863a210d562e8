"""Verify over several ranks: finds nothing where they are right, names rank, step and tensor where
they are not."""

import dataclasses
import io
import json
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from distkit import CPU, run_ranks
from rich.console import Console
from verifykit import BROKEN, break_gradient

from packgraph.graphs.graphed import GraphedModule
from packgraph.parallel.data import FlatParameters
from packgraph.parallel.layout import Layout
from packgraph.train.features.moe import ExpertBalance
from packgraph.verification import compared_run as side
from packgraph.verification.command import print_report, print_total
from packgraph.verification.compare import DIFFERS, Difference
from packgraph.verification.matrix import budget_of, config_for, layouts_of, random_packs
from packgraph.verification.ranks import (
    COPIES,
    FIRST_WEIGHTS,
    GRADIENTS,
    LOSS,
    NORM,
    PARAMETERS,
    STATE,
    OneProcessReport,
    RanksReport,
    compare_with_one_process,
    relative_distance,
    verify_ranks,
)
from packgraph.verification.verify import VerifyReport

DP2, TP2, PP2, CP2 = Layout(dp=2), Layout(dp=1, tp=2), Layout(dp=1, pp=2), Layout(dp=1, cp=2)
EP2, EP4, PP2_EP2 = Layout(dp=2, ep=2), Layout(dp=4, ep=4), Layout(dp=2, pp=2, ep=2)
KINDS = [FIRST_WEIGHTS, LOSS, GRADIENTS, NORM, PARAMETERS, COPIES, STATE]


def config(layout, granularity="layer", steps=5, **run):
    made = config_for(layout, granularity, steps)
    return dataclasses.replace(
        made,
        graph=dataclasses.replace(made.graph, strict=True, granularity=granularity),
        run=dataclasses.replace(made.run, **run),
    )


def packs():
    return random_packs(seed=1)


def both(mesh, settings):
    return verify_ranks("both", settings, packs, CPU, mesh, budget=budget_of)


def asks_everyone(mesh, settings):
    made = side.ComparedRun(settings, CPU, mesh)
    made.close()
    return mesh.everyone() is not None and made.executor.everyone is mesh.everyone()


@pytest.mark.parametrize("layout", [DP2, PP2])
def test_ranks_decide_together_what_a_budget_allows(layout):
    assert run_ranks(asks_everyone, 2, config(layout), layout=layout) == [True, True]


@pytest.mark.parametrize(
    ("layout", "granularity", "dtype"),
    [
        (TP2, "layer", "float32"),
        (DP2, "layer", "float32"),
        (DP2, "chunk", "bfloat16"),
        (PP2, "layer", "float32"),
        (PP2, "chunk", "float32"),
        (PP2, "step", "float32"),
        (EP2, "layer", "float32"),
    ],
)
def test_right_runs_are_bitwise_equal_and_those_of_one_process(layout, granularity, dtype):
    first, second = run_ranks(both, 2, config(layout, granularity, dtype=dtype), layout=layout)
    assert first == second, "all ranks know what every rank has found"
    assert first.good and not first.found() and not first.silent_ranks()
    assert [report.steps for report in first.ranks] == [5, 5] and first.one_process.steps == 5
    assert all(report.rows.total() == report.microbatches > 0 for report in first.ranks)
    assert list(first.one_process.distances) == KINDS
    assert first.one_process.distances[FIRST_WEIGHTS].size == 0.0
    # Far enough from the limits that longer and deeper runs stay below, near enough that limits
    # mean something.
    assert all(
        distance.size <= distance.limit / 5 for distance in first.one_process.distances.values()
    )


def test_tensor_parallel_pipelines_are_verified():
    layout = Layout(dp=1, pp=2, tp=2)
    assert all(
        report.good
        for report in run_ranks(both, 4, config(layout, steps=4), layout=layout, seconds=120.0)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "granularity"), [(EP4, "chunk"), (PP2_EP2, "layer"), (PP2_EP2, "step")], ids=str
)
def test_replicas_of_any_layout_that_share_experts_are_verified(layout, granularity):
    assert all(
        report.good
        for report in run_ranks(both, 4, config(layout, granularity), layout=layout, seconds=120.0)
    )


def test_a_step_that_lacks_room_for_experts_is_made_again_before_it_is_compared():
    made = config(EP2, "chunk", steps=3)
    tight = dataclasses.replace(made, parallel=dataclasses.replace(made.parallel, expert_room=1.0))
    first, second = run_ranks(both, 2, tight, layout=EP2)
    assert first == second and first.good
    assert first.ranks[0].made_again == first.ranks[1].made_again > 0
    assert "with more room for experts" in printed(first)


def biases_left_alone(mesh, settings):
    """From the second step on, eager training moves no bias of a router on rank 1."""
    original, calls = ExpertBalance.update, []

    def update(self, skip=None):
        calls.append(None)
        before = [gate.e_score_correction_bias.clone() for gate in self._gates]
        original(self, skip)
        if mesh.rank == 1 and len(calls) == 3:
            for gate, bias in zip(self._gates, before, strict=True):
                gate.e_score_correction_bias.copy_(bias)

    with mock.patch.object(ExpertBalance, "update", update):
        return verify_ranks(
            "biases", settings, packs, CPU, mesh, one_process=False, budget=budget_of
        )


def test_biases_of_routers_are_compared():
    report, _ = run_ranks(biases_left_alone, 2, config(EP2, steps=3), layout=EP2)
    (first, *_) = report.found("parameters")
    assert (first.rank, first.difference.step) == (1, 2)
    assert first.difference.name == "layers.1.mlp.gate.e_score_correction_bias"


def disturbed_on_the_second_rank(mesh, settings):
    """From the third step on, graphs of rank 1 leave something behind in one gradient buffer."""
    original = GraphedModule.__call__

    def forward(self, *args):
        result = original(self, *args)
        if self.stats.replayed == 1:
            dict(self.named_parameters())["norm.weight"].grad.add_(1e-3)
        return result

    with mock.patch.object(GraphedModule, "__call__", forward if mesh.rank == 1 else original):
        return verify_ranks(
            "disturbed", settings, packs, CPU, mesh, one_process=False, budget=budget_of
        )


def test_the_rank_whose_graphs_are_wrong_is_named():
    first, second = run_ranks(disturbed_on_the_second_rank, 2, config(DP2), layout=DP2)
    assert first == second and not first.good
    (culprit, *others) = first.found()
    assert culprit.rank == 1 and culprit.kind == "gradients" and culprit.difference.step == 3
    assert str(culprit).startswith("rank 1: step 3: norm.weight: ")
    assert {one.rank for one in first.found("gradients") if one.difference.step == 3} == {1}
    assert (
        {one.rank for one in first.found("summed gradients")}
        == {0, 1}
        == {one.rank for one in first.found("loss")}
    )
    assert {other.difference.step for other in others} == {3, 4}, (
        "the next step's losses see the wrong weights"
    )
    assert not first.found("random states")
    text = printed(first)
    assert (
        "First difference between eager and graph: gradients: rank 1: step 3: norm.weight: " in text
    )
    assert "; also on rank" in text and "0 of 1 runs bitwise equal on every rank\n" in text


def compared(mesh, settings):
    return compare_with_one_process(settings, packs(), CPU, mesh, budget_of)


def averaged(mesh, settings):
    """Gradients are averaged over the replicas instead of added up: wrong, for losses are divided
    by all tokens."""
    original = FlatParameters.reduce

    def reduce(self):
        original(self)
        for span in self.spans if self.group is not None else ():
            span.own_gradients.mul_(0.5)

    with mock.patch.object(FlatParameters, "reduce", reduce):
        return compared(mesh, settings), verify_ranks(
            "averaged", settings, packs, CPU, mesh, one_process=False
        )


@pytest.mark.parametrize("name", ["adamw8bit", "adafactor"])
def test_other_optimizers_are_compared_or_it_says_how(name):
    settings = config(DP2)
    options = dataclasses.replace(settings.optimizer, name=name)
    settings = dataclasses.replace(settings, optimizer=options)
    for report in run_ranks(compared, 2, settings, layout=DP2):
        assert report.good, report
        assert report.changed.startswith("by adamw") == (name == "adamw8bit")


def test_a_wrong_scale_of_gradients_is_no_run_of_one_process():
    for report, bitwise in run_ranks(averaged, 2, config(DP2), layout=DP2):
        assert bitwise.good, (
            "eager and graphs agree, so only the comparison with one process can tell"
        )
        assert not report.good
        assert {kind for kind, distance in report.distances.items() if not distance.good} == {
            GRADIENTS,
            NORM,
        }
        assert report.distances[GRADIENTS].size == pytest.approx(0.5, rel=1e-3)
        assert report.distances[GRADIENTS].step == 1 and report.distances[GRADIENTS].name


def not_gathered(mesh, settings):
    with (
        mock.patch.object(FlatParameters, "begin_gather", return_value=None),
        mock.patch.object(FlatParameters, "gather", return_value=None),
    ):
        return compared(mesh, settings)


def one_weight_changed(mesh, settings, name):
    """Rank 1 begins with another value in one element of a weight."""
    original = side.build_chunks

    def build(config, device, made_for):
        model = original(config, device, made_for)
        if made_for.world > 1 and mesh.rank == 1:
            with torch.no_grad():
                dict(model.named_parameters())[name].view(-1)[0].mul_(1.01)
        return model

    with mock.patch.object(side, "build_chunks", build):
        return compared(mesh, settings)


def test_wrong_weights_are_named():
    report, _ = run_ranks(not_gathered, 2, config(DP2), layout=DP2)
    assert not report.distances[PARAMETERS].good and report.distances[PARAMETERS].step == 1
    assert not report.distances[COPIES].good
    assert report.distances[STATE].good, "every rank has updated its own part rightly"
    report, _ = run_ranks(one_weight_changed, 2, config(PP2), "norm.weight", layout=PP2)
    wrong = report.distances[FIRST_WEIGHTS]
    assert not wrong.good and (wrong.step, wrong.name, wrong.limit) == (0, "norm.weight", 0.0)
    assert report.distances[COPIES].good


def test_tied_weights_that_are_not_equal_are_named():
    report, _ = run_ranks(one_weight_changed, 2, config(PP2), "embed_tokens.weight", layout=PP2)
    assert report.distances[FIRST_WEIGHTS].good, "the first stage's copy is the right one"
    wrong = report.distances[COPIES]
    assert not wrong.good and wrong.name == "embed_tokens.weight"


def test_distances_are_relative_and_nan_is_over_every_limit():
    ones = torch.ones(4)
    assert relative_distance(ones, ones.clone()) == 0.0
    assert relative_distance(1.01 * ones, ones) == pytest.approx(0.01, rel=1e-4)
    assert relative_distance(torch.zeros(4), torch.zeros(4)) == 0.0
    assert (
        relative_distance(ones, torch.zeros(4))
        == math.inf
        == relative_distance(ones, torch.ones(5))
    )
    assert relative_distance(1e-3 * ones, torch.zeros(4), smallest=1.0) == pytest.approx(2e-3)
    assert math.isnan(relative_distance(ones * math.nan, ones)) and math.isnan(
        relative_distance(ones, ones * math.nan)
    )
    report = OneProcessReport("float32", steps=3)
    for step, size in enumerate((1e-7, 3e-7, 2e-7)):
        report.note(LOSS, step, "", size)
    assert report.good and report.distances[LOSS].step == 1
    report.note(LOSS, 3, "", math.nan)
    report.note(LOSS, 4, "", 1.0)
    assert not report.good and report.distances[LOSS].step == 3, (
        "the first step that is wrong says where to look"
    )
    assert not OneProcessReport("float32").good, "nothing compared is nothing shown"


def printed(report):
    console = Console(file=io.StringIO(), width=200)
    print_report(report, console)
    print_total([report], console)
    return console.file.getvalue()


def test_the_first_difference_is_the_one_that_came_up_first():
    def report(*found):
        differences = {kind: Difference(step, name, "") for kind, step, name in found}
        return VerifyReport("", replayed=1, differences=differences)

    ranks = RanksReport(
        "",
        (
            report(("summed gradients", 3, "a"), ("parameters", 3, "b")),
            report(("gradients", 3, "a"), ("random states", 2, "cpu")),
            report(("loss", 4, "loss")),
        ),
        None,
    )
    order = [(one.rank, one.difference.name) for one in ranks.found()]
    assert order == [(1, "cpu"), (1, "a"), (0, "a"), (0, "b"), (2, "loss")]


def test_every_layout_of_a_number_of_processes_is_tried():
    assert layouts_of(2) == [DP2, PP2, TP2, EP2, CP2]
    assert {
        (layout.dp, layout.pp, layout.cp, layout.tp, layout.ep) for layout in layouts_of(4)
    } == {
        (4, 1, 1, 1, 1),
        (2, 1, 1, 2, 1),
        (1, 1, 1, 4, 1),
        (2, 2, 1, 1, 1),
        (1, 2, 1, 2, 1),
        (1, 4, 1, 1, 1),
        (4, 1, 1, 1, 4),
        (2, 2, 1, 1, 2),
        (1, 1, 4, 1, 1),
        (1, 2, 2, 1, 1),
    }


@pytest.mark.slow
def test_torchrun_verifies_and_ends_with_its_verdict(tmp_path):
    (tmp_path / "documents.txt").write_text(Path(__file__).read_text()[:5000])
    options = f"""verify qwen3-tiny --steps 4 --data.source text
        --data.path {tmp_path}/documents.txt --run.device cpu --run.tokens-per-step 512
        --model.num-layers 2 --graph.capacities 128x4,256x8""".split()
    good = torchrun(*options, "--parallel.tp", "2")
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("eager against graph on 2 ranks") == 1 and "tp 2" in good.stdout
    assert (
        "1 of 1 runs bitwise equal on every rank and, within the limits, those of one process"
        in good.stdout
    )
    # all of it is one step, a step of warm-up
    once = ("--data.epochs", "1", "--run.tokens-per-step", "1000000")
    nothing = torchrun(*options, *once, "--skip-one-process")
    assert nothing.returncode == 1 and "Nothing was replayed on rank 0, 1" in nothing.stdout
    assert "against one process" not in nothing.stdout and "Traceback" not in nothing.stdout


def torchrun(*words):
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
    return subprocess.run(
        [*launcher, "-m", "packgraph.cli", *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )


def test_the_model_of_anybodys_config_is_compared_at_a_layout(tmp_path):
    pytest.importorskip("transformers", reason="the model is of this library")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    sizes |= {"num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3", "tie_word_embeddings": True} | sizes))
    words = ["--hf-config", str(file), "--layers", "2", "--parallel.tp", "2", "--steps", "4"]
    done = torchrun("verify", *words)
    assert done.returncode == 0, done.stderr
    assert "qwen3, tp 2" in done.stdout and "against one process" in done.stdout
    assert "1 of 1 runs bitwise equal on every rank and" in done.stdout


# ---- one run in memory at a time: the verdict of the lockstep, on every rank


def apart_config(layout, granularity, steps=4, **parallel):
    made = config_for(layout, granularity, steps)
    return dataclasses.replace(
        made,
        parallel=dataclasses.replace(made.parallel, **parallel),
        graph=dataclasses.replace(made.graph, strict=True, granularity=granularity),
    )


def both_reports(mesh, settings):
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


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (DP2, apart_config(DP2, "chunk")),
        (PP2, apart_config(PP2, "step")),
        (EP2, apart_config(EP2, "chunk", 3, expert_room=1.0)),
    ],
    ids=["replicas", "pipeline", "made again"],
)
def test_right_runs_have_the_report_of_the_lockstep(layout, settings):
    first, second = run_ranks(both_reports, 2, settings, layout=layout)
    assert first == second
    lockstep, apart, left = first
    assert apart == lockstep and apart.good and left == [0, 0]
    assert (apart.ranks[0].made_again > 0) == (layout == EP2)


def disturbed_apart(mesh, settings):
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


def test_the_rank_whose_graphs_are_wrong_is_named_by_one_run_after_the_other():
    (lockstep, apart), second = run_ranks(
        disturbed_apart, 2, apart_config(DP2, "layer"), layout=DP2
    )
    assert [lockstep, apart] == second and not apart.good
    assert str(apart.found()[0]) == f"rank 1: step 3: {BROKEN}: {DIFFERS}"
    known, found = (
        [(one.rank, one.kind, one.difference.step, one.difference.name) for one in report.found()]
        for report in (lockstep, apart)
    )
    assert known == found and any(kind == "summed gradients" for _, kind, *_ in found)
