"""`packgraph plan memory --world N`: ways to spread a run, from the shape of a model."""

import functools
import json
from dataclasses import replace

import pytest

from packgraph.cli import main
from packgraph.models.decoder import DecoderModel
from packgraph.train.config.planning import PlanMemoryArguments
from packgraph.train.config.presets import PRESETS
from packgraph.train.plan_memory import (
    WorldChoice,
    memory_choices,
    world_choices,
)
from packgraph.train.updates import adamw

TOKENS = 4096
ASKED = PlanMemoryArguments(tokens=TOKENS)


@functools.cache
def found(world: int, limit: int | None = None, preset: str = "qwen3-0.6b", **speeds: float):
    config = PRESETS[preset]()
    memory = None if limit is None else f"{limit / 2**20}MiB"
    return world_choices(config, world, replace(ASKED, memory=memory, **speeds))


def the(choices: list[WorldChoice], **fields: object) -> WorldChoice:
    """The one way with these fields; axes that are not named have one rank."""
    axes = {"pp": 1, "cp": 1, "tp": 1, "ep": 1}
    asked = axes | {"shard": "none", "shard_ranks": 0, "recompute": "none", "offload": False}
    asked |= fields
    (choice,) = [c for c in choices if all(getattr(c, k) == v for k, v in asked.items())]
    return choice


def test_one_rank_is_the_plan_of_one_device():
    config = PRESETS["qwen3-0.6b"]()
    alone = memory_choices(config, ASKED)
    choices = found(1)
    assert len(choices) == len(alone)
    for one in alone:
        choice = the(choices, recompute=one.recompute, offload=one.offload)
        assert choice.device == pytest.approx(one.device, rel=0.02) and choice.waits == 0
        assert choice.host == pytest.approx(one.host, rel=0.02)
    fastest = the(choices)
    for one in alone:
        choice = the(choices, recompute=one.recompute, offload=one.offload)
        # The update comes to the time of the rows.
        assert choice.seconds / fastest.seconds <= one.time * 1.0001


def test_optimizers_change_memory_and_time():
    config = PRESETS["qwen3-0.6b"]()
    elements = sum(p.numel() for p in DecoderModel(config.model, device="meta").parameters())
    choices = {}
    for name in ("adamw", "muon", "adamw8bit", "adafactor"):
        named = replace(config, optimizer=replace(config.optimizer, name=name))
        choices[name] = world_choices(named, 2, ASKED)
    assert not any(choice.dp == 2 for choice in choices["muon"])
    assert not any(choice.tp == 2 for choice in choices["adafactor"])
    plain, eight, factors = (
        the(choices[name], dp=2) for name in ("adamw", "adamw8bit", "adafactor")
    )
    saved = plain.device - eight.device
    assert saved == pytest.approx((8 - 2.03125) * elements / 2, rel=0.01)
    assert plain.device - factors.device == pytest.approx(8 * elements / 2, rel=0.01)
    assert factors.seconds < plain.seconds < eight.seconds  # plain operations, not one kernel


def test_state_on_the_host_takes_the_time_of_its_copies():
    config = PRESETS["qwen3-0.6b"]()
    config = replace(config, run=replace(config.run, dtype="bfloat16"))
    away = replace(config, optimizer=replace(config.optimizer, offload=True))

    def chosen(run, memory):
        choices = world_choices(run, 2, replace(ASKED, memory=memory))
        return the(choices, dp=2, recompute="full")

    here, there = chosen(config, None), chosen(away, None)
    assert here.host == 0 < there.host
    passes = 2 * adamw.PASSES["bfloat16"] * there.host / (ASKED.device_gb_s * 1e9)
    copies = there.host / (ASKED.gb_s * 1e9)
    assert there.seconds - here.seconds == pytest.approx(copies - passes, rel=1e-6)
    assert chosen(away, "1024GiB").seconds == here.seconds and chosen(away, "1024GiB").host == 0


def test_what_ranks_send_is_what_the_axes_say():
    config, choices = PRESETS["qwen3-0.6b"](), found(4)
    model = config.model
    named = dict(DecoderModel(model, device="meta").named_parameters())
    weights = 2 * sum(p.numel() for p in named.values())
    layers = [p for name, p in named.items() if name.startswith("layers.")]
    matrices = 2 * sum(p.numel() for p in layers if p.ndim >= 2)
    row = 2 * TOKENS * model.hidden_size
    both = 1 + 4 / 2  # of weights, and of float32 gradients
    assert the(choices).sent == {"dp": round(both * weights * 3 / 4)}
    sharded = the(choices, shard="parameters")
    assert sharded.sent["shard"] == round((2 + 2) * matrices * 3 / 4)
    assert sharded.sent["dp"] == pytest.approx(both * (weights - matrices) * 3 / 4)
    reduced = the(choices, shard="gradients")
    assert reduced.sent["shard"] == round(2 * matrices * 3 / 4)
    assert reduced.sent["new"] == round(matrices * 3 / 4), "gathers all weights"
    assert reduced.sent["dp"] == pytest.approx(both * (weights - matrices) * 3 / 4)
    assert the(choices, tp=4).sent == {"tp": round(4 * model.num_layers * 8 * row * 3 / 4)}
    assert the(choices, pp=4).sent == {"pp": 4 * 2 * row}


def test_more_ranks_of_a_kind_hold_less():
    choices = found(8)
    for axis in ("tp", "cp"):
        devices = [the(choices, **{axis: size}).device for size in (1, 2, 4)]
        assert devices == sorted(devices, reverse=True) and len(set(devices)) == 3, axis
    none, gradients, parameters = (
        the(choices, shard=shard).device for shard in ("none", "gradients", "parameters")
    )
    assert none > gradients > parameters


def test_slow_links_favour_what_sends_less():
    fast, slow = found(16), found(16, net_gb_s=0.5)
    assert the(slow).seconds > the(fast).seconds
    assert the(slow, tp=8).waits > the(fast, tp=8).waits, "replicas lie on two hosts"
    assert slow[0].sent.get("dp", 0) <= fast[0].sent.get("dp", 0)


def test_layers_shared_within_a_host_travel_over_its_links_alone():
    choices = found(16, net_gb_s=0.5)
    every, host = (the(choices, shard="parameters", shard_ranks=ranks) for ranks in (0, 8))
    matrices = every.sent["shard"] * 16 / 15 / 4
    assert host.sent["shard"] == pytest.approx(4 * matrices * 7 / 8)
    assert host.sent["across"] == pytest.approx(3 * matrices / 8 / 2)
    assert host.seconds < every.seconds and host.waits < every.waits
    # A rank keeps an eighth of weights and gradients, and updates a sixteenth, as ever.
    more = (1 + 2) * matrices / 16 + 2 * matrices / 16  # gradients are float32
    assert host.device - every.device == pytest.approx(more, rel=0.01)
    assert not [c for c in found(8) if c.shard_ranks], "all ranks are of one host"
    with_experts = found(16, preset="moonlight")
    assert {c.ep for c in with_experts if c.shard_ranks == 8} >= {1, 8, 16}


def test_the_fastest_that_fits_comes_first():
    free = found(8)
    assert {c.fits for c in free} == {None}
    assert [c.seconds for c in free] == sorted(c.seconds for c in free)
    sizes = sorted(c.device for c in free)
    limit = sizes[len(sizes) // 3]
    limited = found(8, limit)
    fitting = [c.fits for c in limited]
    assert fitting == sorted(fitting, reverse=True) and len(limited) == len(free)
    assert all(c.fits == (c.device <= limit) for c in limited)


def test_experts_are_shared_by_replicas_only():
    choices = found(8, preset="moonlight")
    assert {c.ep for c in choices} >= {1, 8} and all(c.dp % c.ep == 0 for c in choices)
    sharded = the(choices, ep=8, shard="parameters")
    assert sharded.device < the(choices, ep=8).device < the(choices).device


def test_thousands_of_ranks(capsys):
    words = ["plan", "memory", "qwen3-0.6b", "--world", "2048", "--tokens", "8192", "--top", "3"]
    assert main([*words, "--memory", "80GiB", "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)
    assert len(ways) == 3 and all(w["fits"] for w in ways)
    assert all(w["dp"] * w["pp"] * w["cp"] * w["tp"] == 2048 for w in ways)
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "on 2,048 GPUs" in said and "tokens/s and GPU" in said


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--step-tokens", "5"], "--step-tokens: goes with --world N"),
        (["--world", "0"], "--world: must be more than 0"),
        (["--world", "8", "--net-gb-s", "0"], "--net-gb-s: must be more than 0"),
    ],
)
def test_nonsense_is_refused(words, name, capsys):
    assert main(["plan", "memory", *words]) == 2
    assert name in capsys.readouterr().err
