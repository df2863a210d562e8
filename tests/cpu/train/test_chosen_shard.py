"""`parallel.shard = auto`: the least that is predicted to fit."""

import dataclasses

import pytest
from trainkit import tiny
from tuningkit import tiny_model

from packgraph.models.config import DecoderConfig
from packgraph.packing.capacity import Capacity
from packgraph.train.config.presets import LIVE, preset
from packgraph.train.config.reading import ConfigLayer, read_config
from packgraph.train.config.sections import GraphConfig, OptimizerConfig, ParallelConfig
from packgraph.train.features.live import live_layer
from packgraph.train.launch import shard_choices, with_chosen_shard
from packgraph.train.memory import SHARE, predicted_peak

EIGHT = DecoderConfig(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tie_embeddings=False,
)  # 8B widths
GIB = 2**30
ALL = ("none", "gradients", "parameters")


def run(**parallel):
    made = tiny()
    return dataclasses.replace(
        made,
        model=EIGHT,
        graph=GraphConfig(capacities=(Capacity(4096, 64),)),
        parallel=ParallelConfig(**parallel),
        run=dataclasses.replace(made.run, dtype="bfloat16"),
    )


def chosen(config, available, world=2, rank=0, agree=lambda mine: mine):
    found, notes = with_chosen_shard(config, "cuda", available, world, rank, agree)
    return found.parallel.shard, notes


def peaks(world, rank=0, **parallel):
    return {
        shard: predicted_peak(run(shard=shard, **parallel), "cuda", world, rank) for shard in ALL
    }


@pytest.mark.parametrize("world", [2, 8])
def test_the_first_that_fits_is_chosen(world):
    found = peaks(world)
    assert found["none"] > found["gradients"] > found["parameters"]
    for shard, peak in found.items():
        assert chosen(run(), round(peak / SHARE) + 1, world)[0] == shard
    below = round(found["parameters"] / SHARE) - 1
    assert chosen(run(), below, world)[0] == "parameters", "what takes the least"
    assert chosen(run(), 2**60, world) == ("none", []), "as before, nothing to be said"


def test_what_was_asked_stays():
    for shard in ALL:
        assert chosen(run(shard=shard), GIB) == (shard, [])
        assert shard_choices(run(shard=shard), "cuda", 2) == [run(shard=shard)]


def test_the_choice_says_why():
    shard, (note,) = chosen(run(), 80 * GIB)
    assert shard == "parameters"
    words = ("auto chose parameters", "none ", "gradients ", "GiB", "72")
    assert all(word in note for word in words), note


def test_without_replicas_auto_stays_and_shards_nothing():
    assert chosen(run(), GIB, world=1) == ("auto", [])
    assert chosen(run(tp=2), GIB, world=2) == ("auto", []), "no replicas"
    assert run().parallel.known_shard == "none" and not run().parallel.shards


def test_ranks_choose_what_fits_on_all():
    """A rank for which less would do follows the others."""
    asked = []

    def agree(mine):
        asked.append(mine)
        return mine and len(asked) != 2  # none does not fit elsewhere

    assert chosen(run(), 2**60, agree=agree)[0] == "gradients"
    assert asked == [True, True, True]


def test_memory_that_is_not_known_shards_nothing_and_says_so():
    shard, (note,) = chosen(run(), None)
    assert shard == "none" and "not known" in note
    assert chosen(run(), 2**60, agree=lambda mine: False)[0] == "none", "not known elsewhere"


def test_only_what_is_legal_is_chosen():
    """Adapters have no gradients of layers to share."""
    config = run()
    config = dataclasses.replace(config, lora=dataclasses.replace(config.lora, rank=8))
    assert chosen(config, 2 * GIB)[0] == "parameters"
    assert chosen(run(dynamic_cp=True, cp=2), GIB, world=4)[0] == "auto", "refused, both of them"


def test_models_of_transformers_are_predicted_by_their_sizes(tmp_path):
    model = str(tiny_model(tmp_path / "model", num_hidden_layers=12, hidden_size=512))
    path = ConfigLayer("path", {"hf": {"path": model}})
    config = read_config(preset(LIVE), [path, live_layer(model)])
    config = dataclasses.replace(config, graph=GraphConfig(capacities=(Capacity(128, 4),)))

    def sharded(shard):
        return dataclasses.replace(config, parallel=ParallelConfig(shard=shard))

    found = {shard: predicted_peak(sharded(shard), "cuda", 8) for shard in ALL}
    assert found["none"] > found["gradients"] > found["parameters"]
    for shard, peak in found.items():
        assert chosen(config, round(peak / SHARE) + 1, 8)[0] == shard


def test_blocks_of_ranks_are_kept_where_layers_are_shared():
    config = run(shard_ranks=2)
    found, _ = with_chosen_shard(config, "cuda", 80 * GIB, 4, 0, lambda mine: mine)
    assert found.parallel.shard != "none" and found.parallel.shard_ranks == 2
    whole, _ = with_chosen_shard(config, "cuda", 2**60, 4, 0, lambda mine: mine)
    assert (whole.parallel.shard, whole.parallel.shard_ranks) == ("none", 0)


def test_recomputation_and_host_state_count():
    config, plain = run(shard="none"), predicted_peak(run(shard="none"), "cuda")
    again = dataclasses.replace(config, run=dataclasses.replace(config.run, recompute="full"))
    moved = dataclasses.replace(config, optimizer=OptimizerConfig(offload=True))
    assert predicted_peak(again, "cuda") < plain
    assert predicted_peak(moved, "cuda") < plain - 80 * GIB
    auto = dataclasses.replace(config, run=dataclasses.replace(config.run, recompute="auto"))
    assert predicted_peak(auto, "cuda") == plain, "what recomputation saves is its own choice"
