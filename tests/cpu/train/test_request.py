"""Defaults that give way to options, with a note, and options that contradict each other."""

from typing import Any

import pytest

from packgraph.packing.capacity import Capacity
from packgraph.train.config.presets import preset
from packgraph.train.config.reading import ConfigError, ConfigLayer
from packgraph.train.config.request import RunRequest

CP = {"parallel.cp": "4", "parallel.dynamic_cp": "true"}
# Options; the device; the default that gives way, its value, and the note.
GIVES_WAY: list[tuple[dict[str, str], str, str, Any, str]] = [
    (
        {"run.steps": "2"},
        "cpu",
        "graph.warmup",
        1,
        "graph.warmup = 1 instead of 2: so that a step of run.steps = 2 is left to replay",
    ),
    (
        {"graph.optimizer": "true"},
        "cpu",
        "graph.granularity",
        "step",
        "graph.granularity = step instead of layer: graph.optimizer is part of no other graph",
    ),
    (
        {"optimizer.resident": "2GB"},
        "cpu",
        "optimizer.offload",
        True,
        "optimizer.offload = true instead of false: optimizer.resident = 2GB is of a state on the "
        "host",
    ),
    (
        {"optimizer.gradients": "bfloat16"},
        "cpu",
        "run.dtype",
        "bfloat16",
        "run.dtype = bfloat16 instead of float32: optimizer.gradients = bfloat16 needs it",
    ),
    (
        {"model.precision": "fp8"},
        "cuda",
        "run.dtype",
        "bfloat16",
        "run.dtype = bfloat16 instead of float32: model.precision = fp8 on a GPU needs it",
    ),
    (
        {"model.attention_backend": "flash"},
        "cuda",
        "run.dtype",
        "bfloat16",
        "run.dtype = bfloat16 instead of float32: model.attention_backend = flash needs it",
    ),
    (
        CP,
        "cpu",
        "graph.capacities",
        (Capacity(4096, 32),),
        "graph.capacities = 4096x32 instead of 256x8,512x16,1024x32: a row on parallel.cp = 4 "
        "ranks of 1024 tokens each",
    ),
]


def asked(options: dict[str, str], *layers: ConfigLayer) -> RunRequest:
    words = ConfigLayer("command line", options, text=True)
    return RunRequest("qwen3-tiny", preset("qwen3-tiny"), (*layers, words))


def value_of(config: Any, path: str) -> Any:
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize(("options", "device", "path", "value", "note"), GIVES_WAY)
def test_a_default_gives_way_with_a_note(
    options: dict[str, str], device: str, path: str, value: Any, note: str
) -> None:
    request = asked(options)
    config, notes = request.read(device_type=device)
    assert value_of(config, path) == value and notes == [note]
    if "parallel.cp" not in options:
        request.check(world=1)
    request.check(world=4)


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"run.steps": "2", "graph.warmup": "2"}, "graph.warmup = 2 leaves no step"),
        ({"run.steps": "1", "graph.warmup": "1"}, "or set graph.enabled = false"),
        (
            {"graph.optimizer": "true", "graph.granularity": "layer"},
            "graph.optimizer needs graph.granularity = step, not layer",
        ),
        (
            {"optimizer.gradients": "bfloat16", "run.dtype": "float32"},
            "optimizer.gradients = bfloat16 needs run.dtype = bfloat16",
        ),
        (
            CP | {"graph.capacities": "512x8,1024x8"},
            "parallel.dynamic_cp needs graph.capacities of one number of tokens",
        ),
        (CP | {"graph.capacities": "auto"}, "parallel.dynamic_cp needs graph.capacities that are"),
    ],
)
def test_two_options_that_contradict_each_other_are_an_error(
    options: dict[str, str], problem: str, in_file: bool
) -> None:
    layers, words = [], dict(options)
    if in_file:  # what a file says is no default
        *_, path = words
        section, _, name = path.partition(".")
        layers = [ConfigLayer("run.toml", {section: {name: words.pop(path)}}, text=True)]
    request = asked(words, *layers)
    assert request.read()[1] == []
    with pytest.raises(ConfigError, match=problem):
        request.check(world=4)


def test_a_float32_run_in_float8_stays_one_where_it_can_be() -> None:
    assert asked({"model.precision": "fp8"}).read(device_type="cpu")[1] == []
