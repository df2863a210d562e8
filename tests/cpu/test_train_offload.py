"""The trainer with offloading: the same run bit by bit, whatever moves and whatever is captured."""
from dataclasses import replace

import pytest
import torch
from trainkit import CPU, RandomPacks, state_of, tiny, trainer

from packgraph.plan.offload.plan import KEPT
from packgraph.train.disagreements import disagreements
from packgraph.train.offload_options import OffloadConfig
from packgraph.train.options import ParallelConfig
from packgraph.train.signals import StopRequest

DENSE = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_act")


def finish(folder, config):
    run = trainer(folder, config, RandomPacks())
    summary = run.run(StopRequest())
    state, prepare = state_of(run), run.executor.prepare
    if prepare is not None:
        (told,) = summary["offload"]
        assert told["moved_bytes"] <= told["bytes"] and told["groups"] == len(prepare.engines[0].plan.moves)
    run.close()
    return state, prepare


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("kept") / "run", tiny())[0]


@pytest.mark.parametrize(("graph", "granularity", "fraction"), [
    (False, "layer", 0.5), (True, "layer", 1.0), (True, "chunk", 0.5), (True, "step", 1.0)])
def test_a_run_that_offloads_is_bitwise_one_that_does_not(graph, granularity, fraction, kept, tmp_path):
    config = tiny(graph=graph)
    modules = [name for name in DENSE if granularity != "layer" or "norm" not in name]
    config = replace(config, graph=replace(config.graph, granularity=granularity, strict=True),
                     offload=OffloadConfig(modules=tuple(modules), fraction=fraction, min_bytes=1, margin=0))
    assert disagreements(config, "cpu") == []
    found, offloading = finish(tmp_path / "run", config)
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    (engine,) = offloading.engines
    assert sum(engine.plan.moves) == len(engine.plan.moves) * fraction
    assert all((at == KEPT) != moves for moves, at in zip(engine.plan.moves, engine.plan.reload_at, strict=True))


def test_what_cannot_be_offloaded_is_refused_with_all_reasons():
    config = tiny(graph=True)
    config = replace(config, offload=OffloadConfig(modules=("attn_proj", "attn_norm", "expert_fc1", "mlp_akt")),
                     parallel=ParallelConfig(expert_stash=1.1))
    found = " | ".join(disagreements(config, "cpu"))
    for reason in ("attn_proj needs core_attn", "did you mean 'mlp_act'", "expert_fc1 is in the stash",
                   "attn_norm saves a hidden state that a region takes in"):
        assert reason in found
    with pytest.raises(ValueError, match="fraction must be 0 to 1"):
        OffloadConfig(fraction=2.0)


def test_nothing_is_attached_without_modules(tmp_path):
    run = trainer(tmp_path / "run", tiny(), RandomPacks(), CPU)
    assert run.executor.prepare is None
