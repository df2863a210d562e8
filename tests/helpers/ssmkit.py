"""What the tests of packed convolution and SSD share: ids of documents, random inputs, outputs with
all gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")


def ids_of(lengths: Sequence[int], padding: int = 0, first: int = 0) -> Tensor:
    """int32 ids of documents of these lengths (0 is allowed, its number is left out), then
    padding."""
    numbers = [first + number for number, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(numbers + [-1] * padding, dtype=torch.int32)


def ssd_inputs(
    rows: int,
    heads: int = 4,
    size: int = 3,
    groups: int = 2,
    state: int = 5,
    dtype: torch.dtype = torch.float32,
    skip: bool = True,
) -> list[Tensor | None]:
    """x, dt, a, b, c, d; x, b and c in `dtype`, the others at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    x, b, c = (
        torch.randn(rows, heads, size),
        torch.randn(rows, groups, state),
        torch.randn(rows, groups, state),
    )
    dt, a = torch.rand(rows, heads, dtype=wide), -0.1 - torch.rand(heads, dtype=wide)
    return [
        x.to(dtype),
        dt,
        a,
        b.to(dtype),
        c.to(dtype),
        torch.randn(heads, dtype=wide) if skip else None,
    ]


def delta_inputs(
    rows: int,
    key_heads: int,
    heads: int,
    keys: int = 16,
    columns: int = 16,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """q, k, v, g, beta: q, k and v in `dtype`, the first two of length one, the others float32."""
    q, k, v = (
        torch.randn(rows, key_heads, keys),
        torch.randn(rows, key_heads, keys),
        torch.randn(rows, heads, columns),
    )
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    decays, steps = -torch.rand(rows, heads), torch.rand(rows, heads)
    return [q.to(dtype), k.to(dtype), v.to(dtype), decays, steps]


def conv_inputs(
    rows: int,
    channels: int = 6,
    taps: int = 4,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
) -> list[Tensor | None]:
    """x, weight, bias in `dtype`."""
    return [
        torch.randn(rows, channels).to(dtype),
        torch.randn(channels, taps).to(dtype),
        torch.randn(channels).to(dtype) if bias else None,
    ]


def with_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor]:
    """The output, then the gradient of every input that is a tensor."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    given = [leaf for leaf in leaves if leaf is not None]
    if not out.requires_grad:  # all padding: the sequential definition touches nothing
        return [out, *(torch.zeros_like(leaf) for leaf in given)]
    gradients = torch.autograd.grad(out, given, grad.to(out), allow_unused=True)
    return [
        out.detach(),
        *(torch.zeros_like(x) if g is None else g for x, g in zip(given, gradients, strict=True)),
    ]


def distances(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[float]:
    """Relative distance of each pair, by norms."""
    return [
        float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-6))
        for x, y in zip(ours, theirs, strict=True)
    ]


def mend_interpreter(monkeypatch: Any) -> None:
    """Let loops of interpreted kernels run to a bound that is a kernel's argument.

    Triton 3.6 keeps scalars as arrays of one element and hands those to int(), which numpy refuses
    from 2.4 on.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
