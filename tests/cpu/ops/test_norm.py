"""Operations of RMSNorm with what stands around it, against float64: outputs, all gradients, what
is saved, compiled code; and which of them the tables choose."""

import pytest
import torch
from normkit import (
    EPS,
    added_reference,
    assert_near,
    differentiated,
    draw,
    exact,
    kept_reference,
    tables,
    turned_reference,
)

from packgraph.ops import norm_configs
from packgraph.ops.norm import (
    added_and_normed,
    fuses_norm,
    fuses_turn,
    normed_and_kept,
    normed_and_turned,
)
from packgraph.ops.norm_configs import Normed, Turned

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ROWS, WIDTH, TOKENS, HEADS, HEAD_DIM = 7, 48, 6, (4, 2), 16


def cases(dtype):
    """Name, operation, reference, tensors that get gradients, gradients of outputs."""
    rows, heads = (ROWS, WIDTH), [(TOKENS, count, HEAD_DIM) for count in HEADS]
    x, branch, weight, grad, residual = draw(rows, rows, (WIDTH,), rows, rows, dtype=dtype)
    q, k, q_grad, k_grad = draw(*heads, *heads, dtype=dtype)
    q_weight, k_weight = draw((HEAD_DIM,), (HEAD_DIM,), dtype=dtype)
    cos, sin = tables(TOKENS, HEAD_DIM, dtype)
    return {
        "kept": (
            lambda x, w: normed_and_kept(x, w, EPS),
            kept_reference,
            [x, weight],
            [grad, residual],
        ),
        "added": (
            lambda x, b, w: added_and_normed(x, b, w, EPS),
            added_reference,
            [x, branch, weight],
            [grad, residual],
        ),
        "turned": (
            lambda q, k, a, b: normed_and_turned(q, k, (a, b), EPS, cos, sin),
            turned_reference(cos, sin),
            [q, k, q_weight, k_weight],
            [q_grad, k_grad],
        ),
    }


NAMES = ("kept", "added", "turned")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_are_those_of_float64(name, dtype):
    function, reference, leaves, grads = cases(dtype)[name]
    found = differentiated(function, leaves, grads)
    if name == "added":  # the sum is rounded before it is normalised, as in a layer
        total = leaves[0] + leaves[1]
        assert torch.equal(found[1], total) and torch.equal(found[2], found[3])
        expected = exact(kept_reference, [total, leaves[2]], grads)
        return assert_near([found[0], found[2], found[4]], [expected[0], *expected[2:]])
    return assert_near(found, exact(reference, leaves, grads))


@pytest.mark.parametrize("name", NAMES)
def test_sums_of_single_operations_in_float64_are_the_same(name):
    function, reference, leaves, grads = cases(torch.float64)[name]
    assert_near(differentiated(function, leaves, grads), exact(reference, leaves, grads))


@pytest.mark.parametrize("name", NAMES)
def test_frozen_weights_get_no_gradient_and_change_no_other(name):
    function, _, leaves, grads = cases(torch.float32)[name]
    whole = differentiated(function, leaves, grads)[len(grads) :]
    trained = [leaf.dim() > 1 for leaf in leaves]
    tensors = [
        leaf.clone().requires_grad_(wanted) for leaf, wanted in zip(leaves, trained, strict=True)
    ]
    torch.autograd.backward(function(*tensors), grads)
    for leaf, expected, wanted in zip(tensors, whole, trained, strict=True):
        assert torch.equal(leaf.grad, expected) if wanted else leaf.grad is None


@pytest.mark.parametrize("name", NAMES)
def test_saved_tensors_go_through_the_hooks_of_autograd(name):
    """What is moved elsewhere and back gives the same bits, and nothing is kept behind."""
    function, _, leaves, grads = cases(torch.bfloat16)[name]
    expected, saved = differentiated(function, leaves, grads), []

    def moved(tensor):
        saved.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(moved, lambda held: held.clone()):
        found = differentiated(function, leaves, grads)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(saved) == {"kept": 2, "added": 2, "turned": 6}[name]


@pytest.mark.parametrize("name", NAMES)
def test_compiled_code_has_the_same_bits(name):
    function, _, leaves, grads = cases(torch.bfloat16)[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = differentiated(function, leaves, grads)
    found = differentiated(compiled, leaves, grads)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_operations_are_registered_as_they_run():
    x, branch, weight, *_ = draw((3, 8), (3, 8), (8,), dtype=torch.float32)
    leaves = [value.requires_grad_() for value in (x, branch, weight)]
    torch.library.opcheck(torch.ops.packgraph.added_rms_norm.default, (*leaves, EPS))
    q, k = (value.requires_grad_() for value in draw((3, 2, 4), (3, 1, 4), dtype=torch.float32))
    weights = [value.requires_grad_() for value in draw((4,), (4,), dtype=torch.float32)]
    cos, sin = tables(3, 4, torch.float32)
    operands = (q, k, *weights, EPS, cos, sin)
    torch.library.opcheck(torch.ops.packgraph.turned_rms_norm.default, operands)


def test_gradients_of_gradients_are_refused():
    x, weight = (value.requires_grad_() for value in draw((3, 8), (8,), dtype=torch.float64))
    normed, _ = normed_and_kept(x, weight, EPS)
    (found,) = torch.autograd.grad(normed.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


def test_tables_name_single_operations_everywhere():
    """Until a gain is measured."""
    for table in (norm_configs.NORMED, norm_configs.TURNED):
        assert {way.kernel for _, way in table} == {"operations"}


def test_the_choice(monkeypatch):
    x, weight = draw((4, 8), (8,), dtype=torch.bfloat16)
    q, k = draw((4, 2, 8), (4, 1, 8), dtype=torch.bfloat16)
    heads = (q, k, (weight, weight))
    assert not fuses_norm(x, weight) and not fuses_turn(*heads, weight.expand(4, 8))
    monkeypatch.setattr(norm_configs, "NORMED", ((4, Normed("rows")), (0, Normed())))
    monkeypatch.setattr(norm_configs, "TURNED", ((0, Turned("heads")),))
    assert not fuses_norm(x, weight), "a CPU is not what the tables hold for"
    monkeypatch.setattr(norm_configs, "is_measured", lambda device: True)
    assert fuses_norm(x, weight) and fuses_turn(*heads, weight.expand(4, 8))
    assert not fuses_norm(x[:3], weight), "fewer rows"
    assert not fuses_norm(x.double(), weight), "kernels compute in float32"
    assert not fuses_norm(x.as_subclass(type("Other", (torch.Tensor,), {})), weight)
    assert not fuses_turn(*heads, weight.expand(4, 8)[:, :4]), "some columns do not turn"
    three = q[..., :6], k[..., :6], (weight[:6], weight[:6])
    assert not fuses_turn(*three, weight[:6].expand(4, 6)), "no power of two"
