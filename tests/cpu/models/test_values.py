"""First values: the same whoever draws them, in whatever order, and normal."""

import pytest
import torch

from packgraph.models.values import draw_normal, generator_of
from packgraph.parallel import deferred


@pytest.mark.parametrize("cores", [1, 7])
def test_values_follow_from_names_alone(cores, monkeypatch):
    monkeypatch.setattr(deferred, "cores", lambda: cores)
    named = {"a.weight": torch.empty(40, 30), "experts": torch.empty(5, 20, 30, requires_grad=True)}
    draw_normal(named.items(), 3, 0.5)
    alone = torch.empty(20, 30)
    draw_normal([("experts 4", alone)], 3, 0.5)
    assert torch.equal(named["experts"][4], alone)
    expected = torch.empty(40, 30).normal_(0.0, 0.5, generator=generator_of(3, "a.weight"))
    assert torch.equal(named["a.weight"], expected)
    assert (
        len({float(matrix.detach()[0, 0]) for matrix in (*named["experts"], named["a.weight"])})
        == 6
    )
    assert named["experts"].grad_fn is None


def test_narrow_values_are_rounded_wide_ones():
    wide, narrow = torch.empty(64, 64), torch.empty(64, 64, dtype=torch.bfloat16)
    for matrix in (wide, narrow):
        draw_normal([("same", matrix)], 0, 0.02)
    assert torch.equal(narrow, wide.bfloat16())
    assert abs(float(wide.mean())) < 0.002 and abs(float(wide.std()) - 0.02) < 0.001


def test_what_a_thread_meets_is_raised():
    with pytest.raises(RuntimeError, match="std"):
        draw_normal([("matrix", torch.empty(2, 2))], 0, -1.0)
