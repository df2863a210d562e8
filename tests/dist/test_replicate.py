"""`packgraph.replicate`: ranks of an own loop train as one process does, and through graphs exactly
as eagerly."""

import contextlib
import functools

import pytest
import torch
from distkit import run_ranks
from replicakit import CAPACITY, Tied, facts_of, microbatches, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tracekit import differences

import packgraph
import packgraph.parallel.replicate as module
from packgraph.parallel.data import FlatParameters


def both(mesh, options):
    """Graphs, and the same eagerly."""
    return train(mesh.rank, **options), train(mesh.rank, eager=True, **options)


@pytest.mark.parametrize("granularity", ["chunk", "layer"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_graphs_equal_eager_and_one_process(granularity, set_to_none):
    options = {"granularity": granularity, "set_to_none": set_to_none}
    results = run_ranks(both, 2, options)
    alone = train(None, **options)
    for graphs, eager in results:
        assert graphs["replayed"] >= 5 and eager["replayed"] == 0
        assert not differences(graphs, eager)
        for step, facts in enumerate(alone["trace"]):
            for name, value in facts.items():
                found = graphs["trace"][step][name]
                assert (found is None) == (value is None), name
                if value is not None:  # sums of the ranks are rounded in another order
                    torch.testing.assert_close(
                        found, value, rtol=1e-4, atol=2e-6 if "gradient" in name else 2e-4
                    )
    assert not differences(results[0][0], results[1][0])
    assert any(value is None for value in alone["trace"][0].values()), "frozen and idle parts"


def sums_in_float32(mesh, kind):
    """Gradients of eight microbatches of each rank in bfloat16 weights, and in float64 those of the
    same microbatches one by one."""
    torch.manual_seed(1)
    model = Tied().bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    batches = [batch for step in range(8) for batch in microbatches(step, mesh.rank)[:1]]
    right = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in own]
    for batch in batches:
        loss = model(batch, torch.tensor(100))
        for total, one in zip(
            right, torch.autograd.grad(loss, own, allow_unused=True), strict=True
        ):
            total += 0 if one is None else one
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if kind == "shard":
        shards = packgraph.shard(model, reduce="sum")
        called = packgraph.graph(model, capacities=[CAPACITY], warmup=1)
    else:
        called = packgraph.replicate(
            packgraph.graph(model, capacities=[CAPACITY], warmup=1), reduce="sum"
        )
    for number, batch in enumerate(batches):
        quiet = kind != "shard" and number < len(batches) - 1
        with called.no_sync() if quiet else contextlib.nullcontext():
            called(batch, torch.tensor(100)).backward()
    for total in right:
        torch.distributed.all_reduce(total)
    right = {names[id(parameter)]: total for parameter, total in zip(own, right, strict=True)}
    if kind == "shard":
        norms = []
        shards.step(Watching(shards, norms))
        return (
            norms[0],
            sum(value.square().sum() for value in right.values()),
            called.stats.replayed,
        )
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    ours = sum(gradient.double().square().sum() for gradient in found.values())
    wrong = sum((found[name] - right[name]).square().sum() for name in found)
    assert wrong < 1e-10 * ours
    return ours, sum(value.square().sum() for value in right.values()), called.stats.replayed


class Watching:
    """An optimizer that only looks at gradients of parts."""

    def __init__(self, shards, norms):
        self.shards, self.norms = shards, norms

    def step(self):
        parts = self.shards.parameters()
        assert {(p.dtype, p.grad.dtype) for p in parts} == {(torch.bfloat16, torch.float32)}
        norm = sum(part.grad.double().square().sum() for part in parts)
        torch.distributed.all_reduce(norm)
        self.norms.append(norm)


@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_sums_of_bfloat16_weights_may_be_float32(kind):
    for ours, right, replayed in run_ranks(sums_in_float32, 2, kind):
        assert replayed >= 5
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=0)


def test_compiled_stages_equal_eager():
    options = {"compile": "aot_eager", "granularity": "layer", "steps": 3}
    for graphs, eager in run_ranks(both, 2, options):
        assert graphs["replayed"] and not differences(graphs, eager)


def as_ddp(mesh):
    """One step by `replicate`, and by torch's DistributedDataParallel."""
    torch.manual_seed(1)
    model, twin = Tied(), Tied()
    for layer in [*model.layers, *twin.layers]:
        del layer.idle  # of which DDP would complain
    twin.load_state_dict(model.state_dict())
    replicated = packgraph.replicate(packgraph.graph(model, capacities=[CAPACITY], warmup=1))
    wrapped = DistributedDataParallel(twin)
    traces = [], []
    for step in range(4):
        batches = microbatches(step, mesh.rank)
        for trace, called, own in ((traces[0], replicated, model), (traces[1], wrapped, twin)):
            for number, batch in enumerate(batches):
                last = number == len(batches) - 1
                with contextlib.nullcontext() if last else called.no_sync():
                    tokens = torch.tensor(batch.num_loss_tokens)
                    (called(batch, tokens) / len(batches)).backward()
            trace.append(facts_of(own))
            own.zero_grad()
    return {"trace": traces[0]}, {"trace": traces[1]}, replicated.stats.replayed


def test_means_are_those_of_distributed_data_parallel_bit_by_bit():
    for ours, theirs, replayed in run_ranks(as_ddp, 2):
        assert replayed >= 4 and not differences(ours, theirs)


class Watched(FlatParameters):
    """Small spans; how many were sent before the end of each backward."""

    sent: list[int]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, span_bytes=600, **kwargs)
        self.sent = []

    def reduce(self):
        self.sent.append(self.launched)
        super().reduce()


@contextlib.contextmanager
def watched():
    """The flat buffers that `replicate` makes within the block."""
    made = []

    def build(*args, **kwargs):
        made.append(Watched(*args, **kwargs))
        return made[-1]

    before, module.FlatParameters = module.FlatParameters, build
    try:
        yield made
    finally:
        module.FlatParameters = before


def overlapped(mesh, granularity):
    with watched() as made:
        small = train(mesh.rank, granularity=granularity)
    return made[0].sent, len(made[0].spans), differences(small, train(mesh.rank))


@pytest.mark.parametrize("granularity", ["chunk", "layer"])
def test_spans_are_sent_while_the_backward_runs(granularity):
    for sent, spans, differ in run_ranks(overlapped, 2, granularity):
        # The idle parts are never known to be final: what comes after the first of them waits.
        assert not differ and spans > 3 and all(count >= 1 for count in sent)


class Chosen(nn.Module):
    """Two branches, of which a call takes one."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, side):
        return (self.left if side else self.right)(x).square().mean()


def one_branch(mesh, eager_rank):
    """Ranks whose calls take other branches; some run eagerly, some replay."""
    torch.manual_seed(2)
    model = Chosen()
    replicated = packgraph.replicate(packgraph.graph(model, warmup=0))
    seen = []
    for step in range(4):
        x = torch.full((2, 3), float(step + 1 + mesh.rank))
        sides = [True, step == 2]  # by rank
        with packgraph.eager("no") if mesh.rank == eager_rank else contextlib.nullcontext():
            replicated(x, sides[mesh.rank]).backward()
        local = Chosen()
        local.load_state_dict(model.state_dict())
        for rank in range(2):
            local(torch.full((2, 3), float(step + 1 + rank)), sides[rank]).div(2).backward()
        for (name, ours), theirs in zip(model.named_parameters(), local.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), (step, name)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)
        seen.append([name for name, p in model.named_parameters() if p.grad is None])
        model.zero_grad()
    return seen, replicated.stats.replayed


@pytest.mark.parametrize("eager_rank", [None, 0])
def test_parameters_without_a_gradient_on_one_rank_or_all(eager_rank):
    results = run_ranks(one_branch, 2, eager_rank)
    for seen, _ in results:
        never = ["never.weight", "never.bias"]
        assert seen == [never, never, ["right.weight", "right.bias", *never], never]
    assert results[1][1] == 4 and results[0][1] == (0 if eager_rank == 0 else 4)


class Pair(nn.Module):
    """Two outputs, of which one is made of the other; or that one alone."""

    def __init__(self, both):
        super().__init__()
        self.first, self.second, self.both = nn.Linear(4, 4), nn.Linear(4, 4), both

    def forward(self, x):
        hidden = self.first(x)
        loss = self.second(hidden).square().mean()
        return {"hidden": hidden, "loss": loss} if self.both else {"loss": loss}


def odd_loops(mesh, kind):
    """Losses that a walk from one output alone would get wrong; the gradients of both ranks must be
    those of one process."""
    torch.manual_seed(3)
    model, twin = Pair("output" in kind), Pair("output" in kind)
    twin.load_state_dict(model.state_dict())
    with watched():
        replicated = packgraph.replicate(packgraph.graph(model, warmup=1))

    def loss(called, x):
        if kind == "outputs":
            found = called(x)
            return found["loss"] + found["hidden"].sum()
        if kind == "one of the outputs":
            return called(x)["hidden"].sum()
        if kind == "calls":
            return called(x)["loss"] + 2 * called(x + 1)["loss"]
        if kind == "checkpoint":
            return checkpoint(lambda t: called(t)["loss"], x.requires_grad_(), use_reentrant=True)
        return called(x)["loss"]

    for step in range(4):
        if (kind, step) in (("hooks", 0), ("hooks on captured", 2)):
            for parameter in [*model.parameters(), *twin.parameters()]:
                parameter.register_hook(lambda gradient: gradient * 2)
        inputs = [torch.full((2, 4), float(step + rank)) for rank in range(2)]
        made = loss(replicated, inputs[mesh.rank].clone())
        # Nobody has captured that: the region hands gradients to autograd, which adds them later.
        casts = torch.autocast("cpu", torch.bfloat16, enabled=kind == "backward under autocast")
        with casts:
            made.backward()
        for x in inputs:
            made = loss(twin, x.clone()) / 2
            with casts:
                made.backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)
        model.zero_grad()
        twin.zero_grad()
    return replicated.stats.replayed


@pytest.mark.parametrize(
    "kind",
    [
        "outputs",
        "one of the outputs",
        "calls",
        "hooks",
        "hooks on captured",
        "backward under autocast",
        "checkpoint",
    ],
)
def test_whatever_the_loss_is_made_of(kind):
    counts = run_ranks(odd_loops, 2, kind)
    assert counts[0] == counts[1] > 0


def refused(mesh, kind):
    torch.manual_seed(4)
    model = Tied()
    with watched():
        replicated = packgraph.replicate(
            packgraph.graph(model, capacities=[CAPACITY], warmup=0, granularity="layer"),
            reduce="sum",
        )
    batch, one = microbatches(0, mesh.rank)[0], torch.ones(())
    call = functools.partial(replicated, batch, one)
    if kind == "twice":
        call().backward()
        call().backward()
    if kind == "late":
        (call() + model.layers[2].down.weight.square().sum()).backward()
    if kind == "thawed":
        model.layers[0].requires_grad_(True)
        call().backward()
    if kind == "other parameters":
        packgraph.replicate(packgraph.graph(nn.Linear(2, 3 + mesh.rank)))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("twice", "gradients are sums over all ranks already"),
        ("late", "a gradient from outside of the replicated module"),
        ("thawed", "a gradient that no other rank hears of"),
        ("other parameters", r"rank 0 has \('weight', \(3, 2\).*rank 1 has \('weight', \(4, 2\)"),
    ],
)
def test_what_ranks_could_not_agree_on_is_refused(kind, words):
    with pytest.raises(AssertionError, match=words):
        run_ranks(refused, 2, kind)


def late_and_right(mesh):
    """What `late` is to do instead, and a rank without a microbatch."""
    torch.manual_seed(4)
    model = Tied()
    replicated = packgraph.replicate(
        packgraph.graph(model, capacities=[CAPACITY], warmup=0), reduce="sum"
    )
    if mesh.rank == 0:
        with replicated.no_sync():
            loss = replicated(microbatches(0, 0)[0], torch.ones(()))
        (loss + model.layers[2].down.weight.square().sum()).backward()
    replicated.reduce_gradients()
    found = facts_of(model)
    model.zero_grad()
    twin = Tied()
    twin.load_state_dict(model.state_dict())
    loss = twin(microbatches(0, 0)[0], torch.ones(()))
    (loss + twin.layers[2].down.weight.square().sum()).backward()
    return {"trace": [found]}, {"trace": [facts_of(twin)]}


def test_a_rank_without_a_microbatch_and_a_loss_with_other_terms():
    for ours, expected in run_ranks(late_and_right, 2):
        assert not differences(ours, expected)


def test_errors_without_ranks():
    graphed = packgraph.graph(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"needs a process group: start the ranks with torchrun"):
        packgraph.replicate(graphed)
    with pytest.raises(TypeError, match=r"that packgraph.graph returned, not an object .* Linear"):
        packgraph.replicate(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'mean' or 'sum', not 'max'"):
        packgraph.replicate(graphed, reduce="max")


def replicated_names(mesh):
    graphed = packgraph.graph(Tied(), capacities=[CAPACITY])
    replicated = packgraph.replicate(graphed)
    assert list(replicated.state_dict()) == list(Tied().state_dict())
    assert replicated.stats is graphed.stats and replicated.train() is replicated
    with torch.no_grad():
        replicated(microbatches(0, 0)[0], torch.ones(()))
    return replicated.scale.item()


def test_names_are_those_of_the_module():
    assert run_ranks(replicated_names, 2) == [1.25, 1.25]
