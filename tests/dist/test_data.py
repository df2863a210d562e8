"""Data parallelism: two replicas train as one process does, through graphs exactly as eagerly."""

import threading

import pytest
import torch
from distkit import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from parallelkit import Run, assert_same_within_rounding, steps_of_packs, train, train_both
from torch import nn
from tracekit import differences

from packgraph.ops.collectives import all_gather_flat
from packgraph.parallel.data import FlatParameters
from packgraph.parallel.flat_buffers import ALIGNMENT, plan_gradient_buckets
from packgraph.train.feed import shares

STEPS = 10


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(1, 5000)),
)
def test_every_parameter_lies_in_one_span(parameters, ranks, most):
    sizes, kinds = [size for size, _ in parameters], [kind for _, kind in parameters]
    spans = plan_gradient_buckets(sizes, kinds, ranks, most)
    assert sorted(index for span in spans for index, _ in span.members) == list(range(len(sizes)))
    for span in spans:
        assert span.size % (ranks * ALIGNMENT) == 0
        end = 0
        for index, place in span.members:
            assert place.start >= end and place.start % ALIGNMENT == 0
            assert place.stop - place.start == sizes[index] and kinds[index] == span.kind
            end = place.stop
        assert end <= span.size
        assert most is None or len(span.members) == 1 or end <= most
    lowest = [min(index for index, _ in span.members) for span in spans]
    assert lowest == sorted(lowest, reverse=True), "a span is complete with its first parameter"


@given(st.integers(0, 9), st.integers(1, 4))
def test_a_step_is_dealt_out_whole(steps, replicas):
    packs = next(steps_of_packs(1)) * steps
    dealt = shares(packs, replicas)
    assert sorted(id(pack) for share in dealt for pack in share) == sorted(map(id, packs))
    places = [sum(pack.capacity.tokens for pack in share) for share in dealt]
    assert max(places) - min(places) <= 64


def test_parameters_keep_identity_values_and_ties():
    layer = nn.Linear(3, 5)
    layer.alias = layer.weight
    before = {name: value.clone() for name, value in layer.named_parameters()}
    layer.bias.grad = torch.ones(5)
    flat = FlatParameters(layer.named_parameters(), None)
    assert layer.alias is layer.weight
    assert all(torch.equal(value, before[name]) for name, value in layer.named_parameters())
    assert torch.equal(layer.bias.grad, torch.ones(5))
    assert layer.weight.data_ptr() % 64 == 0 and {span.decays for span in flat.spans} == {
        True,
        False,
    }


def test_a_gradient_made_elsewhere_is_taken_in():
    weight = nn.Parameter(torch.ones(4))
    flat = FlatParameters([("weight", weight)], None)
    weight.grad = torch.full((4,), 3.0)
    flat.reduce()
    assert torch.equal(flat.spans[0].own_gradients[:4], torch.full((4,), 3.0))
    weight.grad = None
    flat.reduce()
    assert not flat.spans[0].own_gradients.any() and weight.grad is not None


class Slow(FlatParameters):
    """The first span takes a while to be sent; `sent` is the order in which they are on their
    way."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sent, self.sending, self.other_is_done = [], threading.Event(), threading.Event()

    def _launch(self):
        number = self.launched
        super()._launch()
        if number == 0:
            self.sending.set()
            self.other_is_done.wait(0.3)
        self.sent.append(number)


def test_hooks_of_two_threads_send_spans_in_their_order():
    layer = nn.Linear(4, 4)
    flat = Slow(layer.named_parameters(), None)
    first, second = (span.members[0].parameter for span in flat.spans)
    flat.expect([first, second])
    other = threading.Thread(target=flat.ready, args=([first],))
    other.start()
    assert flat.sending.wait(10)
    # autograd runs nodes without a device in the thread that called it, others in one per device
    flat.ready([second])
    flat.other_is_done.set()
    other.join()
    assert flat.sent == [0, 1]


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_graphs_equal_eager_on_every_replica(granularity):
    for eager, graph in run_ranks(
        train_both, 2, {"steps": STEPS, "dropout": 0.2, "granularity": granularity}
    ):
        assert graph["replayed"] > 10
        assert not differences(eager, graph)


def test_sharded_layers_do_what_they_do_on_gpus():
    options = {"steps": 6, "granularity": "layer", "shard": "parameters", "dtype": torch.bfloat16}
    for eager, graph in run_ranks(train_both, 2, options):
        assert graph["replayed"] > 3 and not differences(eager, graph)


def test_two_replicas_equal_one_process_within_rounding():
    alone = train(None, graphs=False, steps=STEPS)
    results = run_ranks(run_graphs, 2)
    assert_same_within_rounding(results, alone)
    losses = [sum(result["trace"][step]["loss"] for result in results) for step in range(STEPS)]
    torch.testing.assert_close(
        losses, [facts["loss"] for facts in alone["trace"]], rtol=1e-4, atol=1e-5
    )
    assert not [
        name
        for name in results[0]["trace"][-1]
        if name.startswith("parameter")
        and not torch.equal(results[0]["trace"][-1][name], results[1]["trace"][-1][name])
    ]


def run_graphs(mesh):
    return train(mesh, graphs=True, steps=STEPS)


def run_variants(mesh):
    plain = train(mesh, graphs=True, steps=6, overlap=False)
    return (
        plain,
        train(mesh, graphs=True, steps=6),
        train(mesh, graphs=True, steps=6, set_to_none=True),
    )


def test_overlap_and_gradients_set_to_none_change_nothing():
    for plain, overlapped, set_to_none in run_ranks(run_variants, 2):
        assert not differences(plain, overlapped)
        assert not differences(plain, set_to_none)
        assert plain["overlapped"] == 0 and overlapped["overlapped"] > 0


def poisoned_until_gathered(mesh):
    """Before the parts come together every other rank's part is made NaN: nobody may have used the
    old values."""
    begin, poisoned = FlatParameters.begin_gather, []

    def poison_and_gather(flat, span):
        with torch.no_grad():
            own = span.own_parameters.clone()
            span.parameters.fill_(float("nan"))
            span.own_parameters.copy_(own)
        poisoned.append(span)
        begin(flat, span)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatParameters, "begin_gather", poison_and_gather)
        run = Run(mesh, graphs=True)
        places = [parameter.data_ptr() for parameter in run.model.parameters()]
        trace = [run.step(number, packs) for number, packs in enumerate(steps_of_packs(4))]
        assert places == [parameter.data_ptr() for parameter in run.model.parameters()]
        assert len(poisoned) == 4 * len(run.optimizer.flat.spans)
        run.executor.close()
    return {"trace": trace}, train(mesh, graphs=True, steps=4)


def test_parameters_are_whole_before_they_are_used():
    for poisoned, plain in run_ranks(poisoned_until_gathered, 2):
        assert not differences(poisoned, plain)
        assert all(value.isfinite().all() for value in poisoned["trace"][-1].values())


def reduce_small_spans(mesh):
    """Many spans, complete in an order of their own on every rank."""
    torch.manual_seed(0)
    weights = [(str(number), nn.Parameter(torch.randn(3, 50))) for number in range(6)]
    flat = FlatParameters(weights, mesh.group("dp"), span_bytes=700)
    assert len(flat.spans) > 2
    flat.zero_gradients()
    for number, (_, weight) in enumerate(weights):
        weight.grad += (mesh.rank + 1) * (number + 1)
    order = [weight for _, weight in weights]
    flat.expect(order)
    for weight in order if mesh.rank else order[::-1]:
        flat.ready([weight])
    flat.reduce()
    for span in flat.spans:
        whole = torch.empty_like(span.gradients)
        all_gather_flat(whole, span.own_gradients, group=mesh.group("dp"))
        for member in span.members:
            assert torch.equal(
                whole[member.place], torch.full((150,), 3.0 * (int(member.name) + 1))
            )
    return True


def test_spans_are_sent_in_one_order_on_all_ranks():
    assert run_ranks(reduce_small_spans, 2) == [True, True]
