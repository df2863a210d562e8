"""The step benchmark of hybrids: every way computes what eager does, and rows say so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import main
from bench_models import (
    shape,
    twin,
)
from bench_ways import layers_of
from benchkit import ONE, make, make_way, results
from expert_ways import partial_scope
from others import GraphedCallables, Recorded
from torch import Tensor

from packgraph.models.config import DecoderConfig
from packgraph.models.layers.decoder import DecoderLayer
from packgraph.models.stack import DecoderStack

pytestmark = pytest.mark.usefixtures("fresh_compiler")

TINY = shape("hybrid-tiny")


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
    model, draws, setting = make("layers", TINY, 2)
    expected = results(make_way("eager", setting), model, draws, setting.work)
    way = make_way(name, setting)
    found = results(way, model, draws, setting.work)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)
    assert name.endswith("compile") or found == expected
    way.close()


def test_graphs_of_torch_take_what_layers_read() -> None:
    """Document ids and no tables come in as tensors of their own; with modules that run in place of
    graphs."""
    model, draws, setting = make("layers", TINY, 2)
    expected = results(make_way("eager", setting), model, draws, setting.work)
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
        main(
            [
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
