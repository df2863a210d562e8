"""The step benchmark of hybrids: every way computes what eager does, and rows say so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from others import GraphedCallables, Recorded
from torch import Tensor

from packgraph import cli
from packgraph.bench.compiled import layers_of
from packgraph.bench.models import (
    FreshModel,
    TimedPart,
    build_part,
    draw_batches,
    refit,
    shape,
    squared_gradients,
    twin,
    zero_gradients,
)
from packgraph.bench.moe_variants import partial_scope
from packgraph.bench.step import ALL_WAYS
from packgraph.bench.variants import Setting, Way
from packgraph.models.config import DecoderConfig
from packgraph.models.layers.decoder import DecoderLayer
from packgraph.models.layers.mamba import FIRST_DECAY
from packgraph.models.stack import DecoderStack
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

CPU, ONE = torch.device("cpu"), Capacity(32, 6)


def make_expert_way(name: str, setting: Setting) -> Way:
    return ALL_WAYS[name](name, setting)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make(count: int = 2) -> tuple[DecoderStack, list[PackedBatch], Setting]:
    model = build_part("layers", shape("hybrid-tiny"), CPU, torch.float32)
    zero_gradients([model])
    draws = draw_batches(ONE, count, 300, mean=8, sigma=0.8, seed=0)
    return (
        model,
        draws,
        Setting(
            TimedPart(model, 32, min(batch.num_tokens for batch in draws)),
            model,
            ONE,
            (ONE,),
            compiler="aot_eager",
        ),
    )


def results(
    way: Way, model: DecoderStack, draws: list[PackedBatch], work: TimedPart
) -> list[tuple[float, float]]:
    """Score of the output and norm of the gradients for each microbatch, after the way got
    ready."""
    batches = [refit(batch, way.capacity(batch)) for batch in draws]
    way.prepare(batches)
    found = []
    for batch in batches:
        zero_gradients([model])
        with way.frozen():
            found.append((work.score(way.run(batch)), squared_gradients([model]) ** 0.5))
    assert way.complaint() is None
    return found


@pytest.mark.parametrize(
    "name",
    [
        "partial",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("chunk", "compile", "chunk+compile")
        ),
    ],
)
def test_ways_compute_what_eager_does(name: str) -> None:
    model, draws, setting = make()
    expected = results(make_expert_way("eager", setting), model, draws, setting.work)
    way = make_expert_way(name, setting)
    found = results(way, model, draws, setting.work)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)
    assert name.endswith("compile") or found == expected
    way.close()


def test_graphs_of_torch_take_what_layers_read() -> None:
    """Document ids and no tables come in as tensors of their own; with modules that run in place of
    graphs."""
    model, draws, setting = make()
    expected = results(make_expert_way("eager", setting), model, draws, setting.work)
    own = twin(model, "auto")
    work = setting.work.by(own)

    def pretend(modules: tuple[Any, ...], samples: tuple[Any, ...]) -> tuple[Any, ...]:
        assert all(isinstance(value, Tensor) for sample in samples for value in sample)
        return modules

    way = Recorded(
        "graphed-callables",
        work,
        ONE,
        lambda batch: GraphedCallables(own, layers_of(own), work.arguments(batch), pretend),
    )
    found = results(way, model, draws, setting.work)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-7)


def test_partial_graphs_capture_what_is_no_expert() -> None:
    assert partial_scope(shape("hybrid")) == ("mamba", "attn", "moe_router", "moe_preprocess")
    assert partial_scope(shape("moonlight")) == ("attn", "moe_router", "moe_preprocess")


def test_fresh_models_have_decays_of_the_paper() -> None:
    model = FreshModel(shape("hybrid-tiny"), device=CPU, dtype=torch.bfloat16)
    decay = model.get_parameter("layers.0.mamba.A_log").detach().exp()
    assert (
        decay.dtype == torch.float32
        and FIRST_DECAY[0] <= decay.min() < decay.max() <= FIRST_DECAY[1]
    )


def test_shapes_are_those_of_1_to_2_billion_parameters() -> None:
    for name in ("hybrid", "hybrid-dense"):
        config = shape(name)
        assert (
            isinstance(config, DecoderConfig)
            and config.count("mamba") >= 7
            and config.count("attn") == 2
        )
        with torch.device("meta"):
            model = DecoderStack(
                config, {index: DecoderLayer(config, index) for index in range(config.num_layers)}
            )
        assert 1e9 < sum(parameter.numel() for parameter in model.parameters()) < 2e9


def test_the_command_writes_rows_of_a_hybrid(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert (
        cli.main(
            [
                "bench",
                "step",
                "--device",
                "cpu",
                "--model",
                "hybrid-tiny",
                "--tokens",
                "32",
                "--documents",
                "6",
                "--mean",
                "10",
                "--sigma",
                "0.5",
                "--ways",
                "eager",
                "chunk",
                "--rounds",
                "1",
                "--calls",
                "1",
                "--part",
                "layers",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["way"] for row in rows] == ["eager", "chunk"] and all(row["agrees"] for row in rows)
    assert all(row["model"] == "hybrid-tiny" for row in rows)
