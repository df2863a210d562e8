"""The same promises with CUDA graphs: bitwise, any order, poisoned pools, no syncs, undone
failures."""

import gc
import threading
import warnings

import pytest
import torch
from graphkit import Toy, make_toy, poison_free_slots, toy_inputs, toy_loss, train
from torch import nn
from tracekit import differences

from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph
from packgraph.graphs.slots import Slots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCOPES = [None, ["attn"], ["mlp"], ["attn", "mlp"], ["embed", "head"], ["embed", "attn", "head"]]


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_sync_debug_mode("default")


def cuda_toy(**options):
    return make_toy(**options).cuda()


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_every_scope_and_granularity_equals_eager_bitwise(scope, granularity):
    eager = train(cuda_toy(), steps=5, device="cuda")
    graphed = graph(cuda_toy(), scope=scope, granularity=granularity)
    assert (
        differences(eager, train(graphed, steps=5, between=poison_free_slots, device="cuda")) == []
    )
    assert graphed.stats.replayed > 4 and dict(graphed.stats.fallbacks) == {"warm-up": 2}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_any_order_over_slots_and_variants_with_poisoned_memory(seed, granularity):
    options = {"steps": 5, "seed": seed, "sizes": (4, 8, 12, 20), "in_flight": 5, "device": "cuda"}
    eager = train(cuda_toy(layers=2), **options)
    graphed = graph(cuda_toy(layers=2), granularity=granularity, warmup=1)
    assert differences(eager, train(graphed, between=poison_free_slots, **options)) == []


def test_slots_sharing_one_pool_are_wrong_and_the_order_test_sees_it(monkeypatch):
    make, pools = Slots.acquire, []

    def acquire(self, key):
        ticket = make(self, key)
        pools.append(ticket.slot.pool)
        ticket.slot.pool = pools[0]
        return ticket

    options = {"steps": 5, "seed": 1, "sizes": (8,), "in_flight": 5, "device": "cuda"}
    eager = train(cuda_toy(layers=2), **options)
    monkeypatch.setattr(Slots, "acquire", acquire)
    assert differences(eager, train(graph(cuda_toy(layers=2), warmup=1), **options)) != []


def test_a_thousand_replays_without_a_host_sync():
    def loop(model):
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        inputs = [toy_inputs(tokens, "cuda") for tokens in (5, 9, 7)]
        losses = torch.zeros(1000, device="cuda")
        for step in range(1000):
            ids, x = inputs[step % 3]
            loss = toy_loss(model(ids, x * (1 + step / 1000)))
            loss.backward()
            losses[step] = loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            if step == 10:
                torch.cuda.set_sync_debug_mode("error")
        torch.cuda.set_sync_debug_mode("default")
        return losses

    eager_losses = loop(cuda_toy(layers=1))
    graphed = graph(cuda_toy(layers=1))
    assert torch.equal(loop(graphed), eager_losses)
    assert graphed.stats.replayed == 998


def test_the_variants_of_a_slot_cost_the_largest_not_the_sum():
    blocks = [
        nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)
    ]
    model = nn.Sequential(*blocks).cuda()
    graphed = graph(model, warmup=0)
    sizes = []
    for tokens in (8192, 4096, 2048, 1024):
        graphed(torch.randn(tokens, 512, device="cuda")).sum().backward()
        sizes.append(graphed.stats.pool_bytes)
    assert sizes[-1] <= 1.02 * sizes[0]
    assert graphed.stats.captured == 4 and not +graphed.stats.recaptures


PIECES = {
    "item": lambda h, x: h * h.sum().item(),
    "branch": lambda h, x: h if (x > 0).any() else -h,
    "nonzero": lambda h, x: h.sum() + (x > 0).nonzero().sum(),
    "mask": lambda h, x: h[x[:, 0] > 0],
    "to cpu": lambda h, x: h * x.to("cpu").sum().to("cuda"),
    "equal": lambda h, x: h if torch.equal(h, x) else h * 2,
}


class Snippet(nn.Module):
    def __init__(self, piece):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout, self.piece = nn.Linear(6, 6), nn.Dropout(0.5), piece

    def forward(self, x):
        return self.piece(self.dropout(self.linear(x)), x)


@pytest.mark.parametrize("name", PIECES)
def test_a_sync_is_refused_at_its_line_and_training_goes_on(name):
    def loop(model):
        torch.manual_seed(0)
        outs = []
        for _ in range(3):
            out = model(torch.randn(4, 6, device="cuda").abs())
            out.sum().backward()
            outs.append(out.detach())
        return [*outs, model.linear.weight.grad, torch.cuda.get_rng_state()]

    expected = loop(Snippet(PIECES[name]).cuda())
    with pytest.raises(CaptureError) as caught:
        graph(Snippet(PIECES[name]).cuda(), warmup=0, strict=True)(
            torch.randn(4, 6, device="cuda").abs()
        )
    assert __file__ in caught.value.where
    with pytest.warns(PackgraphWarning):
        got = loop(graph(Snippet(PIECES[name]).cuda(), warmup=0))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


class SyncsOnlyWhileCapturing(nn.Module):
    """A violation that the dry run cannot see: CUDA itself must refuse it, and nothing may be left
    broken."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x):
        if (
            torch._C._cuda_isCurrentStreamCapturing()
        ):  # unlike torch.cuda's function it tells modules the truth
            torch.cuda.current_stream().synchronize()
        return self.dropout(self.linear(x))


def test_a_capture_that_cuda_refuses_leaves_everything_usable():
    with warnings.catch_warnings(action="ignore"):
        broken = graph(SyncsOnlyWhileCapturing().cuda(), warmup=0)
        torch.manual_seed(0)
        for _ in range(3):
            out = broken(torch.randn(4, 6, device="cuda"))
            out.sum().backward()
    assert dict(broken.stats.fallbacks) == {"capture failed": 3}
    eager = train(cuda_toy(), steps=4, device="cuda")
    assert differences(eager, train(graph(cuda_toy(), warmup=1), steps=4, device="cuda")) == []


def test_other_threads_may_use_the_device_during_a_capture():
    stop = threading.Event()

    def pin():
        while not stop.is_set():
            torch.ones(1000).pin_memory().to("cuda", non_blocking=True)
            torch.empty(1 << 21, device="cuda")

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        eager = train(cuda_toy(), steps=3, device="cuda")
        assert differences(eager, train(graph(cuda_toy(), warmup=1), steps=3, device="cuda")) == []
    finally:
        stop.set()
        thread.join()


def test_allocator_churn_between_replays_changes_nothing():
    def churn(model, step):
        torch.cuda.empty_cache()
        junk = [torch.full((1 << (10 + i),), float("nan"), device="cuda") for i in range(12)]
        del junk
        gc.collect()

    eager = train(cuda_toy(), steps=4, device="cuda")
    graphed = graph(cuda_toy(), granularity="layer", warmup=1)
    assert differences(eager, train(graphed, steps=4, device="cuda", between=churn)) == []


def test_a_module_s_own_generator_is_registered():
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator("cuda").manual_seed(1)
            self.scale = nn.Parameter(torch.ones(8, device="cuda"))

        def forward(self, x):
            return x * self.scale + torch.rand(x.shape, generator=self.generator, device=x.device)

    def loop(model):
        return torch.stack([model(torch.zeros(4, 8, device="cuda")).detach() for _ in range(5)])

    assert torch.equal(loop(Noise()), loop(graph(Noise(), warmup=1)))


def test_close_frees_the_pools():
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphed = graph(Toy(layers=2).cuda(), warmup=0)
    toy_loss(graphed(*toy_inputs(4096, "cuda"))).backward()
    assert graphed.stats.pool_bytes > 0
    graphed.close()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    assert graphed.stats.pool_bytes == 0
    assert (
        torch.cuda.memory_reserved() - before - graphed.capture_backend.workspaces.nbytes()
        < 32 << 20
    )


def forget_workspaces():
    """What torch.compile's reduce-overhead does around each of its captures, and the memory is then
    needed."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("scope", [None, ["attn"], ["mlp"]], ids=str)
def test_workspaces_that_torch_forgets_stay_mapped_while_graphs_write_to_them(scope):
    """An illegal memory access before the workspaces had a pool of their own."""
    eager = train(cuda_toy(), steps=6, device="cuda")
    graphed = graph(cuda_toy(), scope=scope, granularity="layer")
    workspaces = graphed.capture_backend.workspaces
    before = workspaces.nbytes()
    assert before > 0
    results = train(graphed, steps=6, between=lambda *_: forget_workspaces(), device="cuda")
    assert differences(eager, results) == [] and graphed.stats.replayed > 4
    addresses = [segment["address"] for segment in workspaces.segments()]
    workspaces.ensure()
    assert workspaces.nbytes() == before and addresses
    assert [segment["address"] for segment in workspaces.segments()] == addresses


def test_workspaces_are_freed_with_the_module_and_streams_may_come_again():
    for _ in range(40):  # more than torch has streams
        graphed = graph(cuda_toy(layers=1), warmup=0)
        train(graphed, steps=1, device="cuda")
        handle = tuple(graphed.capture_backend.workspaces.handle)
        graphed.close()
    del graphed
    gc.collect()
    forget_workspaces()
    assert handle not in {
        tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()
    }


def test_streams_whose_host_workspace_lies_elsewhere_are_passed_over():
    """Somebody multiplied on every stream before, without a backward: its workspaces are not
    ours."""
    for _ in range(32):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.ones(16, 16, device="cuda", dtype=torch.bfloat16).mm(
                torch.ones(16, 16, device="cuda").bfloat16()
            )
    eager = train(cuda_toy(layers=1), steps=4, device="cuda")
    graphed = graph(cuda_toy(layers=1))
    assert (
        differences(
            eager, train(graphed, steps=4, between=lambda *_: forget_workspaces(), device="cuda")
        )
        == []
    )
