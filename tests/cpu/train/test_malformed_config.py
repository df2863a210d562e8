"""Config files that make no sense are named, with the key."""

import json

from malformedkit import (
    DEEP,
    DIGITS,
    Case,
    bound,
    cases,
    folder,
    loop,
    nowhere,
    pipe,
    refuse,
)

LONG = "x" * 300


def config(name: str, content, says: str, kind: str = "toml") -> Case:
    return Case(
        name,
        ["train", "--config", f"{{dir}}/c.{kind}", "--run.folder", "{dir}/runs"],
        says,
        {f"c.{kind}": content},
    )


def in_json(name: str, values, says: str) -> Case:
    return config(f"json {name}", json.dumps({"preset": "qwen3-tiny"} | values), says, "json")


PRESET = 'preset = "qwen3-tiny"\n'


@cases(
    config("empty", "", "says no preset"),
    config("empty json", "", "not valid JSON", "json"),
    config("no toml", "{", "not valid TOML"),
    config("no json", "[", "not valid JSON", "json"),
    config("a list", "[]", "top level", "json"),
    config("a number", "3", "top level", "json"),
    config("null", "null", "top level", "json"),
    config("a text", '"x"', "top level", "json"),
    config("binary", b"\xff\xfe\x00\x01", "not valid TOML"),
    config("binary json", b"\x80\x81", "not valid", "json"),
    config("UTF-16", (PRESET + "x = 1").encode("utf-16"), "not valid TOML"),
    config("NUL", PRESET + "\0", "not valid TOML"),
    config("a marked one", b"\xef\xbb\xbf" + PRESET.encode(), "TOML"),
    config("deep", PRESET + "x = " + DEEP, "nested too deeply"),
    config(
        "deep tables",
        PRESET + "x = " + "{a=" * 5000 + "1" + "}" * 5000,
        "nested too deeply|not valid",
    ),
    config("deep names", PRESET + "[" + ".".join("a" * 3000) + "]", "unknown section"),
    config("deep json", DEEP, "nested too deeply", "json"),
    config("deep objects", '{"a":' * 50_000 + "1" + "}" * 50_000, "nested too deeply", "json"),
    config(
        "deep value",
        '{"preset": "qwen3-tiny", "run": {"name": ' + "[" * 400 + "]" * 400 + "}}",
        "run.name",
        "json",
    ),
    config("digits", PRESET + f"[run]\nseed = {DIGITS}", "not valid TOML"),
    config(
        "digits json",
        '{"preset": "qwen3-tiny", "run": {"seed": ' + DIGITS + "}}",
        "not valid JSON",
        "json",
    ),
    config(
        "4,000 digits",
        PRESET + f"[run]\nseed = {'9' * 4000}",
        "run.seed: expected a whole number below",
    ),
    config(
        "4,000 digits of a fraction", PRESET + f"[optimizer]\neps = {'9' * 4000}", "eps: expected a"
    ),
    config("a date", PRESET + "[run]\nseed = 2020-01-01", "run.seed: expected a whole number"),
    config("infinite", PRESET + "[optimizer]\neps = inf", "eps: expected a finite number"),
    config("nan", PRESET + "[optimizer]\neps = nan", "eps: expected a finite number"),
    config("twice", PRESET + "[run]\nseed = 1\nseed = 2", "not valid TOML"),
    config("unknown key", PRESET + "[run]\nseeed = 1", "did you mean run.seed"),
    config("unknown section", PRESET + "[runn]\nseed = 1", "unknown section, did you mean run"),
    config("unknown preset", 'preset = "qwen3-tinny"', "did you mean qwen3-tiny"),
    config("a preset that is none", "preset = 3", "says no preset"),
    config("a pipe", pipe, "it is no file"),
    config("a folder", folder, "it is no file"),
    config("a loop of links", loop, "cannot be read"),
    config("a link to nothing", nowhere, "cannot be read"),
    config("a socket", bound, "it is no file"),
    in_json("NUL in name", {"run": {"name": "a\0b"}}, "run.name: expected text.*control character"),
    in_json("surrogate in name", {"run": {"name": "\ud800"}}, "run.name: expected text.*Unicode"),
    in_json(
        "escape in name",
        {"run": {"name": "\x1b[31mred"}},
        "run.name: expected text.*control character",
    ),
    in_json("NUL in folder", {"run": {"folder": "a\0b"}}, "run.folder: expected text"),
    in_json(
        "NUL in path", {"data": {"source": "jsonl", "path": "a\0b"}}, "data.path: expected text"
    ),
    in_json("long path", {"data": {"source": "jsonl", "path": LONG}}, "path cannot be .*300 bytes"),
    in_json("NUL in tokenizer", {"data": {"tokenizer": "\0"}}, "data.tokenizer: expected text"),
    in_json("NUL in init_from", {"run": {"init_from": "\0"}}, "run.init_from: expected text"),
    in_json("NUL in a key", {"run": {"na\0me": "x"}}, "unknown key"),
    in_json("escape in a key", {"\x1b[31m": {"x": 1}}, "unknown section"),
    in_json("long key", {"run": {"x" * 10_000: 1}}, "unknown key"),
    in_json("empty key", {"": 1}, "unknown"),
    in_json("name is a number", {"run": {"name": 3}}, "run.name: expected"),
    in_json("name is a list", {"run": {"name": ["x"]}}, "run.name: expected"),
    in_json("name is an object", {"run": {"name": {"a": 1}}}, "run.name"),
    in_json("seed is a text", {"run": {"seed": "1"}}, "run.seed: expected a whole number"),
    in_json("seed is true", {"run": {"seed": True}}, "run.seed: expected a whole number"),
    in_json("seed is null", {"run": {"seed": None}}, "run.seed: expected a whole number"),
    in_json("seed 2^64", {"run": {"seed": 2**64}}, "run.seed: expected a whole number below"),
    in_json("seed 1.0", {"run": {"seed": 1.0}}, "run.seed: expected a whole number"),
    in_json("steps 1e400", {"run": {"steps": float("inf")}}, "run.steps: expected"),
    in_json("resume is a list", {"run": {"resume": []}}, "run.resume: expected"),
    in_json("dtype is a list", {"run": {"dtype": ["float32"]}}, "run.dtype: expected"),
    in_json("section is a list", {"run": []}, "this is a section"),
    in_json("section is null", {"run": None}, "this is a section"),
    in_json("section is a text", {"model": "big"}, "this is a section"),
    in_json("betas are one", {"optimizer": {"betas": 0.9}}, "optimizer.betas: expected"),
    in_json("betas are three", {"optimizer": {"betas": [0.9, 0.9, 0.9]}}, "expected 2 values"),
    in_json("betas are texts", {"optimizer": {"betas": ["a", "b"]}}, "optimizer.betas: expected"),
    in_json("capacities are a number", {"graph": {"capacities": 64}}, "graph.capacities: expected"),
    in_json(
        "capacities are numbers", {"graph": {"capacities": [64]}}, "graph.capacities: expected"
    ),
    in_json(
        "capacities are objects", {"graph": {"capacities": [{"tokens": 1}]}}, "graph.capacities: "
    ),
    in_json(
        "capacities of texts",
        {"graph": {"capacities": [{"tokens": "a", "documents": 2}]}},
        "graph.capacities: ",
    ),
    in_json(
        "capacities of fractions",
        {"graph": {"capacities": [{"tokens": 1.5, "documents": 2}]}},
        "capacities: ",
    ),
    in_json("capacities are null", {"graph": {"capacities": None}}, "graph.capacities: expected"),
    in_json("capacities are huge", {"graph": {"capacities": ["9" * 30 + "x1"]}}, "below 2\\^31"),
    in_json(
        "many capacities", {"graph": {"capacities": ["axb"] * 5000}}, "graph.capacities: expected"
    ),
    in_json("scope is a number", {"graph": {"scope": 3}}, "graph.scope: expected"),
    in_json("scope of NUL", {"graph": {"scope": ["a\0"]}}, "graph.scope: expected text"),
    in_json("suffixes of numbers", {"data": {"suffixes": [1]}}, "data.suffixes: expected text"),
)
def test_a_config_file_that_makes_no_sense_is_named(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refuse(case, tmp_path, capsys, at_once=True)
    assert (
        f"c.{'json' if 'c.json' in case.files else 'toml'}" in said
        or "section" in said
        or "preset" in said
    )
