"""The flash backend around stand-in kernels that behave as the real ones: what they read and what
they leave unwritten.

The kernels themselves need a GPU (tests/gpu/test_ops_gpu.py); everything around them is tested
here.
"""

import dataclasses
import types

import pytest
import torch
from attentionkit import NAN, random_inputs, textbook_backward, textbook_forward
from bench_models import SHAPES, draw_batches
from graphkit import poison_free_slots
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import hand_batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import packgraph
from packgraph.models.decoder import DecoderModel
from packgraph.ops.attention import flash as attention_flash
from packgraph.ops.attention.api import attention, attention_metadata
from packgraph.ops.attention.flash import Kernels, Library, flash_problems, repeats_heads
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

# sums of at most 24 float32 terms of size one in different order
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


class StandIn:
    """flash-attn-4's two functions by the textbook formula, with its traps. seen: the options of
    every call."""

    def __init__(self) -> None:
        self.seen: list[dict] = []

    def forward(
        self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, out, lse, **options
    ) -> None:
        self.note(options, q, k, v)
        used, left = int(cu_seqlens_q[-1]), options.get("window_size_left", -1)
        made, sums = textbook_forward(q, k, v, cu_seqlens_q, softmax_scale, cu_seqlens_k, left=left)
        out[:used] = made[:used]
        lse.copy_(sums)

    def backward(
        self,
        q,
        k,
        v,
        out,
        grad,
        lse,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        softmax_scale,
        dq,
        dk,
        dv,
        **options,
    ) -> None:
        self.note(options, q, k, v, grad)
        left = options.get("window_size_left", -1)
        found = textbook_backward(
            grad, q, k, v, out, lse, cu_seqlens_q, softmax_scale, cu_seqlens_k, left
        )
        for target, gradient in zip((dq, dk, dv), found):
            target.copy_(gradient)

    def note(self, options: dict, *read: Tensor) -> None:
        """A tile that crosses the end of a document reads whatever stands behind it."""
        assert all(torch.isfinite(x).all() for x in read), (
            "0 times NaN would be NaN in the rows before"
        )
        self.seen.append(options)


@pytest.fixture
def kernels(monkeypatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(
        attention_flash,
        "library",
        lambda: Library(Kernels(stand_in.forward, stand_in.backward), None),
    )
    monkeypatch.setattr(attention_flash, "_check_supported", lambda *facts: None)
    return stand_in


def run(
    backend: str, tensors: list[Tensor], lengths: list[int], grad: Tensor, finite: bool = False
) -> list[Tensor]:
    batch = hand_batch([[1] * length for length in lengths], grad.shape[0], len(lengths) + 2)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attention(*leaves, attention_metadata(batch, backend, finite_padding=finite))
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=4),
    padding=st.integers(1, 5),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    value_dim=st.sampled_from([4, 8]),
    repeat=st.booleans(),
    finite=st.booleans(),
    seed=st.integers(0, 99),
)
def test_flash_equals_naive_whatever_padding_holds(
    lengths, padding, kv_heads, group, value_dim, repeat, finite, seed
):
    used, rows = sum(lengths), sum(lengths) + padding
    q, k, v, grad = random_inputs(rows, kv_heads, group, 8, value_dim, seed)
    held = 3.0 if finite else NAN  # whoever vouches for finite numbers has them
    poisoned = [x.index_fill(0, torch.arange(used, rows), held) for x in (q, k, v, grad)]
    with pytest.MonkeyPatch.context() as patch:
        stand_in = StandIn()
        patch.setattr(
            attention_flash,
            "library",
            lambda: Library(Kernels(stand_in.forward, stand_in.backward), None),
        )
        patch.setattr(attention_flash, "_check_supported", lambda *facts: None)
        patch.setattr(
            attention_flash, "repeats_heads", lambda tokens, documents, group: repeat and group > 1
        )
        actual = run("flash", poisoned[:3], lengths, poisoned[3], finite)
    for ours, theirs in zip(actual, run("naive", [q, k, v], lengths, grad)):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
        assert (ours[used:] == 0).all()


def test_options_are_host_bounds_and_follow_the_global_setting(kernels):
    q, k, v, grad = random_inputs(16, 1, 2, 8, 8, seed=1)
    run("flash", [q, k, v], [5, 6], grad)
    torch.use_deterministic_algorithms(True)
    try:
        run("flash", [q, k, v], [5, 6], grad)
    finally:
        torch.use_deterministic_algorithms(False)
    forward, plain, _, strict = kernels.seen
    assert all(
        seen["max_seqlen_q"] == seen["max_seqlen_k"] == 16 and seen["causal"]
        for seen in kernels.seen
    )
    assert forward["return_lse"] and (plain["deterministic"], strict["deterministic"]) == (
        False,
        True,
    )


def test_operations_are_registered_as_torch_wants_them(kernels):
    batch = hand_batch([[1] * 4, [1] * 3], 8, 3)
    q, k, v, grad = random_inputs(8, 1, 2, 8, 4, seed=2)
    cu_keys, tail = batch.cu_seqlens.clone(), batch.padding_mask.clone()
    facts = (batch.cu_seqlens, cu_keys, batch.padding_mask, tail, 8, 8, 0.5)
    arguments = (*facts, False, False, -1, None)
    torch.library.opcheck(
        attention_flash._forward,
        (q, k, v, *arguments),
        test_utils=("test_schema", "test_faketensor"),
    )
    out, lse = attention_flash._forward(q, k, v, *arguments)
    arguments = (grad, q, k, v, out, lse.zero_(), *facts, False, True, -1)
    torch.library.opcheck(attention_flash._backward, arguments, test_utils=("test_schema",))
    shapes = [x.shape for x in attention_flash._backward(*arguments)]
    assert shapes == [q.shape, k.shape, v.shape]


def test_backward_makes_no_gradient_for_what_nobody_uses(kernels):
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    leaves = [x.requires_grad_() for x in random_inputs(8, 1, 2, 8, 4, seed=2)[:3]]
    out = attention(*leaves, attention_metadata(hand_batch([[1] * 4, [1] * 3], 8, 3), "flash"))
    with Names():
        torch.autograd.grad(out, leaves, torch.ones_like(out.detach()))
    names = [
        name
        for name in names
        if name
        not in (
            "ones_like",
            "detach",
            "unsqueeze",
            "expand",
            "clone",
            "view",
            "_unsafe_view",
            "_reshape_alias",
            "sum",
            "squeeze",
        )
    ]
    assert names == ["masked_fill", "flash_attention_backward", *["masked_fill"] * 3]


def test_a_decoder_clears_gradients_only(kernels):
    """Its padding begins as zeros and stays finite, which the stand-in checks: no tensor is masked
    by a pass over all of it, neither on the way in nor on the way out."""
    masks = []

    class Masks(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ == "masked_fill":
                masks.append(tuple(args[0].shape))
            return function(*args, **(kwargs or {}))

    model, batch = flash_model(), PackedBatch.build([[5] * 10, [6] * 19], Capacity(40, 4))
    state = model.run_embed(model.begin(batch))
    hidden = state["hidden"].detach().requires_grad_()
    with Masks():
        out = model.layers["0"].run_mixer({**state, "hidden": hidden})["hidden"]
        assert masks == []
        out.backward(torch.ones_like(out).masked_fill(batch.padding_mask[:, None], 0.0))
    assert len(masks) == 1, "that of the gradient here"
    assert (hidden.grad[29:] == 0).all() and (hidden.grad[:29] != 0).any()


def test_heads_are_repeated_where_places_outweigh_tokens(kernels, monkeypatch):
    assert (
        repeats_heads(1024, 64, 2)
        and not repeats_heads(4096, 64, 2)
        and not repeats_heads(1024, 64, 1)
    )
    assert (
        repeats_heads(1024, 256, 4)
        and not repeats_heads(1024, 256, 8)
        and not repeats_heads(1024, 8, 2)
    )
    q, k, v, grad = random_inputs(16, 1, 2, 8, 8, seed=1)
    seen = []
    monkeypatch.setattr(attention_flash, "repeats_heads", lambda *facts: seen.append(facts) or True)
    run("flash", [q, k, v], [5, 6], grad)
    assert seen == [(16, 4, 2)]
    torch.use_deterministic_algorithms(True)
    try:
        run("flash", [q, k, v], [5, 6], grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(seen) == 1, "bits do not depend on the capacity then"


def flash_model(**options) -> DecoderModel:
    return DecoderModel(
        dataclasses.replace(SHAPES["tiny"], attention_backend="flash", num_layers=2, **options),
        seed=3,
    )


def test_a_layer_is_one_graph_for_torch_compile(kernels):
    model, batch = (
        flash_model(),
        draw_batches(Capacity(32, 4), 1, 320, mean=8.0, sigma=0.5, seed=0)[0],
    )
    torch._dynamo.reset()
    eager = model(batch)
    eager.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")(batch)
    loss.backward()
    assert torch.equal(loss, eager)
    # The order of sums of tied weights is the compiler's, everything else is the same operations.
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-5, atol=1e-7)


def losses_and_gradients(model, batches, poison: bool = False) -> list[Tensor]:
    """Loss and gradients of one microbatch after the other."""
    found = []
    for number, batch in enumerate(batches):
        if poison:
            poison_free_slots(model, number)
        loss = model(batch)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return found


def test_replays_equal_eager(kernels):
    """With memory that nobody wrote being NaN: the stand-in refuses to read that."""
    batches = [
        *draw_batches(Capacity(32, 4), 3, 320, mean=8.0, sigma=0.8, seed=1),
        PackedBatch.build([[5] * 9], Capacity(32, 4)),
    ]
    graphed = packgraph.graph(flash_model(), capacities=[Capacity(32, 4)], warmup=1, strict=True)
    replayed = losses_and_gradients(graphed, batches, poison=True)
    pairs = zip(losses_and_gradients(flash_model(), batches), replayed, strict=True)
    assert all(torch.equal(eager, replayed) for eager, replayed in pairs)
    assert graphed.stats.replayed == 3


def test_reasons_why_it_cannot_run(monkeypatch):
    cuda, low = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(
        attention_flash, "library", lambda: Library(None, "flash-attn-4 is not installed")
    )
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert flash_problems(torch.device("cpu"), low, 64, 64) == ["the tensors are on cpu"]
    assert flash_problems(cuda, low, 64, 64) == ["flash-attn-4 is not installed"]
    monkeypatch.setattr(attention_flash, "library", lambda: Library(Kernels(print, print), None))
    assert not flash_problems(cuda, low, 192, 128) and not flash_problems(
        cuda, torch.float16, 256, 256
    )
    assert "float32" in flash_problems(cuda, torch.float32, 64, 64)[0]
    assert "264 (keys)" in flash_problems(cuda, low, 264, 64)[0]
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (10, 0))
    assert (
        not flash_problems(cuda, low, 192, 128)
        and "192 (keys)" in flash_problems(cuda, low, 192, 192)[0]
    )
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    assert len(flash_problems(cuda, torch.float32, 64, 64)) == 2


def test_library_is_refused_when_absent_broken_or_of_another_version(monkeypatch):
    def found(outcome) -> Library:
        def load(name: str):
            if isinstance(outcome, ImportError):
                raise outcome
            return outcome

        monkeypatch.setattr(attention_flash, "importlib", types.SimpleNamespace(import_module=load))
        return attention_flash.library.__wrapped__()

    absent = found(ModuleNotFoundError("no module", name="flash_attn"))
    assert absent == (None, "flash-attn-4 is not installed")
    assert (
        "cannot be imported (libcudart" in found(ImportError("libcudart.so.13: not found")).reason
    )
    assert "needs cutlass" in found(ModuleNotFoundError("needs cutlass", name="cutlass")).reason
    other = types.SimpleNamespace(
        _flash_attn_fwd=lambda q, k, v: None, _flash_attn_bwd=lambda q: None
    )
    assert "do not take causal, cu_seqlens_k" in found(other).reason
    assert "another interface" in found(types.SimpleNamespace()).reason

    def forward(
        q,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        return_lse,
        out,
        lse,
    ): ...

    def backward(
        q,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        deterministic,
        dq,
        dk,
        dv,
    ): ...

    found_both = found(types.SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward))
    assert found_both == (Kernels(forward, backward), None)


def test_stand_in_catches_kernels_that_read_poison(kernels):
    """Negative control: without the masks on the way in the stand-in would have complained."""
    batch = hand_batch([[1] * 3], 4, 1)
    q, k, v, _ = random_inputs(4, 1, 1, 8, 8, seed=0)
    v[3] = NAN
    with pytest.raises(AssertionError, match="0 times NaN"):
        attention_flash._forward(
            q,
            k,
            v,
            batch.cu_seqlens,
            batch.cu_seqlens,
            batch.padding_mask,
            batch.padding_mask,
            4,
            4,
            1.0,
            False,
            False,
            -1,
            None,
        )
