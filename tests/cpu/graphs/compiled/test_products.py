"""Gradients of weights that are added by the product that makes them: where, where not, and with
what result."""

import pytest
import torch
from graphkit import Stages
from torch import nn
from torch.utils.checkpoint import checkpoint

import packgraph
from packgraph.graphs.compiled.compiler import CompiledCode
from packgraph.graphs.compiled.products import AddingCode, Product, take_products
from packgraph.graphs.fallback import SAVED_TENSOR_HOOKS
from packgraph.graphs.stages import Stage
from packgraph.moe.experts import Experts

TRACED = "aot_eager"


class Chain(Stages):
    """Linear layers, one after the other. reuse: the last layer is the first one again."""

    def __init__(self, reuse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6, bias=number == 0) for number in range(3)]
        self.layers = nn.ModuleList([*layers, layers[1]] if reuse else layers)

    def stages(self):
        return [
            Stage("mlp", number, lambda state, layer=layer: {"x": layer(state["x"]).tanh()})
            for number, layer in enumerate(self.layers)
        ]


@pytest.fixture(autouse=True)
def added(monkeypatch) -> list[bool]:
    """For every product: whether it was added in place."""
    torch._dynamo.reset()
    found: list[bool] = []
    total = AddingCode._total

    def noting(self, weight):
        answer = total(self, weight)
        found.append(answer[1])
        return answer

    monkeypatch.setattr(AddingCode, "_total", noting)
    yield found
    torch._dynamo.reset()


def graphed(module: nn.Module, **options):
    return packgraph.graph(module, **{"warmup": 1, "strict": True, "compile": TRACED, **options})


def inputs(count: int = 3):
    generator = torch.Generator().manual_seed(7)
    # With gradients: a backward reads a weight only to make the gradient of its layer's input.
    return [torch.randn(5, 6, generator=generator).requires_grad_() for _ in range(count)]


def gradients(module, reason: str | None = None, before=lambda module: None):
    """Gradients after three microbatches."""
    for x in inputs():
        if reason is None:
            out = module(x)
        else:
            with packgraph.eager(reason):
                out = module(x)
        before(module)
        out.square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def same(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_weights_get_their_products_in_place_eagerly_and_in_graphs(added):
    gradients(
        graphed(Chain()), "compare"
    )  # the first code that torch compiles changes what its layers call
    added.clear()
    eager = gradients(graphed(Chain()), "compare")
    assert added == [False] * 3 + [True] * 9, "compiling ahead adds to nothing, three calls do"
    module = graphed(Chain())
    replayed = gradients(module)
    assert same(eager, replayed) and module.stats.replayed == 2
    for ours, theirs in zip(replayed, gradients(Chain()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    (variant,) = module.slots.all[0].variants.values()
    (region,) = variant.regions.values()
    names = [
        str(node[0])
        for node in region.backward.graph.program
        if not isinstance(node[0], CompiledCode)
    ]
    assert names == ["aten._foreach_add_.List"], "that of the one bias"


def test_weights_behind_hooks_of_saved_tensors_get_their_products_in_place(added):
    """Such hooks, which offloading uses, make autograd hand out another tensor for the weight."""
    expected = gradients(graphed(Chain()), "compare")
    usual, added[:] = list(added), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        found = gradients(graphed(Chain()), "compare")
    assert added == usual and same(expected, found)


def test_a_checkpoint_around_a_compiled_module_is_an_eager_one():
    """Its first call compiles ahead, which the checkpoint is not to see, and so does its
    backward."""
    module = graphed(Chain(), strict=False)
    for x in inputs():
        checkpoint(module, x, use_reentrant=False).square().sum().backward()
    assert same(gradients(graphed(Chain())), [p.grad for p in module.parameters()])
    assert module.stats.captured == 0 and set(module.stats.fallbacks) == {SAVED_TENSOR_HOOKS}


def test_zeros_come_first_where_there_is_no_gradient_yet():
    def forget(module):
        module.zero_grad(set_to_none=True)

    assert same(
        gradients(graphed(Chain()), "compare", forget), gradients(graphed(Chain()), before=forget)
    )


def test_whoever_asks_for_the_gradient_itself_gets_it(added):
    module = graphed(Chain())
    weights = [layer.weight for layer in module.layers]
    with packgraph.eager("compare"):
        found = torch.autograd.grad(module(inputs()[0]).square().sum(), weights)
    assert not any(added) and all(weight.grad is None for weight in weights)
    expected = torch.autograd.grad(module.module(inputs()[0]).square().sum(), weights)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reason", ["compare", None])
def test_hooks_see_the_gradient(reason):
    seen = []
    module = graphed(Chain())
    module.layers[1].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    found = gradients(module, reason)
    assert len(seen) == 3
    torch.testing.assert_close(found[2], torch.stack(seen).sum(0), rtol=1e-5, atol=1e-6)


class Returning(Chain):
    """The second layer also adds its weight, whose gradient is no product there."""

    def stages(self):
        more = Stage("attn", 1, lambda state: {"x": state["x"] + self.layers[1].weight[0]})
        return [*super().stages(), more]


@pytest.mark.parametrize("granularity", ["chunk", "layer"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Chain(reuse=True),
        lambda: Returning(),
        lambda: Returning(reuse=True),
    ],
    ids=["two products", "a product and another", "two products and another"],
)
@pytest.mark.few(6)
def test_weights_with_several_uses_get_products_in_place_in_one_segment(added, make, granularity):
    gradients(graphed(make(), granularity=granularity), "compare")
    added.clear()
    eager = gradients(graphed(make(), granularity=granularity), "compare")
    in_place = len(make().layers) * [True]
    if granularity == "layer":  # of the second layer's weight, by all that use it
        in_place = [number in (0, 2) for number in (1, 2, 1, 0)[-len(in_place) :]]
    assert added[-3 * len(in_place) :] == in_place * 3
    module = graphed(make(), granularity=granularity)
    assert same(eager, gradients(module)) and module.stats.replayed == 2


def test_nothing_is_added_in_place_beside_stages_that_are_not_compiled(added):
    class Mixed(Chain):
        def stages(self):
            first, *others = super().stages()
            return [Stage("attn", 0, first.run), *others]

    eager = gradients(graphed(Mixed(), scope=["mlp"]), "compare")
    module = graphed(Mixed(), scope=["mlp"])
    assert same(eager, gradients(module)) and not added


def traced_backward() -> torch.fx.GraphModule:
    """The backward of x @ weight.T as AOTAutograd names things: gradients of weight and x, as
    Inductor gets them."""
    from torch._inductor.compile_fx import record_original_output_strides

    graph = torch.fx.Graph()
    weight, x, tangent = map(graph.placeholder, ("primals_1", "primals_2", "tangents_1"))
    aten = torch.ops.aten
    turned = graph.call_function(aten.permute.default, (tangent, [1, 0]))
    ours = graph.call_function(aten.mm.default, (turned, x))
    theirs = graph.call_function(aten.mm.default, (tangent, weight))
    output = graph.output((ours, theirs))
    for node, shape in (
        (weight, (3, 2)),
        (x, (5, 2)),
        (tangent, (5, 3)),
        (turned, (3, 5)),
        (ours, (3, 2)),
        (theirs, (5, 2)),
    ):
        node.meta["val"] = torch.zeros(shape)
    output.meta["user_visible_output_idxs"] = [0, 1]  # as compile_fx_backward does
    module = torch.fx.GraphModule({}, graph)
    record_original_output_strides(module)
    return module


def test_inductor_pads_for_the_outputs_that_are_left():
    """It does so on CUDA only; on a CPU this is one step of what it does there."""
    from torch._inductor.graph import get_user_visible_output_strides, mark_nodes_dislike_padding

    backward = traced_backward()
    assert take_products(backward, {0}) == [Product(0, 0)]
    visible = get_user_visible_output_strides(backward.graph)
    with torch._inductor.config.patch(comprehensive_padding=True):
        mark_nodes_dislike_padding(backward.graph, visible)
    assert [node.target for node in visible] == [torch.ops.aten.mm.default]


def test_a_total_has_memory_of_its_own():
    backward = traced_backward()
    take_products(backward, {0})
    weight, x, tangent, total = (
        node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")
    )
    assert total.shape == weight.shape and total.data_ptr() != weight.data_ptr(), (
        "writes to it are not to the weight"
    )
    gradients = backward(weight, x.fill_(2), tangent.fill_(3), total.fill_(4))
    assert gradients[0] is None and torch.equal(total, torch.full((3, 2), 34.0))


class Grouped(Chain):
    """Experts, each with its own rows: their gradients are stacks of products. used: how often."""

    def __init__(self, used: int = 1) -> None:
        super().__init__()
        self.experts = Experts(3, 8, 16)
        self.used = used
        self.register_buffer("offsets", torch.tensor([2, 2, 5], dtype=torch.int32))

    def stages(self):
        def run(state):
            x = state["x"].repeat_interleave(2, 1)[:, :8]
            for _ in range(self.used):
                x = x + self.experts(x, x[:, 0].sigmoid(), self.offsets)
            return {"x": x[:, :6]}

        return [*super().stages(), Stage("moe_experts", 3, run)]


@pytest.mark.parametrize(("used", "products"), [(1, 5), (2, 3)])
@pytest.mark.few(2)
def test_stacks_of_products_are_added_in_place_unless_there_are_two_of_them(added, used, products):
    eager = gradients(graphed(Grouped(used)), "compare")
    assert added.count(True) == 3 * products
    module = graphed(Grouped(used))
    assert same(eager, gradients(module)) and module.stats.replayed == 2
    for ours, theirs in zip(eager, gradients(Grouped(used)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
