"""Digests of tensors: every bit and its place counts, strides and devices do not, and little memory
is needed."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from packgraph.verification.compare import (
    DIFFERS,
    Digest,
    Digester,
    first_difference,
    unequal_digests,
)

CPU = torch.device("cpu")
DTYPES = (
    torch.uint8,
    torch.bool,
    torch.int8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.int16,
    torch.float32,
    torch.int32,
    torch.int64,
    torch.float64,
    torch.complex64,
)
SMALLEST = Digester(
    CPU, slice_words=8
)  # of 32 bytes, so that few elements are slices of slices of slices
WHOLE = Digester(CPU, slice_words=1024)


@st.composite
def tensors(draw: st.DrawFn, least: int = 0) -> Tensor:
    """Random bits of any dtype and of up to three dimensions, with at least `least` elements."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(
        st.lists(st.integers(0 if least == 0 else 1, 9), max_size=3).filter(
            lambda sizes: torch.Size(sizes).numel() >= least
        )
    )
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    flat = torch.tensor(
        [byte & 1 for byte in raw] if dtype == torch.bool else list(raw), dtype=torch.uint8
    )
    return flat.view(dtype).view(
        shape
    )  # copies of flags make every byte 0 or 1, so others would be no copies


def raw_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def naive(digester: Digester, tensor: Tensor, level: int = 0) -> list[int]:
    """The definition, by numbers of any size."""
    raw = bytes(raw_bytes(tensor.contiguous()).tolist()) if tensor.numel() else b""
    raw += b"\0" * (-len(raw) % 4)
    words = [
        int.from_bytes(raw[place : place + 4], "little", signed=True)
        for place in range(0, len(raw), 4)
    ]
    size = digester._slice_words
    found = [
        [
            sum(key * word for key, word in zip(keys, words[start : start + size]))
            for keys in digester._keys_of(level).tolist()
        ]
        for start in range(0, len(words), size)
    ]
    signed = [[(number + 2**63) % 2**64 - 2**63 for number in sums] for sums in found]
    if len(signed) > 1:
        return naive(digester, torch.tensor(signed), level + 1)
    return signed[0] if signed else [0, 0]


@given(tensors())
def test_digests_are_what_they_are_defined_to_be(tensor: Tensor) -> None:
    for digester in (SMALLEST, WHOLE):
        assert (
            digester.sums(tensor).tolist()
            == naive(digester, tensor)
            == digester.sums(tensor.clone()).tolist()
        )


@given(tensors(least=1), st.data())
def test_every_bit_counts(tensor: Tensor, data: st.DataObject) -> None:
    other = tensor.clone()
    raw = raw_bytes(other)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for digester in (SMALLEST, WHOLE):
        assert not torch.equal(digester.sums(tensor), digester.sums(other))


@given(tensors(least=2), st.data())
def test_every_place_counts(tensor: Tensor, data: st.DataObject) -> None:
    rows = raw_bytes(tensor.clone()).view(tensor.numel(), -1)
    first, second = (data.draw(st.integers(0, len(rows) - 1)) for _ in range(2))
    changed = rows.clone()
    changed[[first, second]] = rows[[second, first]]
    other = changed.view(-1).view(tensor.dtype).view(tensor.shape)
    for digester in (SMALLEST, WHOLE):
        assert torch.equal(digester.sums(tensor), digester.sums(other)) == torch.equal(
            rows, changed
        )


@given(tensors(), st.data())
def test_strides_do_not_count(tensor: Tensor, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(tensor.ndim)))
    view = tensor.permute(order)
    if view.ndim and data.draw(st.booleans()):
        view = view[..., :: data.draw(st.integers(1, 3))]
    for digester in (SMALLEST, WHOLE):
        assert torch.equal(digester.sums(view), digester.sums(view.contiguous()))


def test_views_at_any_byte_and_single_values_have_digests() -> None:
    flat = torch.arange(101, dtype=torch.uint8)
    for start in range(9):
        for digester in (SMALLEST, WHOLE):
            assert torch.equal(digester.sums(flat[start:]), digester.sums(flat[start:].clone()))
    assert not torch.equal(WHOLE.sums(torch.tensor(0.0)), WHOLE.sums(torch.tensor(-0.0)))
    assert torch.equal(
        WHOLE.sums(torch.tensor(float("nan"))), WHOLE.sums(torch.tensor(float("nan")))
    )


@pytest.mark.parametrize("digester", [SMALLEST, WHOLE], ids=["many slices", "one slice"])
def test_signs_that_change_together_do_not_cancel(digester: Digester) -> None:
    """The highest bits of two words: a sum of products with odd numbers has the least to tell them
    apart."""
    values = torch.ones(40)
    found = set()
    for first in range(40):
        for second in range(first + 1):
            values[[first, second]] = -1.0
            found.add(tuple(digester.sums(values).tolist()))
            values[[first, second]] = 1.0
    assert len(found) == 40 * 41 // 2


class LargestMade(TorchDispatchMode):
    """The largest storage, in bytes, that operations have made."""

    largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    "made", [lambda: torch.randn(90_000), lambda: torch.randn(300, 300).t()], ids=["flat", "t"]
)
def test_temporaries_are_as_small_as_slices(made: Any) -> None:
    digester, tensor = Digester(CPU, slice_words=1024), made()
    digester.sums(tensor)
    with LargestMade() as seen:
        digester.sums(tensor)
    assert 0 < seen.largest <= 2 * 8 * 1024  # a product with both rows of keys


def test_digests_are_taken_while_a_moment_lasts() -> None:
    values = torch.zeros(3)

    def moments() -> Any:
        for number in range(2):
            values.fill_(number)
            yield {"kind": {"name": values, "empty": torch.zeros(0, 2)}}

    first, second = WHOLE.digests(moments())
    assert (
        first["kind"]["name"]
        == Digest(torch.Size([3]), torch.float32, (0, 0))
        != second["kind"]["name"]
    )
    assert second["kind"]["name"].sums == tuple(WHOLE.sums(torch.ones(3)).tolist())
    assert first["kind"]["empty"] == second["kind"]["empty"]


def test_the_first_difference_of_digests_has_a_name() -> None:
    def digests(**values: Tensor) -> Any:
        return WHOLE.digests([{"kind": values}])[0]["kind"]

    difference = partial(first_difference, differs=unequal_digests)
    known = digests(a=torch.ones(2), b=torch.zeros(3))
    assert difference(1, known, digests(a=torch.ones(2), b=torch.zeros(3))) is None
    assert (
        str(difference(4, known, digests(a=torch.ones(2), b=torch.ones(3))))
        == f"step 4: b: {DIFFERS}"
    )
    assert "a: torch.float32 [2] against torch.int32 [2]" in str(
        difference(1, known, digests(a=torch.ones(2).view(torch.int32), b=torch.zeros(3)))
    )
    assert "torch.float32 [3] against torch.float32 [4]" in str(
        difference(1, known, digests(a=torch.ones(2), b=torch.zeros(4)))
    )
    assert "b: only in the eager run" in str(difference(1, known, digests(a=torch.ones(2))))
