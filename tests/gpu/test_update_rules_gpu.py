"""Update rules on CUDA: nothing waits for the device, a captured update has the bits of an eager
one, AdamW's kernel is its specification, bits of torch's AdamW are those of float32 copies of all
gradients, state and temporary memory stay within bounds; prints milliseconds of an update."""

import functools
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from packgraph.train import optimizer as optimizers
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.optimizer import TINY, Optimizer
from packgraph.train.spikes import Limits
from packgraph.train.updates import adamw, host_state
from packgraph.train.updates.adamw import (
    GROUP,
    MEANS,
    Numbers,
    fused_adamw,
    naive_adamw,
    narrow_adamw,
)
from packgraph.train.updates.host_state import PIECE, HostState
from packgraph.train.updates.rule import slices_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
NAMES = ["adamw", "muon", "adamw8bit", "adafactor"]
MOST_BYTES = {"adamw": 8.1, "muon": 8.1, "adamw8bit": 2.1, "adafactor": 0.1}  # of an element
# Bytes: scalars and sums of norms; a float32 copy of a group, and scalars.
MOST_TEMPORARY = {("adamw", True): 2**20, ("adamw", False): 5 * GROUP}
SIZES = [1, 127, 4096, 4097, 2**20 + 128]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # a kernel rounds a product and a sum together


def made(
    name: str, layers: int, width: int, resident: int | None = 0, **more: Any
) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    blocks = [nn.Linear(width, 3 * width, device=CUDA) for _ in range(layers)]
    model = nn.ModuleDict(
        {"embed_tokens": nn.Embedding(50 * width, width, device=CUDA), "up": nn.ModuleList(blocks)}
    ).bfloat16()
    options = OptimizerConfig(name=name, weight_decay=0.1, **more)  # type: ignore[arg-type]
    return model, Optimizer(model.named_parameters(), options, resident=resident or 0)


def draw(optimizer: Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for span in optimizer.flat.spans:
        span.gradients.normal_()


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_update_has_the_bits_of_an_eager_one(name: str) -> None:
    ends = []
    for captured in (False, True):
        model, optimizer = made(name, 3, 64)
        optimizer.watch()
        graph = torch.cuda.CUDAGraph()
        for step in range(6):
            draw(optimizer, step)
            optimizer.set_learning_rate(1e-3 * (step + 1))
            loss = torch.full((), float("nan") if step == 4 else 1.0, device=CUDA)
            if step == 2 and captured:
                static = loss.clone()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    optimizer.update(static)
            if step >= 2 and captured:
                static.copy_(loss)
                graph.replay()
            else:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                optimizer.update(loss)
                torch.cuda.set_sync_debug_mode("default")
        ends.append({**dict(model.named_parameters()), **optimizer.state_tensors()})
    assert ends[0]["step"] == 5  # one was blocked
    assert not [key for key in ends[0] if not torch.equal(ends[0][key], ends[1][key])]


@pytest.mark.parametrize("size", [1, 127, 128, 2**20, 2**25, 2**25 + 3])
def test_the_norm_of_bfloat16_has_the_bits_of_that_of_float32(size: int) -> None:
    values = torch.randn(size, device=CUDA).bfloat16()
    (found,) = torch._foreach_norm([values], 2, dtype=torch.float32)
    assert torch.equal(found, torch._foreach_norm([values.float()])[0])


def flats_of(size: int, dtype: torch.dtype) -> list[Tensor]:
    """Parameters, gradients, masters and means, and 128 elements behind each."""
    torch.manual_seed(0)
    masters, means = (torch.randn(size + 128, device=CUDA) for _ in range(2))
    gradients = torch.randn(size + 128, device=CUDA).to(dtype)
    squares = torch.rand(size + 128, device=CUDA) + 0.01  # an update is 0.1 at most
    return [masters.to(dtype), gradients, masters, means * 0.1, squares]


def numbers_of(steps: int, blocked: float = 0.0) -> Numbers:
    values = (1e-2, float(steps), 0.3, blocked)
    return Numbers.of(*(torch.tensor(v, device=CUDA) for v in values), OptimizerConfig())


@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_of_adamw_is_its_specification(
    size: int, dtype: torch.dtype, decays: bool
) -> None:
    config = OptimizerConfig(weight_decay=0.1)
    ends = []
    for update in (narrow_adamw, naive_adamw):
        flats = flats_of(size, dtype)
        first = [flat.clone() for flat in flats]
        for steps in range(3):
            numbers = numbers_of(steps)
            update(*(flat[:size] for flat in flats), numbers, config, decays=decays)
        parameters, gradients, masters, *_ = flats
        assert torch.equal(parameters[:size], masters[:size].to(dtype))
        assert torch.equal(gradients, first[1])
        for flat, before in zip(flats, first, strict=True):
            assert torch.equal(flat[size:], before[size:])
        for number in (2, 3, 4):
            assert not torch.equal(flats[number][:size], first[number][:size])
        ends.append(flats[2:])
    for found, expected in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("size", SIZES)
def test_a_blocked_kernel_changes_nothing(size: int) -> None:
    """Whatever the gradients are; where it is not blocked, they spoil everything."""
    for blocked in (1.0, 0.0):
        flats = flats_of(size, torch.bfloat16)
        flats[1].fill_(float("nan"))
        first = [flat.clone() for flat in flats]
        narrow_adamw(*flats, numbers_of(3, blocked), OptimizerConfig(), decays=True)
        for number in (0, 2, 3, 4):
            assert torch.equal(flats[number], first[number]) == bool(blocked)


def test_bits_of_the_kernel_do_not_depend_on_where_a_span_is_cut() -> None:
    size, config, ends = 2**20 + 128, OptimizerConfig(weight_decay=0.1), []
    for piece in (size, 2**18, 128 * 7):
        flats = flats_of(size, torch.bfloat16)
        for start in range(0, size, piece):
            part = slice(start, min(start + piece, size))
            narrow_adamw(*(flat[part] for flat in flats), numbers_of(3), config, decays=True)
        ends.append(flats)
    for flats in ends[1:]:
        for found, expected in zip(flats, ends[0], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("buffers", [2, 3])
def test_state_on_the_host_has_the_bits_of_that_on_the_device(
    buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stays on the device: nothing, a part, what is no multiple of anything, all."""
    monkeypatch.setattr(host_state, "BUFFERS", buffers)
    kind = functools.partial(HostState, piece=128 * 99)
    first: dict[str, Tensor] | None = None
    for resident in (None, 0, 12 * 64 * 64 * 3, 1_234_567, 2**30):
        with mock.patch.object(optimizers, "HostState", kind):
            model, optimizer = made("adamw", 3, 64, resident, offload=resident is not None)
            optimizer.watch()
            for step in range(6):
                optimizer.set_limits(Limits(norm=0.0) if step == 4 else Limits())
                draw(optimizer, step)
                optimizer.step(1e-3 * (step + 1), torch.ones((), device=CUDA))
        state = {**dict(model.named_parameters()), **optimizer.state_tensors()}
        where = optimizer.host_state
        if where is not None:
            here = [value for key, value in state.items() if key.endswith(".exp_avg")]
            assert any(value.is_cuda for value in here) == (where.resident > 0)
            assert any(value.is_pinned() for value in here) == (where.moved > 0)
        end = {key: value.detach().cpu() for key, value in state.items()}
        first = end if first is None else first
        assert first.keys() == end.keys() and end["step"] == 5
        assert not [key for key in first if not torch.equal(first[key], end[key])]


def _never(parameters: Tensor) -> bool:
    return False


def test_adamw_has_the_bits_of_float32_copies_of_all_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three groups, the last of them short, by torch's AdamW."""
    monkeypatch.setattr(adamw, "in_one_kernel", _never)
    _, optimizer = made("adamw", 28, 640)
    spans = optimizer.flat.spans
    assert 2 * GROUP < sum(span.parameters.numel() for span in spans) < 4 * GROUP
    options, rate = OptimizerConfig(weight_decay=0.1), torch.tensor(1e-3, device=CUDA)
    masters = [span.own_parameters.detach().float() for span in spans]
    means = [[torch.zeros_like(master) for master in masters] for _ in MEANS]
    for step in range(3):
        draw(optimizer, step)
        norm = optimizer.step(1e-3)
        copies = [span.own_gradients.float() for span in spans]
        norms = torch._foreach_norm(
            [
                c[part]
                for c, span in zip(copies, spans, strict=True)
                for part in slices_of(span.own_gradients.numel(), PIECE)
            ]
        )
        assert torch.equal(norm, torch.stack(norms).square().sum().sqrt())
        torch._foreach_mul_(copies, (options.clip_norm / (norm + TINY)).clamp(max=1.0))
        ordinal = torch.full((), step + 1.0, device=CUDA)
        for number, span in enumerate(spans):
            flats = [[masters[number]], [copies[number]], *([m[number]] for m in means)]
            fused_adamw(*flats, options, rate, ordinal, None, decays=span.decays)
    state = optimizer.state_tensors()
    for number, span in enumerate(spans):
        found = {"master": masters[number]} | {k: m[number] for k, m in zip(MEANS, means)}
        for member in span.members:
            for key, flat in found.items():
                assert torch.equal(state[f"{member.name}.{key}"], span.part(member, flat))
            weight = span.part(member, masters[number])
            assert torch.equal(member.parameter, weight.bfloat16())


@pytest.mark.parametrize(("name", "fused"), [("adamw", False), *((name, True) for name in NAMES)])
def test_an_update_of_half_a_billion_parameters(
    name: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fused: AdamW of bfloat16 weights is one kernel."""
    if not fused:
        monkeypatch.setattr(adamw, "in_one_kernel", _never)
    gc.collect()
    before = torch.cuda.memory_allocated()
    model, optimizer = made(name, 28, 2048)
    elements = sum(value.numel() for value in model.parameters())
    held = torch.cuda.memory_allocated() - before
    state = held / elements - 2 - 4 - 4  # weights, gradients, masters
    assert state < MOST_BYTES[name]
    draw(optimizer, 0)
    for _ in range(3):
        optimizer.step(1e-3)
    torch.cuda.reset_peak_memory_stats()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(5):
        optimizer.step(1e-3)
    end.record()
    torch.cuda.synchronize()
    temporary = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    assert temporary < MOST_TEMPORARY.get((name, fused), 2**30)
    way = name if fused else f"{name} in pieces"
    print(
        f"{way}: {elements / 1e6:.0f}M parameters, {begin.elapsed_time(end) / 5:.2f} ms an "
        f"update, {state:.2f} bytes of state an element, {temporary / 2**20:.0f} MiB of temporaries"
    )
