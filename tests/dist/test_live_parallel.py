"""Models of transformers in pipelines, over contexts and in whole steps: graphs equal eager
bitwise, and layouts equal one process within rounding."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distkit import CPU, run_ranks

pytest.importorskip("transformers", reason="the models are of this library")

from packed_families import CASES, any_decoder, batch_of, build

import packgraph
from packgraph.integrations.transformers.model import PackedPart, packed
from packgraph.ops.attention.context import ContextGroup
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import Layout
from packgraph.train.build import with_shape
from packgraph.train.config.presets import preset
from packgraph.train.config.reading import ConfigError, ConfigLayer
from packgraph.train.config.request import RunRequest
from packgraph.train.config.sections import TrainConfig
from packgraph.train.features.live import live_problems
from packgraph.train.features.recompute import problems_of_recompute
from packgraph.train.memory import need_of
from packgraph.verification.matrix import budget_of
from packgraph.verification.ranks import verify_ranks

CONTEXT, PIPELINE, TENSOR, EXPERTS = (
    Layout(dp=1, cp=2),
    Layout(dp=1, pp=2),
    Layout(dp=1, tp=2),
    Layout(dp=2, ep=2),
)
CAPACITIES = (Capacity(48, 4), Capacity(96, 8))
UNLISTED = ("cohere", "ernie4_5_moe", "olmoe", "persimmon", "phi")


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    """Stores a model of a family with four layers; its folder."""

    def store(kind: str, **changes: Any) -> str:
        make = build if kind in CASES else any_decoder
        made: Any = make(kind, vocab_size=320, num_hidden_layers=4, **changes)
        made.save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    return store


def config(path: str, layout: Layout, values: dict[str, Any]) -> TrainConfig:
    given = {
        "hf.path": path,
        "data.tokenizer": "bytes",
        "run.dtype": "float32",
        "run.steps": 5,
        "run.tokens_per_step": 200,
        "graph.capacities": "48x4,96x8",
        "graph.strict": True,
        "parallel.shard": "none",
        "parallel.ep": layout.ep,
        **{
            f"parallel.{axis.name}": axis.size
            for axis in layout.axes
            if axis.name not in ("dp", "ep")
        },
    }
    asked = RunRequest("hf", preset("hf"), (ConfigLayer("test", given | values),))
    return with_shape(asked)[0]


def compared(mesh: Any, path: str, layout: Layout, values: dict[str, Any]) -> Any:
    asked = config(path, layout, values)
    return verify_ranks("live", asked, packs, CPU, mesh, budget=budget_of)


def packs() -> Iterator[PackedBatch]:
    """Endless packs of random documents, whose lengths zigzag can cut over two ranks."""
    draw = random.Random(1)
    while True:
        lengths = [4 * draw.randint(1, 8) for _ in range(draw.randint(2, 5))]
        documents = [[draw.randrange(256) for _ in range(length)] for length in lengths]
        yield from packgraph.pack(documents, CAPACITIES)


STEP = {"graph.granularity": "step"}
SHARDS = {"parallel.shard": "parameters"}
DELTA_LAYERS = [*["linear_attention"] * 3, "full_attention"]
DELTA = {"layer_types": DELTA_LAYERS}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("kind", "changes", "layout", "values"),
    [
        ("qwen3", {}, PIPELINE, {}),
        ("qwen2", WINDOWS, PIPELINE, {"parallel.chunks": 2, "graph.granularity": "chunk"}),
        ("falcon_h1", {}, PIPELINE, {}),
        ("qwen3", {}, PIPELINE, STEP | {"graph.optimizer": True}),
        ("qwen2", WINDOWS, Layout(dp=2, pp=2), SHARDS),
        ("qwen3", {}, CONTEXT, {"parallel.cp_kind": "zigzag"}),
        ("qwen2", WINDOWS, CONTEXT, {}),
        ("gpt_oss", WINDOWS, CONTEXT, {}),
        ("falcon_h1", {}, CONTEXT, {}),
        ("nemotron_h", {}, Layout(dp=1, cp=2, pp=2), {}),
        ("qwen3_next", DELTA, CONTEXT, {"graph.granularity": "chunk"}),
        ("qwen3_next", DELTA, CONTEXT, STEP | {"graph.optimizer": True}),
        ("qwen3_next", DELTA, Layout(dp=1, cp=2, tp=2), {"hf.random": True}),
        ("qwen3_next", DELTA, Layout(dp=2, cp=2, ep=2), {}),
        ("olmo_hybrid", {}, Layout(dp=2, cp=2), SHARDS),
        ("kimi_linear", {}, Layout(dp=1, cp=4), {}),
        ("qwen3_5_text", {}, CONTEXT, {}),
        ("qwen3", {}, CONTEXT, {"lora.rank": 4}),
        ("qwen3", {}, PIPELINE, {"run.recompute": "full"}),
        ("qwen3_moe", {}, EXPERTS, {"parallel.expert_room": 1.0}),
        ("gpt_oss", WINDOWS, Layout(dp=2, ep=2, pp=2), {}),
        ("qwen2", WINDOWS, TENSOR, {}),
        ("qwen3", {}, TENSOR, {"parallel.sequence": False}),
        ("llama", {}, Layout(dp=1, pp=2, tp=2), {"hf.random": True}),
        ("starcoder2", {}, Layout(dp=1, pp=2, tp=2), {"hf.random": True}),
        ("qwen3", {}, Layout(dp=2, tp=2), SHARDS),
        ("granite", {}, Layout(dp=1, cp=2, pp=2), {"hf.random": True}),
        ("olmo", {}, Layout(dp=2), STEP | {"graph.optimizer": True}),
    ],
)
def test_graphs_equal_eager_and_layouts_equal_one_process(stored, kind, changes, layout, values):
    path = stored(kind, **changes)
    world = layout.dp * layout.pp * layout.cp * layout.tp
    given = path, layout, values
    found = run_ranks(compared, world, *given, layout=layout, seconds=400.0)[0]
    assert found.good and not found.found() and not found.silent_ranks()
    assert found.one_process.steps == 5
    for kind, distance in found.one_process.distances.items():
        assert distance.size <= distance.limit / 5, (kind, distance)


@pytest.mark.parametrize("kind", [*CASES, *UNLISTED])
@pytest.mark.few(6)
def test_stages_one_after_the_other_are_the_whole(kind: str) -> None:
    """They say the same bits, and have each parameter under its name, a tied one twice."""
    model: Any = build(kind) if kind in CASES else any_decoder(kind)
    batch, whole = batch_of(), packed(model)
    loss = whole(batch)
    loss.backward()
    layers, parts = len(whole.layers), list[PackedPart]()
    for numbers in (range(1), range(1, layers)):
        other = copy.deepcopy(model)
        other.zero_grad()
        parts.append(PackedPart(packed(other), numbers))
    hidden = parts[0](batch)
    received = hidden.detach().requires_grad_()
    last = parts[1](batch, None, received)
    last.backward()
    hidden.backward(received.grad)
    assert torch.equal(last, loss)
    held = [dict(part.named_parameters()) for part in parts]
    twice = held[0].keys() & held[1].keys()
    assert twice <= {"model.model.embed_tokens.weight", "model.transformer.wte.weight"}
    for name, parameter in whole.named_parameters():
        found = [part[name].grad for part in held if name in part]
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert found, name
        total = sum(value for value in found if value is not None)
        assert torch.equal(total + torch.zeros_like(expected), expected), name


def test_what_cannot_be_spread_is_named(stored: Any) -> None:
    def problems(kind: str, layout: Layout, cp_kind: str = "", **changes: Any) -> str:
        given = {"parallel.cp_kind": cp_kind} if cp_kind else {}
        changes |= WINDOWS if kind == "qwen2" else {}
        return "; ".join(live_problems(config(stored(kind, **changes), layout, given)))

    scanned = problems("falcon_h1", CONTEXT, cp_kind="auto")
    assert "must be ulysses for mixers with a state, which scan rows in their order" in scanned
    odd = {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "layer_types": DELTA_LAYERS}
    told = problems("qwen3_next", CONTEXT, **odd)
    assert "cp = 2: Qwen3NextGatedDeltaNet: 3 heads in 3 groups cannot be shared by 2" in told
    assert not problems("falcon_h1", CONTEXT)
    assert "must be ulysses" in problems("qwen2", CONTEXT, cp_kind="zigzag")
    assert not problems("qwen2", CONTEXT)
    with pytest.raises(ConfigError, match="reads none"):
        config(stored("qwen3"), CONTEXT, {"data.path": "x"})


def test_noise_is_refused_where_ranks_share_a_row() -> None:
    live = packed(build("qwen3").train())
    live.noise, live.context = 5.0, 2
    live.contexts[2] = ContextGroup(2, 0, "", "ulysses")
    with pytest.raises(ValueError, match="noise of embeddings is not there yet"):
        live(batch_of())


def test_memory_is_predicted_of_a_part(stored: Any) -> None:
    path = stored("qwen3")
    whole = need_of(config(path, Layout(dp=1), {}), "cpu")
    half = need_of(config(path, PIPELINE, {}), "cpu", world=2)
    assert (half.weights, half.gradients) == (whole.weights // 2, whole.gradients // 2)
    assert half.optimizer == whole.optimizer // 2


def passes_on_doubles(mesh: Any, path: str) -> None:
    end = PackedPart.end
    PackedPart.end = lambda part, state: end(part, state).double()  # type: ignore[method-assign]
    compared(mesh, path, PIPELINE, {"graph.enabled": False, "graph.strict": False})


def test_a_stage_that_passes_on_another_dtype_is_refused(stored: Any) -> None:
    with pytest.raises(AssertionError, match=r"passes on .* in torch.float64, and the next"):
        run_ranks(passes_on_doubles, 2, stored("qwen3"), layout=PIPELINE)


def test_layers_that_exchange_are_not_recomputed(stored: Any) -> None:
    asked = {"run.recompute": "full"}
    for layout in (TENSOR, CONTEXT, EXPERTS):
        problems = problems_of_recompute(config(stored("qwen3"), layout, asked))
        assert "would exchange once more" in problems[0]
    assert not problems_of_recompute(config(stored("qwen3"), PIPELINE, asked))


def test_an_attention_with_windows_is_refused_in_zigzag(stored: Any) -> None:
    """Also where nobody has looked at the options of a run."""
    path = stored("qwen2", **WINDOWS)
    with pytest.raises(AssertionError, match="cut in zigzag has no window"):
        run_ranks(compared, 2, path, CONTEXT, {"parallel.cp_kind": "zigzag"}, layout=CONTEXT)
