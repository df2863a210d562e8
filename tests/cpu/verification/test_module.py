"""`packgraph.verify` of modules of one's own."""

import sys
import warnings

import pytest
import torch
from torch import nn

import packgraph
from packgraph.models.config import DecoderConfig
from packgraph.models.decoder import DecoderModel


def batches(count=6, rows=4):
    torch.manual_seed(0)
    return [torch.randn(rows, 8, requires_grad=True) for _ in range(count)]


def layers():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 8))


def test_a_module_that_replays_is_equal_and_left_alone():
    module = layers()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found = packgraph.verify(
        module, batches(), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    )
    assert found and found.replayed == 4 and found.steps == 6 and found.fallbacks == {"warm-up": 2}
    # outputs, loss, gradients of input and parameters, parameters, buffers, random state
    assert found.tensors == 6 * (1 + 1 + 1 + 6 + 6 + 3 + 1)
    assert str(found).startswith("equal bit by bit: 114 tensors in 6 steps (4 calls replayed")
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not any(parameter.grad is not None for parameter in module.parameters())


SCALE = [1.0]


@torch.library.custom_op("test_module::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    """The Python of an operation, which no tracer reads."""
    return x * SCALE[0]


scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, gradient: gradient * SCALE[0])


class Scaled(nn.Module):
    """Forward reads a number that nobody sees."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return scaled(self.linear(x))


def test_a_broken_promise_is_found(monkeypatch):
    def changing():
        for number, batch in enumerate(batches()):
            if number == 4:
                SCALE[0] = 2.0
            yield batch

    monkeypatch.setattr(sys.modules[__name__], "SCALE", [1.0])
    found = packgraph.verify(Scaled(), changing())
    assert not found and found.steps == 5
    # A graph on a CPU calls the operation again, and has its own formula of the gradient.
    assert found.difference is not None and found.difference.name == "gradient of input 0"
    assert str(found).startswith("differs from eager at step 5: gradient of input 0")


def test_what_never_replays_verifies_nothing():
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(x.sum())

    with warnings.catch_warnings(action="ignore", category=packgraph.PackgraphWarning):
        found = packgraph.verify(Reads(8, 8), batches())
    assert not found and found.difference is None and found.replayed == 0
    assert str(found).startswith("nothing was verified")
    with pytest.raises(packgraph.CaptureError):
        packgraph.verify(Reads(8, 8), batches(), strict=True)


def test_packed_batches_of_a_decoder_in_chunks():
    capacity = packgraph.Capacity(tokens=32, documents=4)
    documents = [list(range(1, length)) for length in (9, 20, 5, 30, 12, 7, 16, 28)]
    packs = packgraph.pack(documents, [capacity])
    config = DecoderConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        dropout=0.1,
    )
    found = packgraph.verify(
        DecoderModel(config),
        packs * 2,
        loss=lambda loss: loss,
        capacities=[capacity],
        granularity="chunk",
        warmup=1,
    )
    assert found and found.replayed == 2 * len(packs) - 1, found


def test_compiled_code_is_compared_with_itself():
    found = packgraph.verify(layers(), batches(4), compile="aot_eager", warmup=1)
    assert found, found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (True, {"deterministic": True}),
        ({"max_autotune": False}, {"deterministic": True, "max_autotune": False}),
        ({"deterministic": False}, {"deterministic": False}),
        ("aot_eager", "aot_eager"),
    ],
)
def test_kernels_of_both_copies_are_not_chosen_by_their_time(monkeypatch, given, expected):
    class Asked(Exception):
        pass

    def graph(module, *, compile):
        raise Asked(compile)

    monkeypatch.setattr("packgraph.verification.module.graph", graph)
    with pytest.raises(Asked) as found:
        packgraph.verify(layers(), batches(), compile=given)
    assert found.value.args == (expected,)


def test_no_floating_point_output_needs_a_loss():
    class Ids(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    with pytest.raises(ValueError, match="pass loss="):
        packgraph.verify(Ids(8, 8), batches())
