"""Mixers of transformers with a state, over rows spread over ranks: delta rules and Mamba-2 are
those of one process, and graphs equal eager bitwise."""

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from distkit import run_ranks

pytest.importorskip("transformers", reason="the models are of this library")

from mambakit import hybrid
from packed_families import CASES, VOCAB, any_decoder, build, draw_weights
from torch import Tensor, nn

from packgraph.graphs.graphed import graph
from packgraph.integrations.transformers import mixers
from packgraph.integrations.transformers.model import packed
from packgraph.mamba.heads import whole_scan_rows
from packgraph.mamba.shape import ScanShape
from packgraph.ops.attention.context import ContextGroup, own_rows
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.rows import spread_context
from packgraph.parallel.layout import Layout

KINDS = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "falcon_h1")
ROWS = 48
LENGTHS = {
    "mixed": (13, 1, 20, 7),
    "one document on all ranks": (47,),
    "borders of documents and ranks": (12, 12, 1, 11, 12),
    "ranks with padding only": (5,),
}


def live(kind: str) -> Any:
    return build(kind) if kind in CASES else draw_weights(any_decoder(kind, vocab_size=VOCAB))


def mixer_of(kind: str) -> Any:
    return next(filter(mixers.runner_of, live(kind).double().modules()))


def batch_with(lengths: tuple[int, ...]) -> Any:
    """What mixers read of a batch."""
    ids = [number for number, length in enumerate(lengths) for _ in range(length)]
    padding = torch.arange(ROWS) >= len(ids)
    filled = torch.tensor(ids + [len(lengths)] * (ROWS - len(ids)), dtype=torch.int32)
    return SimpleNamespace(document_ids=filled, padding_mask=padding)


def differentiated(
    mixer: Any, lengths: tuple[int, ...], context: ContextGroup | None, fault: str = ""
) -> list[list[Tensor]]:
    """Output and gradient of the input, this rank's rows; gradients of all parameters. In float64:
    norms amplify the rounding of rows that are almost 0."""
    draw, batch = torch.Generator().manual_seed(len(lengths)), batch_with(lengths)
    drawn = (torch.randn(ROWS, 16, generator=draw, dtype=torch.float64) for _ in range(2))
    x, grad = (own_rows(y.masked_fill(batch.padding_mask[:, None], 0), context) for y in drawn)
    if fault == "a state that crosses documents":
        batch.document_ids.zero_()
    if fault == "a state that is not passed on":
        batch = SimpleNamespace(**{name: own_rows(y, context) for name, y in vars(batch).items()})
        context = None
    run, leaf = mixers.runner_of(mixer), x.clone().requires_grad_()
    assert run is not None
    mixer.zero_grad()
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):  # of decays
        found = run(mixer, leaf, batch, context)
    found.backward(grad)
    return [[found.detach(), leaf.grad], [p.grad.clone() for p in mixer.parameters()]]


def on_ranks(mesh: Any, kinds: tuple[str, ...], fault: str = "") -> list[list[list[Tensor]]]:
    context = ContextGroup(mesh.size("cp"), mesh.place["cp"], mesh.group("cp").group_name)
    cases = itertools.product(kinds, LENGTHS.values())
    return [differentiated(mixer_of(kind), lengths, context, fault) for kind, lengths in cases]


def distances(kinds: tuple[str, ...], results: Any) -> dict[tuple[str, str], float]:
    """The largest difference from one process, of all tensors of a case, each in parts of its
    largest number."""
    found = {}
    for number, (kind, name) in enumerate(itertools.product(kinds, LENGTHS)):
        rows, sums = differentiated(mixer_of(kind), LENGTHS[name], None)
        ours = [torch.cat([one[number][0][part] for one in results]) for part in range(2)]
        ours += [sum(one[number][1][part] for one in results) for part in range(len(sums))]
        each = zip(ours, rows + sums, strict=True)
        found[kind, name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in each)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_mixers_on_spread_rows_are_those_of_one_process(ranks: int) -> None:
    """Outputs, gradients of inputs, and sums over ranks of all parameters' gradients. Over four
    ranks there are more ranks than key heads."""
    found = distances(KINDS, run_ranks(on_ranks, ranks, KINDS, layout=Layout(cp=ranks)))
    for (kind, name), distance in found.items():  # the norm of Kimi Linear rounds to float32
        assert distance < (1e-6 if kind == "kimi_linear" else 1e-11), (kind, name, distance)


@pytest.mark.parametrize(
    "fault", ["a state that crosses documents", "a state that is not passed on"]
)
def test_what_goes_wrong_is_found(fault: str) -> None:
    kinds = ("qwen3_next", "kimi_linear")
    found = distances(kinds, run_ranks(on_ranks, 2, kinds, fault, layout=Layout(cp=2)))
    for (_, name), distance in found.items():
        without = {
            "a state that crosses documents": ("one document on all ranks", "ranks with padding"),
            "a state that is not passed on": ("borders", "ranks with padding"),
        }[fault]
        assert distance < 1e-6 if name.startswith(without) else distance > 1e-2, found


def poisoned(mesh: Any, value: float) -> list[Tensor]:
    """Results of the rule and gradients of what it reads, padding being `value`."""
    context = ContextGroup(mesh.size("cp"), mesh.place["cp"], mesh.group("cp").group_name)
    draw, batch = torch.Generator().manual_seed(1), batch_with((13, 1, 20, 7))
    shapes = ((ROWS, 2 * 2 * 8 + 4 * 6), (ROWS, 4, 6), (ROWS, 4), (ROWS, 4, 8))
    leaves = []
    for shape in shapes:
        made = -torch.rand(shape, generator=draw)
        made[batch.padding_mask] = value
        leaves.append(own_rows(made, context).clone().requires_grad_())
    conv = nn.Conv1d(56, 56, 4, groups=56, bias=False)
    nn.init.constant_(conv.weight, 0.5)
    sizes = {"num_v_heads": 4, "num_k_heads": 2, "head_v_dim": 6, "head_k_dim": 8}
    parts = {"norm": lambda y, gate: y, "out_proj": lambda y: y}
    mixer = SimpleNamespace(conv1d=conv, **sizes, **parts)
    given = SimpleNamespace(**dict(zip(("columns", "gate", "beta", "decay"), leaves, strict=True)))
    y = mixers.run_gated_delta(lambda mixer, x: given, mixer, leaves[0], batch, context)
    y.square().sum().backward()
    read = (leaves[0].grad, *(leaf.grad for leaf in leaves[2:]), conv.weight.grad)
    return [y.detach(), *(grad for grad in read if grad is not None)]


def test_what_stands_in_padding_reaches_nothing() -> None:
    ours, others = (
        run_ranks(poisoned, 2, value, layout=Layout(cp=2)) for value in (0.0, torch.nan)
    )
    padding = batch_with((13, 1, 20, 7)).padding_mask
    for one, other in zip(ours, others, strict=True):
        assert len(one) == 5 and all(map(torch.equal, one, other))
    for part in range(4):
        rows = torch.cat([one[part] for one in others])
        assert (rows[padding] == 0).all() and (rows[~padding] != 0).any()


def batches() -> list[PackedBatch]:
    """Rows over two ranks and over one by turns, other documents each time."""
    draw, found = torch.Generator().manual_seed(3), []
    for number in range(12):
        tokens = (48, 24)[number % 2]
        lengths = [(tokens,), (1, tokens // 2 + 3, 1, 2), (3, 1), (5, tokens // 2)][number // 2 % 4]
        documents = [torch.randint(VOCAB, (n,), generator=draw).tolist() for n in lengths]
        batch = PackedBatch.build(documents, Capacity(tokens, 6))
        batch.tokens[batch.padding_mask] = 10**9  # no word
        found.append(batch)
    return found


def trained(mesh: Any, kind: str, graphs: bool) -> Any:
    """Loss and gradients of each batch, and replays."""
    model, whole = packed(live(kind)), hybrid("M*", num_layers=2)
    if mesh is not None:
        spread_context(model, mesh, 24, "ulysses", whole)
    capacities = [Capacity(48, 6), Capacity(24, 6)]
    call: Any = model
    if graphs:
        call = graph(model, capacities=capacities, granularity="layer", strict=True, warmup=1)
    trace = []
    for batch in batches():
        model.zero_grad()
        loss = call(batch)
        loss.backward()
        given = [p.grad for p in model.parameters() if p.grad is not None]
        trace.append([loss.detach().clone(), *(grad.clone() for grad in given)])
    counts = (call.stats.replayed, dict(call.stats.fallbacks)) if graphs else None
    if graphs:
        call.close()
    return trace, counts


@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid", "qwen3_5_text", "kimi_linear"])
@pytest.mark.few(2)
def test_graphs_over_changing_ranks_equal_eager_and_one_process(kind: str) -> None:
    eager, graphs = (
        run_ranks(trained, 2, kind, use, layout=Layout(dp=1, cp=2)) for use in (False, True)
    )
    alone, _ = trained(None, kind, False)
    for (expected, _), (found, (replayed, _)) in zip(eager, graphs, strict=True):
        assert replayed >= 3 * 2
        for one, other in zip(expected, found, strict=True):
            assert len(one) == len(other) and all(map(torch.equal, one, other))
    for number, expected in enumerate(alone):
        shared = number % 2 == 0
        over = [trace[number] for trace, _ in eager] if shared else [eager[0][0][number]]
        ours = [sum(parts) for parts in zip(*over, strict=True)]
        scale = max(float(grad.abs().max()) for grad in expected[1:])
        for one, other in zip(ours, expected, strict=True):
            assert float((one - other).abs().max()) <= 1e-5 * max(scale, float(expected[0]))


def test_rows_cut_in_zigzag_are_refused() -> None:
    columns, steps, shape = torch.zeros(8, 24), torch.zeros(8, 4), ScanShape(4, 2, 2, 4)
    with pytest.raises(ValueError, match="cut in zigzag cannot be scanned in their order"):
        whole_scan_rows(columns, steps, shape, ContextGroup(2, 0, "", "zigzag"))
