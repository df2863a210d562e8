"""`packgraph plan memory`: time against memory, from the shape of a model."""

import json

import pytest

from packgraph.cli import main
from packgraph.train.config.presets import PRESETS
from packgraph.train.plan_memory import PlanMemoryArguments, memory_choices

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
