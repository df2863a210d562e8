"""Ways of the step benchmark: every one computes what the model does, and says so when it ran
otherwise.

What needs CUDA graphs is tested in its logic, with graphs that run the function again (and on GPUs
in tests/gpu).
"""

import json
from pathlib import Path
from typing import Any

import hand_made
import pytest
import torch
import torch.nn.functional as F
from bench import main
from bench_models import (
    TimedPart,
    build_part,
    refit,
    shape,
    squared_gradients,
    twin,
    zero_gradients,
)
from bench_ways import Graphed, compiled_layers, layers_of
from benchkit import ONE, SMALL, make, make_way, results
from others import GraphedCallables, Recorded, WholeGraph
from torch import Tensor

from packgraph.bench.comparison import room_for_code
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

pytestmark = pytest.mark.usefixtures("fresh_compiler")

COMPILED = ("compile", "auto+compile")
BUCKETS = Capacity(24, 2), Capacity(32, 3), ONE
TWO = ("--layers", "2")


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *((part, name) for part in ("model", "layers") for name in ("layer", "chunk", "auto")),
        ("model", "chunk+compile"),
        *(
            pytest.param(part, name, marks=pytest.mark.slow)
            for part, name in (
                ("layers", "chunk+compile"),
                *((part, name) for part in ("model", "layers") for name in COMPILED),
            )
        ),
    ],
)
@pytest.mark.few(3)
def test_ways_compute_what_eager_does(part: str, name: str) -> None:
    model, draws, setting = make(part, shape("tiny", 2), 6, BUCKETS)
    eager, way = make_way("eager", setting), make_way(name, setting)
    expected = results(eager, model, draws, setting.work)
    found = results(way, model, draws, setting.work)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)
    used = way.facts()
    if isinstance(way, Graphed):
        shapes = {way.capacity(batch) for batch in draws}
        assert way.graphed.stats.replayed > len(draws) and used["capture_layer_seconds"] > 0
        assert (len(shapes) > 1) == name.startswith("auto") and shapes <= set(way.capacities)
        assert (used["compiled"] > 0) == name.endswith("+compile")
        assert used["by_autograd"] == 0, "a schedule replays without autograd"
    else:
        assert used["shapes"] == "own" and used["capture_seconds"] is None
    way.close()


def run_again(run: Any) -> tuple[Any, Any]:
    """In place of a graph: runs the function again, and puts its result where the first one was."""
    out: Tensor = run().clone()
    return out, lambda: out.copy_(run())


@pytest.mark.parametrize("part", ["model", "layers"])
@pytest.mark.parametrize("compiled", [False, True])
def test_graphed_callables_hand_layers_nothing_but_tensors(part: str, compiled: bool) -> None:
    model, draws, setting = make(part, shape("tiny", 2), 6, BUCKETS)
    expected = results(make_way("eager", setting), model, draws, setting.work)
    own = twin(model, "auto")
    layers = compiled_layers(own, "aot_eager", dynamic=False) if compiled else layers_of(own)
    made: list[Any] = []

    def pretend(modules: tuple[Any, ...], samples: tuple[Any, ...]) -> tuple[Any, ...]:
        made.extend(zip(modules, samples, strict=True))
        assert all(isinstance(value, Tensor) for _, sample in made for value in sample)
        assert all(sample[0].requires_grad and sample[1] is made[0][1][1] for _, sample in made), (
            "tables are shared"
        )
        assert len({sample[0].data_ptr() for _, sample in made}) == len(modules), (
            "hidden states are not"
        )
        return modules

    work = setting.work.by(own)
    way = Recorded(
        "graphed-callables",
        work,
        ONE,
        lambda batch: GraphedCallables(own, layers, work.arguments(batch), pretend),
    )
    found = results(way, model, draws, setting.work)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert len(made) == 2 and way.facts()["capture_seconds"] >= 0
    with pytest.raises(ValueError, match="these graphs are of"):
        way.run(refit(draws[0], Capacity(40, 6)))


@pytest.mark.parametrize("part", ["model", "layers"])
def test_the_whole_graph_reads_static_inputs(part: str) -> None:
    model, draws, setting = make(part, shape("tiny", 2), 6, BUCKETS)
    expected = results(make_way("eager", setting), model, draws, setting.work)
    padded = Capacity(32, 256)
    way = Recorded(
        "whole-padded",
        setting.work,
        padded,
        lambda batch: WholeGraph(setting.work, batch, run_again),
    )
    found = results(way, model, draws, setting.work)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert way.facts()["shapes"] == ["32x256"]
    with pytest.raises(ValueError, match="this graph is of"):
        way.run(draws[0])


def test_padding_rows_of_layers_bring_no_gradient() -> None:
    """Negative control: with a gradient in padding the shape that documents run in would change the
    results."""
    model, draws, setting = make("layers", shape("tiny", 2), 4, BUCKETS)
    way = make_way("eager", setting)
    short = min(draws, key=lambda batch: batch.num_tokens)
    if short.num_tokens == 32:
        short = PackedBatch.build([[1] * 20], ONE)
    batches = [refit(short, Capacity(tokens, 6)) for tokens in (short.num_tokens, 32)]
    for real, equal in ((short.num_tokens, True), (32, False)):
        work = TimedPart(model, 32, real)
        norms = []
        for batch in batches:
            zero_gradients([model])
            torch.autograd.backward(model(*work.arguments(batch)), work.incoming(batch))
            norms.append(squared_gradients([model]))
        assert (abs(norms[0] - norms[1]) < 1e-4 * norms[0]) == equal
    way.close()


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["attention", "--model", "tiny", "--tokens", "32", "--mean", "8", "--draws", "2"], 3),
        pytest.param(
            ["memory", *SMALL, *TWO, "--part", "layers", "--banks", "1", "2"],
            3,
            marks=pytest.mark.slow,
        ),
        (["capture", *SMALL, *TWO, "--banks", "1", "2", "--ways", "layer", "chunk"], 4),
    ],
)
def test_small_benchmarks_write_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], count: int
) -> None:
    out = tmp_path / "rows.jsonl"
    assert main([*words, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert captured.out == out.read_text() and len(rows) == count
    assert all(row["benchmark"] == words[0] and row["reason"] is None for row in rows)
    if words[0] == "attention":
        assert [row["places"] for row in rows] == ["tight", "64", "256"] and rows[0][
            "forward_tax"
        ] == 1.0
        assert all(
            row["figures"]["backward_us"]["n"] == 2 and row["backward_tax"] >= 0 for row in rows
        )
    elif words[0] == "memory":
        assert [row["buckets"] for row in rows] == [0, 1, 2] and rows[0]["pool_bytes"] is None
        assert rows[2]["pool_bytes"] <= rows[1]["pool_bytes"] * 1.1, (
            "a bank is as large as its largest bucket"
        )
    else:
        assert [row["buckets"] for row in rows] == [1, 2, 1, 2] and all(
            row["capture_seconds"] > 0 for row in rows
        )
        assert all(
            row["prepare_seconds"] >= row["capture_seconds"] and row["compile_seconds"] == 0
            for row in rows
        )


def test_room_for_code_ends_with_its_block() -> None:
    before = torch._dynamo.config.recompile_limit
    with room_for_code():
        assert torch._dynamo.config.recompile_limit > before
        assert torch._dynamo.config.fail_on_recompile_limit_hit
    assert torch._dynamo.config.recompile_limit == before


def test_a_way_that_falls_back_complains() -> None:
    _, draws, setting = make("layers", shape("tiny", 2), 2, BUCKETS)
    way = make_way("chunk", setting)
    way.prepare([refit(batch, way.capacity(batch)) for batch in draws])
    way.run(PackedBatch.build([[1] * 20], Capacity(24, 6)))
    assert way.complaint() == "microbatches ran eagerly: {'capacity not declared': 1}"
    way.close()


# ---- layers of a graph that is made by hand


def by_documents(q, k, v, boundaries, longest):
    """Attention of one document after the other."""
    found = []
    for begin, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        parts = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        found.append(F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True))
    return torch.cat(found, 2)[0].transpose(0, 1)


def test_layers_by_hand_compute_what_packgraph_computes(monkeypatch):
    monkeypatch.setattr(hand_made, "attend", by_documents)
    batch, cpu = hand_made.documents_of(96, 50), torch.device("cpu")
    model = build_part("layers", shape("tiny", 2), cpu, torch.float32)
    work = TimedPart(model, 96, batch.num_tokens)
    expected = model(*work.arguments(batch))
    cos, sin = model.rotary(batch.position_ids, torch.float32)
    hidden = work.hidden
    for layer in model.layers.values():
        by_hand = hand_made.HandLayer(layer, max(batch.lengths))
        hidden = by_hand(hidden, cos[:, None], sin[:, None], batch.cu_seqlens)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_without_cuda_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hand_made.main([]) == 2
    assert "needs CUDA" in capsys.readouterr().err
