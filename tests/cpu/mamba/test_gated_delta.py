"""The gated delta rule in chunks against row by row, and what documents and padding reach."""

import pytest
import torch

from packgraph.mamba.gated_delta import gated_delta, naive_gated_delta

# float32 through a recurrence of up to 20 rows
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
LENGTHS = {"one": [20], "many": [3, 1, 9, 4], "borders": [4, 8, 4], "padding": [5, 2], "none": []}
ROWS = 20


def inputs(seed=0, key_heads=2, channels=()):
    """channels: of decays, (6,) for one of each channel."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    q, k, v = draw(ROWS, key_heads, 6), draw(ROWS, key_heads, 6), draw(ROWS, 4, 5)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return [q, k, v, -draw(ROWS, 4, *channels).exp(), draw(ROWS, 4).sigmoid()]


def ids_of(lengths):
    ids = [number for number, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(ids + [-1] * (ROWS - len(ids)), dtype=torch.int32)


def run(function, tensors, ids, *options):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves, ids, *options)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)]


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("chunk", [1, 4, 7, 32])
@pytest.mark.parametrize(("key_heads", "channels"), [(1, ()), (4, ()), (4, (6,)), (2, (6,))])
def test_chunks_equal_rows(name, chunk, key_heads, channels):
    ids, tensors = ids_of(LENGTHS[name]), inputs(key_heads=key_heads, channels=channels)
    found = run(gated_delta, tensors, ids, chunk)
    if not LENGTHS[name]:
        assert all((x == 0).all() for x in found)
        return
    for ours, theirs in zip(found, run(naive_gated_delta, tensors, ids)):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("channels", [(), (6,)])
def test_documents_reach_each_other_in_no_bit_and_padding_reaches_nothing(channels):
    ids, tensors = ids_of([3, 9, 4]), inputs(channels=channels)
    before = run(gated_delta, tensors, ids, 4)
    for tensor, other in zip(tensors, inputs(seed=1, channels=channels)):
        tensor[3:12] = other[3:12]
        tensor[16:] = torch.nan
    after = run(gated_delta, tensors, ids, 4)
    for one, other in zip(before, after):
        assert torch.equal(one[:3], other[:3]) and torch.equal(one[12:16], other[12:16])
        assert (other[16:] == 0).all() and not torch.equal(one[3:12], other[3:12])


@pytest.mark.parametrize("channels", [(), (6,)])
def test_strong_decays_do_not_overflow(channels):
    ids, tensors = ids_of([20]), inputs(channels=channels)
    tensors[3] = tensors[3] * 1000
    found = run(gated_delta, tensors, ids, 8)
    for ours, theirs in zip(found, run(naive_gated_delta, tensors, ids)):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_shapes_that_do_not_fit_are_named():
    q, k, v, g, beta = inputs()
    with pytest.raises(ValueError, match=r"q \(20, 2, 5\)"):
        gated_delta(q[..., :5], k, v, g, beta, ids_of([20]))
