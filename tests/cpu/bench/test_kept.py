"""What a forward keeps for its backward: saved, alive when it ends, once, and not there before."""

import torch
import torch.nn.functional as F
from bench_offload import OffloadArguments, OffloadCase
from offload_measures import kept_for_backward

from packgraph.bench.models import build_part, shape, zero_gradients
from packgraph.offloading.plan import CopySpeed


def test_saved_storages_count_once_while_they_live():
    weight, x = torch.ones(8, 8, requires_grad=True), torch.ones(4, 8, requires_grad=True)

    def forward():
        hidden = x @ weight  # saves what is there anyway
        F.silu(torch.ones(99, requires_grad=True) * 2)  # nobody needs it when the forward ends
        return F.silu(hidden[:2]).sum() + F.silu(hidden[2:]).sum()  # two views of one storage

    assert kept_for_backward(forward, [weight, x]) == 4 * 8 * 4
    assert kept_for_backward(forward, [x]) == (4 * 8 + 8 * 8) * 4
    assert kept_for_backward(lambda: x.sum(), []) == 0


def kept_by(layers):
    model = build_part("layers", shape("tiny", layers), torch.device("cpu"), torch.float32)
    zero_gradients([model])
    options = OffloadArguments(model="tiny", layers=layers, part="layers", tokens=(32,))
    return OffloadCase(options, model, torch.device("cpu"), 32, CopySpeed()).kept_bytes()


def test_every_layer_keeps_as_much_as_another():
    one, two, three = kept_by(1), kept_by(2), kept_by(3)
    assert three - two == two - one > 32 * 3 * shape("tiny", 1).intermediate_size * 4, (
        "gate, up and their product"
    )
