"""Parameters that wait for their values, and are put aside or on the meta device for a while."""

import copy

import pytest
import torch
from torch import nn

from packgraph.graphs.parameters import local_tensor
from packgraph.integrations.transformers import deferred as models
from packgraph.parallel.deferred import defer, on_meta, set_aside, values_of

CPU = torch.device("cpu")


def nothing(pieces):
    """Fills nothing."""


def fail(what: str, expected: bool) -> None:
    assert expected
    raise RuntimeError(what)


def tied(device: str = "cpu") -> nn.Module:
    """A module with a matrix at two places."""
    module = nn.ModuleDict({name: nn.Linear(3, 3, device=device) for name in ("one", "two")})
    module["two"].weight = module["one"].weight
    return module


def test_what_was_set_aside_is_back_after_an_error():
    module = tied()
    before = dict(module.named_parameters(remove_duplicate=False))
    with pytest.raises(RuntimeError, match="no memory"), set_aside(module, ["one.weight"]):
        fail("no memory", module["two"].weight is None)
    after = dict(module.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_what_waited_for_values_waits_after_an_error():
    module = tied("meta")
    defer(module, {"one.weight": nothing, "one.bias": nothing}, CPU)
    with pytest.raises(RuntimeError, match="no rank"), on_meta(module):
        fail("no rank", module["one"].weight.is_meta and module["two"].weight.is_meta)
    weight = module["one"].weight
    assert weight.device == CPU and values_of(weight) is nothing
    assert module["two"].weight is weight and values_of(module["one"].bias) is nothing
    assert local_tensor(weight).untyped_storage().nbytes() == 4


def test_what_replaced_parameters_in_the_block_waits_too():
    module = tied("meta")
    defer(module, {"one.weight": nothing}, CPU)
    with on_meta(module):
        module["one"].weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    assert module["one"].weight.shape == (2, 3) and values_of(module["one"].weight) is nothing


def test_a_model_that_cannot_be_moved_is_as_it_was():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    expected = copy.deepcopy(model.state_dict())
    model.to = lambda device: fail("no such device", True)
    with pytest.raises(RuntimeError, match="no such device"):
        models.defer_copies(model, CPU)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert not [p for p in model.parameters() if values_of(p) is not None]
