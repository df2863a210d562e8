"""Experts of a decoder with a stash: two operations whose rows are in pages until their backward,
compiled or not."""

from dataclasses import replace

import pytest
import torch
from bench_models import draw_batches
from stashkit import poison_pages

import packgraph
from packgraph.models.config import DecoderConfig, ExpertConfig
from packgraph.models.decoder import DecoderModel
from packgraph.models.layers.moe import moe_blocks
from packgraph.moe.experts import Experts
from packgraph.moe.stash.stash import Stash, columns_of, stashed_experts
from packgraph.packing.capacity import Capacity
from packgraph.train.features.moe import share

PAGE, CAPACITY = 16, Capacity(32, 4)
CONFIG = DecoderConfig(
    vocab_size=320,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    initializer_range=0.2,
    dropout=0.1,
    experts=ExpertConfig(count=8, per_token=2, intermediate_size=16, shared=1, load_loss=1e-2),
)
COLUMNS = {(torch.float32, 16): 1, (torch.float32, 32): 1}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def stash_of(pages: int = 40, host_pages: int = 0) -> Stash:
    stash = Stash("cpu", page_rows=PAGE)
    stash.allocate(pages, host_pages, columns=COLUMNS)
    return stash


def rows(live: int, rows: int = 48) -> list[torch.Tensor]:
    """values, weights, ends of four experts, and a gradient whose tail must not be read."""
    torch.manual_seed(live)
    ends = torch.tensor([live // 4, live // 3, live // 3, live], dtype=torch.int32)
    return [
        torch.randn(rows, 16).requires_grad_(),
        torch.rand(rows).requires_grad_(),
        ends,
        torch.randn(rows, 16),
    ]


def by(run, live: int, activation: str = "swiglu") -> list[torch.Tensor]:
    """The live rows of the result, gradients of values (live rows), weights and matrices."""
    torch.manual_seed(0)
    experts = Experts(4, 16, 16 if activation == "swiglu" else 32, activation)
    values, weights, ends, gradient = rows(live)
    made = run(experts, values, weights, ends)
    made.backward(gradient)
    return [
        made.detach()[:live],
        values.grad[:live],
        weights.grad,
        *(p.grad for p in experts.parameters()),
    ]


@pytest.mark.parametrize(("host_pages", "activation"), [(0, "swiglu"), (3, "swiglu"), (0, "relu2")])
@pytest.mark.parametrize("live", [0, 1, 16, 33, 48])
def test_the_operation_is_experts_bit_by_bit(live, host_pages, activation):
    stash = stash_of(pages=1 if host_pages else 3, host_pages=host_pages)
    expected = by(lambda experts, *given: experts(*given), live, activation)
    found = by(lambda experts, *given: stashed_experts(experts, *given, stash), live, activation)
    assert all(map(torch.equal, expected, found))
    assert stash.in_use() == 0 and stash.need_hi() == -(-live // PAGE) and not stash.overflow_flag()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_pages_of_frozen_experts_come_back(backend):
    """Rows that no gradient is made of need not be brought back: a compiler leaves that out, and
    what it would free."""
    stash, experts = stash_of(), Experts(4, 16, 16)
    experts.first_proj.requires_grad_(False)
    run = (
        torch.compile(stashed_experts, backend=backend, fullgraph=True)
        if backend
        else stashed_experts
    )
    for live in (30, 20):
        values, weights, ends, gradient = rows(live)
        run(experts, values, weights, ends, stash).backward(gradient)
        assert values.grad is not None and experts.first_proj.grad is None and stash.in_use() == 0
    assert stash.need_hi() == 2


def test_pages_of_a_backward_of_the_second_product_alone_come_back_at_the_next_reset():
    stash, experts = stash_of(), Experts(4, 16, 16)
    values, weights, ends, gradient = rows(30)
    made = stashed_experts(experts, values, weights, ends, stash)
    torch.autograd.grad(made, [experts.down_proj], gradient)
    assert stash.in_use() == 2
    stash.pages.reset()
    assert stash.in_use() == 0
    stashed_experts(experts, values, weights, ends, stash).backward(gradient)
    assert stash.in_use() == 0 and not stash.overflow_flag()


def test_without_pages_nothing_is_stashed_and_columns_tell_what_they_are_for():
    stash = Stash("cpu", page_rows=PAGE)
    expected = by(lambda experts, *given: experts(*given), 20)
    assert all(
        map(torch.equal, expected, by(lambda e, *given: stashed_experts(e, *given, stash), 20))
    )
    assert stash.nbytes() == 0 and columns_of(Experts(4, 16, 16)) == COLUMNS
    assert (
        columns_of(Experts(4, 32, 16))
        == columns_of(Experts(4, 32, 32, "relu2"))
        == {(torch.float32, 32): 2}
    )
    other = Stash("cpu")
    other.allocate(4, columns={(torch.float32, 16): 1})
    with pytest.raises(RuntimeError, match=r"saves 1 tensors of torch\.float32 and width 32"):
        by(lambda e, *given: stashed_experts(e, *given, other), 20)


def packs(count: int):
    return draw_batches(CAPACITY, count, 320, mean=8.0, sigma=0.8, seed=2)


def trained(stash, draws, compile, **options):
    """Two rounds over a decoder's graphs: losses, gradients and buffers; shapes that its first call
    saves; counts."""
    torch.manual_seed(5)
    config = replace(CONFIG, num_layers=1) if compile else CONFIG  # compiling takes long
    model = DecoderModel(config, seed=1)
    if stash is not None:
        share(stash, moe_blocks([model]))
    graphed = packgraph.graph(model, CAPACITY, warmup=1, compile=compile, **options)
    found, saved = [], []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    pack.__module__ = (
        "packgraph.of_the_test"  # a stash leaves to hooks of others what it would have
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graphed(draws[0]).backward()
    for batch in 2 * draws:
        loss = graphed(batch)
        loss.backward()
        found.append(loss.detach())
        if stash is not None:
            poison_pages(stash)
    found += [p.grad.clone() for p in model.parameters()]
    found += [b.clone() for name, b in model.named_buffers() if "stash" not in name]
    if (
        stash is not None
    ):  # as after an overflow: more pages are compiled for, if at all, and captured again
        replayed = graphed.stats.replayed
        stash.allocate(2 * stash.pages.pages, columns=dict(stash.columns))
        share(stash, moe_blocks([model]))
        graphed(draws[0]).backward()
        assert graphed.stats.replayed == replayed + 1
    return found, saved, graphed.stats


@pytest.mark.filterwarnings("ignore:capturing again")
@pytest.mark.parametrize(
    ("compile", "options"),
    [
        (False, {"granularity": "layer"}),
        (False, {"granularity": "chunk", "scope": ("attn", "moe_experts")}),
        ("aot_eager", {"granularity": "chunk"}),
    ],
    ids=str,
)
@pytest.mark.few(3)
def test_graphs_of_a_decoder_are_the_same_bits(compile, options):
    """And code that is compiled hands no rows to its backward: it could take them in the forward,
    and keep those."""
    draws, rows, stash = packs(2), CAPACITY.tokens * CONFIG.experts.per_token, stash_of(60)
    expected, plain, _ = trained(None, draws, compile, **options)
    found, saved, stats = trained(stash, draws, compile, **options)
    assert all(map(torch.equal, expected, found))
    assert (
        stats.replayed >= 3
        and not stats.fallbacks["capture failed"]
        and bool(stats.compiled) == bool(compile)
    )
    assert stash.in_use() == 0 and not stash.overflow_flag() and stash.need_hi() > 1
    assert {(rows, 16), (rows, 32)} <= set(plain) and not {(rows, 16), (rows, 32)} & set(saved)


class InPages(torch.nn.Module):
    """Experts whose rows are in pages of a stash, None = are kept; other rows are zeros, so that a
    first replay can be compared."""

    def __init__(self, stash):
        super().__init__()
        self.stash, self.experts = stash, Experts(4, 16, 16)

    def forward(self, values, weights, offsets):
        live = torch.arange(len(values)) < offsets[-1]
        values, weights = values.where(live[:, None], 0.0), weights.where(live, 0.0)
        if self.stash is None:
            made = self.experts(2 * values, weights, offsets)
        else:
            made = stashed_experts(self.experts, 2 * values, weights, offsets, self.stash)
        return made.where(live[:, None], 0.0)


def test_compiled_code_keeps_once_and_brings_back_once():
    """A compiler may move what only the backward needs; what it must not do is to reserve twice."""
    stash = stash_of()
    plain, given = InPages(None), InPages(stash)
    plain.load_state_dict(given.state_dict())
    graphed = packgraph.graph(given, warmup=0, compile="aot_eager")
    for live in (40, 17, 0, 48):
        results = []
        for model in (plain, graphed):
            values, weights, offsets, gradient = rows(live)
            model(values, weights, offsets).backward(gradient)
            own = [p.grad.clone() for p in model.parameters()]
            results.append([values.grad[:live], weights.grad, *own])
            poison_pages(stash)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert graphed.stats.replayed == 4
    assert stash.in_use().item() == 0 and stash.need_hi().item() == 3


def test_a_second_backward_is_an_error():
    stash, experts = stash_of(), Experts(4, 16, 16)
    values, weights, ends, gradient = rows(30)
    made = stashed_experts(experts, values, weights, ends, stash)
    made.backward(gradient, retain_graph=True)
    with pytest.raises(RuntimeError, match="backward through stashed experts a second time"):
        made.backward(gradient)
