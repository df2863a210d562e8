"""What a region reads and hands on: its gradients are summed in the order in which eager autograd
sums them.

The gradients here are large and cancel, so that another order of additions shows in bf16 and in
float32.
"""

import itertools

import pytest
import torch
from graphkit import Stages
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from packgraph import eager
from packgraph.graphs.fallback import OTHER_STATE
from packgraph.graphs.graphed import graph
from packgraph.graphs.stages import Stage
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

ROWS, WIDTH = 6, 8
NAMES = ("attn", "mlp", "mamba", "head")


class Relay(Stages):
    """Stages that all read one entry of the state and hand it on. uses: how often each stage reads
    it.

    how: as what a stage hands it on: "entry" (untouched), "renamed", or "within" a tuple beside
    something new. made: the entry is made by the first stage from the call's input, by a weight,
    instead of being that input. apart: factors are parameters of their own; else rows of one, whose
    gradients meet in no element, which compiled code does not show.
    """

    def __init__(self, uses, how="entry", made=False, dtype=torch.bfloat16, apart=False):
        super().__init__()
        self.uses, self.how, self.made = tuple(uses), how, made
        random = torch.Generator().manual_seed(5)
        total = sum(uses)
        scales = 10.0 ** torch.randint(-2, 5, (total, 1, WIDTH), generator=random)
        factors = (torch.randn(total, 1, WIDTH, generator=random) * scales).to(dtype)
        self.factors = nn.ParameterList(factors.unbind()) if apart else nn.Parameter(factors)
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=dtype))

    def begin(self, x):
        return {"shared": x, "sum": x.new_zeros(())}

    def end(self, state):
        return {"sum": state["sum"]}

    def stages(self):
        first = [0, *itertools.accumulate(self.uses)]
        make = [Stage("embed", -1, self.make)] if self.made else []
        return make + [
            Stage(
                NAMES[i % len(NAMES)],
                i,
                lambda state, i=i: self.read(state, first[i], first[i + 1]),
            )
            for i in range(len(self.uses))
        ]

    def make(self, state):
        return {**state, "shared": state["shared"] * self.weight}

    def read(self, state, start, stop):
        state = dict(state)
        key = next(key for key in state if key.startswith("shared"))
        value = state.pop(key)
        shared = value[0] if isinstance(value, tuple) else value
        for i in range(start, stop):
            state["sum"] = state["sum"] + (shared * self.factors[i]).float().sum()
        if self.how == "renamed":
            return {**state, f"{key}_": shared}
        return {**state, key: (shared, state["sum"] * 2) if self.how == "within" else value}


def gradients(module, steps=4, dtype=torch.bfloat16):
    """Per step: output, gradient of the input, gradients of all parameters."""
    found = []
    torch.manual_seed(0)
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
        out = module(x)
        out["sum"].backward()
        parameters = {
            name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
        }
        found.append({"sum": out["sum"].detach(), "x": x.grad, **parameters})
        module.zero_grad()
    return found


def assert_graph_is_eager(make, dtype=torch.bfloat16, **options):
    expected = gradients(make(), dtype=dtype)
    graphed = graph(make(), warmup=1, **options)
    found = gradients(graphed, dtype=dtype)
    assert graphed.stats.replayed == 3, dict(graphed.stats.fallbacks)
    for step, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == [], f"step {step}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", ["entry", "renamed", "within"])
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize(
    ("granularity", "scope"),
    [
        ("layer", None),
        ("chunk", None),
        ("chunk", ["attn"]),
        ("chunk", ["attn", "mamba"]),
        ("layer", ["attn", "mlp"]),
        ("chunk", ["mlp", "mamba"]),
        ("chunk", ["head"]),
    ],
    ids=str,
)
@pytest.mark.few(8)
def test_gradients_of_what_is_handed_on_are_summed_as_in_eager(
    granularity, scope, made, how, dtype
):
    assert_graph_is_eager(
        lambda: Relay((2, 3, 1, 3), how, made, dtype), dtype, granularity=granularity, scope=scope
    )


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=4).filter(any),
    st.booleans(),
    st.sampled_from(["entry", "renamed", "within"]),
    st.sampled_from(["layer", "chunk"]),
    st.data(),
)
def test_any_number_of_uses_in_any_regions_is_summed_as_in_eager(
    uses, made, how, granularity, data
):
    scope = data.draw(st.sets(st.sampled_from(NAMES[: len(uses)]), min_size=1))
    assert_graph_is_eager(
        lambda: Relay(uses, how, made), granularity=granularity, scope=sorted(scope)
    )


def test_squares_and_other_operations_that_read_twice_count_twice():
    class Square(Relay):
        def read(self, state, start, stop):
            shared, factor = state["shared"], self.factors[start]
            return {
                **state,
                "sum": state["sum"]
                + (shared * shared * factor + shared.sin() * factor).float().sum(),
            }

    assert_graph_is_eager(lambda: Square((1, 1, 1)), granularity="layer")


def regions_of(uses, how="entry"):
    graphed = graph(Relay(uses, how), warmup=0, granularity="layer")
    gradients(graphed, steps=1)
    (slot,) = graphed.slots.all
    (variant,) = slot.variants.values()
    return variant.regions, slot


@pytest.mark.parametrize("how", ["entry", "renamed"])
def test_only_what_is_read_twice_and_handed_on_leaves_as_an_output_and_its_memory_is_the_inputs(
    how,
):
    regions, slot = regions_of((1, 2, 0, 3), how)
    assert [len(region.outputs) for region in regions.values()] == [1, 2, 0, 2]
    read = regions[0].inputs[0].buffer
    (number,) = [
        i
        for i, out in enumerate(regions[1].outputs)
        if out.static.tensor.data_ptr() == read.data_ptr()
    ]
    assert (1, number) in [entry.token for entry in regions[3].inputs]
    assert [role for role in slot._buffers if role[0] == "gradient"] == [
        ("gradient", 3, 0)
    ]  # the others are baked


class Beside(Relay):
    """Hands on a packed batch in one entry with what it reads; an eager stage looks at the batch's
    lengths."""

    def begin(self, x):
        batch = PackedBatch.build([torch.arange(3), torch.arange(2)], Capacity(ROWS, 2))
        return {"shared": (x, batch), "sum": x.new_zeros(())}

    def read(self, state, start, stop):
        value, batch = state["shared"]
        if start:
            state = {**state, "sum": state["sum"] + sum(batch.lengths)}
        for i in range(start, stop):
            state = {**state, "sum": state["sum"] + (value * self.factors[i]).float().sum()}
        return state


def test_a_batch_handed_on_beside_it_keeps_its_lengths():
    assert_graph_is_eager(lambda: Beside((2, 3)), scope=["attn"])


def test_what_the_call_gets_back_of_its_own_input_needs_no_slot_and_has_its_gradient():
    class Returned(Relay):
        def end(self, state):
            return {"sum": state["sum"], "shared": state["shared"]}

    graphed = graph(Returned((3, 2), made=True), warmup=1, slots=1)
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH).bfloat16().requires_grad_()
        out = graphed(x)
        before = out["shared"].detach().clone()
        (out["sum"] + out["shared"].float().sum()).backward()
        with torch.no_grad():
            graphed(torch.zeros(ROWS, WIDTH).bfloat16().requires_grad_())
        assert torch.equal(out["shared"], before) and torch.equal(before, x)
    assert graphed.stats.replayed >= 2


def test_compiled_stages_hand_on_what_they_read():
    torch._dynamo.reset()
    runs = []
    for reason in (None, "the twin"):
        graphed = graph(
            Relay((1, 2, 1), apart=True),
            warmup=0,
            granularity="chunk",
            scope=["attn", "mlp"],
            compile="aot_eager",
        )
        with eager(reason) if reason else torch.enable_grad():
            runs.append(gradients(graphed))
        assert reason or graphed.stats.replayed == 4
    for one, other in zip(*runs, strict=True):
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    torch._dynamo.reset()


class Twins(Relay):
    """One tensor under two entries, of which stages read now one, now the other. twice: who puts it
    there."""

    def __init__(self, uses, twice, **options):
        super().__init__(uses, made=twice == "stage", **options)
        self.twice = twice

    def begin(self, x, other=None):
        state = {"shared": x, "sum": x.new_zeros(())}
        return state if self.twice == "stage" else {**state, "other": x if other is None else other}

    def make(self, state):
        made = state["shared"] * self.weight
        return {**state, "shared": made, "other": made}

    def read(self, state, start, stop):
        total = state["sum"]
        for i in range(start, stop):
            total = total + (state[("shared", "other")[i % 2]] * self.factors[i]).float().sum()
        return {**state, "sum": total, "other": state["other"]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("twice", ["call", "stage"])
@pytest.mark.parametrize(
    ("granularity", "scope"),
    [
        ("layer", None),
        ("chunk", None),
        ("chunk", ["attn"]),
        ("chunk", ["attn", "mamba"]),
        ("layer", ["attn", "mlp"]),
        ("chunk", ["mlp", "mamba"]),
    ],
    ids=str,
)
@pytest.mark.few(4)
def test_one_tensor_in_two_entries_is_summed_as_in_eager(granularity, scope, twice, dtype):
    assert_graph_is_eager(
        lambda: Twins((3, 2, 3, 1), twice, dtype=dtype), dtype, granularity=granularity, scope=scope
    )


def test_a_stage_that_does_not_give_one_tensor_twice_any_more_is_no_wrong_number():
    class Fickle(Twins):
        calls = 0

        def make(self, state):
            state = super().make(state)
            Fickle.calls += 1
            return {**state, "other": state["other"] * 2} if Fickle.calls > 5 else state

    graphed = graph(Fickle((3, 2), "stage"), warmup=1, scope=["attn", "mlp"])
    found = gradients(graphed, steps=8)
    Fickle.calls = 0
    graphed.close()
    assert graphed.stats.fallbacks[OTHER_STATE] > 0 and len(found) == 8


def test_arguments_may_be_one_tensor_in_one_call_and_two_in_the_next():
    graphed, twin = graph(Twins((1, 1), "call"), warmup=0), Twins((1, 1), "call")
    for same in (True, False, True, False):
        x, y = (torch.randn(ROWS, WIDTH).bfloat16().requires_grad_() for _ in range(2))
        found = []
        for module in (graphed, twin):
            module(x, x if same else y)["sum"].backward()
            found.append((x.grad, y.grad))
            x.grad = y.grad = None
        assert torch.equal(found[0][0], found[1][0])
        assert same or torch.equal(found[0][1], found[1][1])
    assert graphed.stats.replayed == 4


class Shared(Stages):
    """Three stages with one matrix, which the second reads twice. rows: each reads a row of its
    own, elementwise."""

    def __init__(self, rows):
        super().__init__()
        torch.manual_seed(2)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.rows = rows

    def end(self, state):
        return state["x"].sum()

    def stages(self):
        runs = self.one, self.two, self.three
        return [Stage(name, i, run) for i, (name, run) in enumerate(zip(NAMES, runs, strict=False))]

    def use(self, x, row):
        return (x * self.matrix[row] if self.rows else x @ self.matrix).sin()

    def one(self, state):
        return {"x": self.use(state["x"], 0)}

    def two(self, state):
        return {"x": self.use(self.use(state["x"], 1), 2)}

    def three(self, state):
        return {"x": self.use(state["x"], 3)}


@pytest.mark.parametrize("rows", [False, True])
def test_a_parameter_read_twice_and_later_again_runs_eagerly_unless_the_parts_are_others(rows):
    """Gradients accumulate over calls: eager adds the three of a call up before."""
    found = []
    for model in (Shared(rows), Shared(rows)):
        call = graph(model, granularity="layer", warmup=1) if found else model
        torch.manual_seed(4)
        # why it runs eagerly is known
        for _ in range(4):
            call(torch.randn(ROWS, WIDTH, requires_grad=True)).backward()
        found.append(model.matrix.grad)
    assert torch.equal(*found)
    assert call.stats.replayed == (3 if rows else 0)
