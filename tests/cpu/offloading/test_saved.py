"""What autograd saves, and how it asks for it, in all the ways that models do: offloading changes
no number."""

import weakref

import pytest
import torch
from offloadkit import AsksTwice, offloaded
from torch import nn

from packgraph.graphs.recorder import copy_streams as recorder_lanes
from packgraph.graphs.recorder.copy_streams import EmulatedCopyStreams
from packgraph.offloading.marks import offload_block
from packgraph.offloading.plan import CopySpeed, OffloadKnobs
from packgraph.offloading.search import plan_by_knobs


class Marked(nn.Module):
    """One weight, and a block around `made(hidden)`."""

    def __init__(self, made, size: int = 32, dtype=torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(size, size, dtype=dtype))
        self.made, self.offload = made, offload_block

    def forward(self, x):
        with self.offload("core_attn"):
            return self.made(x.to(self.weight.dtype) @ self.weight)


def gradients_of(
    module: nn.Module, run=lambda module, x: module(x).abs().sum().backward()
) -> list[torch.Tensor]:
    run(module, torch.randn(32, 32, generator=torch.Generator().manual_seed(1)))
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("made", "dtype"),
    [
        (lambda h: AsksTwice.apply(h * 2, h.sin()), torch.float32),
        (
            lambda h: h.exp() * (h * 2).conj(),
            torch.complex64,
        ),  # a bit of the saved tensor says: conjugate
        (lambda h: (h * 2).conj().imag * h.real.sin(), torch.complex64),  # and here: negative
    ],
    ids=["asks-twice", "conjugate", "negative"],
)
def test_gradients_are_those_without_offloading(made, dtype):
    plain, moving = Marked(made, dtype=dtype), Marked(made, dtype=dtype)
    runtime = offloaded(moving)
    for ours, theirs in zip(gradients_of(moving), gradients_of(plain), strict=True):
        assert torch.equal(ours, theirs)
    assert runtime.trace.bytes > 0


def test_another_backward_that_asks_again_is_refused():
    module = Marked(lambda h: AsksTwice.apply(h * 2, h.sin()))
    offloaded(module)
    loss = module(torch.randn(32, 32)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_a_second_part_may_begin_with_what_the_first_has_saved_after_its_backward():
    """Losses layer by layer: `h` has come back when the second part saves it, so it is new memory
    for that."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = (nn.Parameter(torch.randn(32, 32)) for _ in range(2))
            self.offload = offload_block

        def encode(self, x):
            with self.offload("core_attn"):
                return (x @ self.first).tanh()

        def decode(self, h):
            with self.offload("mlp_act"):
                return (h @ self.second).sin()

    def run(module, x):
        h = module.encode(x)
        h.square().sum().backward()
        module.decode(h.detach()).sum().backward()

    moving = Two()
    offloaded(moving)
    for ours, theirs in zip(gradients_of(moving, run), gradients_of(Two(), run), strict=True):
        assert torch.equal(ours, theirs)


class Changing(nn.Module):
    """Changes in place what its product has saved: within the block, after it, or after the next
    one, at whose end main has waited for the first one's copy if one may be in flight."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.weight, self.offload, self.when = nn.Parameter(torch.ones(4)), offload_block, when

    def forward(self, x):
        with self.offload("core_attn"):
            hidden = x * 2
            out = hidden * self.weight
            if self.when == "within":
                hidden.add_(1)
        if self.when == "after":
            hidden.add_(1)
        with self.offload("mlp_act"):
            out = out.exp()
        if self.when == "later":
            hidden.add_(1)
        return out.sum()


@pytest.mark.parametrize(
    "options", [{}, {"postpones": True}, {"measures": True}], ids=["moves", "postpones", "stays"]
)
@pytest.mark.parametrize("late", [(), ("out",), ("back",)])
@pytest.mark.parametrize("when", ["within", "after"])
def test_what_is_changed_in_place_before_its_copy_has_ended_is_refused(when, late, options):
    """A copy that is not late has read the right numbers here; on a device nobody knows."""
    module = Changing(when)
    offloaded(module, late, **options)
    with pytest.raises(RuntimeError, match="changed in place"):
        module(torch.arange(4.0)).backward()


def test_what_is_changed_after_its_copy_has_ended_does_no_harm():
    module = Changing("later")
    offloaded(module, in_flight=1)
    module(torch.arange(4.0)).backward()
    expected = torch.arange(4.0) * 2 * (torch.arange(4.0) * 2).exp()
    assert torch.equal(module.weight.grad, expected)


def test_a_forward_without_backward_gives_its_host_memory_back_at_once(no_collections):
    module = Marked(lambda h: h.sin() * h.cos().exp())
    runtime = offloaded(module)
    for _ in range(20):
        module(torch.randn(32, 32))
        runtime.end_step()
    assert len(runtime.copy_streams.memories._buffers) == 1


class Stack(nn.Module):
    """Layers one after the other, each with a block."""

    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Marked(torch.tanh) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin()
        return x


def every(trace):
    return plan_by_knobs(trace, CopySpeed(), OffloadKnobs(min_bytes=1))


def test_what_the_loss_leaves_out_is_needed_last():
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.extra = Marked(torch.tanh), Marked(torch.exp)
            self.offload = offload_block

        def forward(self, x):
            x = self.main(x)
            with self.offload("mlp_act"):
                extra = x.exp().cos()
            return x.sin(), extra

    module = Extra()
    runtime = offloaded(module, policy=every)
    for _ in range(2):
        made, _ = module(torch.randn(32, 32))
        made.sum().backward()
        runtime.end_step()
    runtime.settle()
    assert [group.name for group in runtime.trace.groups] == ["core_attn", "mlp_act"]
    assert runtime.trace.backward_order[-1] == 1
    made, _ = module(torch.randn(32, 32))
    made.sum().backward()


def test_a_reload_that_nobody_came_for_writes_to_memory_that_is_still_its_own(
    monkeypatch, no_collections
):
    gone = []
    move = recorder_lanes.move

    def noting(copy_stream, tensors, places):
        if copy_stream == "back":
            gone.append(sum(target is None for target in tensors))
        move(copy_stream, tensors, places)

    monkeypatch.setattr(recorder_lanes, "move", noting)
    module = Stack(4)
    runtime = offloaded(module)
    loss = module(torch.randn(32, 32)).sum()
    torch.autograd.grad(loss, list(module.layers[2:].parameters()))
    del loss
    runtime.end_step()
    assert len(gone) == 3 and not any(gone)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_came_back_is_gone_after_the_backward(keeps, monkeypatch, no_collections):
    brought = []
    back = EmulatedCopyStreams.back

    def noting(self, host, targets):
        brought.extend(weakref.ref(target.untyped_storage()) for target in targets)
        return back(self, host, targets)

    monkeypatch.setattr(EmulatedCopyStreams, "back", noting)
    module = Stack(4)
    offloaded(module)
    loss = module(torch.randn(32, 32)).sum()
    loss.backward(retain_graph=keeps)
    assert brought and all(storage() is None for storage in brought)


def test_only_who_reads_what_was_changed_is_refused():
    """Parts of one memory that count their changes apart."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight, self.offload = nn.Parameter(torch.randn(32, 96)), offload_block

        def forward(self, x):
            with self.offload("core_attn"):
                q, k, v = (x @ self.weight).unsafe_chunk(3, 1)
                made = q.sin() + v.sin(), k.sin()
            k.mul_(2)
            return made

    module, plain = Parts(), Parts()
    offloaded(module)

    def run(module, x):
        module(x)[0].sum().backward()

    for ours, theirs in zip(gradients_of(module, run), gradients_of(plain, run), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match="changed in place"):
        module(torch.randn(32, 32))[1].sum().backward()
