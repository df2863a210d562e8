"""`graph.capacities = auto` and `packgraph plan DATA`: read, chosen, written down, gone on with,
explained."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_models import shape
from trainkit import CPU, tiny

from packgraph import cli
from packgraph.packing.buckets.cost import FLASH4, CostModel
from packgraph.packing.capacity import Capacity
from packgraph.train.config.presets import preset
from packgraph.train.config.reading import ConfigError, ConfigLayer, read_config, to_dict
from packgraph.train.config.sections import BucketConfig, GraphConfig, ParallelConfig, TrainConfig
from packgraph.train.data import DataConfig, build_tokenizer, open_documents
from packgraph.train.features.context import decoder_cost
from packgraph.train.launch import prepare
from packgraph.train.memory import DecoderMemory
from packgraph.train.plan import bucket_request, read_lengths, with_capacities

SMALL = [
    "--model.hidden-size",
    "16",
    "--model.intermediate-size",
    "32",
    "--model.num-layers",
    "1",
    "--model.num-heads",
    "2",
    "--model.num-kv-heads",
    "1",
    "--model.head-dim",
    "8",
    "--run.device",
    "cpu",
    "--run.tokens-per-step",
    "300",
    "--optimizer.warmup-steps",
    "2",
    "--graph.capacities",
    "auto",
    "--buckets.max-tokens",
    "128",
    "--buckets.max-count",
    "3",
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Forty texts of 21 to 59 tokens and four chats, one of them without an assistant."""
    rows: list[dict[str, Any]] = [
        {"text": "to be or not to be " * (1 + index % 3)} for index in range(40)
    ]
    rows += [
        {"messages": [{"role": "user", "content": "why"}, {"role": role, "content": "x" * 90}]}
        for role in ("assistant", "assistant", "assistant", "user")
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_for(path: Path, **buckets: Any) -> TrainConfig:
    config = tiny(graph=True)
    return replace(
        config,
        model=replace(config.model, vocab_size=320),
        data=DataConfig(source="jsonl", path=str(path), window=8),
        graph=GraphConfig(capacities="auto"),
        buckets=BucketConfig(**{"max_tokens": 128} | buckets),
    )


def test_lengths_are_those_that_will_be_trained_on(path: Path) -> None:
    config = config_for(path)
    lengths = read_lengths(config, open_documents(config.data), build_tokenizer(config.data))
    assert len(lengths.planned) + len(lengths.held_out) == 43, (
        "the chat without an assistant is left out"
    )
    assert len(lengths.held_out) == 43 // 5 and (lengths.read, lengths.total) == (44, 44)
    assert sorted(set(lengths.planned)) == [21, 40, 59, 98]
    fewer = config_for(path, documents=10)
    assert read_lengths(fewer, open_documents(config.data), build_tokenizer(config.data)).read == 10


def test_capacities_are_chosen_once_and_the_same_everywhere(path: Path) -> None:
    config = config_for(path)
    first, second = prepare(config, CPU), prepare(config, CPU, world=1)
    chosen = first.config.graph.declared_capacities()
    assert chosen == second.config.graph.declared_capacities() and max(chosen).tokens == 128
    assert len(chosen) <= 8 and first.config == replace(
        config, graph=replace(config.graph, capacities=chosen)
    )
    assert "chosen for 35 documents: expected padding" in first.notes[0]
    assert {next(first.microbatches).capacity for _ in range(30)} <= set(chosen)
    assert with_capacities(first.config, None, None) == (first.config, ()), "what is given is taken"  # type: ignore


def test_capacities_that_are_not_chosen_yet_are_no_capacities(path: Path) -> None:
    with pytest.raises(RuntimeError, match="auto: they are not chosen yet"):
        config_for(path).graph.captured_capacities()


def test_what_the_run_is_like_goes_into_the_request(path: Path) -> None:
    config = config_for(path, memory_gib=2.0, max_count=5)
    request = bucket_request(config)
    assert (request.max_tokens, request.max_buckets, request.budget, request.slots) == (
        128,
        5,
        2**31,
        1,
    )
    assert (request.policy.documents, request.policy.batches, request.layers) == (8, False, 2)
    assert bucket_request(config, batch=5).policy.batches
    config = replace(config, graph=replace(config.graph, slots=3))
    assert bucket_request(config).slots == 3
    split = bucket_request(replace(config, parallel=ParallelConfig(tp=6)))
    assert split.multiple % 6 == 0
    flash = replace(config, model=replace(config.model, attention_backend="flash"))
    assert bucket_request(flash).cost == decoder_cost(config.model, measured=FLASH4) != request.cost
    assert bucket_request(config, device=CPU).cost == request.cost
    piped = bucket_request(replace(config, parallel=ParallelConfig(pp=2)))
    assert (piped.layers, piped.slots) == (1, 2), (
        "a stage has its part of the layers and the slots of its schedule"
    )


def test_what_cannot_be_planned_names_the_options(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"have more than 64 tokens.*buckets.max_tokens"):
        prepare(config_for(path, max_tokens=64), CPU)
    with pytest.raises(ConfigError, match=r"holds no bucket.*buckets.memory_gib"):
        prepare(config_for(path, memory_gib=1e-6), CPU)
    with pytest.raises(
        ValueError, match="max_tokens must be at least 1, got 0; memory_gib must be positive"
    ):
        BucketConfig(max_tokens=0, memory_gib=0.0)


def test_auto_is_written_as_it_is_read() -> None:
    base = tiny()
    for given, capacities in (("auto", "auto"), ("16x2,8x1", (Capacity(16, 2), Capacity(8, 1)))):
        config = read_config(
            base, [ConfigLayer("command line", {"graph": {"capacities": given}}, text=True)]
        )
        assert config.graph.capacities == capacities
        assert read_config(base, [ConfigLayer("file", to_dict(config))]) == config
    with pytest.raises(
        ConfigError,
        match=r"--graph.capacities: expected TOKENSxDOC.*, got 'automatic' \(or `auto`\)",
    ):
        read_config(
            base, [ConfigLayer("command line", {"graph": {"capacities": "automatic"}}, text=True)]
        )


def test_estimates_are_near_what_was_measured() -> None:
    """Memory of rows of 4,096 in benchmarks/results/h100_shard.jsonl, times in
    benchmarks/results/first_step.jsonl."""
    model = preset("qwen3-0.6b").model
    for config, gibibytes in ((model, 7.125), (shape("qwen3-8b", 20), 15.94)):
        memory = DecoderMemory(config, config.num_layers, 2, compiled=True)
        found = memory(Capacity(4096, 16)) / 2**30
        assert found == pytest.approx(gibibytes, rel=0.05)
        assert replace(memory, compiled=False)(Capacity(4096, 16)) / 2**30 > found
    measured, scaled = CostModel(), decoder_cost(model)
    assert all(
        getattr(scaled, name) == pytest.approx(value, rel=1e-3)
        for name, value in vars(measured).items()
    )
    for tokens, milliseconds in ((1024, 25.9), (2048, 45.8), (4096, 79.6), (8192, 141.0)):
        attention = 0.7 * tokens
        assert (scaled.shape_us(tokens, 64) + attention) / 1000 == pytest.approx(
            milliseconds, rel=0.06
        )
    halves = decoder_cost(model, parts=2)
    assert (
        halves.token_us == pytest.approx(scaled.token_us / 2)
        and halves.microbatch_us == scaled.microbatch_us
    )


def test_a_run_chooses_writes_and_goes_on_with_its_capacities(path: Path, tmp_path: Path) -> None:
    words = [
        "train",
        "qwen3-tiny",
        *SMALL,
        "--data.source",
        "jsonl",
        "--data.path",
        str(path),
        "--run.name",
        "x",
        "--run.folder",
        str(tmp_path),
    ]
    assert cli.main([*words, "--run.steps", "3"]) == 0
    stored = json.loads((tmp_path / "x" / "config.json").read_text())["graph"]["capacities"]
    assert 2 <= len(stored) <= 3 and stored[-1].startswith("128x")
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert summary["captured"] % len(stored) == 0 and summary["replayed"] > 0
    assert (
        cli.main(
            [
                *words,
                "--run.steps",
                "5",
                "--resume",
                "--optimizer.decay-steps",
                "3",
                "--data.path",
                str(path),
            ]
        )
        == 0
    )
    assert json.loads((tmp_path / "x" / "config.json").read_text())["graph"]["capacities"] == stored


def test_verify_chooses_too(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "verify",
        "qwen3-tiny",
        *SMALL,
        "--data.source",
        "jsonl",
        "--data.path",
        str(path),
        "--steps",
        "4",
    ]
    assert cli.main(words) == 0, capsys.readouterr()


def test_the_command_explains_a_plan(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(path), "--buckets.max-tokens", "128"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert (
        "data.jsonl: 35 documents of 21 to 98 tokens" in text and "256 wait to be combined" in text
    )
    assert "held out" in text and "memory" in text and "capture" in text
    assert max(map(len, text.splitlines())) <= 200
    assert cli.main([*words, "qwen3-0.6b", "--json", "--batch", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == 28 and found["documents"] == 35 and found["documents_held_out"] == 8
    assert found["memory_bytes"] > max(bucket["pool_bytes"] for bucket in found["buckets"]) > 8e8
    assert abs(sum(bucket["rows"] for bucket in found["buckets"]) - 1) < 1e-9
    used = found["capacities"]
    config = read_config(
        tiny(), [ConfigLayer("command line", {"graph": {"capacities": used}}, text=True)]
    )
    assert [(c.tokens, c.documents) for c in config.graph.declared_capacities()] == [
        (bucket["tokens"], bucket["documents"]) for bucket in found["buckets"]
    ]


def test_help_of_both_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "stdlib", "--help"]) == 0
    assert "--batch N" in capsys.readouterr().out
    assert cli.main(["plan", "--help"]) == 0
    assert "packgraph plan DATA" in capsys.readouterr().out
