"""Compiled stages where a model is split over ranks: graphs of them equal the same code run
eagerly, on every rank."""

import contextlib
import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from distkit import run_ranks
from trainkit import tiny, trainer

from packgraph.graphs.graphed import graph
from packgraph.graphs.parameters import local_tensor
from packgraph.parallel.layout import Layout
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.signals import StopRequest

pytestmark = [pytest.mark.dist, pytest.mark.slow]
NEVER = 10**6


IN_FLOAT8 = {"precision": "fp8", "bf16_ends": 0, "head_dim": 16}
GRADIENTS_TOO = IN_FLOAT8 | {"precision": "fp8_weight_gradients"}


def config(layout: Layout, shape, **options):
    made = tiny(graph=True, steps=4, checkpoint_every=100)
    model = dataclasses.replace(
        made.model, tie_embeddings=False, num_heads=4, num_kv_heads=2, **shape
    )
    return dataclasses.replace(
        made,
        model=model,
        parallel=ParallelConfig(dp=layout.dp, cp=layout.cp, pp=layout.pp, tp=layout.tp),
        graph=dataclasses.replace(made.graph, compile=True, strict=True, **options),
    )


def traced(*args, compile, **options):
    """torch's tracing compiler instead of the one that generates code."""
    return graph(*args, compile="aot_eager" if compile else False, **options)


def go(mesh, folder, settings):
    """This rank's tensors at the end of a run, and what its graphs did."""
    with (
        mock.patch("packgraph.train.strategies.graph", traced),
        contextlib.closing(trainer(Path(folder), settings, mesh=mesh)) as run,
    ):
        summary = run.run(StopRequest())
        parameters = {
            name: local_tensor(value.detach()).clone()
            for name, value in run.model.named_parameters()
        }
        return parameters, summary["replayed"], summary["compiled"]


@pytest.mark.parametrize(
    ("layout", "granularity", "shape"),
    [
        (Layout(tp=2), "chunk", {}),
        (Layout(tp=2), "chunk", IN_FLOAT8),
        (Layout(tp=2), "chunk", GRADIENTS_TOO),
        (Layout(dp=2), "chunk", {}),
        (Layout(dp=1, pp=2), "layer", {}),
        (Layout(dp=1, pp=2), "step", {}),
        (Layout(dp=1, cp=2), "chunk", {}),
    ],
    ids=["TP2", "TP2-fp8", "TP2-fp8_weight_gradients", "DP2", "PP2", "PP2-step", "CP2"],
)
def test_graphs_of_compiled_stages_equal_the_stages(layout, granularity, shape, tmp_path):
    eager, graphs = (
        run_ranks(
            go,
            2,
            str(tmp_path / name),
            config(layout, shape, warmup=warmup, granularity=granularity),
            layout=layout,
            seconds=290.0,
        )
        for name, warmup in (("eager", NEVER), ("graph", 2))
    )
    for (expected, none, _), (got, replayed, compiled) in zip(eager, graphs, strict=True):
        assert none == 0 and replayed > 0 and compiled > 0
        assert not [name for name in got if not torch.equal(expected[name], got[name])]
