"""`packgraph plan memory`: time against memory, from the shape of a model."""

import json
from dataclasses import replace

import pytest

from packgraph.cli import main
from packgraph.train.config.planning import PlanMemoryArguments
from packgraph.train.config.presets import PRESETS
from packgraph.train.plan_memory import memory_choices

CHOICES = [
    ("none", False),
    ("selective", False),
    ("full", False),
    ("none", True),
    ("selective", True),
    ("full", True),
]


@pytest.mark.parametrize("preset", PRESETS)
def test_less_memory_takes_more_time(preset):
    found = memory_choices(PRESETS[preset](), PlanMemoryArguments(tokens=65536))
    assert [(choice.recompute, choice.offload) for choice in found] == CHOICES
    none, selective, full, moved, some, both = found
    assert none.device > selective.device > full.device > both.device > 0
    assert selective.device > some.device > both.device
    assert none.time == 1 < selective.time < full.time <= both.time
    assert selective.time <= some.time <= both.time
    assert none.host == full.host == 0 < some.host == both.host < moved.host
    assert {choice.fits for choice in found} == {None}


def test_what_fits_is_said(capsys):
    words = ["plan", "memory", "qwen3-0.6b", "--tokens", "65536", "--memory", "80GiB"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [choice["fits"] for choice in found] == [False, True, True, True, True, True]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "layer_input" in told
    assert "--run.recompute auto, without offloading: selective\n" in told
    assert "--run.recompute auto, with everything on the host that may move: none\n" in told
    assert main([*words[:-1], "1GiB"]) == 0
    assert "without offloading: full, which does not fit" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--memory", "much"], ["--gb-s", "0"], ["--length", "0"]])
def test_nonsense_is_refused(words, capsys):
    assert main(["plan", "memory", *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_state_of_the_optimizer_is_on_the_host_as_far_as_it_does_not_fit():
    """Qwen3-0.6B: 6.7 GiB of state, and 0.75 GiB of buffers beside state on the host."""
    config = PRESETS["qwen3-0.6b"]()
    config = replace(config, run=replace(config.run, dtype="bfloat16"))
    away = replace(config, optimizer=replace(config.optimizer, offload=True))
    kept = replace(away, optimizer=replace(away.optimizer, resident="2GiB"))

    def full(run, memory):
        asked = PlanMemoryArguments(tokens=8192, memory=memory)
        return next(
            c for c in memory_choices(run, asked) if c.recompute == "full" and not c.offload
        )

    here, all_away = full(config, None), full(away, None)
    state = all_away.host
    assert here.host == 0 and state == pytest.approx(6.7 * 2**30, rel=0.01)
    buffers = all_away.device - (here.device - state)
    assert buffers == 2 * 12 * 2**25
    some = full(away, "9GiB")
    stays = state - some.host
    assert some.fits and 0 < stays < state
    assert some.device == all_away.device + stays == pytest.approx(0.9 * 9 * 2**30, abs=1)
    assert full(away, "80GiB").host == 0
    assert full(away, "2GiB").host == state and not full(away, "2GiB").fits
    for memory in (None, "9GiB", "80GiB"):
        assert full(kept, memory).host == state - 2 * 2**30
        assert full(kept, memory).device == all_away.device + 2 * 2**30
