"""Configurations: layers, types, all problems at once, round trips."""

import dataclasses
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packgraph.graphs.errors import PackgraphWarning
from packgraph.packing.capacity import Capacity
from packgraph.train.config.command_line import all_options, options_help, parse_arguments
from packgraph.train.config.presets import preset
from packgraph.train.config.reading import (
    CommandArguments,
    ConfigError,
    ConfigLayer,
    Count,
    convert,
    differences,
    load_file,
    option,
    plain,
    read_config,
    render,
    to_dict,
)


@dataclass(frozen=True)
class Inner:
    """An inner section.

    rate: how fast
        it goes. kind: which. cap: largest.
    """

    rate: float = 0.5
    shape: tuple[int, int] = (1, 2)
    names: tuple[str, ...] | None = None
    kind: Literal["one", "two"] = "one"
    capacities: tuple[Capacity, ...] = (Capacity(8, 2),)
    cap: int | None = field(default=None, metadata={"bare": "50"})

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate must not be negative, got {self.rate}")


@dataclass(frozen=True)
class Outer:
    """The whole."""

    title: str = "x"
    on: bool = False
    count: int = 3
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True, kw_only=True)
class Command(CommandArguments):
    """Options of a command with arguments by place."""

    preset: str | None = option(None, "the run", positional=True)
    file: Path | None = option(None, "values", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class Bench(CommandArguments):
    """Options of a command without arguments by place."""

    tokens: tuple[Count, ...] = option((), "of a microbatch", metavar="T ...")
    ways: tuple[Annotated[str, ("layer", "chunk")], ...] = option(("layer",), "what is timed")
    seconds: float = option(1.0, "of {own.ways}", required=True)


def from_words(*words: str) -> Outer:
    return read_config(Outer(), [parse_arguments(words, CommandArguments(), Outer()).overrides])


def problems_of(*layers: ConfigLayer) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_config(Outer(), layers)
    return caught.value.problems


def test_later_layers_win_and_untouched_values_stay() -> None:
    config = read_config(
        Outer(),
        [
            ConfigLayer("a.toml", {"count": 5, "inner": {"rate": 1}}),
            ConfigLayer("command line", {"inner": {"rate": "0.25"}}, text=True),
        ],
    )
    assert config == Outer(count=5, inner=Inner(rate=0.25))


def test_options_of_every_type() -> None:
    config = from_words(
        "--inner.rate",
        "1e-3",
        "--inner.shape=3,4",
        "--inner.names",
        "a, b",
        "--inner.kind",
        "two",
        "--inner.capacities",
        "512x32,256x16x64",
        "--on",
        "--title=--odd",
        "--count",
        "-7",
    )
    assert config.inner == Inner(
        rate=1e-3,
        shape=(3, 4),
        names=("a", "b"),
        kind="two",
        capacities=(Capacity(512, 32), Capacity(256, 16, 64)),
    )
    assert (config.on, config.title, config.count) == (True, "--odd", -7)


def test_flags_take_a_value_only_when_it_fits() -> None:
    words = ["--on", "preset", "--inner.cap", "--file", "f.toml"]
    asked = parse_arguments(words, Command(), Outer())
    assert asked.own == Command(preset="preset", file=Path("f.toml"))
    assert asked.given == {"preset", "file"}
    assert read_config(Outer(), [asked.overrides]) == Outer(on=True, inner=Inner(cap=50))
    assert from_words("--inner.cap", "7").inner.cap == 7
    assert from_words("--inner.cap", "off").inner.cap is None
    assert from_words("--on", "--no-on").on is False


def test_all_problems_come_at_once_with_place_and_nearest_key() -> None:
    problems = problems_of(
        ConfigLayer(
            "run.toml",
            {"cuont": 1, "count": 2.5, "inner": {"kind": "three", "on": True, "rate": "fast"}},
        ),
        ConfigLayer(
            "command line",
            {"rate": "1", "inner": {"shape": "1,2,3", "capacities": "512"}, "on": "maybe"},
            text=True,
        ),
    )
    text = "\n".join(problems)
    assert len(problems) == 9
    assert "run.toml: cuont: unknown key, did you mean count?" in text
    assert "run.toml: count: expected a whole number, got 2.5" in text
    assert "run.toml: inner.kind: expected one | two, got 'three'" in text
    assert "run.toml: inner.on: unknown key, did you mean on?" in text
    assert "run.toml: inner.rate: expected a number, got 'fast'" in text
    assert "--rate: unknown key, did you mean --inner.rate?" in text
    assert "--inner.shape: expected 2 values, got 3" in text
    assert "--inner.capacities: expected TOKENSxDOCUMENTS" in text
    assert "--on: expected true or false, got 'maybe'" in text


def test_a_section_that_refuses_its_values_is_a_problem_among_others() -> None:
    problems = problems_of(ConfigLayer("f.json", {"inner": {"rate": -1.0}, "zzzzz": 1}))
    assert problems == (
        "f.json: zzzzz: unknown key, did you mean title?",
        "section inner: rate must not be negative, got -1.0 (values of f.json)",
    )


def test_a_file_nests_sections_and_names_no_dotted_path(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_text('{"inner": {"rate": 1.0}, "inner.rate": 2.0}')
    said = f"{file}: 'inner.rate': a file nests its sections; no key has dots"
    assert problems_of(load_file(file)) == (said,)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (
            ["--modell.num-layers", "3"],
            "--modell.num-layers: unknown key, did you mean --model.num-layers?",
        ),
        (["--lr", "1"], "--lr: unknown key, did you mean --optimizer.learning-rate?"),
        (
            ["--optimiser.lr", "1"],
            "--optimiser.lr: unknown key, did you mean --optimizer.learning-rate?",
        ),
        (["--run.step", "1"], "--run.step: unknown key, did you mean --run.steps?"),
        (["--layers", "1"], "--layers: unknown key, did you mean --model.num-layers?"),
        (["--batch-size", "1"], "--batch-size: unknown key, did you mean"),
    ],
)
def test_an_unknown_option_names_the_nearest(words: list[str], near: str) -> None:
    base = preset("qwen3-tiny")
    with pytest.raises(ConfigError) as caught:
        read_config(base, [parse_arguments(words, CommandArguments(), base).overrides])
    assert near in caught.value.problems[0] and len(caught.value.problems) == 1


def test_an_unknown_section_of_a_file_names_the_nearest_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(
            preset("qwen3-tiny"),
            [ConfigLayer("run.toml", {"modl": {"num_layers": 1, "hidden_size": 2}})],
        )
    assert caught.value.problems == ("run.toml: modl: unknown section, did you mean model?",)


def test_a_section_set_as_a_value_and_a_missing_value() -> None:
    assert (
        "this is a section; set one of its keys, such as f.json: inner.rate"
        in problems_of(ConfigLayer("f.json", {"inner": 3}))[0]
    )
    with pytest.raises(ConfigError, match=r"--inner\.rate: expected a number, got no value"):
        from_words("--inner.rate", "--on")
    with pytest.raises(ConfigError, match=r"--title: expected text, got no value"):
        from_words("--title")
    assert from_words("--title=").title == ""


def test_mistakes_in_options_of_the_command_and_of_the_run_come_at_once() -> None:
    words = ["a", "b", "--file", "--count", "x", "--fille", "f", "--on", "no"]
    with pytest.raises(ConfigError) as caught:
        read_config(Outer(), [parse_arguments(words, Command(), Outer()).overrides])
    assert caught.value.problems == (
        "'b': not expected here; see --help",
        "--file: expected a path or none, got no value",
        "--count: expected a whole number, got 'x'",
        "--fille: unknown key, did you mean --file?",
    )


def test_a_command_of_options_alone_takes_several_words() -> None:
    asked = parse_arguments(["--tokens", "8", "16", "--ways", "chunk", "--seconds", "2"], Bench())
    assert asked.own == Bench(tokens=(8, 16), ways=("chunk",), seconds=2.0)
    with pytest.raises(ConfigError) as caught:
        parse_arguments(["--tokens", "0", "--ways", "all", "--token", "1"], Bench())
    assert caught.value.problems == (
        "--seconds: required",
        "--tokens: expected a whole number of at least 1, got '0'",
        "--ways: expected layer | chunk, got 'all'",
        "--token: unknown key, did you mean --tokens?",
    )
    text = options_help(Bench())
    assert "  --ways layer | chunk, ...\n      what is timed (default: layer)" in text
    assert "of ('layer',) (required)" in text and text.endswith("explain this command")


def test_files_are_read_and_broken_ones_are_named(tmp_path: Path) -> None:
    """Below a folder with a long name, too."""
    tmp_path = tmp_path / ("long" * 30)
    tmp_path.mkdir()
    good = tmp_path / "a.toml"
    good.write_text('count = 9\n[inner]\ncap = "off"\ncapacities = ["8x4"]\nshape = [5, 6]\n')
    assert read_config(Outer(), [load_file(good)]) == Outer(
        count=9, inner=Inner(capacities=(Capacity(8, 4),), shape=(5, 6))
    )
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_file(tmp_path / "missing.toml")


letters = st.characters(
    codec="utf-8", exclude_characters=",", exclude_categories=("Cs", "Zs", "Cc")
)
names = st.text(letters, min_size=1, max_size=5)
WHOLE = st.integers(-(2**63) + 1, 2**63 - 1)
capacity = st.builds(Capacity, st.integers(1, 4096), st.integers(1, 64))


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Outer,
        title=names,
        on=st.booleans(),
        count=WHOLE,
        inner=st.builds(
            Inner,
            rate=st.floats(0, 1e30),
            shape=st.tuples(WHOLE, WHOLE),
            kind=st.sampled_from(["one", "two"]),
            names=st.none() | st.lists(names).map(tuple),
            capacities=st.lists(capacity, min_size=1).map(tuple),
            cap=st.none() | WHOLE,
        ),
    )
)
def test_json_round_trip(config: Outer) -> None:
    again = read_config(
        Outer(), [ConfigLayer("config.json", json.loads(json.dumps(to_dict(config))))]
    )
    assert again == config
    assert differences(to_dict(config), to_dict(again)) == {}


@settings(max_examples=60, deadline=None)
@given(capacity, st.floats(allow_nan=False, allow_infinity=False), WHOLE, st.booleans())
def test_rendered_text_reads_back(shape: Capacity, number: float, whole: int, flag: bool) -> None:
    pairs = [
        (shape, Capacity),
        (number, float),
        (whole, int),
        (flag, bool),
        ((whole, whole), tuple[int, int]),
    ]
    for value, kind in pairs:
        assert convert(render(value), kind, from_text=True) == value
        assert convert(plain(value), kind, from_text=False) == value


def test_help_lists_every_option_with_default_and_help() -> None:
    text = options_help(Outer())
    assert all(option in text for option in all_options(Outer()))
    assert "--inner.rate a number\n      how fast it goes (default: 0.5)" in text
    assert "--inner.cap [a whole number or none]" in text
    assert "--inner.capacities TOKENSxDOCUMENTS[xLONGEST], ..." in text


def test_differences_name_the_paths() -> None:
    before, after = to_dict(Outer()), to_dict(dataclasses.replace(Outer(), inner=Inner(rate=2.0)))
    assert differences(before, after) == {"inner.rate": (0.5, 2.0)}


def test_files_of_earlier_versions_may_name_an_option_that_is_gone() -> None:
    base = preset("qwen3-tiny")
    silent = {"merge_projections": False, "linear_product": "native"}
    stored = ConfigLayer("config.json", {"model": silent})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_config(base, [stored]) == base
    used = ConfigLayer("config.json", {"model": {"merge_projections": True}})
    with pytest.warns(PackgraphWarning, match=r"merge_projections: no longer an option"):
        assert read_config(base, [used]) == base
    with pytest.raises(ConfigError, match=r"--model\.merge-projections: no longer an option"):
        read_config(base, [ConfigLayer("command line", stored.values, text=True)])
