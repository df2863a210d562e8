"""AdamW with running means of eight bits, held against a naive twin and against torch's AdamW."""

import pytest
import torch
from torch import Tensor
from updatekit import Small

from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.optimizer import Optimizer
from packgraph.train.updates import adamw8bit
from packgraph.train.updates.adamw8bit import BLOCK, CodeTable, Quantized, parts_in_blocks

CPU = torch.device("cpu")
TABLES = {"signed": CodeTable.signed(CPU), "unsigned": CodeTable.unsigned(CPU)}
OPTIONS = OptimizerConfig(name="adamw8bit", weight_decay=0.25, clip_norm=None)


def naive(values: Tensor, table: CodeTable) -> Tensor:
    """Values after quantisation: of each block the nearest of all products."""
    found = torch.empty_like(values)
    for start in range(0, values.numel(), BLOCK):
        block = values[start : start + BLOCK]
        largest = block.abs().max()
        if largest < adamw8bit.LEAST_SCALE:
            found[start : start + BLOCK] = 0
            continue
        nearest = (block[:, None] / largest - table.values).abs().argmin(-1)
        found[start : start + BLOCK] = table.values[nearest] * largest
    return found


def drawn(size: int, kind: str) -> Tensor:
    """Heavy-tailed, of very different scales in different blocks."""
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator) ** 5
    values *= (
        10.0
        ** torch.randint(-12, 3, (-(-size // 100),), generator=generator).repeat_interleave(100)[
            :size
        ]
    )
    return values if kind == "signed" else values.square()


@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_sorted_and_end_at_one(kind: str) -> None:
    values = TABLES[kind].values
    assert len(values) == 255 and bool((values.diff() > 0).all()) and values[-1] == 1
    if kind == "signed":
        assert torch.equal(values, -values.flip(0)) and values[127] == 0
    else:
        assert 0 < values[0] < 1e-6
    # the paper's error: a step is at most a tenth of what it is near, from a hundredth up
    large = values[values > 0.01]
    assert float((large.diff() / large[:-1]).max()) < (0.3 if kind == "signed" else 0.15)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("size", [128, 256, 1000 - 1000 % 128, 4096])
def test_quantised_values_are_the_nearest_and_stay_so(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw8bit.slices_of, "__defaults__", (512,))
    values, quantized = drawn(size, kind), Quantized(size, TABLES[kind])
    assert not quantized.values(slice(0, size)).any()
    for part in parts_in_blocks(size):
        quantized.set(part, values[part])
    found = torch.cat([quantized.values(part) for part in parts_in_blocks(size)])
    assert torch.equal(found, naive(values, TABLES[kind]))
    again = Quantized(size, TABLES[kind])
    for part in parts_in_blocks(size):
        again.set(part, found[part])
    assert torch.equal(again.codes, quantized.codes)
    assert torch.equal(again.scales, quantized.scales)


def test_values_too_small_for_a_scale_are_zero_again() -> None:
    for table in TABLES.values():
        quantized = Quantized(256, table)
        quantized.set(slice(0, 256), torch.full((256,), 1e-35))
        assert not quantized.values(slice(0, 256)).any() and not quantized.scales.any()


def test_a_square_never_becomes_zero_beside_a_large_one() -> None:
    quantized, values = Quantized(256, TABLES["unsigned"]), torch.full((256,), 1e-12)
    values[3] = 1.0
    quantized.set(slice(0, 256), values)
    assert float(quantized.values(slice(0, 256)).min()) > 1e-7


def test_it_equals_a_naive_twin_bit_by_bit_and_torch_at_first() -> None:
    ours, twin, theirs = Small(), Small(), Small()
    optimizer = Optimizer(ours.named_parameters(), OPTIONS)
    spans = [span for span in optimizer.flat.spans if span.decays]
    names = {member.name for span in spans for member in span.members}
    state = {key: [torch.zeros_like(s.own_gradients) for s in spans] for key in ("m", "v")}
    named, torchs = dict(twin.named_parameters()), dict(theirs.named_parameters())
    torch_adamw = torch.optim.AdamW(
        [torchs[name] for name in sorted(names)], betas=OPTIONS.betas, weight_decay=0.25
    )
    for step, rate in enumerate((1e-2, 5e-2, 1e-3, 2e-2), start=1):
        optimizer.zero_grad()
        for name, gradient in optimizer.gradients().items():
            gradient.normal_()
            torchs[name].grad = gradient.clone()
        gradients = {name: value.clone() for name, value in optimizer.gradients().items()}
        optimizer.step(rate)
        naive_step(spans, state, named, gradients, step, rate)
        for name in names:
            assert torch.equal(dict(ours.named_parameters())[name], named[name]), (step, name)
        torch_adamw.param_groups[0]["lr"] = rate
        torch_adamw.step()
        for name in names if step == 1 else ():  # nothing was quantised before
            torch.testing.assert_close(named[name], torchs[name], rtol=1e-5, atol=1e-6)
    found = {n: t for n, t in optimizer.state_tensors().items() if n.endswith(".exp_avg")}
    for number, span in enumerate(spans):
        for member in span.members:
            expected = span.part(member, state["m"][number])
            assert torch.equal(found[f"{member.name}.exp_avg"], expected)
    assert found["norm.weight.exp_avg"].any()  # AdamW's


def naive_step(spans, state, named, gradients, step, rate):
    """One step of the twin, span by span, state quantised at its end."""
    rate, ordinal = torch.tensor(rate), torch.tensor(float(step))
    beta1, beta2 = OPTIONS.betas
    for number, span in enumerate(spans):
        gradient = torch.zeros_like(span.own_gradients)
        for member in span.members:
            gradient[member.place] = gradients[member.name].flatten()
        mean = state["m"][number].lerp(gradient, 1 - beta1)
        square = (state["v"][number] * beta2).addcmul(gradient, gradient, value=1 - beta2)
        divisor = (square / (1 - beta2**ordinal)).sqrt() + OPTIONS.eps
        for member in span.members:
            weight = named[member.name].detach()
            change = (mean / divisor)[member.place].view_as(weight)
            kept = weight * (1 - rate * OPTIONS.weight_decay)
            weight.copy_(kept - change * (rate / (1 - beta1**ordinal)))
        state["m"][number] = naive(mean, TABLES["signed"])
        state["v"][number] = naive(square, TABLES["unsigned"])


def test_vectors_stay_in_float32() -> None:
    optimizer = Optimizer(Small().named_parameters(), OPTIONS)
    eight, full = optimizer._rules[1], optimizer._rules[0]
    assert {n.rsplit(".", 1)[0] for n in full.state_tensors()} == {
        "up.bias",
        "norm.weight",
        "norm.bias",
        "down.bias",
    }
    assert "stack.exp_avg" in eight.state_tensors()
