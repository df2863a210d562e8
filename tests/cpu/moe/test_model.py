"""Decoders with experts: scopes, granularities, padding, isolation of documents, losses that ride
along."""

import itertools
import random

import pytest
import torch

import packgraph
from packgraph.graphs.stages import scope_errors
from packgraph.models.config import DecoderConfig, ExpertConfig
from packgraph.models.decoder import DecoderModel, named_stages
from packgraph.models.layers.moe import moe_blocks
from packgraph.moe.stash.stash import Stash
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

CAPACITY = Capacity(32, 4)
EXPERTS = ExpertConfig(
    count=8,
    per_token=2,
    intermediate_size=16,
    shared=1,
    first_dense=1,
    score="sigmoid",
    score_bias=True,
    document_loss=1e-2,
    z_loss=1e-3,
    load_loss=1e-2,
)
CONFIG = DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    initializer_range=0.2,
    dropout=0.1,
    experts=EXPERTS,
)
PARTS = ("attn", "mlp", "moe_router", "moe_preprocess")


def plain(**changes) -> DecoderConfig:
    return DecoderConfig(**(vars(CONFIG) | {"dropout": 0.0} | changes))


def batches(count: int, seed: int = 0, capacity: Capacity = CAPACITY) -> list[PackedBatch]:
    draw = random.Random(seed)
    return [
        PackedBatch.build(
            [
                [draw.randrange(40) for _ in range(draw.randint(1, 9))]
                for _ in range(draw.randint(1, 3))
            ],
            capacity,
        )
        for _ in range(count)
    ]


def legal_scopes() -> list[tuple[str, ...] | None]:
    stages = named_stages(CONFIG)
    some = [scope for size in (1, 2, 3, 4) for scope in itertools.combinations(PARTS, size)]
    some += [(*rest, "moe") for rest in ((), ("attn",), ("mlp",), ("attn", "mlp"))]
    return [
        None,
        *(scope for scope in some if not scope_errors(stages, scope, "layer")),
        ("moe_experts",),
        ("attn", "moe_dispatch", "moe_combine"),
    ]


@pytest.mark.parametrize(
    ("granularity", "scopes"),
    [
        pytest.param("layer", legal_scopes()[1:5], id="layer"),
        pytest.param(
            "layer", [None, *legal_scopes()[5:]], id="layer (others)", marks=pytest.mark.slow
        ),
        pytest.param("chunk", legal_scopes(), id="chunk", marks=pytest.mark.slow),
    ],
)
@pytest.mark.few(2)
def test_every_legal_scope_is_bitwise_eager(granularity, scopes):
    torch.manual_seed(3)
    state, eager = torch.get_rng_state(), DecoderModel(CONFIG, seed=1)
    losses = [loss for batch in batches(5) if (loss := eager(batch)).backward() is None]
    for scope in scopes:
        torch.set_rng_state(state)
        captured = DecoderModel(CONFIG, seed=1)
        graphed = packgraph.graph(
            captured, CAPACITY, warmup=1, strict=True, scope=scope, granularity=granularity
        )
        for batch, loss in zip(batches(5), losses, strict=True):
            found = graphed(batch)
            found.backward()
            assert torch.equal(found, loss), scope
        assert graphed.stats.replayed == 4, scope
        for (name, ours), theirs in zip(
            captured.named_parameters(), eager.parameters(), strict=True
        ):
            assert torch.equal(ours.grad, theirs.grad), (scope, name)
        for (name, ours), theirs in zip(captured.named_buffers(), eager.buffers(), strict=True):
            assert torch.equal(ours, theirs), (scope, name)


class WaitingDispatcher:
    """The local dispatcher, said to wait for the host in one stage."""

    why_not = {"moe_preprocess": "the host reads how many rows there are"}

    def __init__(self, inner) -> None:
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_a_stage_that_waits_for_the_host_stays_eager_and_cannot_be_asked_for():
    model = DecoderModel(plain(), seed=1)
    for block in moe_blocks([model]):
        block.dispatcher = WaitingDispatcher(block.dispatcher)
    with pytest.raises(
        ValueError, match=r"'moe_preprocess' cannot be captured here: .* the host reads how many"
    ):
        packgraph.graph(model, CAPACITY, scope=("moe_router", "moe_preprocess"))
    with pytest.raises(ValueError, match="'moe' cannot be captured here"):
        packgraph.graph(model, CAPACITY, scope=("moe",))
    graphed = packgraph.graph(model, CAPACITY, warmup=0, strict=True)
    for batch in batches(3):
        graphed(batch).backward()
    assert graphed.stats.replayed == 3


def test_a_changed_document_changes_nothing_of_the_others():
    """Within rounding of float64: an expert that gets fewer rows may be multiplied by another
    kernel."""
    experts = ExpertConfig(
        **(vars(EXPERTS) | {"load_loss": 0.0, "z_loss": 0.0, "document_loss": 0.0})
    )
    second, found = [7, 8, 9], []
    for first in ([1, 2, 3, 4, 5], [30, 31, 32, 33, 34]):
        model = DecoderModel(plain(experts=experts), seed=1, dtype=torch.float64)
        logits = model.logits(PackedBatch.build([first, second], CAPACITY))
        (gradient,) = torch.autograd.grad(logits[5:8].square().sum(), [model.embed_tokens.weight])
        found.append((logits, gradient))
    (logits, gradient), (others, other_gradient) = found
    torch.testing.assert_close(logits[5:8], others[5:8], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(logits[:5], others[:5])


def test_auxiliary_losses_reach_the_router_and_leave_the_reported_loss_alone():
    (batch,) = batches(1)
    none = dict.fromkeys(("document_loss", "z_loss", "load_loss"), 0.0)
    quiet = plain(experts=ExpertConfig(**(vars(EXPERTS) | none)))
    with_losses, without = DecoderModel(plain(), seed=1), DecoderModel(quiet, seed=1)
    assert torch.equal(with_losses(batch), without(batch))
    for model in (with_losses, without):
        model(batch).backward()
    ours, theirs = (model.layers["2"].mlp.gate.weight.grad for model in (with_losses, without))
    assert not torch.equal(ours, theirs)


def test_drop_and_pad_keeps_the_most_an_expert_may_take():
    config = plain(experts=ExpertConfig(**(vars(EXPERTS) | {"drop_factor": 1.0})))
    model = DecoderModel(config, seed=1)
    seen = []
    block = model.layers["1"].mlp
    dispatcher = block.dispatcher
    before = dispatcher.preprocess
    dispatcher.preprocess = lambda routing: seen.append(routing.experts) or before(routing)
    model(batches(1)[0]).backward()
    most = CAPACITY.tokens * EXPERTS.per_token // EXPERTS.count
    assert int(torch.bincount(seen[0][seen[0] >= 0].long()).max()) <= most


class LackingDispatcher(WaitingDispatcher):
    """The local dispatcher, said to need half as much room again as there is."""

    why_not: dict[str, str] = {}

    def demand(self, plan):
        return torch.full((), 1500, dtype=torch.int64)


def test_what_an_evaluation_lacks_is_not_taken_for_a_lack_of_training():
    model = DecoderModel(plain(), seed=1)
    blocks = moe_blocks([model])
    for block in blocks:
        block.dispatcher = LackingDispatcher(block.dispatcher)
    (batch,) = batches(1)
    with torch.no_grad():
        model(batch)
    model.eval()(batch).backward()
    assert all(block.demand == 0 and block.evaluation_demand == 1500 for block in blocks)
    model.train()
    for run in (model, packgraph.graph(model, CAPACITY, warmup=0, strict=True)):
        for block in blocks:
            block.forget_demand()
        run(batch).backward()
        assert all(block.demand == 1500 and block.evaluation_demand == 0 for block in blocks)


def test_an_evaluation_takes_no_pages():
    model, stash = DecoderModel(plain(), seed=1), Stash("cpu", page_rows=16)
    stash.allocate(1, columns={(torch.float32, 16): 1, (torch.float32, 32): 1})
    for block in moe_blocks([model]):
        block.stash = stash
    (batch,) = batches(1)
    with torch.no_grad():
        model(batch)
    model.eval()(batch).backward()
    assert not stash.overflow_flag() and stash.need_hi() == 0
    model.train()(batch).backward()
    assert stash.overflow_flag()


def test_half_a_row_of_padding_changes_neither_counts_nor_gradients():
    tight, wide = Capacity(16, 2), Capacity(32, 2)
    documents = [list(range(9)), list(range(20, 27))]
    found = []
    for capacity in (tight, wide):
        model = DecoderModel(plain(), seed=1, dtype=torch.float64)
        loss = model(PackedBatch.build(documents, capacity))
        loss.backward()
        found.append(
            (loss, [p.grad for p in model.parameters()], [b.gate.load for b in moe_blocks([model])])
        )
    (loss, gradients, loads), (wide_loss, wide_gradients, wide_loads) = found
    assert all(int(load.sum()) == 16 * 2 for load in loads)
    assert all(map(torch.equal, loads, wide_loads))
    torch.testing.assert_close(wide_loss, loss)
    torch.testing.assert_close(wide_gradients, gradients)
