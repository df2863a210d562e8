"""Forward graphs alone, log-probabilities and released weights on a CUDA device."""

import pytest
import torch
from graphkit import make_toy, poison_free_slots, toy_inputs, toy_loss, train
from tracekit import differences

import packgraph
from packgraph.graphs.graphed import graph
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.ops.log_probabilities import linear_log_probabilities, naive_log_probabilities

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
CAPACITY = packgraph.Capacity(tokens=256, documents=8)
CONFIG = DecoderConfig(
    vocab_size=1000,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
)


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_calls_without_gradients_replay_in_the_pool_of_training(mode, training):
    eager, graphed = make_toy().cuda(), graph(make_toy().cuda(), warmup=1)
    for seed in range(3):
        for model in (eager, graphed):
            torch.manual_seed(seed)
            toy_loss(model(*toy_inputs(64, "cuda"))).backward()
    pool = graphed.stats.pool_bytes
    eager.train(training)
    graphed.train(training)
    for seed in range(4):
        outs = []
        for model in (eager, graphed):
            torch.manual_seed(seed)
            inputs = toy_inputs(64, "cuda")
            poison_free_slots(graphed, 0)
            with MODES[mode]():
                outs.append(model(*inputs))
        assert all(torch.equal(outs[0][name], outs[1][name]) for name in outs[0])
        assert packgraph.control(graphed).slots.in_flight() == 0
    assert dict(graphed.stats.fallbacks) == {"warm-up": 1} and graphed.stats.replayed == 6
    assert graphed.stats.pool_bytes == pool


def test_training_with_evaluations_in_flight_is_that_of_eager():
    def evaluate(model, step):
        state = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(step)
        ids, x = toy_inputs(8, "cuda")
        for mode in MODES.values():
            with mode():
                model(ids, x)
        model.eval()
        with torch.no_grad():
            model(ids, x)
        model.train()
        torch.cuda.set_rng_state(state)
        if isinstance(model, packgraph.GraphedModule):
            poison_free_slots(model, step)

    eager, graphed = make_toy().cuda(), graph(make_toy().cuda(), warmup=2)
    options = {"steps": 4, "between": evaluate, "device": "cuda"}
    assert differences(train(eager, **options), train(graphed, **options)) == []
    assert set(graphed.stats.fallbacks) == {"warm-up"}


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probabilities_of_bfloat16_are_those_of_all_logits(entropy):
    torch.manual_seed(0)
    hidden = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 128, device="cuda", dtype=torch.bfloat16).mul_(0.1)
    weight.requires_grad_()
    labels = torch.randint(1000, (300,), device="cuda")
    labels[::7] = -100
    found = linear_log_probabilities(hidden, weight, labels, 128, entropy=entropy)
    expected = naive_log_probabilities(hidden @ weight.t(), labels, entropy=entropy)
    # logits are the same bfloat16 numbers; float32 sums of 1,000 terms in another order
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    factors = torch.randn_like(found)
    ours = torch.autograd.grad((found * factors).sum(), (hidden, weight))
    theirs = torch.autograd.grad((expected * factors).sum(), (hidden, weight))
    for one, other in zip(ours, theirs, strict=True):
        # gradients of logits are rounded to bfloat16 (2^-8) once
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


def test_graphs_of_log_probabilities_equal_eager_and_release_gives_memory_back():
    made = lambda: DecoderModel(CONFIG, seed=1, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    eager, graphed = made(), graph(made(), capacities=[CAPACITY], warmup=1)
    own = packgraph.control(graphed)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        documents = [torch.randint(1000, (n,), generator=generator).tolist() for n in (90, 40, 75)]
        batch, found = packgraph.PackedBatch.build(documents, CAPACITY).to("cuda"), []
        for model in (eager, graphed):
            model.zero_grad()
            poison_free_slots(graphed, 0)
            with torch.no_grad():
                old = packgraph.logprobs(model, batch)
            new, entropy = packgraph.logprobs(model, batch, entropy=True)
            ((new - old).exp() + 0.1 * entropy).sum().backward()
            found.append([old, new.detach(), *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *found)), "bit by bit"
        del old, new, entropy, model
        if seed in (2, 4):
            torch.cuda.synchronize()
            found.clear()
            graphed.zero_grad()
            weights = sum(p.nbytes for p in graphed.parameters())
            before = torch.cuda.memory_reserved()
            assert own.release() >= weights and own.stats.pool_bytes == 0
            assert not any(p.is_cuda for p in graphed.parameters())
            assert before - torch.cuda.memory_reserved() >= 2**21  # a segment at the least
            own.restore()
            assert all(p.is_cuda for p in graphed.parameters())
    assert dict(graphed.stats.fallbacks) == {"warm-up": 2}
