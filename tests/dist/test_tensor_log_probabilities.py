"""Log-probabilities and entropies with the vocabulary split over ranks: those of one process, by
graphs exactly as eagerly."""

import pytest
import torch
from distkit import run_ranks
from graphkit import poison_free_slots
from parallelkit import tiny_config, whole
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import packgraph
from packgraph.models.decoder import DecoderModel
from packgraph.ops.log_probabilities import naive_log_probabilities
from packgraph.parallel.layout import Layout
from packgraph.parallel.tensor import parallelize
from packgraph.parallel.vocabulary import head_log_probabilities

TP2 = Layout(tp=2)
CAPACITIES = (packgraph.Capacity(16, 4), packgraph.Capacity(32, 4))
# float32 sums over ranks, in another order than those of one process
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def case(words, label=None):
    torch.manual_seed(words)
    hidden, weight = torch.randn(10, 6), 3 * torch.randn(words, 6)
    labels = torch.randint(0, words, (10,))
    labels[::4] = -100
    if label is not None:
        labels[5] = label
    hidden[0] = torch.nan  # a row without a label, as of padding in a poisoned slot
    return hidden, weight, labels, torch.randn(2, 10)


def of_a_split_head(mesh, words, chunk, split_rows, entropy, label=None, softcap=0.0):
    hidden, weight, labels, given = case(words, label)
    head = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(0)]))
    part = (hidden.chunk(2)[mesh.rank] if split_rows else hidden).requires_grad_()
    found = head_log_probabilities(part, head, labels, entropy, chunk, softcap=softcap)
    found.backward(given if entropy else given[0])
    return found.detach(), part.grad, head.grad.full_tensor()


def of_a_whole_head(words, entropy, label=None, softcap=0.0):
    hidden, weight, labels, given = case(words, label)
    live = hidden.masked_fill((labels == -100)[:, None], 0.0).requires_grad_()
    weight.requires_grad_()
    found = naive_log_probabilities(live @ weight.t(), labels, softcap=softcap, entropy=entropy)
    found.backward(given if entropy else given[0])
    return found.detach(), live.grad, weight.grad


@pytest.mark.parametrize(
    ("words", "chunk", "split_rows", "entropy", "softcap"),
    [
        (8, None, False, False, 0.0),
        (9, 3, True, False, 2.0),
        (9, 4, False, True, 2.0),
        (8, None, True, True, 0.0),
    ],
)
def test_a_split_head_equals_the_specification(words, chunk, split_rows, entropy, softcap):
    how = (words, chunk, split_rows, entropy, None, softcap)
    results = run_ranks(of_a_split_head, 2, *how, layout=TP2)
    expected, of_hidden, of_head = of_a_whole_head(words, entropy, None, softcap)
    for rank, (found, part_gradient, head_gradient) in enumerate(results):
        assert torch.equal(found, results[0][0]) and found.dtype == torch.float32
        torch.testing.assert_close(found, expected, **TOLERANCE)
        ours = of_hidden.chunk(2)[rank] if split_rows else of_hidden
        torch.testing.assert_close(part_gradient, ours, **TOLERANCE)
        torch.testing.assert_close(head_gradient, of_head, **TOLERANCE)


@pytest.mark.parametrize("label", [-1, 9, 5000])
def test_a_label_that_no_rank_has_makes_its_row_nan_on_all(label):
    expected, of_hidden, _ = of_a_whole_head(9, True)
    for found, gradient, head in run_ranks(
        of_a_split_head, 2, 9, 4, False, True, label, layout=TP2
    ):
        assert found[:, 5].isnan().all() and gradient[5].isnan().all() and head.isnan().all()
        others = [row for row in range(10) if row != 5]
        torch.testing.assert_close(found[:, others], expected[:, others], **TOLERANCE)
        torch.testing.assert_close(gradient[others], of_hidden[others], **TOLERANCE)


def batch_of(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7 + 4 * (seed % 2), (3,), generator=generator).tolist()
    documents = [torch.randint(32, (n,), generator=generator).tolist() for n in lengths]
    return packgraph.pack(documents, list(CAPACITIES))[0]


def policy_steps(model, entropy):
    """Old and new log-probabilities, entropies and gradients of changing batches."""
    trace = []
    for seed in range(8):
        batch = batch_of(seed)
        model.zero_grad()
        if isinstance(model, packgraph.GraphedModule):
            poison_free_slots(model, 0)
        with torch.no_grad():
            old = packgraph.logprobs(model, batch)
        new = packgraph.logprobs(model, batch, entropy=entropy)
        new, bonus = new if entropy else (new, torch.zeros(()))
        weights = torch.linspace(-1, 1, len(new))
        (((new - old - 0.5).exp() * weights).sum() + 0.1 * bonus.sum()).backward()
        gradients = [whole(parameter.grad) for parameter in model.parameters()]
        trace.append([old, new.detach(), bonus.detach(), *gradients])
    return trace


def eager_and_graphed(mesh, sequence, entropy):
    found = []
    for graphs in (False, True):
        model = DecoderModel(tiny_config(vocab_size=33), seed=1)
        parallelize(model, mesh["tp"], sequence=sequence)
        if graphs:
            model = packgraph.graph(model, capacities=CAPACITIES, warmup=1)
        found.append(policy_steps(model, entropy))
    return *found, dict(model.stats.fallbacks), model.stats.replayed


@pytest.mark.parametrize(("sequence", "entropy"), [(False, True), (True, False), (True, True)])
def test_ranks_equal_one_process_and_graphs_equal_eager(sequence, entropy):
    alone = policy_steps(DecoderModel(tiny_config(vocab_size=33), seed=1), entropy)
    for eager, graph, fallbacks, replayed in run_ranks(
        eager_and_graphed, 2, sequence, entropy, layout=TP2
    ):
        assert not {*fallbacks} - {"warm-up"} and replayed >= 10
        for step, (one, other, single) in enumerate(zip(eager, graph, alone, strict=True)):
            assert all(map(torch.equal, one, other)), f"step {step}: bit by bit"
            for ours, theirs in zip(one, single, strict=True):
                torch.testing.assert_close(ours, theirs, **TOLERANCE)


def hidden_states(mesh, sequence):
    model = DecoderModel(tiny_config(), seed=1)
    if mesh is not None:
        parallelize(model, mesh["tp"], sequence=sequence)
    hidden = model(batch_of(0), output="hidden")
    (hidden * torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [hidden.detach(), *map(whole, gradients)]


@pytest.mark.parametrize("sequence", [False, True])
def test_hidden_states_are_whole_on_every_rank(sequence):
    alone = hidden_states(None, sequence)
    for found in run_ranks(hidden_states, 2, sequence, layout=TP2):
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, theirs, **TOLERANCE)
