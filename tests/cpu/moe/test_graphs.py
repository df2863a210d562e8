"""What graphs have baked of a layer with experts, and what code around it may ask of it."""

import dataclasses

import pytest
import torch
from trainkit import tiny

import packgraph
from packgraph.models.config import ExpertConfig
from packgraph.models.decoder import DecoderModel
from packgraph.models.layers.moe import moe_blocks
from packgraph.moe.dispatch.over_ranks import PaddedDispatcher
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack

CAPACITY = Capacity(32, 4)


def decoder(**options):
    experts = ExpertConfig(
        count=4, per_token=2, intermediate_size=16, shared=1, document_loss=1e-3, **options
    )
    return DecoderModel(dataclasses.replace(tiny().model, dropout=0.0, experts=experts))


def batch():
    return pack([[1, 2, 3, 4, 5] * 3, [3] * 9], [CAPACITY])[0]


@pytest.mark.filterwarnings("ignore:capturing again")
def test_another_dispatcher_is_noticed_by_graphs():
    """Its room is baked: a graph of the old one would go on to leave tokens out."""
    model = decoder()
    graphed = packgraph.graph(model, warmup=0, backend="recorder")
    graphed(batch()).backward()
    for block in moe_blocks([model]):
        block.dispatcher = PaddedDispatcher(4, None, 2.0)
    graphed(batch()).backward()
    assert graphed.stats.captured == 2


def test_the_router_stays_exact_under_autocast():
    model = decoder()
    expected = model.logits(batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch())
        found = model.logits(batch())
    loss.backward()
    torch.testing.assert_close(found.float()[:24], expected[:24], rtol=0.1, atol=0.02)


def test_experts_that_drop_without_padding_are_captured_whole():
    """Nothing waits for how many tokens an expert keeps: no rows are made up to a capacity."""
    batches = [pack([torch.randint(1, 32, (n,)).tolist()], [CAPACITY])[0] for n in (9, 24, 32, 17)]
    found = packgraph.verify(
        decoder(drop_factor=0.75), batches * 2, strict=True, warmup=1, backend="recorder"
    )
    assert found and found.replayed >= 6
    assert not torch.equal(decoder()(batches[1]), decoder(drop_factor=0.75)(batches[1]))
