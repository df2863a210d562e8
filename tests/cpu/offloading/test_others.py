"""What is not offloading's to move, and what happens to blocks and backwards beside the usual:
nothing that would not happen without it."""

import io
import weakref

import pytest
import torch
from offloadkit import NAMES, by_hand, offloaded, runtime_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import packgraph
from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.recorder.copy_streams import EmulatedCopyStreams
from packgraph.offloading.api import attach
from packgraph.offloading.marks import offload_block
from packgraph.offloading.runtime import LOOKS, OffloadRuntime

SIZE = 32


class Block(nn.Module):
    """Two blocks, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.randn(SIZE, SIZE) / SIZE**0.5) for _ in range(2))
        self.offload = offload_block

    def inner(self, x):
        return torch.tanh(x @ self.one)

    def forward(self, x):
        with self.offload("core_attn"):
            h = self.inner(x)
        with self.offload("mlp_act"):
            h = (h * h.sin()) @ self.two
        return x + h


class Net(nn.Module):
    """Layers, perhaps each under a checkpoint."""

    def __init__(
        self, count: int = 3, reentrant: bool | None = None, kind: type[Block] = Block
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.reentrant = nn.ModuleList(kind() for _ in range(count)), reentrant

    def forward(self, x):
        for layer in self.layers:
            x = (
                layer(x)
                if self.reentrant is None
                else checkpoint(layer, x, use_reentrant=self.reentrant)
            )
        return x


def sample(rows: int = 64, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters()]


def same_as_kept(
    make, run=lambda module: module(sample().requires_grad_()).sum().backward()
) -> OffloadRuntime:
    """Run `make()` with and without a runtime, which is returned."""
    plain, moving = make(), make()
    runtime = offloaded(moving)
    for module in (plain, moving):
        run(module)
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(gradients(moving), gradients(plain), strict=True)
    )
    return runtime


PASSED_BY = "ignore:offloading passes:packgraph.graphs.errors.PackgraphWarning"


@pytest.mark.filterwarnings(PASSED_BY)
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_drops_and_computes_again_is_its_own(reentrant):
    runtime = same_as_kept(lambda: Net(reentrant=reentrant))
    assert runtime.trace is None and runtime.copy_streams.memories.arenas.nbytes() == 0


def test_blocks_that_are_passed_by_are_told_once_each():
    module = Net(reentrant=False)
    runtime = offloaded(module, policy=by_hand())
    with pytest.warns(PackgraphWarning, match="hooks") as told:
        module(sample()).sum().backward()
    assert sorted(str(warning.message).split()[2] for warning in told) == sorted(NAMES)
    module(sample()).sum().backward()
    runtime.settle()
    assert runtime.plan is None


def test_parameters_that_were_changed_between_forward_and_backward_are_refused():
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    offloaded(module)
    one, other = module(sample(seed=1)).sum(), module(sample(seed=2)).sum()
    one.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed in place"):
        other.backward()


def test_a_parameter_may_get_other_memory_and_lets_go_of_its_own():
    """As weights do that are gathered for a forward and for its backward."""
    gathered = []

    def gather(module, *rest):
        whole = torch.full((SIZE, SIZE), 0.25)
        gathered.append(weakref.ref(whole.untyped_storage()))
        module.one.data = whole

    def run(module):
        layer = module.layers[0]
        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(
            lambda module, *rest: setattr(module.one, "data", torch.empty(0))
        )
        layer.register_full_backward_pre_hook(gather)
        loss = module(sample().requires_grad_()).sum()
        assert gathered[-1]() is None
        loss.backward()

    same_as_kept(lambda: Net(1), run)


class Scaled(nn.Module):
    """Saves a parameter, a buffer and what is left to others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.offload = nn.Parameter(torch.eye(SIZE)), offload_block
        self.register_buffer("scale", torch.ones(SIZE))

    def forward(self, x, others):
        with self.offload("core_attn", leave=others):
            return x @ self.weight * self.scale * others


@pytest.mark.parametrize("what", ["weight", "scale", "others", "x"])
def test_whatever_stays_is_refused_when_it_was_changed(what):
    module, others, x = Scaled(), torch.ones(SIZE), sample().requires_grad_()
    offloaded(module)
    loss = module(x, others).sum()
    with torch.no_grad():
        {"weight": module.weight, "scale": module.scale, "others": others, "x": x}[what].mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_chunks_whose_blocks_save_nothing_are_captured():
    """A frozen body; there is nothing to plan, which is no reason to run eagerly."""

    class Headed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.head = nn.Linear(SIZE, 4)

        def forward(self, x):
            return self.head(super().forward(x))

    model = Headed()
    called = packgraph.graph(model, warmup=1, strict=True)
    runtime = runtime_of(called, model, NAMES, policy=by_hand())
    for seed in range(3):
        called(sample(seed=seed)).sum().backward()
        runtime.end_step()
    assert called.stats.replayed == 2 and runtime.plan is None
    with pytest.raises(RuntimeError, match="there is nothing to plan offloading by"):
        OffloadRuntime(NAMES, EmulatedCopyStreams(), policy=by_hand()).settle()


class Marked(nn.Module):
    """Saves its weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.offload = nn.Parameter(weight), offload_block

    def forward(self, x):
        with self.offload("core_attn"):
            return x @ self.weight


class Subclass(torch.Tensor):
    """Weights of another library."""


def distributed(weight):
    return DTensor.from_local(
        weight, DeviceMesh("cpu", [0], _init_backend=False, _rank=0), [Replicate()]
    )


@pytest.mark.parametrize(
    "kind", [lambda weight: weight.as_subclass(Subclass), distributed], ids=["subclass", "DTensor"]
)
def test_weights_of_other_kinds_are_refused_when_they_were_changed(kind):
    module = Marked(kind(torch.eye(SIZE)))
    offloaded(module)
    x = sample().requires_grad_()
    loss = module(kind(x) if kind is distributed else x).sum()
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


class Force(Block):
    """A gradient within a forward."""

    def inner(self, x):
        h = torch.tanh(x @ self.one)
        z = h.detach().requires_grad_()
        return h + torch.autograd.grad(((z * 2).sin() ** 3).sum(), z)[0]


class Nested(Block):
    """A block within a block."""

    def forward(self, x):
        with self.offload("core_attn"):
            h = torch.tanh(x @ self.one)
            with self.offload("mlp_act"):
                h = (h * h.sin()) @ self.two
            return x + h.cos()


@pytest.mark.parametrize("kind", [Force, Nested])
def test_blocks_may_hold_backwards_and_blocks(kind):
    runtime = same_as_kept(lambda: Net(kind=kind))
    assert len(runtime.trace.groups) == 6 and min(group.bytes for group in runtime.trace.groups) > 0


def test_a_block_that_fails_is_none_of_its_pass():
    class Failing(Block):
        def inner(self, x):
            h = super().inner(x)
            raise ValueError(f"of {len(h)} rows none will do")

    def run(module):
        module.layers[1].__class__ = Failing
        x = sample()
        for layer in module.layers:
            try:
                x = layer(x)
            except ValueError:
                continue
        x.sum().backward()
        for parameter in module.layers[1].parameters():
            parameter.grad = torch.zeros_like(parameter)

    runtime = same_as_kept(Net, run)
    assert [group.layer for group in runtime.trace.groups] == [0, 0, 2, 2]


def test_host_memory_does_not_grow_with_every_new_size():
    for sizes in (range(64, 128), range(128, 64, -1)):
        module = Net()
        runtime = offloaded(module)
        for rows in sizes:
            module(sample(rows)).sum().backward()
            runtime.end_step()
        largest = offloaded(Net())
        module = Net()
        attach(largest, module)
        module(sample(128)).sum().backward()
        assert (
            runtime.copy_streams.memories.arenas.nbytes()
            == largest.copy_streams.memories.arenas.nbytes()
        )
        assert len(runtime.copy_streams.memories._buffers) == len(
            largest.copy_streams.memories._buffers
        )


def test_nothing_is_kept_of_passes_that_no_step_ends():
    module = Net()
    runtime, counts = offloaded(module), []
    for number in range(3 * LOOKS):
        loss = module(sample()).sum()
        if number % 2:
            hook = module.layers[1].one.register_hook(_refuse)
            with pytest.raises(ValueError, match="no gradient"):
                loss.backward()
            hook.remove()
        else:
            loss.backward()
        del loss
        counts.append(
            (
                len(runtime._waits.all),
                sum(len(copy.held) for copy in runtime.copy_streams._under_way),
            )
        )
    assert counts[-1][0] == counts[2 * LOOKS][0], "clocks"
    assert max(held for _, held in counts[LOOKS:]) <= max(held for _, held in counts[:4]), (
        "targets of reloads"
    )


def _refuse(gradient):
    raise ValueError("no gradient for you")


def test_a_model_with_an_engine_is_written_and_read_without_it():
    module = Net()
    offloaded(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert all(layer.offload is offload_block for layer in read.layers)
    assert torch.equal(read(sample()), module(sample()))


class Quantised(torch.autograd.Function):
    """Saves eight bits."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.quantize_per_tensor(x.detach(), 0.05, 0, torch.qint8))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].dequantize()


class Rows(torch.autograd.Function):
    """Saves rows of several lengths as one tensor."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.nested.as_nested_tensor(list(x.detach().split([10, 20, 34]))))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.cat(ctx.saved_tensors[0].unbind())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("function", [Quantised, Rows])
def test_tensors_that_are_more_than_bytes_stay(function):
    class Other(Block):
        def inner(self, x):
            return function.apply(x @ self.one)

    same_as_kept(lambda: Net(kind=Other))


def test_transformations_of_functions_move_nothing():
    module = Net()
    offloaded(module)

    def loss(parameters):
        return torch.func.functional_call(module, parameters, (sample(),)).sum()

    found = torch.func.grad(loss)(dict(module.named_parameters()))
    module(sample()).sum().backward()
    assert all(
        torch.equal(found[name], parameter.grad) for name, parameter in module.named_parameters()
    )
