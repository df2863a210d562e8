"""What docs/guides/limits.md says holds: every sentence names its tests, and those that no other
file has are here."""

import ast
import contextlib
import copy
import dataclasses
import functools
import json
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from autogradkit import Returns, assert_same, gradients, sample, twins
from limitskit import HELD, MEASURED, ROOT, sentences
from statekit import One, X, quietly
from threadkit import Wide, looking, together, whole
from torch import Tensor, nn

from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import control, graph
from packgraph.models.config import DecoderConfig, ExpertConfig, LatentConfig, MambaConfig
from packgraph.ops import grouped_gemm
from packgraph.train.config.command_line import all_options
from packgraph.train.config.presets import preset
from packgraph.train.config.reading import ValueProblem, convert

RESULTS = ROOT / "benchmarks" / "results"

# ---- every sentence and what holds it


def test_every_sentence_has_an_entry_and_no_entry_is_stale() -> None:
    found = {
        sentence: [key for key in HELD if sentence.startswith(key)] for sentence in sentences()
    }
    assert not [sentence for sentence, keys in found.items() if len(keys) != 1]
    assert sorted(key for keys in found.values() for key in keys) == sorted(HELD)
    assert all(sentence.endswith(".") for sentence in found)


@pytest.mark.parametrize("key", HELD)
def test_what_holds_a_sentence_exists(key: str) -> None:
    assert HELD[key] or HELD[key] is MEASURED
    for file, names in HELD[key].items():
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert names and all(name.startswith("test_") for name in names)
        assert set(names) <= known, file


# ---- trainer and experts


def test_the_options_that_are_named_exist() -> None:
    (named,) = [text for text in sentences() if text.startswith("The trainer knows")]
    ways = re.findall(r"`(?:--parallel)?\.(\w+)`", named)
    assert sorted(ways) == ["chunks", "cp", "dp", "ep", "pp", "shard", "tp"]
    known = all_options(preset("qwen3-tiny"))
    assert {*(f"--parallel.{way}" for way in ways), "--graph.optimizer"} <= set(known)


@pytest.mark.parametrize(
    ("capability", "dtype", "by_torch"),
    [
        ((9, 0), torch.bfloat16, True),
        ((10, 0), torch.bfloat16, True),
        ((12, 0), torch.bfloat16, True),
        ((8, 0), torch.bfloat16, False),
        ((9, 0), torch.float32, False),
        ((10, 0), torch.float16, False),
    ],
    ids=str,
)
def test_which_gpus_take_the_grouped_product_of_torch(
    capability: tuple[int, int],
    dtype: torch.dtype,
    by_torch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    rows: Any = types.SimpleNamespace(device=torch.device("cuda"), dtype=dtype, is_cuda=True)
    assert grouped_gemm._by_torch(rows, 64, 128) is by_torch
    assert grouped_gemm.on_hopper(rows.device) is (capability[0] == 9)


def test_the_other_kernel_of_experts_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = types.SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.float32, is_cuda=True
    )
    monkeypatch.setattr(grouped_gemm, "HAS_TRITON", True)
    assert grouped_gemm._by_kernel(rows)
    monkeypatch.setattr(grouped_gemm, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="needs Triton"):
        grouped_gemm._by_kernel(rows)


def test_rows_are_of_at_most_four_gpus_and_of_hybrids_on_at_most_two() -> None:
    """A row says its device and, where there were several, how many ranks."""
    rows = [
        json.loads(line)
        for path in sorted(RESULTS.rglob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    on_gpus = [row for row in rows if str(row.get("device")).startswith("NVIDIA")]
    assert {row["device"] for row in on_gpus} == {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}
    assert {row.get("ranks", 1) for row in on_gpus} == {1, 2, 4}
    hybrids = [row.get("ranks", 1) for row in on_gpus if "hybrid" in str(row.get("model"))]
    assert hybrids and max(hybrids) <= 2


# ---- backward


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("shared", [True, False], ids=["one layer", "a layer each"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_backward_for_each_output_needs_the_graph_kept(
    warmup: int, shared: bool, kept: bool
) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.first(x)
            return hidden.tanh(), (hidden.sigmoid() if shared else self.second(x))

    def common(model: nn.Module, number: int) -> None:
        first, second = model(sample(number))
        (first.sum() + second.sum()).backward()

    eager, graphed = twins(Two, calls=0, warmup=warmup)
    for number in range(2):
        for model in (eager, graphed):
            quietly(common, model, number)
    for model in (eager, graphed):
        first, second = model(sample(3))
        quietly(first.sum().backward, None, kept)
        with (
            contextlib.nullcontext()
            if kept or (model is eager and not shared)
            else pytest.raises(RuntimeError, match="a second time")
        ):
            quietly(second.sum().backward)
    if kept:
        assert_same(gradients(eager), gradients(graphed))
    for model in (eager, graphed):
        model.zero_grad()
        common(model, 4)
    assert_same(gradients(eager), gradients(graphed))


def test_eight_sets_of_outputs_are_captured_and_others_run_eagerly() -> None:
    class Four(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [layer(x) for layer in self.layers]

    def step(model: nn.Module, chosen: int) -> None:
        outs = model(sample(chosen))
        used = [out.square().sum() for number, out in enumerate(outs) if chosen >> number & 1]
        sum(used[1:], used[0]).backward()

    eager, graphed = twins(Four, calls=0, warmup=1)
    again = "another set of outputs got gradients than any captured backward starts from"
    counts = []
    for chosen in (15, *range(1, 12), *range(1, 12)):  # the first is warm-up
        step(eager, chosen)
        quietly(step, graphed, chosen)
        counts.append(graphed.stats.fallbacks[again])
        assert_same(gradients(eager), gradients(graphed))
    # Seven beside the one of warm-up; of the second round only the others are eager again.
    assert counts == [0, *range(1, 12), *[11] * 7, 12, 13, 14, 15]
    assert graphed.stats.captured == 8


class Chained(nn.Module):
    """A loss, and what it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        return self.second(hidden).square().sum(), hidden


def test_an_inner_output_gets_the_gradients_of_the_callers_code_only() -> None:
    eager, graphed = twins(Chained, warmup=1)

    def both(model: nn.Module) -> tuple[Tensor, ...]:
        loss, hidden = model(sample(5))
        wanted = [hidden, model.get_parameter("first.bias")]
        return torch.autograd.grad(loss + 3 * hidden.sum(), wanted)

    expected, first, second = both(eager), quietly(both, graphed), both(graphed)
    assert graphed.stats.replayed == 4 and graphed.stats.captured == 2
    for found in (first, second):  # by running the forward again, and by a replay
        assert torch.equal(found[0], torch.full((3, 4), 3.0))
        assert torch.equal(found[1], expected[1])
    assert not torch.equal(expected[0], first[0])  # which has the share of the loss, too


# ---- outputs and effects

OVERLAPPING = {
    "a view": lambda m, y, x: y.t(),
    "a view of an argument": lambda m, y, x: x[1:],
    "a parameter": lambda m, y, x: m.linear.weight,
    "a buffer": lambda m, y, x: m.table,
}


@pytest.mark.parametrize("make", OVERLAPPING.values(), ids=OVERLAPPING)
def test_a_clone_of_what_shares_memory_is_captured(
    make: Callable[[nn.Module, Tensor, Tensor], Tensor],
) -> None:
    def replays(copied: bool) -> int:
        def forward(m: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            shared = make(m, y, x)
            return y, shared.clone() if copied else shared

        torch.manual_seed(0)
        eager = Returns(forward)
        eager.register_buffer("table", torch.ones(4))
        graphed = graph(copy.deepcopy(eager), warmup=1, strict=True)
        for number in range(4):
            outs = [model(sample(number)) for model in (eager, graphed)]
            for first, _ in outs:
                first.square().sum().backward()
            assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))
        return graphed.stats.replayed

    with pytest.raises(CaptureError, match=r"shares? .*memory") as caught:
        replays(copied=False)
    assert ".clone()" in caught.value.remedy
    assert replays(copied=True) == 3


def test_an_attribute_that_keeps_its_value_may_be_assigned() -> None:
    """What a replay does not do makes no difference then, and a value that was changed meanwhile is
    noticed."""

    def forward(module: Any, x: Tensor) -> Tensor:
        module.mode = "train"
        return module.linear(x)

    graphed = graph(One(forward), warmup=1)
    for _ in range(3):
        graphed(X).sum().backward()
    assert graphed.stats.replayed == 2
    graphed.module.mode = "another"
    quietly(graphed, X)
    assert graphed.module.mode == "train"


# ---- threads


def test_who_calls_the_module_itself_may_meet_its_capture() -> None:
    """Parameters have stand-ins while a module is captured, which whoever calls what
    `packgraph.graph` returned waits for."""
    asked, answered = (threading.Semaphore(0) for _ in range(2))
    seen = list[int]()

    @looking
    def look() -> None:
        if threading.current_thread() is capturing:
            asked.release()
            assert answered.acquire(timeout=60)

    module = One(lambda m, x: m.linear(look(x)))
    real, graphed = id(module.linear.weight), graph(module, warmup=0, strict=True)
    capturing = threading.Thread(target=lambda: graphed(X), daemon=True)
    capturing.start()
    while capturing.is_alive():
        if asked.acquire(timeout=0.01):
            seen.append(id(module.linear.weight))
            answered.release()
    assert graphed.stats.captured == 1
    assert any(weight != real for weight in seen) and id(module.linear.weight) == real


def test_several_threads_cost_a_copy_of_gradients() -> None:
    torch.manual_seed(0)
    graphed = graph(Wide(8), warmup=1)
    for seed in range(3):
        graphed(whole(4, seed, 8)).sum().backward()

    def taken() -> int:
        """Bytes of gradients and of what graphs add to."""
        buffers = control(graphed).capturer._buffers.made.values()
        held = [*(buffer.tensor for buffer in buffers), *(p.grad for p in graphed.parameters())]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in held}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    alone = taken()
    assert alone == sum(p.numel() * p.element_size() for p in graphed.parameters())
    assert not together(lambda: graphed(whole(4, 3, 8)).sum().backward())
    assert taken() == 2 * alone


def test_one_module_is_captured_at_a_time() -> None:
    lock = threading.Lock()
    inside, most = [0], [0]

    @looking
    def look() -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        with lock:
            inside[0] -= 1

    def forward(module: Any, x: Tensor) -> Tensor:
        return module.linear(look(x))

    plain = [One(forward) for _ in range(3)]
    assert not together(*[functools.partial(module, X) for module in plain])
    assert most[0] > 1  # eager calls meet
    most[0] = 0
    graphs = [graph(One(forward), warmup=0, strict=True) for _ in range(3)]
    # Calls would replay, too, beside the next one's capture.
    captures = [functools.partial(control(module).build, [(X,)]) for module in graphs]
    assert not (errors := together(*captures)), errors
    assert most[0] == 1 and all(module.stats.captured == 1 for module in graphs)


# ---- sizes, counts

SHAPE = DecoderConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    latent=LatentConfig(kv_rank=8, query_rank=8),
    experts=ExpertConfig(count=4, per_token=1, intermediate_size=8),
    pattern="M*E",
    mamba=MambaConfig(num_heads=4),
)
OTHER_BOUNDS = {
    "vocab_size": 2**24,
    "num_layers": 16_384,
    "max_position_embeddings": 2**62,
    "latent.scaling.original_positions": 2**62,
}
# What has to grow with a size, so that only its bound is in the way.
GROWS_TOO = {
    "experts.per_token": ["count"],
    "experts.groups": ["count"],
    "experts.groups_kept": ["count", "groups"],
    "mamba.groups": ["num_heads"],
}


def whole_numbers(section: Any, prefix: str = "") -> Iterator[str]:
    """The names of all whole numbers of a configuration, with dots."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from whole_numbers(value, f"{prefix}{field.name}.")
        elif type(value) is int:
            yield prefix + field.name


def replaced(section: Any, path: str, value: int, others: list[str]) -> Any:
    """`section` with another whole number, and with the same one for `others` beside it."""
    name, _, rest = path.partition(".")
    if rest:
        inner = replaced(getattr(section, name), rest, value, others)
        return dataclasses.replace(section, **{name: inner})
    return dataclasses.replace(section, **dict.fromkeys([name, *others], value))


@pytest.mark.parametrize("path", list(whole_numbers(SHAPE)))
def test_sizes_of_models_are_bounded(path: str) -> None:
    bound, others = OTHER_BOUNDS.get(path, 262_144), GROWS_TOO.get(path, [])
    with pytest.raises(ValueError, match=f"{path} is {bound + 2}, must be at most {bound:,}"):
        replaced(SHAPE, path, bound + 2, others)
    said = ""
    try:
        replaced(SHAPE, path, bound, others)
    except ValueError as error:  # such as heads that do not divide
        said = str(error)
    assert "must be at most" not in said


@pytest.mark.parametrize("from_text", [True, False])
def test_whole_numbers_are_below_two_to_the_63(from_text: bool) -> None:
    def given(number: int) -> int | str:
        return str(number) if from_text else number

    assert convert(given(2**63 - 1), int, from_text=from_text) == 2**63 - 1
    for number in (2**63, -(2**63)):
        with pytest.raises(ValueProblem, match=r"below 2\^63"):
            convert(given(number), int, from_text=from_text)


# ---- what is not watched


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Time zones may be set, and are put back."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield patch
    time.tzset()


FACTOR = [1.0]


@torch.library.custom_op("test_limits::times_factor", mutates_args=())
def times_factor(x: Tensor) -> Tensor:
    """As the code of an extension: a graph on a GPU has what it computed."""
    return x * FACTOR[0]


times_factor.register_fake(torch.empty_like)
times_factor.register_autograd(lambda ctx, gradient: gradient * FACTOR[0])


def test_what_an_operation_reads_is_as_it_was_at_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    graphed = graph(One(lambda m, x: times_factor(m.linear(x))), warmup=1, strict=True)
    for _ in range(2):
        graphed(X).sum().backward()
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", [2.0])
    graphed.zero_grad()
    graphed(X).sum().backward()
    assert graphed.stats.replayed == 2 and not graphed.stats.recaptures
    assert torch.equal(graphed.module.linear.bias.grad, torch.full((4,), 3.0))


@pytest.mark.parametrize("what", ["the time", "a file", "the seed", "a print"])
def test_what_library_calls_do_and_return_is_not_captured(
    what: str, tmp_path: Path, clock: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "number"
    file.write_text("1.0")
    torch.manual_seed(1)
    reads: dict[str, Callable[[Any], float]] = {
        "the time": lambda m: time.localtime(0).tm_hour + 1,
        "a file": lambda m: float(file.read_text()),
        "the seed": lambda m: torch.initial_seed(),
        "a print": lambda m: print("called") or 1.0,
    }
    read = reads[what]
    graphed = graph(One(lambda m, x: m.linear(x) * read(m)), warmup=0)
    quietly(graphed, X)
    clock.setenv("TZ", "UTC-5")
    time.tzset()
    file.write_text("2.0")
    torch.manual_seed(2)
    printed = capsys.readouterr().out
    assert torch.equal(quietly(graphed, X), graphed.module(X))
    assert graphed.stats.fallbacks["capture failed"] == 2
    assert capsys.readouterr().out == 2 * printed == ("called\n" * 2 if what == "a print" else "")


@pytest.mark.parametrize("depth", [1, 9])
def test_objects_and_classes_are_watched_whatever_their_depth(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def factor(module: Any) -> float:
        found = module.held
        while hasattr(found, "inner"):
            found = found.inner
        return found.scale * module.linear.scale

    last = held = types.SimpleNamespace(scale=1.0)
    for _ in range(depth - 1):
        held = types.SimpleNamespace(inner=held)
    monkeypatch.setattr(nn.Linear, "scale", 1.0, raising=False)
    graphed = graph(One(lambda m, x: m.linear(x) * factor(m), held=held), warmup=0)
    quietly(graphed, X)
    for recaptures, (changed, value) in enumerate([(last, 2.0), (nn.Linear, 3.0)], 1):
        monkeypatch.setattr(changed, "scale", value)
        assert torch.equal(quietly(graphed, X), graphed.module(X))
        assert graphed.stats.recaptures.total() == recaptures == graphed.stats.replayed - 1


WRITES = {
    "data": lambda tensor: tensor.data.mul_(3),
    "numpy": lambda tensor: tensor.detach().numpy().__imul__(3),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("which", ["argument", "output", "parameter"])
def test_what_autograd_cannot_see_between_forward_and_backward_is_not_seen(
    which: str, write: Callable[[Tensor], object]
) -> None:
    """Graphs have copies of arguments and outputs, but no copies of parameters."""

    def backward(model: nn.Module, changed: bool) -> Tensor:
        model.zero_grad()
        x = X.clone()
        out = model(x)
        if changed:
            weight = model.get_parameter("linear.weight")
            write({"argument": x, "output": out, "parameter": weight}[which])
        out.sum().backward()
        return model.get_parameter("linear.bias" if which == "output" else "first").grad

    def make() -> One:
        module = One(lambda m, x: m.linear(x * m.first).exp())
        module.first = nn.Parameter(torch.ones(4))
        return module

    eager, graphed = make(), graph(make(), warmup=1)
    expected = backward(eager, changed=False)
    for _ in range(3):
        assert torch.equal(backward(graphed, changed=False), expected)
    found, wanted = backward(graphed, changed=True), backward(eager, changed=True)
    assert graphed.stats.replayed == 3 and not torch.equal(wanted, expected)
    assert torch.equal(found, wanted if which == "parameter" else expected)


# ---- modes


def test_a_backward_under_autocast_runs_its_forward_again() -> None:
    calls = list[int]()
    look = looking(lambda: calls.append(1))
    graphed = graph(One(lambda m, x: m.linear(look(x)).tanh()), warmup=1)
    for _ in range(3):
        graphed(X).sum().backward()
    assert graphed.stats.replayed == 2
    before = len(calls)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        out = graphed(X).sum()
    out.backward()
    assert len(calls) == before + 1  # by the replay
    out = graphed(X).sum()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.warns(PackgraphWarning, match="the backward runs under autocast"),
    ):
        out.backward()
    assert len(calls) == before + 3 and graphed.stats.replayed == 4
