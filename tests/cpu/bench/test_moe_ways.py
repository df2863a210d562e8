"""Ways of the step benchmark for layers with experts: every one computes what the model does,
whatever it makes."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import ALL, PEERS, AllMoeArguments, main, measure_step
from bench_command import read_bench
from bench_models import (
    SHAPES,
    build_part,
    refit,
    shape,
    twin,
)
from bench_ways import WAYS, Graphed, layers_of
from benchkit import CPU, ONE, make, make_way, results
from expert_ways import EXPERT_WAYS, MOE_WAYS, RoomyDispatcher, Stashed, partial_scope
from others import GraphedCallables, Recorded, WholeGraph, their_layers
from step_figures import model_flops
from torch import Tensor

from packgraph.bench.comparison import Deadline
from packgraph.bench.rows import Rows, facts
from packgraph.models.layers.moe import moe_blocks
from packgraph.moe.dispatch.dispatcher import LocalDispatcher, Routing
from packgraph.packing.capacity import Capacity

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "h200_moe.sh"
TINY = shape("moonlight-tiny")
EXACT = ("host-splits", "chunk", "partial", "chunk+stash")


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[float, float]]]:
    return {
        part: results(make_way("eager", setting), model, draws, setting.work)
        for part in ("layers", "model")
        for model, draws, setting in [make(part, TINY, 3)]
    }


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *(("layers", name) for name in (*EXACT, "compile")),
        *(
            pytest.param("layers", name, marks=pytest.mark.slow)
            for name in ("chunk+compile", "chunk+compile+stash")
        ),
        ("model", "partial"),
        ("model", "chunk+stash"),
    ],
)
@pytest.mark.few(3)
def test_ways_compute_what_eager_does(expected: dict[str, Any], part: str, name: str) -> None:
    model, draws, setting = make(part, TINY, 3)
    way = make_way(name, setting)
    found = results(way, model, draws, setting.work)
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected[part]), rtol=1e-5, atol=1e-7
    )
    if name in EXACT:
        assert found == expected[part]
    if isinstance(way, Graphed):
        assert way.graphed.stats.replayed >= len(draws) and not way.graphed.stats.fallbacks.get(
            "capture failed"
        )
        assert bool(way.by_autograd) == (name.startswith("partial") and part == "layers")
    way.close()


def test_the_layers_of_transformers_share_values_and_gradients(expected: dict[str, Any]) -> None:
    """Without a gradient of the losses that balance experts, which it has not: 1e-5 of the norm
    here."""
    pytest.importorskip("transformers")
    model, draws, setting = make("layers", TINY, 3)
    way = make_way("transformers", setting)
    found = results(way, model, draws, setting.work)
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected["layers"]), rtol=1e-4, atol=1e-6
    )
    way.close()


def test_transformers_has_no_such_layers_without_latent_attention() -> None:
    model, _, _ = make("layers", shape("tiny"), 3)
    with pytest.raises(ValueError, match=r"for latent attention with experts \(DeepSeek-V3\) only"):
        their_layers(model)


def test_graphs_of_torch_take_what_experts_read(expected: dict[str, Any]) -> None:
    """With functions that run again in place of graphs: all that a layer reads of a batch comes in
    as tensors."""
    model, draws, setting = make("layers", TINY, 3)

    def again(run: Any) -> tuple[Any, Any]:
        out: Tensor = run().clone()
        return out, lambda: out.copy_(run())

    def pretend(modules: tuple[Any, ...], samples: tuple[Any, ...]) -> tuple[Any, ...]:
        assert all(isinstance(value, Tensor) for sample in samples for value in sample)
        return modules

    own = twin(model, "auto")
    work = setting.work.by(own)
    for way in (
        Recorded(
            "whole-padded", work, Capacity(32, 256), lambda batch: WholeGraph(work, batch, again)
        ),
        Recorded(
            "graphed-callables",
            work,
            ONE,
            lambda batch: GraphedCallables(own, layers_of(own), work.arguments(batch), pretend),
        ),
    ):
        found = results(way, model, draws, setting.work)
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected["layers"]), rtol=1e-5, atol=1e-7
        )


def test_a_stash_without_room_is_a_complaint_and_pages_are_counted() -> None:
    _, draws, setting = make("layers", TINY, 3)
    way = make_way("chunk+stash", setting)
    assert isinstance(way, Stashed)
    way.prepare([refit(batch, ONE) for batch in draws])
    found = way.facts()
    assert (
        found["stash_pages"] == 2 and found["stash_bytes"] > 0
    )  # one page of 64 rows for each of two layers
    way.stash.pages.state.fill_(1)  # whatever is in it, an overflow among that
    assert "rows found no page" in str(way.complaint())


def test_ways_of_experts_need_experts() -> None:
    _, _, setting = make("layers", shape("tiny"), 3)
    for name in EXPERT_WAYS:
        with pytest.raises(ValueError, match="is a way of running experts, but the model has none"):
            make_way(name, setting)
    assert set(MOE_WAYS) <= {*WAYS, *EXPERT_WAYS} and not set(WAYS) & set(EXPERT_WAYS)


def test_shapes_with_experts_are_slices_with_experts_in_every_layer() -> None:
    for name in ("moonlight", "moonlight-tiny"):
        config = SHAPES[name]
        assert all(config.experts.has_layer(layer) for layer in range(config.num_layers))
        assert "mlp" not in partial_scope(config)
    model = build_part("layers", shape("moonlight-tiny"), CPU, torch.bfloat16)
    for block in moe_blocks([model]):
        gate = block.gate
        assert gate.weight.dtype == torch.bfloat16 and gate.e_score_correction_bias is not None
        assert gate.e_score_correction_bias.dtype == torch.float32
        assert (
            not gate.e_score_correction_bias.any()
            and not gate.load.any()
            and not block.demand.any()
        )


def test_operations_count_the_experts_that_a_token_is_routed_to() -> None:
    config = SHAPES["moonlight"]
    attention = 2048 * (16 * 192 + 512 + 64) + 512 * 16 * 256 + 16 * 128 * 2048
    layer = attention + 2048 * (64 + 3 * 8 * 1408)
    pairs = 1000 * 1001 // 2
    assert model_flops(config, [1000], head=False) == 8 * (
        6 * layer * 1000 + 3 * 16 * 2 * (192 + 128) * pairs
    )


def test_bench_moe_has_defaults_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--tokens",
        "32",
        "--mean",
        "8",
        "--sigma",
        "0.5",
        "--rounds",
        "1",
        "--calls",
        "1",
        "--device",
        "cpu",
    ]
    assert main(["moe", *words, "--ways", "host-splits", "eager"]) == 0
    assert main(["moe", *words, "--ways", "eager", "chunk"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["way"] for row in rows] == ["host-splits", "eager", "eager", "chunk"]
    assert all(
        row["benchmark"] == "step"
        and row["part"] == "layers"
        and row["model"] == "moonlight-tiny"
        and row["reason"] is None
        and row["agrees"]
        for row in rows
    )
    assert main(["moe", "--help"]) == 0
    assert "default: moonlight on CUDA" in " ".join(capsys.readouterr().out.split())


def test_rows_of_experts_say_what_a_stash_takes() -> None:
    """With room for twice the rows everything static takes twice of what is balanced; a stash one
    layer more."""
    options = AllMoeArguments(
        model="moonlight-tiny",
        layers=2,
        tokens=(32,),
        ways=("host-splits", "chunk", "chunk+stash"),
        rounds=1,
        calls=1,
        mean=8.0,
        sigma=0.8,
        part="layers",
        room=2.0,
    )
    rows = Rows(facts(CPU, "abc123"), write=False)
    measure_step(options, CPU, rows, Deadline(None))
    for row in rows.all:
        json.dumps(row)
        assert row["reason"] is None and row["loss_difference"] == 0.0 and row["room"] == 2.0
    exact, static, stashed = rows.all
    assert (
        stashed["stash_bytes"] > 0 and stashed["stash_pages"] > 0 and stashed["peak_ratio"] is None
    )  # on a CPU
    assert exact["expert_ratio"] == 1.0 and static["expert_bytes"] == 2 * exact["expert_bytes"]
    assert stashed["slot_bytes"] == stashed["stash_bytes"] + stashed["pool_bytes"]
    assert static["pool_bytes"] > stashed["pool_bytes"]
    one_layer = static["expert_bytes"] // 2
    trash = 4 * (
        SHAPES["moonlight-tiny"].hidden_size
        + 2 * SHAPES["moonlight-tiny"].experts.intermediate_size
    )
    assert stashed["expert_bytes"] == stashed["stash_bytes"] - trash + one_layer


def test_rows_without_documents_to_route_are_empty() -> None:
    """The experts' rows of a model with room, and what they compute, are those of one without."""
    routing = Routing(torch.tensor([[1, 0], [-1, -1], [2, 1]], dtype=torch.int32), torch.rand(3, 2))
    x, (roomy, plain) = torch.randn(3, 4), (RoomyDispatcher(3, 1.5), LocalDispatcher(3))
    (rows, plan), (expected, other) = (
        (d.dispatch(x, routing, plan), plan)
        for d in (roomy, plain)
        for plan in [d.preprocess(routing)]
    )
    assert rows.values.shape == (9, 4) and torch.equal(rows.values[:6], expected.values)
    assert torch.equal(rows.offsets, expected.offsets) and not rows.values[4:].any()
    assert torch.equal(roomy.combine(rows.values, plan), plain.combine(expected.values, other))


@pytest.mark.skipif(sys.platform == "win32", reason="a script for bash")
def test_the_script_for_a_gpu_tests_first_and_runs_ways_that_there_are(tmp_path: Path) -> None:
    def lines(**environment: str) -> list[list[str]]:
        found = subprocess.run(
            ["bash", str(SCRIPT)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"OUT": str(tmp_path), "PYTHON": "echo"} | environment,
        )
        return [shlex.split(line) for line in found.stdout.splitlines()]

    tests, pieces, *benchmarks = lines(COMMIT="abc123", LIMIT="600")
    assert tests[:3] == ["-m", "pytest", "-q"] and all(
        (SCRIPT.parents[1] / file).exists() for file in tests[-2:]
    )
    assert pieces[:3] == ["benchmarks/moe_experts.py", "--seconds", "25"]
    assert all(words[1] == "moe" for words in benchmarks)
    asked = [read_bench(words[1:], ALL) for words in benchmarks]
    assert all(
        one.part == "layers" and one.commit == "abc123" and one.ways[0] == "host-splits"
        for one in asked
    )
    assert [one.tokens for one in asked[:3]] == [(1024,), (4096,), (16384,)], (
        "the whole grid before anything else"
    )
    assert {way for one in asked for way in one.ways} == {*MOE_WAYS, *PEERS}
    assert all(
        one[:2] == ["-m", "pytest"] or one[0] == "benchmarks/moe_experts.py"
        for one in lines(LIMIT="20")
    )
    assert "not run, the limit of 20 seconds is near" in (tmp_path / "h200_moe_own.log").read_text()
    assert lines(TESTS="0")[0][0] == "benchmarks/moe_experts.py"
