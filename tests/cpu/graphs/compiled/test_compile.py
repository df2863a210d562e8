"""torch.compile inside regions: one piece of code per kind of layer and bucket, eager and replayed
alike, bit for bit.

With torch's tracing compiler (`aot_eager`), which has all that matters here but the kernels; one
test generates code. Nearly all time goes into torch's tracing, once for every piece and bucket:
what is not about the real model compiles a smaller one (`compilekit.Packed`), and one module runs
its code both ways.
"""

import dataclasses
import warnings

import pytest
import torch
from bench_models import SHAPES, draw_batches
from compilekit import Packed
from graphkit import Stages, Toy, make_toy, poison_free_slots, toy_inputs, toy_loss, train
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from tracekit import differences

import packgraph
from packgraph.graphs.checks.host_sync import CodeWatcher, compiled_stages
from packgraph.graphs.compiled.compiler import CompiledCode, refuse_unsafe_graph
from packgraph.graphs.errors import PackgraphWarning, traced_line
from packgraph.graphs.fallback import CAPTURE_FAILED
from packgraph.graphs.stages import Stage
from packgraph.graphs.step import GraphedStep
from packgraph.models.decoder import DecoderModel
from packgraph.packing.capacity import Capacity

pytestmark = pytest.mark.usefixtures("fresh_compiler")

TRACED = "aot_eager"
SMALL, LARGE = Capacity(32, 4), Capacity(64, 8)


def dense(dropout: float = 0.1, layers: int = 2) -> DecoderModel:
    return DecoderModel(
        dataclasses.replace(SHAPES["tiny"], num_layers=layers, dropout=dropout), seed=3
    )


def packs(capacity: Capacity, count: int):
    return draw_batches(capacity, count, 320, mean=9.0, sigma=0.8, seed=capacity.tokens)


def steps(model, microbatches, *, reason: str | None = None, poison: bool = False) -> list[Tensor]:
    """Two optimizer steps over all microbatches: losses, gradients accumulated over them, and the
    random state."""
    torch.manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for step in range(2):
        for batch in microbatches:
            if poison:
                poison_free_slots(model, step)
            if reason is None:
                loss = model(batch)
            else:
                with packgraph.eager(reason):
                    loss = model(batch)
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    return [*found, torch.get_rng_state()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))


def start_again(graphed, state) -> None:
    graphed.load_state_dict(state)
    for parameter in graphed.parameters():
        parameter.grad = None


@pytest.mark.parametrize(
    ("granularity", "replays_first"),
    [pytest.param("layer", False, marks=pytest.mark.slow), ("chunk", True)],
)
def test_replays_equal_the_same_code_run_eagerly_and_nearly_the_module_itself(
    granularity, replays_first
):
    """Traced code runs the module's operations; replays also with memory that nobody wrote being
    NaN."""
    batches = [batch for pair in zip(packs(SMALL, 3), packs(LARGE, 3)) for batch in pair]
    graphed = packgraph.graph(
        dense(),
        capacities=[SMALL, LARGE],
        warmup=1,
        strict=True,
        granularity=granularity,
        compile=TRACED,
    )
    state, found = {name: value.clone() for name, value in graphed.state_dict().items()}, {}
    for replayed in (replays_first, not replays_first):
        start_again(graphed, state)
        before = graphed.stats.replayed
        found[replayed] = steps(
            graphed, batches, reason=None if replayed else "compare", poison=replayed
        )
        assert graphed.stats.replayed - before == (11 if replayed else 0)
        assert (
            graphed.stats.compiled == 6
        )  # embed, a layer, head: once per bucket, whatever the number of layers
    assert same(found[False], found[True])
    assert graphed.stats.recompiles == {
        f"{name}: other inputs": 1 for name in ("embed", "attn, mlp", "head")
    }
    assert graphed.stats.compile_seconds > 0
    plain = steps(dense(), batches)
    for ours, theirs in zip(found[True], plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert torch.equal(plain[-1], found[True][-1]), "dropout draws as many numbers"


def test_graphs_hold_compiled_code_and_nothing_else():
    graphed = packgraph.graph(dense(), capacities=[SMALL], warmup=0, strict=True, compile=TRACED)
    for batch in packs(SMALL, 2):
        graphed(batch).backward()
    (variant,) = graphed.slots.all[0].variants.values()
    (region,) = variant.regions.values()
    forward = [node[0] for node in region.forward.program]
    assert all(isinstance(function, CompiledCode) for function in forward) and len(forward) == 4
    backward = [node[0] for node in region.backward.graph.program]
    assert sum(isinstance(function, CompiledCode) for function in backward) == 4
    others = {str(function) for function in backward if not isinstance(function, CompiledCode)}
    sums = {"aten.add_.Tensor", "aten.add.Tensor", "aten._foreach_add_.List", "aten.copy_.default"}
    assert others <= sums, "sums of gradients only"


def test_a_replay_does_not_come_by_python():
    graphed = packgraph.graph(Packed(), capacities=[SMALL], warmup=0, strict=True, compile=TRACED)
    first, second = packs(SMALL, 2)
    graphed(first).backward()
    graphed.capturer.program.compiler.run = None
    graphed(second).backward()
    assert graphed.stats.replayed == 2


def test_modules_with_lambdas_buffers_and_dropout():
    """The toy counts its calls in a buffer, in place, inside compiled code: once per call, never at
    a capture."""
    graphed = packgraph.graph(
        make_toy(layers=2), warmup=1, strict=True, compile=TRACED, granularity="layer"
    )
    state = {name: value.clone() for name, value in graphed.state_dict().items()}
    loop = {"steps": 3, "sizes": (8, 12), "in_flight": 2}
    replays = train(graphed, **loop, between=poison_free_slots)
    replayed, compiled = graphed.stats.replayed, graphed.stats.compiled
    assert replayed > 0
    start_again(graphed, state)
    with packgraph.eager("compare"):
        expected = train(graphed, **loop)
    assert not differences(expected, replays)
    assert (graphed.stats.replayed, graphed.stats.compiled) == (replayed, compiled), (
        "the same code, and no replay"
    )


def test_uncoloured_stages_are_not_compiled():
    graphed = packgraph.graph(
        make_toy(dropout=0.0),
        warmup=0,
        strict=True,
        compile=TRACED,
        scope=["attn"],
        granularity="layer",
    )
    toy_loss(graphed(*toy_inputs(8))).backward()
    assert graphed.stats.compiled == 2 and graphed.stats.replayed == 1


class Scaled(Stages):
    """Layers that multiply by a number of theirs. read: how a layer gets the number."""

    def __init__(self, layers: int, read) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        for number, layer in enumerate(self.layers):
            layer.number = number
        self.read = read

    def stages(self):
        # Bound methods of the layers, as a model of ours has them; nn.Linear has none, so they are
        # bound here.
        return [
            Stage("mlp", number, _Bound(layer, self.read).run)
            for number, layer in enumerate(self.layers)
        ]


class _Bound(nn.Module):
    def __init__(self, layer, read) -> None:
        super().__init__()
        self.layer, self.read = layer, read

    def run(self, state):
        return {**state, "x": self.read(self.layer, state["x"])}


def times_number(layer, x):
    return layer(x) * layer.number


def with_own_object(layer, x):
    return layer(x) * layer.held[1] if layer.held[0] is not None else x


def as_number(layer, x):
    return layer(x) * float(x.sum())


def as_shape(layer, x):
    return layer(x).roll(int(x.sum()))


def as_branch(layer, x):
    if x.sum() > 0:
        return layer(x)
    return x


def as_mask(layer, x):
    return layer(x) + x[x > 0].sum()


def asks_what_is_the_argument_itself(x):
    return 2.0 if x.contiguous().is_leaf else 3.0


def hooks_what_it_makes(x):
    (made := x * 2).register_hook(lambda gradient: gradient * 2)
    return made


@pytest.mark.parametrize("read", [asks_what_is_the_argument_itself, hooks_what_it_makes])
def test_what_a_replay_would_not_do_is_not_compiled(read):
    module = Scaled(1, lambda layer, x: layer(x) * read(x))
    graphed = packgraph.graph(module, warmup=0, strict=True, compile=TRACED)
    with pytest.raises(packgraph.CaptureError, match=r"Tensor\."):
        graphed(torch.randn(2, 4, requires_grad=True))


def test_code_that_fits_no_other_layer_is_counted():
    few = packgraph.graph(Scaled(3, times_number), warmup=0, strict=True, compile=TRACED)
    few(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert few.stats.compiled == 3 and few.stats.recompiles == {"mlp: other constants": 2}
    module = Scaled(6, times_number)
    many = packgraph.graph(module, warmup=0, strict=True, compile=TRACED)
    x = torch.randn(2, 4, requires_grad=True)
    with torch._dynamo.config.patch(recompile_limit=4):  # of other code
        assert torch.equal(many(x), module(x))
    assert many.stats.recompiles == {"mlp: other constants": 5} and many.stats.replayed == 1


@pytest.mark.parametrize("factors", [(0.5, 0.5, 0.5), (0.0, -0.0, 0.0)])
def test_layers_that_hold_objects_of_their_own_share_code(factors):
    module = Scaled(3, with_own_object)
    for layer, factor in zip(module.layers, factors, strict=True):
        layer.held = object(), factor
    graphed = packgraph.graph(module, warmup=0, strict=True, compile=TRACED)
    graphed(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert graphed.stats.compiled == len({str(factor) for factor in factors})


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (as_shape, "torch.compile cannot compile mlp|_local_scalar_dense waits for the device"),
        (as_branch, "torch.compile cannot compile mlp|Python branch on a tensor waits"),
        (as_mask, "the size of a tensor depends on numbers"),
    ],
)
def test_what_cannot_be_captured_is_named_and_changes_nothing(read, what):
    x = torch.randn(2, 4)
    strict = packgraph.graph(Scaled(2, read), warmup=1, strict=True, compile=TRACED)
    with pytest.raises(packgraph.CaptureError, match=what) as caught:
        strict(x)
    line = read.__code__.co_firstlineno + 1
    assert caught.value.where == f"{__file__}:{line} in {read.__name__}"

    torch.manual_seed(0)
    model = Scaled(2, read)
    lenient = packgraph.graph(model, warmup=1, compile=TRACED)
    with pytest.warns(PackgraphWarning, match=what):
        first = lenient(x)
    with warnings.catch_warnings(action="error"):
        second = lenient(x)
    assert torch.equal(first, model(x)) and torch.equal(second, model(x))
    assert lenient.stats.fallbacks[CAPTURE_FAILED] == 1


def test_a_number_that_stays_on_the_device_is_no_host_read():
    """torch.compile turns float(tensor) into operations on the device: then a graph can hold it."""
    graphed = packgraph.graph(Scaled(2, as_number), warmup=0, strict=True, compile=TRACED)
    for x in (torch.ones(2, 4), torch.ones(2, 4) * 3):
        torch.testing.assert_close(graphed(x), graphed.module(x))
    assert graphed.stats.replayed == 2


def test_traced_graphs_are_searched_for_what_a_capture_cannot_hold():
    x = torch.ones(3)
    safe = make_fx(lambda x: x[torch.arange(2)] + 1, tracing_mode="symbolic")(x)
    refuse_unsafe_graph(safe, [x])
    with pytest.raises(packgraph.CaptureError, match="nonzero waits for the device"):
        refuse_unsafe_graph(make_fx(torch.nonzero, tracing_mode="symbolic")(x), [x])
    with pytest.raises(
        packgraph.CaptureError, match="makes a tensor on the cpu inside a compiled stage on meta"
    ):
        refuse_unsafe_graph(safe, [x.to("meta")])
    stack = (
        f'  File "{__file__}", line 7, in inner\n    y = 1\n  File "{torch.__file__}", line 9, in '
        "deep\n    x"
    )
    assert (traced_line(stack), traced_line(None)) == (f"{__file__}:7 in inner", "")


def in_place(layer, x):
    x.mul_(2)
    return layer(x)


def test_writes_that_no_watcher_would_see_are_refused():
    """While a tensor needs a gradient, torch.compile changes it after the compiled code has run."""
    with pytest.raises(
        packgraph.CaptureError, match="changed in place in a way that compiled code cannot"
    ) as caught:
        packgraph.graph(Scaled(2, in_place), warmup=0, strict=True, compile=TRACED)(
            torch.randn(2, 4)
        )
    assert f"{__file__}:" in caught.value.where


def test_undeclared_shapes_run_the_module_itself_and_evaluation_has_code_of_its_own():
    model = dense(dropout=0.0)
    graphed = packgraph.graph(model, capacities=[SMALL], warmup=1, compile=TRACED)
    other = packs(LARGE, 1)[0]
    assert torch.equal(graphed(other), model(other))
    assert graphed.stats.compiled == 0
    for mode in (torch.no_grad, torch.inference_mode):
        for training in (True, False):
            graphed.train(training)
            for batch in packs(SMALL, 3):
                with mode():
                    assert torch.equal(graphed(batch), model(batch))
    assert graphed.stats.replayed == 11 and graphed.stats.fallbacks["warm-up"] == 1
    compiled = graphed.stats.compiled
    graphed.train()
    for batch in packs(SMALL, 3):
        graphed(batch).backward()
    assert graphed.stats.compiled > compiled, "with a backward"


def test_a_bank_is_compiled_before_it_is_captured():
    graphed = packgraph.graph(
        Packed(), capacities=[SMALL, LARGE], warmup=0, strict=True, compile=TRACED
    )
    before = {name: p.detach().clone() for name, p in graphed.named_parameters()}
    random = torch.get_rng_state()
    graphed.build([(packs(capacity, 1)[0],) for capacity in (SMALL, LARGE)])
    assert graphed.stats.compiled == 6 and graphed.stats.captured == 2
    assert torch.equal(random, torch.get_rng_state())
    assert all(
        torch.equal(before[name], p) and p.grad is None for name, p in graphed.named_parameters()
    )
    for capacity in (SMALL, LARGE):
        graphed(packs(capacity, 1)[0]).backward()
    assert graphed.stats.compiled == 6 and graphed.stats.replayed == 2


class HalfCompiled(nn.Module):
    """A module whose author has compiled a function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = torch.compile(lambda x: x.sin() * 2 + x, backend=TRACED)

    def forward(self, x):
        return self.inner(self.linear(x))


@pytest.mark.parametrize("compile", [False, TRACED])
def test_what_the_user_has_compiled_runs_by_his_compiler(compile):
    """A graph would hold other code: the call runs eagerly."""
    module = HalfCompiled()
    graphed = packgraph.graph(module, warmup=1, compile=compile)
    for number in range(3):
        x = torch.full((2, 4), float(number))
        assert torch.equal(graphed(x), module(x))
    assert graphed.stats.replayed == 0 and graphed.stats.fallbacks[CAPTURE_FAILED] == 2
    with pytest.raises(packgraph.CaptureError, match="that you have compiled"):
        packgraph.graph(module, warmup=0, strict=True, compile=compile)(x)


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_step_holds_compiled_code(tied):
    """Its very first call is inside the capture: what several pieces use, a tied matrix, is found
    out there."""
    batches = packs(SMALL, 3)

    def trained(captured: bool) -> list[Tensor]:
        torch.manual_seed(2)
        inner = packgraph.graph(
            Packed(tied=tied), capacities=[SMALL], warmup=0, strict=True, compile=TRACED
        )

        def run(*packed):
            total = 0
            for batch in packed:
                loss = inner.run_eagerly(batch)
                loss.backward()
                total = total + loss.detach()
            return total

        for parameter in inner.parameters():
            parameter.grad = torch.zeros_like(parameter)
        step = (
            GraphedStep(
                [inner.module], run, inner.capture_backend, torch.device("cpu"), compiled=True
            )
            if captured
            else run
        )
        found = [step(*batches[:2]), step(*batches[1:])]
        return [*found, *(p.grad for p in inner.parameters())]

    assert same(trained(False), trained(True))


def test_unknown_compilers_are_refused():
    with pytest.raises(
        ValueError,
        match="compile='fast': use True, False, options of Inductor, or one of inductor, a",
    ):
        packgraph.graph(Toy(), compile="fast")
    with pytest.raises(ValueError, match="Inductor has no option max_autotun; see"):
        packgraph.graph(Toy(), compile={"max_autotun": True, "max_autotune": True})


@pytest.mark.slow
def test_generated_code_replays_as_it_runs_eagerly():
    batches = packs(SMALL, 3)
    graphs = [
        packgraph.graph(Packed(), capacities=[SMALL], warmup=1, strict=True, compile=chosen)
        for chosen in (True, {"triton.cudagraphs": True, "max_autotune": False})
    ]
    assert same(steps(graphs[0], batches, reason="compare"), steps(graphs[1], batches, poison=True))
    loss = dense(dropout=0.0)(batches[0])
    torch.testing.assert_close(
        packgraph.graph(dense(dropout=0.0), capacities=[SMALL], compile=True)(batches[0]),
        loss,
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("compile", [False, TRACED])
def test_a_stage_may_add_what_is_not_there(compile):
    """A state may hold None: an optional table, say, that this model has none of."""

    class Optional(Stages):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def stages(self):
            return [
                Stage("embed", 0, lambda state: state | {"table": None}),
                Stage("mlp", 1, lambda state: state | {"x": self.linear(state["x"])}),
            ]

    module = packgraph.graph(Optional(), warmup=1, strict=True, compile=compile)
    for _ in range(3):
        module(torch.randn(2, 4)).sum().backward()
    assert module.stats.replayed == 2


# ---- what is left out of the watch of operations: torch's own work for a compiler


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_compiler_traces_no_watcher_of_operations():
    """torch hides a mode from its compiler in every call; this library's only where one waits."""
    found = []

    @skip
    def left_to_eager(x):
        return x + 1

    def under(mode):
        found.clear()
        torch._dynamo.reset()
        with compiled_stages(), mode:
            torch.compile(lambda x: left_to_eager(x) * 2, backend="eager")(torch.ones(2))
        assert found
        return [one for one in found if one is not None]

    class Hidden(CodeWatcher):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(get_eval_frame_callback())
            return func(*args, **(kwargs or {}))

    class Plain(TorchDispatchMode):
        """Negative control: a compiler waits for the frames of what it has left to eager."""

        @classmethod
        def _should_skip_dynamo(cls):
            return False

        @classmethod
        def ignore_compile_internals(cls):
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(get_eval_frame_callback())
            return func(*args, **(kwargs or {}))

    assert under(Hidden()) == []
    assert under(Plain()) != []


# ---- compiled stages beside eager ones, and inputs of any layout


class Routed(Stages):
    """An eager stage that hands one tensor of indices on under two names, as dispatchers do, and
    one that uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def stages(self):
        return [Stage("plan", 0, self.plan), Stage("mlp", 0, self.mix)]

    def plan(self, state):
        order = state["x"][:, 0].argsort()
        return {**state, "plan": {"order": order}, "rows": (order, state["x"])}

    def mix(self, state):
        order, x = state["rows"]
        return {"x": self.linear(x[order] + state["x"][state["plan"]["order"]])}


@pytest.mark.parametrize("warmup", [0, 1])
def test_one_tensor_that_eager_stages_hand_on_twice_is_the_same_to_compiled_ones(warmup):
    """Graphs hold memory for each of its places, for which the code of eager calls was not
    compiled."""
    found = []
    for compiler in (False, TRACED):
        torch.manual_seed(2)
        model = packgraph.graph(
            Routed(), warmup=warmup, strict=True, compile=compiler, scope=["mlp"]
        )
        for call in range(4):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(call)).requires_grad_()
            out = model(x)
            out.sum().backward()
            found.append((out.detach(), x.grad))
        found.append((model.linear.weight.grad, model.linear.bias.grad))
        assert model.stats.replayed == 4 - warmup
    for eager, compiled in zip(found[:5], found[5:], strict=True):
        for left, right in zip(eager, compiled, strict=True):
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize(
    "cut",
    [lambda x: x[:, ::2], lambda x: x[:1, :4].expand(6, 4), lambda x: x[:, :6].T[:, :4]],
    ids=["sliced", "expanded", "transposed"],
)
def test_inputs_may_have_any_layout(cut, warmup):
    """Graphs read dense copies of what has gaps; so does compiled code, in eager calls, too."""
    found = []
    for compiler in (False, TRACED):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        if compiler:
            model = packgraph.graph(model, warmup=warmup, strict=True, compile=compiler)
        for call in range(4):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(call)).requires_grad_()
            out = model(cut(x))
            out.sum().backward()
            found += [out.detach(), x.grad]
        found += [parameter.grad for parameter in model.parameters()]
    assert model.stats.replayed == 4 - warmup and not model.stats.recompiles
    for left, right in zip(found[:10], found[10:], strict=True):
        torch.testing.assert_close(left, right)
