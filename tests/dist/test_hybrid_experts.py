"""Hybrids whose experts are shared by ranks: graphs equal eager bitwise on every rank, a run equals
one process."""

import dataclasses

import pytest
import torch
from distkit import run_ranks

from packgraph.parallel.layout import Layout
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.validate import validate
from packgraph.verification.matrix import budget_over, random_packs, tiny_hybrid_config
from packgraph.verification.ranks import verify_ranks

EP2, PP2_EP2, CP2_EP2 = Layout(dp=2, ep=2), Layout(dp=2, pp=2, ep=2), Layout(dp=2, cp=2, ep=2)
EP4, EP2_EDP2 = Layout(dp=4, ep=4), Layout(dp=4, ep=2)
PARTLY = ("mamba", "attn", "moe_router")


def config(layout, granularity, scope=None, latent_size=0, **parallel):
    """A layer of each kind for each stage."""
    made = tiny_hybrid_config("layer", 0.1, 5, scope)
    model = dataclasses.replace(
        made.model,
        num_layers=4 * layout.pp,
        experts=dataclasses.replace(made.model.experts, shared=1, latent_size=latent_size),
    )
    return dataclasses.replace(
        made,
        model=model,
        graph=dataclasses.replace(made.graph, granularity=granularity),
        parallel=ParallelConfig(
            dp=layout.dp,
            pp=layout.pp,
            cp=layout.cp,
            ep=layout.ep,
            **{"expert_room": float(layout.ep)} | parallel,
        ),
    )


def verified(mesh, settings):
    return verify_ranks(
        "hybrid",
        settings,
        lambda: random_packs(seed=1),
        torch.device("cpu"),
        mesh,
        one_process=True,
        budget=budget_over(mesh.size("dp")),
    )


@pytest.mark.parametrize(
    ("layout", "granularity", "scope", "options"),
    [
        (EP2, "chunk", None, {"latent_size": 24}),
        pytest.param(EP2, "layer", PARTLY, {"dispatcher": "host_splits"}, marks=pytest.mark.slow),
        pytest.param(
            EP2, "layer", None, {"expert_stash": 4.0, "latent_size": 24}, marks=pytest.mark.slow
        ),
        pytest.param(EP4, "layer", None, {}, marks=pytest.mark.slow),
        pytest.param(EP2_EDP2, "chunk", None, {}, marks=pytest.mark.slow),
        pytest.param(PP2_EP2, "chunk", None, {}, marks=pytest.mark.slow),
        pytest.param(PP2_EP2, "layer", ("mamba", "attn"), {}, marks=pytest.mark.slow),
        pytest.param(CP2_EP2, "chunk", None, {}, marks=pytest.mark.slow),
        pytest.param(CP2_EP2, "layer", PARTLY, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_hybrids_whose_ranks_share_experts_are_verified(layout, granularity, scope, options):
    settings = config(layout, granularity, scope, **options)
    world = layout.dp * layout.pp * layout.cp
    assert not validate(settings, "cpu", world=world)
    reports = run_ranks(verified, world, settings, layout=layout, seconds=300.0)
    assert all(report.good for report in reports), reports[0]
    for rank in reports[0].ranks:
        assert rank.replayed > 0 and set(rank.fallbacks) <= {"warm-up"}


@pytest.mark.slow
def test_whole_steps_of_hybrids_whose_ranks_share_experts_are_verified():
    settings = config(EP2, "step")
    reports = run_ranks(verified, 2, settings, layout=EP2, seconds=300.0)
    assert all(report.good for report in reports), reports[0]
    assert all(rank.replayed > 0 for rank in reports[0].ranks)
