"""New parameters of a span are gathered while other spans are updated."""

import pytest
import torch
from distkit import run_ranks
from torch import nn

from packgraph.parallel import data
from packgraph.parallel.data import FlatParameters
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.optimizer import Optimizer
from packgraph.train.updates import adamw

STEPS = 3


def updated(mesh, how):
    """What happens in a step, and all parameters after some steps.

    how: `early`, as with kernels on CUDA; `late`, all gathers at the end; `wrong`, spans are
    gathered before they are updated."""
    events = []
    update, gather, begin = adamw.narrow_adamw, data.all_gather_flat, FlatParameters.begin_gather

    def updates(parameters, *given, **options):
        if how == "wrong":
            spans = optimizer.flat.spans
            (span,) = (s for s in spans if s.own_parameters.data_ptr() == parameters.data_ptr())
            begin(optimizer.flat, span)
            torch.distributed.barrier()
        events.append("update")
        update(parameters, *given, **options)

    def gathers(*given, **options):
        events.append("gather")
        return gather(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw, "in_one_kernel", lambda parameters: True)
        patch.setattr(adamw, "narrow_adamw", updates)
        patch.setattr(data, "all_gather_flat", gathers)
        if how != "early":
            patch.setattr(FlatParameters, "begin_gather", lambda flat, span: None)
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3))).bfloat16()
        layers = {f"{number}.weight": number for number in range(3)}
        optimizer = Optimizer(model.named_parameters(), OptimizerConfig(), mesh, layers)
        torch.manual_seed(5 + mesh.rank)
        for _ in range(STEPS):
            events.clear()
            model(torch.randn(4, 24).bfloat16()).square().mean().backward()
            optimizer.step(0.01)
            optimizer.zero_grad()
    return events, [parameter.detach().clone() for parameter in model.parameters()]


def same(first, second):
    return all(map(torch.equal, first, second))


def test_gathers_begin_between_updates_and_bits_stay():
    early, late = run_ranks(updated, 2, "early"), run_ranks(updated, 2, "late")
    assert early[0][0] == ["update", "gather"] * 4, "three layers, and vectors"
    assert late[0][0] == ["update"] * 4 + ["gather"] * 4
    assert same(early[0][1], early[1][1]) and same(early[0][1], late[0][1])


def test_a_gather_before_its_update_is_found():
    (_, first), (_, second) = run_ranks(updated, 2, "wrong")
    assert not same(first, second)
