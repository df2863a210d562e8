"""The paged stash: pages against an oracle, and gradients that are the same bits with and without
it, graphs or not."""

import pytest
import torch
from graphkit import WIDTH, poison_free_slots, toy_inputs, toy_loss, train
from hypothesis import given, settings
from hypothesis import strategies as st
from stashkit import COLUMNS, free_pages, make_expert_toy, make_experts, poison_pages
from torch.utils.checkpoint import checkpoint
from tracekit import differences

from packgraph.graphs.graphed import graph
from packgraph.graphs.recorder.backend import RecorderBackend
from packgraph.graphs.step import GraphedStep
from packgraph.moe.stash.pages import (
    DEMAND,
    HEAD,
    HEADER,
    NEED_HI,
    OVERFLOW,
    Pages,
    keep,
    naive_reserve,
    take,
)
from packgraph.moe.stash.stash import Stash, stashed_experts
from packgraph.parallel.pipeline.schedule import make_schedule

PAGE, ROWS, PLENTY = 4, 30, 400
CPU = torch.device("cpu")


class Oracle:
    """Pages by Python lists. held: rows of every allocation that is out, and its pages (None:
    refused)."""

    def __init__(self, pages, host_pages):
        self.pages, self.free, self.free_hosts = (
            pages,
            list(range(pages)),
            list(range(pages, pages + host_pages)),
        )
        self.overflow, self.demand, self.need_hi = False, 0, 0

    def reserve(self, rows):
        need = -(-rows // PAGE)
        self.demand += need
        self.need_hi = max(self.need_hi, self.demand)
        if self.overflow or need > len(self.free) + len(self.free_hosts):
            self.overflow = True
            return None
        both = self.free[:need], self.free_hosts[: max(need - len(self.free), 0)]
        del self.free[:need], self.free_hosts[: len(both[1])]
        return both[0] + both[1]

    def release(self, rows, held):
        self.demand -= -(-rows // PAGE)
        self.free += [page for page in held or () if page < self.pages]
        self.free_hosts += [page for page in held or () if page >= self.pages]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, ROWS)),
        st.tuples(st.just("release"), st.integers(0, 100)),
        st.tuples(st.just("clear"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=40)
@given(actions, st.integers(1, 20), st.integers(0, 6))
def test_pages_equal_the_oracle_and_none_is_lost(actions, pages, host_pages):
    pool, oracle, out = Pages(pages, host_pages, CPU), Oracle(pages, host_pages), []
    buffers = [torch.full((pages * PAGE + 1, width), float("nan")) for width in (8, 3)]
    hosts = (
        [torch.full((host_pages * PAGE + 1, width), float("nan")) for width in (8, 3)]
        if host_pages
        else []
    )
    sizes = (PAGE, pages, host_pages)
    for number, (what, value) in enumerate(actions):
        if what == "reserve":
            ends = torch.tensor([0, value], dtype=torch.int32)
            sources = [torch.rand(ROWS, width) + number for width in (8, 3)]
            record = keep(pool.state, buffers, hosts, sources, ends, *sizes)
            held = oracle.reserve(value)
            assert [page for page in record[4:].tolist() if page >= 0] == (held or [])
            out.append((value, record, sources, held))
        elif what == "release" and out:
            rows, record, sources, held = out.pop(value % len(out))
            taken = take(
                pool.state, buffers, hosts, record, record, ROWS, PAGE, pages, host_pages, True
            )
            for back, source in zip(taken, sources, strict=True):
                assert torch.equal(
                    back[:rows],
                    source[:rows] if held is not None else torch.zeros_like(source[:rows]),
                )
                assert not back[rows:].any()
            oracle.release(rows, held)
        elif what == "clear":
            pool.clear()
            oracle.overflow, oracle.need_hi = False, 0
        state = pool.state.tolist()
        free = free_pages(state, pages, host_pages)
        assert sorted(free + [page for entry in out for page in entry[3] or ()]) == list(
            range(pages + host_pages)
        )
        assert [bool(state[OVERFLOW]), state[DEMAND], state[NEED_HI]] == [
            oracle.overflow,
            oracle.demand,
            oracle.need_hi,
        ]
    pool.reset()
    assert pool.state[HEADER:-1].tolist() == list(range(pages + host_pages))


@pytest.mark.parametrize(
    ("rows", "spare"),
    [(1, 0), (15, 0), (16, 0)]
    + [(rows, spare) for rows in (17, 31, 32, 33, 47, 48) for spare in (-1, 0)],
)
def test_the_exact_number_of_pages_suffices_and_one_less_does_not(rows, spare):
    need = -(-rows // 16)
    experts, stash = make_experts(), Stash("cpu", page_rows=16)
    stash.allocate(need + spare, columns=COLUMNS)
    values = torch.randn(48, WIDTH, requires_grad=True)
    offsets = torch.tensor([0, rows // 2, rows, rows], dtype=torch.int32)
    made = stashed_experts(experts, values * 1, torch.rand(48), offsets, stash)
    made[:rows].sum().backward()
    assert stash.overflow_flag().item() == (spare < 0)
    assert stash.need_hi().item() == need and stash.in_use().item() == 0
    assert values.grad[:rows].any().item() == (spare >= 0)


def stashed(**options):
    stash = Stash("cpu", page_rows=16)
    stash.allocate(PLENTY, columns=COLUMNS, **options)
    return stash


def checked(trace, stash):
    assert (
        not stash.overflow_flag().item()
        and stash.in_use().item() == 0
        and stash.need_hi().item() > 0
    )
    return trace


def poison_all(stash):
    def poison(model, step):
        poison_pages(stash)
        if hasattr(model, "_slots"):
            poison_free_slots(model, step)

    return poison


@pytest.fixture(scope="module")
def plain():
    return train(make_expert_toy(), steps=4)


@pytest.mark.parametrize("host_pages", [0, 40])
def test_eager_gradients_are_the_same_bits(plain, host_pages):
    stash = Stash("cpu", page_rows=16)
    stash.allocate(3 if host_pages else PLENTY, host_pages, COLUMNS)
    found = train(make_expert_toy(stash), steps=4, between=poison_all(stash))
    assert differences(plain, checked(found, stash)) == []
    assert (stash.spilled_hi().item() > 0) == bool(host_pages)


@pytest.mark.parametrize(
    ("granularity", "scope"),
    [
        ("layer", None),
        pytest.param("chunk", None, marks=pytest.mark.slow),
        pytest.param("layer", ["moe_experts"], marks=pytest.mark.slow),
        ("chunk", ["moe_dispatch", "moe_experts", "moe_combine"]),
    ],
    ids=str,
)
@pytest.mark.few(4)
def test_graphs_in_any_order_are_the_same_bits(plain, granularity, scope):
    """Several microbatches in flight in slots of their own, backwards in random order, poison
    everywhere."""
    stash = stashed()
    graphed = graph(make_expert_toy(stash), scope=scope, granularity=granularity)
    assert (
        differences(plain, checked(train(graphed, steps=4, between=poison_all(stash)), stash)) == []
    )
    assert graphed.stats.replayed > 3 and dict(graphed.stats.fallbacks) == {"warm-up": 2}


def in_order(schedule, models, stash, steps):
    """Microbatches through `models` (the chunks of one rank, here one after the other) in a
    pipeline's order."""
    torch.manual_seed(5)
    trace = []
    for _ in range(steps):
        if stash is not None:
            stash.pages.reset()
        inputs = [[toy_inputs(10) for _ in range(schedule.microbatches)] for _ in models]
        outs = {}
        for action in schedule.rows[0]:
            chunk = schedule.chunk_of(action.stage)
            if action.kind == "F":
                outs[chunk, action.microbatch] = models[chunk](*inputs[chunk][action.microbatch])
            else:
                toy_loss(outs.pop((chunk, action.microbatch))).backward()
            if stash is not None:
                poison_pages(stash)
        facts = {
            f"input {c} {m}": x.grad
            for c, pairs in enumerate(inputs)
            for m, (_, x) in enumerate(pairs)
        }
        for number, model in enumerate(models):
            facts |= {f"{number} {name}": p.grad.clone() for name, p in model.named_parameters()}
            model.zero_grad()
        trace.append(facts)
    return trace


@pytest.mark.parametrize(
    ("granularity", "ranks", "chunks", "slots"),
    [
        ("layer", 1, 1, 1),
        ("chunk", 1, 1, 1),
        ("layer", 3, 1, 3),
        pytest.param("chunk", 3, 1, 3, marks=pytest.mark.slow),
        ("chunk", 2, 2, 3),
    ],
)
@pytest.mark.few(4)
def test_orders_of_pipelines_are_the_same_bits(granularity, ranks, chunks, slots):
    """1F1B with one and three microbatches in flight, and interleaved chunks that share one
    stash."""
    schedule = make_schedule(ranks, chunks, 4)
    plain = in_order(schedule, [make_expert_toy() for _ in range(chunks)], None, 3)
    stash = stashed()
    models = [
        graph(make_expert_toy(stash), granularity=granularity, warmup=1) for _ in range(chunks)
    ]
    assert differences(plain, checked(in_order(schedule, models, stash, 3), stash)) == []
    assert all(model.stats.replayed >= 8 for model in models)
    assert max(len(model.slots.all) for model in models) >= slots


def test_whole_steps_that_begin_with_a_reset_are_the_same_bits():
    """One graph of three microbatches, two of them in flight at once."""

    def run_of(model):
        def run(*pairs):
            if model.stash is not None:
                model.stash.pages.reset()
            first, second, third = (toy_loss(model(ids, x)) for ids, x in pairs)
            second.backward()
            first.backward()
            third.backward()
            return first.detach() + second.detach() + third.detach()

        return run

    def steps(model, run):
        torch.manual_seed(6)
        trace = []
        for _ in range(5):
            loss = run(*((ids, x.detach()) for ids, x in (toy_inputs(9) for _ in range(3))))
            trace.append(
                {"loss": loss.clone()}
                | {name: p.grad.clone() for name, p in model.named_parameters()}
            )
            model.zero_grad()
            if model.stash is not None:
                poison_pages(model.stash)
        return trace

    plain, stash = make_expert_toy(), stashed()
    model = make_expert_toy(stash)
    step = GraphedStep([model], run_of(model), RecorderBackend(), CPU)
    assert differences(steps(plain, run_of(plain)), checked(steps(model, step), stash)) == []
    assert step.stats.replayed == 5


def test_pages_given_out_twice_are_seen(plain, monkeypatch):
    """Negative control: with pages that are free again at once the same comparison must fail."""

    def forgetful(state, *sizes):
        record = naive_reserve(state, *sizes)
        state.data[HEAD] -= record[2]
        return record

    monkeypatch.setattr("packgraph.moe.stash.pages.naive_reserve", forgetful)
    assert differences(plain, train(make_expert_toy(stashed()), steps=4)) != []


def test_an_overflow_is_a_verdict_and_the_next_step_is_whole(plain):
    stash = stashed()
    graphed = graph(make_expert_toy(stash), granularity="chunk", warmup=0)
    ids, x = toy_inputs(12)
    ids[0] = 0
    toy_loss(graphed(ids, x)).backward()
    assert not stash.overflow_flag().item()
    need, whole = stash.need_hi().item(), x.grad.clone()
    small = Stash("cpu", page_rows=16)
    small.allocate(need - 1, columns=COLUMNS)
    model = make_expert_toy(small)
    graphed = graph(model, granularity="chunk", warmup=0)
    for _ in range(3):
        toy_loss(graphed(ids, x)).backward()
    assert (
        small.overflow_flag().item()
        and small.need_hi().item() == need
        and small.in_use().item() == 0
    )
    small.pages.reset()
    assert small.overflow_flag().item(), "a verdict stays until somebody has read it"
    small.allocate(need)
    x.grad = None
    model.zero_grad()
    toy_loss(graph(model, granularity="chunk", warmup=0)(ids, x)).backward()
    assert torch.equal(x.grad, whole) and not small.overflow_flag().item()


def test_forwards_without_backward_keep_their_pages_until_the_reset():
    stash, model = stashed(), None
    model = make_expert_toy(stash)
    inputs = toy_inputs(8)
    with torch.no_grad():
        model(*inputs)
    assert stash.in_use().item() == 0
    out = model(*inputs)
    held = stash.in_use().item()
    del out
    assert held > 0 and stash.in_use().item() == held
    stash.pages.reset()
    assert stash.in_use().item() == 0


def test_a_backward_from_before_the_reset_sets_the_verdict_and_takes_no_page():
    """As a replay of one does; in eager code autograd sees that the pool was reset."""
    stash = stashed()
    source, state, ends = torch.randn(48, WIDTH), stash.pages.state, torch.tensor([0, 40])
    buffers = [stash.buffers[torch.float32, WIDTH][0]]
    record = keep(state, buffers, [], [source], ends, 16, PLENTY, 0)
    assert stash.in_use().item() == 3
    stash.pages.reset()
    (taken,) = take(state, buffers, [], record, record, 48, 16, PLENTY, 0, True)
    assert not taken.any()
    assert stash.overflow_flag().item() and stash.in_use().item() == 0
    free = free_pages(state.tolist(), PLENTY, 0)
    assert sorted(free) == list(range(PLENTY))
    out = make_expert_toy(stashed())
    loss = toy_loss(out(*toy_inputs(8)))
    out.stash.pages.reset()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_is_refused():
    out = toy_loss(make_expert_toy(stashed())(*toy_inputs(8)))
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time: their pages"):
        out.backward()


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="multiple of 16"):
        Stash("cpu", page_rows=20)
    stash = Stash("cpu")
    with pytest.raises(ValueError, match="the columns of its layers"):
        stash.allocate(5)
    with pytest.raises(ValueError, match="negative"):
        Pages(-1, 0, CPU)
    stash.allocate(5, columns={(torch.float32, 16): 1})
    ends = torch.tensor([1, 2, 3, 3], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"width 48.*has pages for 0"):
        stashed_experts(make_experts(), torch.randn(32, WIDTH), torch.rand(32), ends, stash)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_drops_is_not_stashed(reentrant):
    stash, experts = stashed(), make_experts()
    values = torch.randn(48, WIDTH, requires_grad=True)
    ends = torch.tensor([0, 10, 20, 48], dtype=torch.int32)
    out = checkpoint(
        lambda values: stashed_experts(experts, values, torch.rand(48), ends, stash),
        values,
        use_reentrant=reentrant,
    )
    assert stash.in_use().item() == 0
    out.sum().backward()
    assert stash.in_use().item() == 0 and experts.down_proj.grad is not None
