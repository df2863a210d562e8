"""quack-kernels as a library: when it is used, and what compiled code does with it.

Its kernels run on a GPU only (tests/gpu/test_quack_gpu.py); here torch's product stands for them.
"""

import types

import pytest
import torch
from torch import nn

import packgraph
from packgraph.graphs.compiled import large_products
from packgraph.graphs.stages import Stage, run_stages
from packgraph.kernels import quack
from packgraph.ops.grouped_gemm.configs import added_way, multiplied_way


def launched(left, right, out, *rest, **options):
    """What `quack.gemm.gemm` computes for dense matrices."""
    assert rest == (None, None, quack.ROWS, quack.COLUMNS, quack.CLUSTER, 1)
    out.copy_(left @ right.mT)


@pytest.fixture
def found(monkeypatch):
    """quack-kernels on a GPU of Hopper, as far as choices go."""
    monkeypatch.setattr(quack, "library", lambda: quack.QuackLibrary(launched, None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (quack.HOPPER, 0))


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def on(x, device="cuda"):
    """What choices look at of a tensor like this on a device."""
    return types.SimpleNamespace(
        shape=x.shape,
        dtype=x.dtype,
        device=torch.device(device),
        numel=x.numel,
        element_size=x.element_size,
        stride=x.stride,
    )


def test_large_products_are_faster_by_the_number_of_their_tiles(found):
    weight = meta(1024, 2048)
    assert quack.is_faster(on(meta(4096, 2048)), on(weight.t()))
    assert quack.is_faster(on(meta(4000, 1024)), on(weight)), "a tile that is not full is one"
    assert not quack.is_faster(on(meta(2048, 2048)), on(weight.t())), "128 tiles"


@pytest.mark.parametrize(
    ("left", "right", "device"),
    [
        (meta(4096, 1024), meta(1024, 1024), "cpu"),
        (meta(4096, 1024, dtype=torch.float32), meta(1024, 1024, dtype=torch.float32), "cuda"),
        (meta(4096, 1024), meta(1024, 1024, dtype=torch.float16), "cuda"),
        (meta(4096, 1028)[:, 4:1028:2], meta(512, 1024), "cuda"),
        (meta(4096, 1001), meta(1001, 1024), "cuda"),
        (meta(4096, 1), meta(1, 1024), "cuda"),
        (meta(1, 1024).expand(4096, 1024), meta(1024, 1024), "cuda"),
        (meta(4096, 0), meta(0, 1024), "cuda"),
    ],
    ids=["cpu", "float32", "two dtypes", "not dense", "odd", "one wide", "expanded", "empty"],
)
def test_matrices_that_kernels_cannot_read_are_left_to_torch(found, left, right, device):
    assert not quack.is_faster(on(left, device), on(right, device))


@pytest.mark.parametrize("major", [8, 10, 12])
def test_the_tile_is_used_where_it_was_measured(found, monkeypatch, major):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert not quack.is_faster(on(meta(4096, 1024)), on(meta(1024, 1024)))


def test_experts_with_many_rows_get_it_and_others_do_not(found, monkeypatch):
    monkeypatch.setattr("packgraph.ops.grouped_gemm.configs.describable", lambda *x: True)
    matrices, few = on(meta(8, 512, 256)), on(meta(4096, 256))
    assert multiplied_way(on(meta(12288, 256)), matrices).kernel == "quack"
    assert multiplied_way(few, matrices).kernel == "descriptors"
    assert added_way(matrices, on(meta(8192, 512)), on(meta(8192, 256))).kernel == "quack"
    assert added_way(matrices, on(meta(4096, 512)), few).kernel == "descriptors"


def test_library_is_refused_when_absent_broken_or_of_another_version(monkeypatch):
    def load_as(outcome):
        def load(name: str):
            if isinstance(outcome, ImportError):
                raise outcome
            return outcome

        monkeypatch.setattr(quack, "importlib", types.SimpleNamespace(import_module=load))
        return quack.library.__wrapped__()

    absent = load_as(ModuleNotFoundError("no module", name="quack"))
    assert absent == (None, "quack-kernels is not installed")
    assert "needs cutlass" in load_as(ModuleNotFoundError("needs cutlass", name="cutlass")).reason
    assert "another interface" in load_as(types.SimpleNamespace()).reason
    assert "does not take A, B" in load_as(types.SimpleNamespace(gemm=lambda a: None)).reason


class Pair(nn.Module):
    """Two linear layers, each a stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])

    def begin(self, x):
        return {"x": x}

    def stages(self):
        return [
            Stage("mlp", number, lambda state, layer=layer: {"x": layer(state["x"]).tanh()})
            for number, layer in enumerate(self.layers)
        ]

    def end(self, state):
        return state["x"]

    def forward(self, x):
        return run_stages(self, x)


def trained(module):
    """Output and gradients of three microbatches."""
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(16, 8, requires_grad=True)
        out = module(x)
        out.square().sum().backward()
        found += [out.detach().clone(), x.grad]
    return [*found, *(p.grad.clone() for p in module.parameters())]


def test_compiled_code_makes_large_products_by_it_and_replays_them(monkeypatch):
    calls, counts = [], []
    taken = large_products.take_large_products

    def counting(graph):
        counts.append(taken(graph))
        return counts[-1]

    def launch(left, right, out, **options):
        calls.append(tuple(left.shape))
        out.copy_(left @ right.mT)

    monkeypatch.setattr(quack, "is_faster", lambda left, right: True)
    monkeypatch.setattr(quack, "_launch", launch)
    monkeypatch.setattr("packgraph.graphs.compiled.compiler.take_large_products", counting)
    torch._dynamo.reset()
    options = {"warmup": 1, "strict": True, "compile": "aot_eager"}
    with packgraph.eager("compare"):
        eager = trained(packgraph.graph(Pair(), **options))
    assert calls, "eager calls run the same code"
    graphed = packgraph.graph(Pair(), **options)
    found = trained(graphed)
    assert graphed.stats.replayed == 2 and sum(counts) > 0
    assert all(map(torch.equal, eager, found))
    for ours, theirs in zip(found, trained(Pair()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


def test_products_of_weights_gradients_are_not_taken(monkeypatch):
    """They are added to `.grad` by cuBLAS, which is faster there."""
    seen = []
    monkeypatch.setattr(quack, "is_faster", lambda left, right: bool(seen.append(left.shape)))
    torch._dynamo.reset()
    trained(packgraph.graph(Pair(), warmup=1, strict=True, compile="aot_eager"))
    assert seen and all(tuple(shape) == (16, 8) for shape in seen), "none has 16 rows summed over"
    torch._dynamo.reset()
