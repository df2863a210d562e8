"""Threads: several of them may share a graphed module, and a capture takes nothing from those
beside it."""

import contextlib
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as functional
from graphkit import make_toy, toy_inputs, toy_loss
from statekit import One, Staged, X, captured, quietly
from threadkit import Wide, beside, gradients, looking, together, whole
from torch import nn
from tracekit import differences

from packgraph.graphs import slots
from packgraph.graphs.checks import random_state
from packgraph.graphs.checks.random_state import Draws
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.fallback import BUSY
from packgraph.graphs.fallback import eager as run_eagerly
from packgraph.graphs.graphed import graph


@pytest.fixture(autouse=True)
def switch_often():
    """Threads take turns every few microseconds, so that what is not exclusive meets."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# ---- one module in several threads


def backwards(model, rows, seeds, found):
    for seed in seeds:
        x = whole(rows, seed).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        found[rows, seed] = (out.detach().clone(), x.grad.clone())


SHARED = {"replays": (256, 256), "captures of other shapes": (256, 128), "eager calls": (256, 256)}


@pytest.mark.parametrize("warm", [True, False], ids=["captured before", "new"])
@pytest.mark.parametrize("slots", [None, 2])
@pytest.mark.parametrize("case", SHARED)
def test_threads_that_share_a_module_sum_all_gradients(case, slots, warm):
    torch.manual_seed(0)
    eager, count = Wide(), 10
    graphed = graph(Wide(), warmup=2, slots=slots)
    graphed.load_state_dict(eager.state_dict())
    if warm:
        for model in (eager, graphed):
            backwards(model, SHARED[case][0], [1, 2, 3], {})
    seeds = [range(1000 * (thread + 1), 1000 * (thread + 1) + count) for thread in range(2)]
    expected, found = {}, {}

    def work(thread):
        with (
            run_eagerly("a test") if case == "eager calls" and thread else contextlib.nullcontext()
        ):
            backwards(graphed, SHARED[case][thread], seeds[thread], found)

    for thread, rows in enumerate(SHARED[case]):
        backwards(eager, rows, seeds[thread], expected)
    errors = together(lambda: work(0), lambda: work(1))
    assert not errors, errors
    assert found.keys() == expected.keys() and graphed.stats.replayed > 0
    assert all(
        torch.equal(*both)
        for key, pair in expected.items()
        for both in zip(pair, found[key], strict=True)
    )
    for name, gradient in gradients(eager).items():
        assert torch.equal(gradient, gradients(graphed)[name]), name


def test_a_module_may_go_from_one_thread_to_another():
    """Negative control: threads one after another are as one."""
    eager, graphed = make_toy(dropout=0.0), graph(make_toy(dropout=0.0), warmup=1)

    def step(model, trace):
        torch.manual_seed(3)
        ids, x = toy_inputs(8)
        toy_loss(model(ids, x)).backward()
        trace.append({name: p.grad.clone() for name, p in model.named_parameters()} | {"x": x.grad})

    traces = []
    for model in (eager, graphed):
        traces.append([])
        for _ in range(3):
            step(model, traces[-1])
        assert not together(lambda model=model: [step(model, traces[-1]) for _ in range(3)])
        step(model, traces[-1])
    assert not differences(*traces)


# ---- random numbers beside a capture


def capture_many(make, count=8):
    """So many captures of new modules; the statistics of each."""
    found = []
    for _ in range(count):
        graphed = graph(make(), warmup=0, strict=True)
        graphed(X).square().sum().backward()
        found.append(graphed.stats)
    return found


def dropping():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))


DRAWS = {
    "torch": lambda: torch.rand(4).tolist(),
    "random": lambda: [random.random() for _ in range(4)],
    "numpy": lambda: __import__("numpy").random.rand(4).tolist(),
}


def test_a_thread_that_draws_beside_captures_gets_no_number_twice():
    pytest.importorskip("numpy")
    drawn = []
    with beside(lambda: drawn.append([tuple(draw()) for draw in DRAWS.values()])):
        stats = capture_many(dropping)
    assert all(s.captured and s.replayed for s in stats)
    for numbers in zip(*drawn, strict=True):  # of one generator
        assert len(numbers) > 8 and len(set(numbers)) == len(numbers)


def test_a_thread_with_a_generator_of_its_own_draws_as_if_it_were_alone():
    generator, drawn = torch.Generator().manual_seed(5), []
    with beside(lambda: drawn.append(torch.rand(4, generator=generator))):
        capture_many(dropping, 4)
    again = torch.Generator().manual_seed(5)
    assert all(torch.equal(numbers, torch.rand(4, generator=again)) for numbers in drawn)


def test_a_capture_leaves_all_random_states_as_they_were():
    """Negative control of the above: alone, nothing is drawn, eager stages included."""
    numpy = pytest.importorskip("numpy")

    def between(module, state):
        random.random()
        numpy.random.rand()
        return {"x": functional.dropout(state["x"], 0.5) + torch.rand(4, generator=module.held)}

    module = Staged(between)
    module.held = torch.Generator().manual_seed(5)
    graphed = graph(module, scope=["attn", "mlp"], warmup=0, strict=True)
    states = lambda: (  # noqa: E731
        torch.get_rng_state().tolist(),
        random.getstate(),
        module.held.get_state().tolist(),
        [part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()],
    )
    before = states()
    graphed.build([(X,)])
    assert graphed.stats.captured == 2 and before == states()


@pytest.mark.parametrize("draw", ["random", "numpy"])
@pytest.mark.parametrize("held", ["global", "closure", "attribute"])
def test_draws_of_the_captured_code_itself_are_refused_while_another_thread_draws(draw, held):
    numpy = pytest.importorskip("numpy")
    function = random.random if draw == "random" else numpy.random.rand
    forwards = {
        "global": (lambda m, x: m.linear(x) * random.random())
        if draw == "random"
        else through_a_module,
        "closure": lambda m, x: m.linear(x) * float(function()),
        "attribute": lambda m, x: m.linear(x) * float(m.draw()),
    }
    module = One(forwards[held], draw=function)
    with beside(DRAWS[draw]), pytest.raises(CaptureError) as caught:
        graph(module, warmup=0, strict=True)(X)
    assert __file__ in caught.value.where


def through_a_module(module, x):
    import numpy

    return module.linear(x) * numpy.random.rand()


# ---- what is not the capturing thread's


def test_modules_are_captured_in_threads_at_once():
    def work(seed):
        torch.manual_seed(seed)
        graphed = graph(dropping(), warmup=0, strict=True)
        for rows in range(1, 6):
            graphed(torch.randn(rows, 4)).square().sum().backward()
        assert graphed.stats.captured == 5

    errors = together(*[lambda seed=seed: work(seed) for seed in range(4)])
    assert not errors, errors


OTHERS = {
    "seeds": lambda: torch.manual_seed(1),
    "states": lambda: torch.set_rng_state(torch.get_rng_state()),
    "resizes": lambda: torch.empty(3).untyped_storage().resize_(100),
    "seeds a generator": lambda: torch.Generator().manual_seed(3),
}


@pytest.mark.parametrize("work", OTHERS)
def test_what_captured_code_must_not_do_other_threads_may(work):
    with beside(OTHERS[work]):
        for stats in capture_many(lambda: nn.Linear(4, 4), 4):
            assert stats.captured == 1


def test_nothing_of_torch_is_replaced_while_a_capture_runs():
    names = {
        "seed": lambda: torch.manual_seed,
        "get": lambda: torch.get_rng_state,
        "set": lambda: torch.set_rng_state,
        "resize": lambda: vars(torch.UntypedStorage).get("resize_"),
        "cuda": lambda: torch.cuda.manual_seed_all,
    }
    before, seen = {name: look() for name, look in names.items()}, []

    def forward(module, x):
        seen.append({name: look() for name, look in names.items()})
        return module.linear(x)

    captured(One(forward), X)
    assert seen and all(found == before for found in seen)


def test_the_module_itself_is_not_seen_with_stand_ins_for_its_parameters():
    """An eager call of another thread waits while the module is captured, and a capture for calls
    under way."""
    seen = []

    @looking
    def look():
        seen.append((threading.current_thread().name, id(module.linear.weight)))
        time.sleep(1e-4)  # let the other thread in
        seen.append((threading.current_thread().name, id(module.linear.weight)))

    module = One(lambda module, x: module.linear(look(x)))
    real, graphed = id(module.linear.weight), graph(module, warmup=0)

    def evaluate():
        threading.current_thread().name = "evaluating"
        with run_eagerly("evaluation"), torch.no_grad():
            for _ in range(200):
                graphed(X)

    def capture():
        threading.current_thread().name = "capturing"
        for rows in range(1, 9):
            quietly(lambda rows=rows: graphed(torch.randn(rows, 4)).square().sum().backward())

    assert not (errors := together(evaluate, capture)), errors
    assert {weight for name, weight in seen if name == "evaluating"} == {real}
    assert graphed.stats.captured == 8 and graphed.stats.replayed == 8


def test_a_capture_that_others_do_not_make_room_for_is_put_off(monkeypatch):
    monkeypatch.setattr(slots, "LONGEST_WAIT_S", 0.05)
    entered, leave = threading.Event(), threading.Event()

    @looking
    def look():
        if threading.current_thread() is thread:
            entered.set()
            leave.wait(60)

    graphed = graph(One(lambda module, x: module.linear(look(x))), warmup=0)

    def stay_eager():
        with run_eagerly("test"), torch.no_grad():
            graphed(X)

    thread = threading.Thread(target=stay_eager)
    thread.start()
    assert entered.wait(60)
    eager = graphed.module.linear(X)
    assert torch.equal(quietly(lambda: graphed(X)), eager)
    assert not leave.is_set() and graphed.stats.fallbacks[BUSY] == 1 and not graphed.stats.captured
    leave.set()
    thread.join()
    assert torch.equal(graphed(X), eager) and graphed.stats.captured == 1


# ---- the capturing thread's own calls


def swallows(module, x):
    with contextlib.suppress(CaptureError):
        torch.manual_seed(3)
    return module.linear(x)


def test_an_error_that_the_module_swallows_is_raised_all_the_same():
    with pytest.raises(CaptureError) as caught:
        graph(One(swallows), warmup=0, strict=True)(X)
    assert "in swallows" in caught.value.where


def test_a_thread_of_autograds_listens_as_long_as_the_capture():
    draws, found = Draws([torch.default_generator]), []
    draws.bakes = True  # as on a GPU
    state = torch.get_rng_state()

    def engine(listen, ended):
        listen(None)
        try:
            torch.set_rng_state(state)
        except CaptureError as error:
            found.append(error)
        ended.wait(60)
        found.append(torch.set_rng_state(state))

    ended = threading.Event()
    with draws.listening():
        thread = threading.Thread(target=engine, args=(draws.listen, ended))
        thread.start()
        while not found:
            time.sleep(1e-3)
    ended.set()
    thread.join()
    assert isinstance(found[0], CaptureError) and found[1:] == [None]


def test_a_profiler_goes_on_after_a_capture():
    seen = []

    def look(frame, event, argument):
        seen.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        captured(One(lambda m, x: m.linear(x)), X)
        assert sys.getprofile() is look and "capture_variant" in seen
    finally:
        sys.setprofile(None)


def test_a_profiler_that_begins_in_captured_code_is_refused():
    def forward(module, x):
        sys.setprofile(None)
        return module.linear(x)

    with pytest.raises(CaptureError):
        graph(One(forward), warmup=0, strict=True)(X)


def test_a_generator_moved_in_another_way_is_refused():
    def forward(module, x):
        torch.default_generator.set_state(torch.default_generator.get_state())
        return module.linear(x)

    with pytest.raises(CaptureError):
        graph(One(forward), warmup=0, strict=True)(X)


# ---- backwards that share one thread, as on CUDA


class _Again(torch.autograd.Function):
    """Its backward calls the module, as one does that runs its forward again."""

    @staticmethod
    def forward(ctx, x, calls):
        ctx.calls = calls
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with ctx.calls:
            return gradient, None


def test_a_capture_waits_for_backwards_that_may_run_their_forward_again():
    order, closing, flying = [], threading.Event(), [True]

    def elsewhere():
        closing.set()
        return bool(flying)

    calls = slots.Calls(torch.device("cuda"), elsewhere)
    loss = _Again.apply(torch.ones(1, requires_grad=True), calls).sum()

    def captures():
        with calls.capture() as free:
            order.append(("capture", free))

    def differentiates():
        assert closing.wait(10)
        loss.backward()
        order.append("backward")
        flying.clear()

    assert not together(captures, differentiates)
    assert order == ["backward", ("capture", True)]


def test_a_capture_waits_in_vain_for_a_bounded_time_and_then_refuses_such_backwards(monkeypatch):
    monkeypatch.setattr(slots, "LONGEST_WAIT_FOR_BACKWARDS_S", 0.05)
    calls = slots.Calls(torch.device("cuda"), lambda: True)
    loss = _Again.apply(torch.ones(1, requires_grad=True), calls).sum()
    begun, ended = threading.Event(), threading.Event()

    def captures():
        with calls.capture() as free:
            assert free
            begun.set()
            assert ended.wait(10)

    def differentiates():
        assert begun.wait(10)
        with pytest.raises(RuntimeError, match="let one thread call the module alone"):
            loss.backward()
        ended.set()

    assert not together(captures, differentiates)


def test_an_interrupted_wait_leaves_the_module_open():
    def interrupted():
        raise KeyboardInterrupt

    calls = slots.Calls(torch.device("cuda"), interrupted)
    with pytest.raises(KeyboardInterrupt), calls, calls.capture():
        pass
    entered = []

    def enters():
        with calls:
            entered.append(True)

    assert not together(enters) and entered == [True]


def test_numbers_that_only_the_default_generator_can_give_are_taken_back_unless_others_have_drawn():
    """An operation that takes no generator moves the real one: undone alone, kept where another
    thread draws."""

    @torch.library.custom_op("packgraph_tests::noise", mutates_args=())
    def noise(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(4)

    noise.register_fake(lambda x: x.new_empty(4))
    module = One(lambda m, x: m.linear(x) * noise(x))
    state = torch.get_rng_state()
    graph(module, warmup=0, strict=True).build([(X,)])
    assert torch.equal(state, torch.get_rng_state())
    drawn = []
    with beside(lambda: drawn.append(tuple(torch.rand(4).tolist()))):
        for _ in range(5):
            graph(module, warmup=0, strict=True).build([(X,)])
    assert len(set(drawn)) == len(drawn)


def test_threads_that_run_only_a_librarys_code_do_not_count():
    tqdm = pytest.importorskip("tqdm")
    monitor = tqdm.TMonitor(tqdm.tqdm, 10)
    try:
        assert random_state.is_alone()
        with beside(lambda: time.sleep(1e-3)):
            assert not random_state.is_alone()
    finally:
        monitor.exit()
    assert random_state.is_alone()


def test_the_thread_that_makes_steps_ahead_does_not_count():
    with ThreadPoolExecutor(1, random_state.QUIET_THREAD) as thread:
        thread.submit(time.sleep, 0).result()
        assert random_state.is_alone()
    with ThreadPoolExecutor(1, "another") as thread:
        thread.submit(time.sleep, 0).result()
        assert not random_state.is_alone()


@pytest.mark.parametrize(
    "move", [lambda s: torch.random.set_rng_state(s), lambda s: torch.set_rng_state(s)]
)
def test_code_that_moves_the_default_generator_runs_eagerly(move):
    def forward(module, x):
        state = torch.get_rng_state()
        first = torch.rand(4)
        move(state)
        return module.linear(x) * (torch.rand(4) - first + 1)

    eager, graphed = One(forward), graph(One(forward), warmup=0)
    states, outputs = [], []
    for model in (eager, graphed):
        torch.manual_seed(4)
        outputs.append([quietly(model, X) for _ in range(3)])
        states.append(torch.get_rng_state())
    assert torch.equal(*states) and all(map(torch.equal, *outputs))
    assert graphed.stats.replayed == 0 and dict(graphed.stats.fallbacks) == {"capture failed": 3}
