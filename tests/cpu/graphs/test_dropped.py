"""A model that nobody has any more goes at once, with its parameters, pools and host memory: Python
collects garbage when it likes, on a device that has no room meanwhile."""

import dataclasses
import gc
import itertools
import weakref

import pytest
import torch
from offloadkit import CAPACITIES, DENSE, EXPERTS, config, runtime_of
from trainkit import RandomPacks, tiny, trainer

from packgraph.graphs.graphed import graph
from packgraph.models.decoder import DecoderModel
from packgraph.train.config.sections import OffloadConfig
from packgraph.train.signals import StopRequest
from packgraph.train.strategies import sample_batch

pytestmark = pytest.mark.usefixtures("no_collections")
CHUNK, LAYER, SCOPE = (
    {"granularity": "chunk"},
    {"granularity": "layer"},
    {"scope": ("attn", "moe_router")},
)
QUICK = [
    (CHUNK, (), True),
    (LAYER, EXPERTS, True),
    (SCOPE, EXPERTS, False),
]


@pytest.mark.parametrize(
    ("where", "modules", "closed"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
        for case in itertools.product((CHUNK, LAYER, SCOPE), ((), EXPERTS), (True, False))
    ],
)
def test_a_graphed_model_goes_with_its_last_reference(where, modules, closed):
    model = DecoderModel(config(2, experts=True), seed=1)
    graphed = graph(model, capacities=CAPACITIES[:1], warmup=1, strict=True, **where)
    runtime = runtime_of(graphed, model, modules) if modules else None
    arguments = sample_batch(CAPACITIES[0]), torch.tensor(7)
    for _ in range(3):
        graphed(*arguments).backward()
    assert graphed.stats.captured
    held = [
        model,
        graphed,
        graphed.capture_backend,
        graphed.capture_backend.copy_streams.memories,
        *model.parameters(),
        *(slot.pool for slot in graphed.slots.all),
    ]
    living = [weakref.ref(thing) for thing in held]
    if runtime is not None:
        living.append(weakref.ref(runtime))
    if closed:
        graphed.close()
    del held, model, graphed, runtime
    assert [found for of in living if (found := of()) is not None] == []


def test_a_layer_may_outlive_the_one_it_was_taken_from():
    """Its parameters still stay where they are."""
    model = DecoderModel(config(2), seed=1)
    runtime_of(model, model, DENSE)
    attention = next(layer.self_attn for layer in model.layers.values())
    stays = attention.offload._stays
    before = {id(tensor) for tensor in stays()}
    del model
    assert (
        {id(tensor) for tensor in stays()}
        == {id(tensor) for tensor in attention.parameters()}
        < before
    )


@pytest.mark.parametrize(
    ("offload", "granularity"),
    [
        ({}, "chunk"),
        ({"modules": DENSE, "min_bytes": 1}, "step"),
        pytest.param({}, "step", marks=pytest.mark.slow),
        pytest.param({"modules": DENSE, "min_bytes": 1}, "chunk", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_closed_goes_with_its_last_reference(granularity, offload, tmp_path):
    made = tiny(True, steps=4)
    made = dataclasses.replace(
        made,
        graph=dataclasses.replace(made.graph, granularity=granularity, strict=True),
        offload=OffloadConfig(**offload),
    )
    run = trainer(tmp_path / "run", made, RandomPacks())
    summary = run.run(StopRequest())
    assert summary["replayed"], summary
    living = [weakref.ref(thing) for thing in (run, run.model, *run.model.parameters())]
    run.close()
    del run
    assert not gc.isenabled()
    assert [found for of in living if (found := of()) is not None] == []


def test_a_compiled_model_goes_with_the_next_collection_of_garbage():
    """What torch keeps of compiled code, for good, holds none of it."""
    model = DecoderModel(config(2), seed=1)
    graphed = graph(model, capacities=CAPACITIES[:1], warmup=1, strict=True, compile="aot_eager")
    arguments = sample_batch(CAPACITIES[0]), torch.tensor(7)
    for _ in range(3):
        graphed(*arguments).backward()
    assert graphed.stats.compiled
    living = [weakref.ref(thing) for thing in (model, graphed, *model.parameters())]
    graphed.close()
    del model, graphed
    gc.collect()
    assert [found for of in living if (found := of()) is not None] == []
