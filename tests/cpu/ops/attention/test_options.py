"""Windows, soft caps, sinks and dropout of attention: every backend against the naive one, and that
against loops over single numbers."""

import math

import pytest
import torch
from attentionkit import textbook_backward, textbook_forward
from model_batches import hand_batch

from packgraph.ops.attention import flash as attention_flash
from packgraph.ops.attention import varlen as attention_varlen
from packgraph.ops.attention.api import attention, attention_metadata, choose_backend
from packgraph.ops.attention.context import ContextGroup
from packgraph.ops.attention.flash import Kernels, Library
from packgraph.ops.attention.metadata import ScoreOptions

# both sides are float32 sums of at most 24 terms of size one in different order
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
LENGTHS, ROWS = [5, 0, 7, 1], 16
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CASES = {
    "window": ScoreOptions(window=3),
    "window of one": ScoreOptions(window=1),
    "wide window": ScoreOptions(window=99),
    "softcap": ScoreOptions(softcap=0.7),
    "sinks": ScoreOptions(sinks=SINKS),
    "all": ScoreOptions(window=2, softcap=1.5, sinks=SINKS),
}
KERNEL_CASES = [name for name, options in CASES.items() if not options.softcap]


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(ROWS, 4, 8), (ROWS, 2, 8), (ROWS, 2, 6), (ROWS, 4, 6)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def run(backend, options, padding=0.0):
    """Output and gradients of q, k, v and sinks; rows of padding hold `padding` on the way in."""
    q, k, v, grad = inputs()
    used = sum(LENGTHS)
    batch = hand_batch([[1] * length for length in LENGTHS], ROWS, len(LENGTHS) + 1)
    for x in (q, k, v, grad):
        x[used:] = padding
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if options.sinks is not None:
        options = options._replace(sinks=options.sinks.clone().requires_grad_())
    out = attention(*leaves, attention_metadata(batch, backend), options=options)
    out.backward(grad)
    found = [out.detach(), *(leaf.grad for leaf in leaves)]
    assert all((x[used:] == 0).all() for x in found)
    return found if options.sinks is None else [*found, options.sinks.grad]


def by_hand(q, k, v, options):
    """One head of one document, number by number."""
    rows = []
    for place in range(q.shape[0]):
        first = 0 if options.window is None else max(place - options.window + 1, 0)
        scores = [float(q[place] @ k[other]) / math.sqrt(8) for other in range(first, place + 1)]
        if options.softcap:
            scores = [options.softcap * math.tanh(x / options.softcap) for x in scores]
        total = sum(math.exp(score) for score in scores)
        if options.sinks is not None:
            total += math.exp(float(options.sinks))
        parts = (math.exp(x) / total * v[first + n] for n, x in enumerate(scores))
        rows.append(sum(parts, torch.zeros(v.shape[1])))
    return torch.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_naive_is_the_formula(name):
    q, k, v, _ = inputs()
    options, out = CASES[name], run("naive", CASES[name])[0]
    for start, length in ((0, 5), (5, 7), (12, 1)):
        rows = slice(start, start + length)
        for head in range(4):
            own = options
            if options.sinks is not None:
                own = options._replace(sinks=options.sinks[head])
            expected = by_hand(q[rows, head], k[rows, head // 2], v[rows, head // 2], own)
            torch.testing.assert_close(out[rows, head], expected, **TOLERANCE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("padding", [0.0, torch.nan])
def test_sdpa_equals_naive_whatever_padding_holds(name, padding):
    for ours, theirs in zip(run("sdpa", CASES[name], padding), run("naive", CASES[name])):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.fixture
def kernels(monkeypatch):
    """The places of the CUDA kernels taken by the textbook, which knows no sinks."""

    def forward(q, k, v, cu_seqlens, cu_keys, longest, most_keys, scale, left):
        return textbook_forward(q, k, v, cu_seqlens, scale, cu_keys, left)

    def backward(grad, q, k, v, out, lse, cu_seqlens, cu_keys, longest, most_keys, scale, left):
        return textbook_backward(grad, q, k, v, out, lse, cu_seqlens, scale, cu_keys, left)

    def flash(q, k, v, *, cu_seqlens_q, softmax_scale, out, lse, window_size_left=-1, **others):
        used = int(cu_seqlens_q[-1])
        found = textbook_forward(q, k, v, cu_seqlens_q, softmax_scale, None, window_size_left)
        out[:used] = found[0][:used]
        lse.copy_(found[1])

    def flash_backward(
        q,
        k,
        v,
        out,
        grad,
        lse,
        *,
        cu_seqlens_q,
        softmax_scale,
        dq,
        dk,
        dv,
        window_size_left=-1,
        **others,
    ):
        found = textbook_backward(
            grad, q, k, v, out, lse, cu_seqlens_q, softmax_scale, None, window_size_left
        )
        for target, gradient in zip((dq, dk, dv), found):
            target.copy_(gradient)

    library = Library(Kernels(flash, flash_backward, True), None)
    monkeypatch.setattr(attention_varlen, "_launch_forward", forward)
    monkeypatch.setattr(attention_varlen, "_launch_backward", backward)
    monkeypatch.setattr(attention_flash, "library", lambda: library)
    for module in (attention_varlen, attention_flash):
        monkeypatch.setattr(module, "_check_supported", lambda *facts: None)


@pytest.mark.parametrize("name", KERNEL_CASES)
@pytest.mark.parametrize("backend", ["varlen", "flash"])
@pytest.mark.parametrize("padding", [0.0, torch.nan])
def test_kernels_with_windows_and_sinks_equal_naive(kernels, name, backend, padding):
    for ours, theirs in zip(run(backend, CASES[name], padding), run("naive", CASES[name])):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_what_a_backend_lacks_is_named(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention_flash, "library", lambda: Library(Kernels(run, run), None))
    facts = (cuda, torch.bfloat16, 64, 64)
    assert choose_backend(*facts).name == "flash"
    choice = choose_backend(*facts, ("softcap", "dropout"))
    assert choice.name == "sdpa" and "no softcap, dropout" in choice.reason
    choice = choose_backend(*facts, ("window", "sinks"))
    assert choice.name == "varlen" and "takes no window" in choice.reason
    library = Library(Kernels(run, run, True), None)
    monkeypatch.setattr(attention_flash, "library", lambda: library)
    assert choose_backend(*facts, ("window", "sinks")).name == "flash"
    with pytest.raises(ValueError, match="no dropout"):
        run("naive", ScoreOptions(dropout=0.5))


def test_rows_cut_in_zigzag_have_no_options():
    batch = hand_batch([[1] * 4], 4, 1)
    meta = attention_metadata(batch, "sdpa", context=ContextGroup(1, 0, ""))._replace(keys=())
    q, k, v, _ = (x[:4] for x in inputs())
    with pytest.raises(ValueError, match="cut in zigzag has no window"):
        attention(q, k, v, meta, options=ScoreOptions(window=2))


@pytest.mark.parametrize("options", [ScoreOptions(dropout=0.5), ScoreOptions(0, 0.7, 0.5)])
def test_dropout_keeps_the_mean_and_differs_between_calls(options):
    options = options._replace(window=4)
    torch.manual_seed(0)
    first, second = run("sdpa", options)[0], run("sdpa", options)[0]
    assert not torch.equal(first, second)
    mean = torch.stack([run("sdpa", options)[0] for _ in range(400)]).mean(0)
    # 400 draws of terms of size one, each with a deviation of one
    torch.testing.assert_close(
        mean, run("naive", options._replace(dropout=0.0))[0], rtol=0, atol=0.5
    )
