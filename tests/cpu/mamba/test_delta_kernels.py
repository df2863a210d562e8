"""The kernels of the gated delta rule against row by row, in Triton's interpreter."""

import os

import pytest
import torch
from interpreterkit import INSIDE, inside, needs_triton, outside, run_in_interpreter
from ssmkit import delta_inputs, distances, ids_of, mend_interpreter, with_gradients

from packgraph.mamba.gated_delta import delta_by_kernels, delta_problems, naive_gated_delta

pytestmark = needs_triton
NAN = float("nan")


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    if INSIDE in os.environ:
        mend_interpreter(monkeypatch)


def by_kernels(inputs, grad, ids, chunk):
    return with_gradients(lambda *leaves: delta_by_kernels(*leaves, ids, chunk), inputs, grad)


def by_rows(inputs, grad, ids):
    inputs = [x.double() for x in inputs]
    return with_gradients(lambda *leaves: naive_gated_delta(*leaves, ids), inputs, grad.double())


@inside
@pytest.mark.parametrize(
    ("lengths", "padding", "chunk", "heads", "key_heads", "keys", "columns"),
    [
        ([70, 1, 1, 8, 50], 5, 64, 1, 1, 16, 16),
        ([32, 64, 1, 7], 0, 32, 1, 1, 32, 16),  # ends of documents are those of chunks
        ([20, 12, 1, 21], 3, 16, 2, 1, 16, 32),
        ([33], 40, 16, 2, 2, 20, 40),  # chunks of padding; sizes that are no powers of two
        ([90], 0, 16, 1, 1, 80, 16),  # keys in two pieces, one document in many chunks
    ],
)
def test_kernels_equal_rows(lengths, padding, chunk, heads, key_heads, keys, columns):
    ids = ids_of(lengths, padding)
    inputs = delta_inputs(len(ids), key_heads, heads, keys, columns)
    grad = torch.randn(len(ids), heads, columns)
    found = by_kernels(inputs, grad, ids, chunk)
    assert max(distances(found, by_rows(inputs, grad, ids))) < 1e-5


@inside
def test_16_bits():
    """float16: the interpreter multiplies the bits of bfloat16 as if they were integers."""
    ids, grad = ids_of([20, 12, 1, 21], 3), torch.randn(57, 2, 32).half()
    inputs = delta_inputs(57, 1, 2, 16, 32, torch.float16)
    found = by_kernels(inputs, grad, ids, 16)
    assert max(distances(found, by_rows(inputs, grad, ids))) < 0.002


@inside
def test_empty_places_between_documents_and_nan_in_padding_reach_nothing():
    ids = torch.tensor([0] * 9 + [-1] * 3 + [1] * 15 + [-1] * 9 + [2] * 12 + [-1] * 4).int()
    inputs, grad = delta_inputs(len(ids), 1, 2), torch.randn(len(ids), 2, 16)
    clean = by_kernels(inputs, grad, ids, 16)
    assert max(distances(clean, by_rows(inputs, grad, ids))) < 1e-5
    for x in (*inputs, grad):
        x[ids < 0] = NAN
    for old, new in zip(clean, by_kernels(inputs, grad, ids, 16), strict=True):
        assert torch.equal(old, new) and not new[ids < 0].any()


@inside
def test_documents_are_apart_and_results_repeat():
    ids, changed = ids_of([5, 20, 16], 3), slice(5, 25)
    inputs, grad = delta_inputs(44, 1, 1), torch.randn(44, 1, 16)
    before = by_kernels(inputs, grad, ids, 16)
    assert all(map(torch.equal, before, by_kernels(inputs, grad, ids, 16)))
    merged = by_kernels(inputs, grad, ids.clamp(max=0), 16)
    assert min(distances(merged, before)) > 0.01
    for x in inputs:
        x[changed] *= 0.7
    grad[changed] += 3
    kept = torch.ones(44, dtype=torch.bool)
    kept[changed] = False
    for old, new in zip(before, by_kernels(inputs, grad, ids, 16), strict=True):
        assert torch.equal(old[kept], new[kept]) and not torch.equal(old[~kept], new[~kept])


@inside
def test_strong_decays_and_keys_all_alike():
    """Powers of what is below the diagonal would grow with such keys; substitution has none.

    Not with beta = 1: then every row erases what was there, and decays have no gradient.
    """
    ids, inputs, grad = ids_of([60]), delta_inputs(60, 1, 1), torch.randn(60, 1, 16)
    inputs[1] = inputs[1][:1].expand(60, 1, 16).clone()
    inputs[3][1:40] *= 1e-3
    inputs[3][::7] *= 1000
    inputs[4] = torch.full((60, 1), 0.9)
    found = by_kernels(inputs, grad, ids, 64)
    wanted = by_rows(inputs, grad, ids)
    assert max(distances(found, wanted)) < 1e-4


@inside
def test_columns_may_lie_apart_and_compiled_code_holds_the_kernels():
    ids, inputs, grad = ids_of([5, 9], 2), delta_inputs(16, 1, 1), torch.randn(16, 1, 16)

    def run(q, k, v, g, beta):
        rows = torch.cat((q, k, v), -1)
        return delta_by_kernels(*rows.split(16, -1), g, beta, ids, 16)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    wanted = by_kernels(inputs, grad, ids, 16)
    for function in (run, compiled):
        assert all(map(torch.equal, with_gradients(function, inputs, grad), wanted))


@inside
@pytest.mark.parametrize("lengths", [[100, 3, 61], [16] * 11, [200], [], [1, 15, 150]])
def test_every_chunk_ends_one_chain(lengths):
    from packgraph.mamba.delta_forward import chains_of, delta_sizes

    ids, none = ids_of(lengths, 208 - sum(lengths)), torch.empty(208, 1, 1)
    ahead, back = (x.tolist() for x in chains_of(ids, delta_sizes(none, none, 16)))
    chunks = range(len(ahead))
    forward = [c + turn for c in chunks for turn in range(ahead[c]) if turn or c == 0]
    backward = [c - turn for c in chunks for turn in range(back[c]) if turn or c == chunks[-1]]
    assert forward.count(0) == 1 and sorted({*forward}) == sorted(forward) == [*chunks]
    assert sorted(backward) == [*chunks]


@outside
def test_what_kernels_do_not_take_is_named():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert delta_problems(cuda, torch.bfloat16, (48, 256), 64, 2) == []
    (problem,) = delta_problems(cuda, torch.bfloat16, (128, 128), 64, 3)
    assert "one decay a head" in problem
    for device, dtype, sizes, chunk in [
        (cpu, torch.float32, (16, 16), 64),
        (cuda, torch.float64, (16, 16), 64),
        (cuda, torch.float32, (16, 272), 64),
        (cuda, torch.bfloat16, (20, 32), 64),
        (cuda, torch.bfloat16, (32, 6), 64),
        (cuda, torch.float32, (16, 16), 7),
    ]:
        assert len(delta_problems(device, dtype, sizes, chunk, 2)) == 1


@outside
def test_in_the_interpreter():
    run_in_interpreter(__file__)
