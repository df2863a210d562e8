"""Heads that are normalised and rotated by one operation, against float64: outputs, all gradients,
what is saved, compiled code; and where it is chosen."""

import pytest
import torch
from headskit import (
    EPS,
    assert_near,
    differentiated,
    draw,
    exact,
    tables,
    take_everywhere,
    turned_reference,
)

from packgraph.ops import heads
from packgraph.ops.heads import turned_heads, turns_heads

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TOKENS, HEADS, HEAD_DIM = 6, (4, 2), 16


def case(dtype):
    """The operation, its reference, tensors that get gradients, gradients of outputs."""
    shapes = [(TOKENS, count, HEAD_DIM) for count in HEADS]
    q, k, q_grad, k_grad = draw(*shapes, *shapes, dtype=dtype)
    weights = draw((HEAD_DIM,), (HEAD_DIM,), dtype=dtype)
    cos_sin = tables(TOKENS, HEAD_DIM, dtype)

    def function(q, k, first, second):
        return turned_heads(q, k, (first, second), EPS, cos_sin)

    return function, turned_reference(*cos_sin), [q, k, *weights], [q_grad, k_grad]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_are_those_of_float64(dtype):
    function, reference, leaves, grads = case(dtype)
    assert_near(differentiated(function, leaves, grads), exact(reference, leaves, grads))


@pytest.mark.parametrize(
    "trained",
    [
        pytest.param((True, True, False, False), id="frozen weights"),
        pytest.param((True, True, True, False), id="one frozen weight"),
        pytest.param((False, False, True, True), id="weights alone"),
        pytest.param((False, True, False, False), id="keys alone"),
    ],
)
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(trained):
    function, _, leaves, grads = case(torch.float32)
    whole = differentiated(function, leaves, grads)[2:]
    tensors = [
        leaf.clone().requires_grad_(wanted) for leaf, wanted in zip(leaves, trained, strict=True)
    ]
    torch.autograd.backward(function(*tensors), grads)
    for leaf, expected, wanted in zip(tensors, whole, trained, strict=True):
        assert torch.equal(leaf.grad, expected) if wanted else leaf.grad is None


def test_saved_tensors_go_through_the_hooks_of_autograd():
    """What is moved elsewhere and back gives the same bits, and nothing is kept behind. Tables are
    saved where they lie, so that a block of offloading finds what it leaves."""
    function, _, leaves, grads = case(torch.bfloat16)
    expected, saved = differentiated(function, leaves, grads), []

    def moved(tensor):
        saved.append(tensor.data_ptr())
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(moved, lambda held: held.clone()):
        found = differentiated(function, leaves, grads)
    assert all(map(torch.equal, found, expected)) and len(saved) == 6
    of_tables = {cell.cell_contents for cell in function.__closure__}.pop()
    assert {table.data_ptr() for table in of_tables} < set(saved)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_has_the_same_bits(monkeypatch, dynamic):
    """And chooses by the rows that it meets, whether it was made for one number of them or for
    any."""
    function, _, leaves, grads = case(torch.bfloat16)
    take_everywhere(monkeypatch)
    monkeypatch.setattr(heads, "LEAST_ROWS", TOKENS)
    cos_sin = tables(TOKENS, HEAD_DIM, torch.bfloat16)

    def chosen(q, k, first, second):
        rows = tuple(table[: q.shape[0]] for table in cos_sin)
        if turns_heads(q, k, (first, second), rows):
            return turned_heads(q, k, (first, second), EPS, rows)
        return q + 1, k + 1

    torch.compiler.reset()
    compiled = torch.compile(chosen, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = differentiated(function, leaves, grads)
    found = differentiated(compiled, leaves, grads)
    assert all(map(torch.equal, found, expected))
    fewer = [leaves[0][1:], leaves[1][1:], *leaves[2:]]
    assert torch.equal(compiled(*fewer)[0], fewer[0] + 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_outputs_are_the_same(mode):
    function, _, leaves, grads = case(torch.bfloat16)
    with mode():
        found = function(*leaves)
    assert all(map(torch.equal, found, differentiated(function, leaves, grads)[:2]))


def test_the_operation_is_registered_as_it_runs():
    q, k = (value.requires_grad_() for value in draw((3, 2, 4), (3, 1, 4), dtype=torch.float32))
    weights = [value.requires_grad_() for value in draw((4,), (4,), dtype=torch.float32)]
    operands = (q, k, *weights, EPS, *tables(3, 4, torch.float32))
    torch.library.opcheck(torch.ops.packgraph.turned_heads.default, operands)


def test_gradients_of_gradients_are_refused():
    function, _, leaves, _ = case(torch.float64)
    q, *others = (value.requires_grad_() for value in leaves)
    (found,) = torch.autograd.grad(function(q, *others)[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="turned_heads_backward"):
        found.sum().backward()


def test_the_choice(monkeypatch):
    rows = heads.LEAST_ROWS
    q, k = draw((rows, 2, 8), (rows, 1, 8), dtype=torch.bfloat16)
    weights, cos_sin = draw((8,), (8,), dtype=torch.float32), tables(rows, 8, torch.bfloat16)
    assert not turns_heads(q, k, weights, cos_sin), "nothing was measured on a CPU"
    monkeypatch.setattr(heads, "is_measured", lambda device: True)
    assert turns_heads(q, k, weights, cos_sin)
    shorter = [table[1:] for table in cos_sin]
    assert not turns_heads(q[1:], k[1:], weights, shorter), "fewer rows"
    assert not turns_heads(q.double(), k, weights, cos_sin), "kernels compute in float32"
    assert not turns_heads(q, k, [weights[0], weights[1].double()], cos_sin)
    assert not turns_heads(q, k, [weights[0], weights[1].to("meta")], cos_sin)
    assert not turns_heads(q, k, weights, [cos_sin[0], cos_sin[1].requires_grad_()])
    cos_sin[1].requires_grad_(False)
    other = q.as_subclass(type("Other", (torch.Tensor,), {}))
    assert not turns_heads(other, k, weights, cos_sin)
    assert not turns_heads(q, k, weights, [table[:, :4] for table in cos_sin]), "some columns turn"
    assert not turns_heads(q.repeat(1, 257, 1), k, weights, cos_sin), "more than a program holds"
    six = [[table[:, :6] for table in cos_sin], [weight[:6] for weight in weights]]
    assert not turns_heads(q[..., :6], k[..., :6], six[1], six[0]), "no power of two"
