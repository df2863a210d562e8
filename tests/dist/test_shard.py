"""`packgraph.shard`: ranks of an own loop that share layers train as those that hold everything."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from distkit import run_ranks
from replicakit import CAPACITY, Tied, microbatches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from tracekit import differences

import packgraph
from packgraph.graphs.stages import Stage

STEPS, SAME = 4, 2  # microbatches of each rank in a step


class Stopped(Tied):
    """One layer stops the gradient of what it gets."""

    def stages(self):
        def run(layer, state):
            return layer.run({**state, "hidden": state["hidden"].detach()})

        stages = super().stages()  # a list of its own
        stages[3] = Stage("layer", 2, functools.partial(run, self.layers[2]))
        return stages


def model_of(kind):
    torch.manual_seed(7)
    if kind == "stopped":
        return Stopped(layers=4)
    if kind == "own":
        return Tied(layers=4)
    from transformers import LlamaConfig, LlamaForCausalLM

    from packgraph.integrations.transformers import packed

    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    if kind == "adapters":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules="all-linear"))
    return packed(model)


def train(mesh, kind, *, keep, eager=False, reduce="mean", microbatches_each=1, hosts=0, **options):
    """keep: None replicates instead. hosts: that share no layers, 0 = one."""
    model = model_of(kind)
    if keep is None:
        graphed = packgraph.graph(model, capacities=[CAPACITY], warmup=1, **options)
        graphed = packgraph.replicate(graphed, reduce=reduce)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    else:
        sizes = (hosts, mesh.world // hosts) if hosts else (mesh.world,)
        devices = init_device_mesh("cpu", sizes)
        shards = packgraph.shard(model, keep=keep, reduce=reduce, mesh=devices)
        graphed = packgraph.graph(model, capacities=[CAPACITY], warmup=1, **options)
        optimizer = torch.optim.AdamW(shards.parameters(), lr=0.02, weight_decay=0.0)
    trace = []
    with packgraph.eager("comparison") if eager else contextlib.nullcontext():
        for step in range(STEPS):
            batches = [microbatches(10 * step + n, mesh.rank)[0] for n in range(microbatches_each)]
            losses = []
            for number, batch in enumerate(batches):
                last = number == len(batches) - 1
                quiet = keep is None and not last
                with graphed.no_sync() if quiet else contextlib.nullcontext():
                    losses.append(graphed(batch, torch.tensor(batch.num_loss_tokens)))
                    losses[-1].backward()
            if keep is None:
                optimizer.step()
                optimizer.zero_grad()
                facts = (
                    {n: v.clone() for n, v in model.state_dict().items()} if not mesh.rank else {}
                )
            else:
                norm = shards.step(optimizer)
                assert norm.isfinite() and norm > 0
                facts = shards.full_state_dict()
            trace.append(facts | {"loss": torch.stack(losses).detach()})
    return {
        "trace": trace,
        "replayed": graphed.stats.replayed,
        "fallbacks": graphed.stats.fallbacks,
    }


def run_all(mesh, kind, keep, options):
    return [
        train(mesh, kind, keep=None, eager=True, **options),
        train(mesh, kind, keep=keep, eager=True, **options),
        train(mesh, kind, keep=keep, **options),
    ]


@pytest.mark.parametrize(
    ("kind", "keep", "options"),
    [
        ("own", "parameters", {"granularity": "layer"}),
        ("own", "gradients", {"granularity": "chunk"}),
        ("stopped", "parameters", {"granularity": "layer"}),
        ("stopped", "parameters", {"granularity": "chunk"}),
        ("live", "parameters", {"granularity": "layer"}),
        ("adapters", "parameters", {"granularity": "layer", "microbatches_each": SAME}),
        ("live", "parameters", {"reduce": "sum", "scope": ["layer"]}),
    ],
)
def test_graphs_equal_eager_and_replicas_bitwise(kind, keep, options):
    for replicas, eager, graph in run_ranks(run_all, 2, kind, keep, options, seconds=200.0):
        assert graph["replayed"] >= STEPS - 2, graph["fallbacks"]
        assert not differences(replicas, eager)
        assert not differences(eager, graph)


@pytest.mark.parametrize("keep", ["parameters", "gradients"])
def test_compiled_stages_equal_eager(keep):
    options = {"compile": "aot_eager", "granularity": "layer"}
    for _, eager, graph in run_ranks(run_all, 2, "own", keep, options, seconds=200.0):
        assert graph["replayed"] >= STEPS - 2 and not differences(eager, graph)


@pytest.mark.parametrize("keep", ["parameters", "gradients"])
def test_hosts_that_share_no_layers_sum_what_they_keep(keep):
    options = {"hosts": 2, "granularity": "layer", "microbatches_each": SAME}
    for replicas, eager, graph in run_ranks(run_all, 4, "own", keep, options, seconds=200.0):
        assert graph["replayed"] >= STEPS - 2 and not differences(eager, graph)
        for ours, theirs in zip(eager["trace"], replicas["trace"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def several(mesh):
    options = {"microbatches_each": SAME, "granularity": "layer"}
    return run_all(mesh, "own", "parameters", options)


def test_several_microbatches_are_those_of_replicas_within_rounding():
    for replicas, eager, graph in run_ranks(several, 2):
        assert not differences(eager, graph)
        for ours, theirs in zip(eager["trace"], replicas["trace"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Loose(nn.Module):
    """Layers whose stages stand in this order, and may drop entries of the state."""

    def __init__(self, order, keeps):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.order, self.keeps = order, keeps

    def begin(self, x):
        return {"x": x}

    def stages(self):
        def run(number, state):
            known = state if self.keeps else {}
            return {**known, "x": self.layers[number](state["x"])}

        return [Stage("layer", n, functools.partial(run, n)) for n in self.order]

    def end(self, state):
        return state["x"]


def refused(mesh):
    found = []

    def says(make):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            make()
        found.append(str(error.value))

    says(lambda: packgraph.shard(nn.Linear(2, 2)))
    says(lambda: packgraph.shard(packgraph.graph(Tied())))
    says(lambda: packgraph.shard(Tied(), keep="all"))
    says(lambda: packgraph.shard(Tied(), layers=[]))
    devices = init_device_mesh("cpu", (mesh.world, 1, 1))
    says(lambda: packgraph.shard(Tied(), mesh=devices))
    says(lambda: packgraph.shard(Tied(), mesh=devices, group=dist.group.WORLD))
    frozen = Tied()
    frozen.layers.requires_grad_(False)
    says(lambda: packgraph.shard(frozen, keep="gradients"))
    for order, keeps in (((1, 0), True), ((0, 1), False)):
        loose = Loose(order, keeps)
        packgraph.shard(loose)
        says(functools.partial(loose, torch.ones(2, 4)))
    model = Tied()
    packgraph.shard(model)
    batch = microbatches(0, mesh.rank)[0]
    model.layers[1].up.weight.grad = torch.ones_like(model.layers[1].up.weight)
    loss = model(batch, torch.tensor(3))
    says(loss.backward)
    model = Tied()
    packgraph.shard(model)
    says(checkpoint(model, batch, torch.tensor(3), use_reentrant=False).backward)
    return found


def test_what_cannot_be_sharded_is_refused():
    for found in run_ranks(refused, 2):
        words = [
            "stages",
            "before packgraph.graph",
            "keep",
            "layers=",
            "hosts",
            "not both",
            "keep='parameters'",
            "order",
            "drops",
            "replaced",
            "within a backward",
        ]
        assert len(found) == len(words)
        assert all(word in text for word, text in zip(words, found, strict=True)), found


def asked(mesh, how):
    """Graphs, and then something that gradients that were sent cannot give."""
    model = model_of("own")
    shards = packgraph.shard(model)
    graphed = packgraph.graph(model, capacities=[CAPACITY], warmup=1)
    optimizer = torch.optim.SGD(shards.parameters(), lr=0.1)
    batch = microbatches(0, mesh.rank)[0]
    for _ in range(3):
        graphed(batch, torch.tensor(3)).backward()
        shards.step(optimizer)
    weight = model.layers[2].up.weight
    if how == "hook":
        weight.register_hook(lambda gradient: None)
    loss = graphed(batch, torch.tensor(3))
    if how == "hook":  # no replay, but eager
        loss.backward()
        return graphed.stats.replayed, dict(graphed.stats.fallbacks)
    with pytest.raises(RuntimeError, match="sharded"):
        torch.autograd.grad(loss, [weight])
    return graphed.stats.replayed, {}


@pytest.mark.parametrize("how", ["hook", "alone"])
def test_gradients_that_are_sent_cannot_be_had(how):
    for replayed, fallbacks in run_ranks(asked, 2, how):
        assert replayed == 2 + (how != "hook") and len(fallbacks) == (how == "hook") * 2
