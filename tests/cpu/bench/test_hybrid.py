"""The step benchmark of hybrids: every way computes what eager does, and rows say so."""

import pytest
import torch
from bench_models import (
    shape,
)
from benchkit import make, make_way, results
from expert_ways import partial_scope

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


def test_partial_graphs_capture_what_is_no_expert() -> None:
    assert partial_scope(shape("hybrid")) == ("mamba", "attn", "moe_router", "moe_preprocess")
    assert partial_scope(shape("moonlight")) == ("attn", "moe_router", "moe_preprocess")
