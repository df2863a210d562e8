"""Multi-token prediction: the loss and all gradients of documents one by one, nothing of a
neighbour, and graphs that are eager bit by bit."""

import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F

from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.graphed import control, graph
from packgraph.models.config import DecoderConfig, ExpertConfig, LatentConfig
from packgraph.models.decoder import DecoderModel, ModelChunks, stage_layers, stage_weights
from packgraph.models.recompute import recompute
from packgraph.ops.loss import token_count
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.document import IGNORED

CONFIG = DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    initializer_range=0.2,
    mtp_layers=2,
)
EXPERTS = dataclasses.replace(
    CONFIG,
    latent=LatentConfig(kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4),
    qk_norm=False,
    experts=ExpertConfig(
        count=4,
        per_token=2,
        intermediate_size=8,
        shared=1,
        first_dense=1,
        score="sigmoid",
        score_bias=True,
    ),
)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True, mtp_layers=1, mtp_loss_weight=0.1)
SHAPES = {
    "dense": CONFIG,
    "experts": EXPERTS,
    "tied": TIED,
    "tied, two": dataclasses.replace(TIED, mtp_layers=2),
}
CAPACITIES = [Capacity(24, 4), Capacity(48, 8)]


def documents_of(lengths, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(1, 40) for _ in range(length)] for length in lengths]


def random_batches(count):
    draw = random.Random(0)
    for number in range(count):
        capacity = CAPACITIES[draw.randrange(2)]
        lengths = [draw.randrange(1, 7) for _ in range(draw.randrange(1, capacity.documents // 2))]
        yield PackedBatch.build(documents_of(lengths, number), capacity)


def hidden_of(model, tokens, first):
    """The state of one document after the embedding, and its hidden states of all layers before
    `first`."""
    batch = PackedBatch.build([tokens], Capacity(len(tokens), 1))
    state = model.run_embed(model.begin(batch))
    for layer in range(first):
        for stage in model.layers[str(layer)].stages():
            state = stage.run(state)
    return state


def naive_losses(model, document):
    """Sums of the losses of the next token and of each further one, by the definition: a document
    by itself, each depth on as many tokens as there are labels for."""
    config = model.config
    words = torch.tensor(document)
    hidden = model.norm(hidden_of(model, document, config.num_layers)["hidden"])
    sums = [F.cross_entropy(F.linear(hidden[:-1], model.head_weight), words[1:], reduction="sum")]
    for depth in range(1, config.mtp_layers + 1):
        kept = len(document) - depth
        if kept < 2:
            sums.append(hidden.sum() * 0)
            continue
        layer = model.layers[str(config.num_layers + depth - 1)]
        embedding = model.embed_tokens.weight[words[depth:]]
        both = torch.cat((layer.enorm(embedding), layer.hnorm(hidden[:kept])), dim=-1)
        state = {**hidden_of(model, document[:kept], 0), "hidden": layer.eh_proj(both)}
        for stage in layer.stages()[1:]:
            state = stage.run(state)
        hidden = layer.shared_head["norm"](state["hidden"])
        logits = F.linear(hidden[:-1], model.head_weight)
        sums.append(F.cross_entropy(logits, words[depth + 1 :], reduction="sum"))
    return torch.stack(sums)


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_all_gradients_are_those_of_documents_one_by_one(shape):
    """Within the rounding of float32 sums in another order."""
    config = SHAPES[shape]
    packed, naive = DecoderModel(config, seed=1), DecoderModel(config, seed=1)
    documents = documents_of([7, 1, 2, 12, 3, 4])
    batch = PackedBatch.build(documents, Capacity(36, 8))
    loss = packed(batch)
    loss.backward()

    sums = torch.stack([naive_losses(naive, one) for one in documents if len(one) > 1]).sum(0)
    next_token, *further = sums / token_count(batch.labels)
    weight = config.mtp_loss_weight / config.mtp_layers
    (next_token + weight * sum(further)).backward()

    torch.testing.assert_close(loss, next_token)
    torch.testing.assert_close(packed.mtp_sums.losses, torch.stack(further).detach())
    assert (packed.mtp_sums.losses > 0.1).all()
    for name, parameter in packed.named_parameters():
        assert parameter.grad is not None, name
        theirs = naive.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, theirs, rtol=2e-4, atol=2e-6, msg=name)
    further_names = [name for name, _ in packed.named_parameters() if "layers.2." in name]
    assert any(packed.get_parameter(name).grad.abs().max() > 1e-4 for name in further_names)


def numbers(model, neighbour):
    """Loss, losses of further tokens and gradients of a document beside one that has no labels."""
    own, *_ = documents_of([9])
    silent = {"input_ids": neighbour, "labels": [IGNORED] * len(neighbour)}
    batch = PackedBatch.build([{"input_ids": own, "labels": own}, silent], Capacity(20, 2))
    model.zero_grad()
    loss = model(batch)
    loss.backward()
    table = model.embed_tokens.weight.grad
    assert not table[[word for word in neighbour if word not in own]].abs().max()
    return loss.detach(), model.mtp_sums.take(), *(p.grad.clone() for p in model.parameters())


def same(left, right):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(left, right, strict=True))


def test_a_document_does_not_see_its_neighbour():
    model = DecoderModel(CONFIG)
    one, other = documents_of([6], 1)[0], documents_of([6], 2)[0]
    assert one != other and same(numbers(model, one), numbers(model, other))


def test_documents_too_short_for_a_further_token_have_no_loss_of_it():
    model = DecoderModel(CONFIG)
    loss = model(PackedBatch.build([[1, 2], [3]], Capacity(3, 2)))
    loss.backward()
    assert loss > 0 and model.mtp_sums.take().tolist() == [0.0, 0.0]
    assert all(p.grad.isfinite().all() for p in model.parameters())
    model(PackedBatch.build([[1, 2, 3]], Capacity(3, 2))).backward()
    first, second = model.mtp_sums.take().tolist()
    assert first > 0 and second == 0


def test_the_loss_stays_that_of_the_next_token_and_evaluation_counts_nothing():
    with_layers = DecoderModel(CONFIG)
    without = DecoderModel(dataclasses.replace(CONFIG, mtp_layers=0))
    batch = PackedBatch.build(documents_of([5, 8, 2]), Capacity(20, 4))
    assert torch.equal(with_layers(batch), without(batch))
    with_layers.mtp_sums.take()
    for output in ("loss", "log_probabilities", "hidden"):
        with torch.no_grad():
            assert torch.equal(with_layers(batch, output=output), without(batch, output=output))
    assert torch.equal(with_layers.logits(batch), without.logits(batch))
    assert torch.equal(with_layers.eval()(batch), without.eval()(batch))
    assert not with_layers.mtp_sums.losses.any()


def test_illegal_values_are_refused_together():
    with pytest.raises(ValueError, match=r"mtp_layers is -1.*mtp_loss_weight is -0.5"):
        dataclasses.replace(CONFIG, mtp_layers=-1, mtp_loss_weight=-0.5)
    with pytest.raises(ValueError, match="with a pattern nothing says"):
        dataclasses.replace(CONFIG, pattern="(*-)")


def test_the_last_pipeline_stage_has_the_layers_and_a_table_of_its_own():
    config = dataclasses.replace(CONFIG, num_layers=4)
    *_, last = stage_layers(config, 2)
    assert last.stop == 6 and stage_layers(config, 1) == (range(6),)
    whole = DecoderModel(config, seed=3)
    parts = [DecoderModel(config, seed=3, stage=stage, stages=2) for stage in range(2)]
    names = {name for part in parts for name, _ in part.named_parameters()}
    assert names == {name for name, _ in whole.named_parameters()}
    for part in parts:
        assert "embed_tokens.weight" in dict(part.named_parameters())
        for name, value in part.named_parameters():
            assert torch.equal(value, whole.get_parameter(name)), name
    counted = [stage_weights(config, stage, 2) for stage in range(2)]
    for part, (elements, *_) in zip(parts, counted, strict=True):
        assert elements == sum(value.numel() for value in part.parameters())
    with pytest.raises(ValueError, match="embed_tokens"):
        ModelChunks(parts)

    batch = PackedBatch.build(documents_of([5, 8, 2]), Capacity(20, 4))
    assert torch.equal(parts[1](batch, None, parts[0](batch)), whole(batch))


@pytest.mark.parametrize(
    ("shape", "granularity", "scope", "again"),
    [
        ("dense", "layer", None, "none"),
        ("dense", "chunk", None, "full"),
        ("dense", "layer", ("attn", "mlp"), "none"),
        ("dense", "layer", ("mtp", "head"), "none"),
        ("experts", "layer", None, "none"),
        ("experts", "chunk", None, "full"),
        ("experts", "layer", ("attn", "moe_router", "mtp_input"), "none"),
        ("tied", "layer", None, "selective"),
        ("tied, two", "layer", None, "none"),
        ("tied, two", "chunk", None, "none"),
    ],
)
@pytest.mark.few(10)
def test_graphs_are_eager_bit_by_bit(shape, granularity, scope, again):
    config = dataclasses.replace(SHAPES[shape], dropout=0.1)
    models = eager, captured = [DecoderModel(config, seed=1) for _ in range(2)]
    recompute(captured, again)
    graphed = graph(
        captured,
        capacities=CAPACITIES,
        backend="recorder",
        granularity=granularity,
        scope=scope,
        strict=True,
    )
    losses = {}
    for model, call in zip(models, (eager, graphed), strict=True):
        torch.manual_seed(3)
        losses[model] = []
        for batch in random_batches(8):
            loss = call(batch, torch.tensor(20))
            loss.backward()
            losses[model].append((loss.item(), model.mtp_sums.take().tolist()))
    assert losses[eager] == losses[captured] and control(graphed).stats.replayed >= 4
    assert len({str(numbers) for numbers in losses[eager]}) == 8
    for name, parameter in eager.named_parameters():
        assert torch.equal(parameter.grad, captured.get_parameter(name).grad), name
    graphed.close()


def test_a_segment_that_would_sum_gradients_in_another_order_is_refused():
    model = DecoderModel(TIED)
    scope = ("attn", "mlp", "mtp")  # of the tied matrix: two uses, and the head's before
    graphed = graph(
        model, capacities=CAPACITIES, backend="recorder", granularity="chunk", scope=scope
    )
    first, second, third = random_batches(3)
    for batch in (first, second):  # warm-up
        graphed(batch, torch.tensor(20)).backward()
    with pytest.warns(PackgraphWarning, match="summed in another order"):
        graphed(third, torch.tensor(20)).backward()
    assert not control(graphed).stats.replayed
    graphed.close()
