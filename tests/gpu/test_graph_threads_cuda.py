"""Threads on CUDA: streams of their own, autograd's one thread for all backwards, and draws beside
a capture.

`CUDAGraph.capture_begin` registers the device's default generator with every graph and puts its
state into capture mode, which belongs to the process: until the capture ends, whoever draws from it
outside of the capture gets an error. Captured code draws from it by operations that take no
generator (fused dropout), so a private one will not do; and its state cannot be exchanged for the
time of an operation, since other threads draw in C++ without a lock that Python has.
"""

import contextlib
import random
import threading

import pytest
import threadkit
import torch
from threadkit import beside
from torch import nn

from packgraph.graphs.errors import CaptureError
from packgraph.graphs.fallback import eager as run_eagerly
from packgraph.graphs.graphed import graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH = 256


def whole_numbers(rows, seed):
    """float32 sums of them are exact, so gradients do not depend on the order of threads."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (rows, WIDTH), generator=generator).float().cuda().requires_grad_()


def wide():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).cuda()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator).float())
    return module


def backwards(model, rows, seeds, found):
    for seed in seeds:
        x = whole_numbers(rows, seed)
        out = model(x)
        out.sum().backward()
        found[rows, seed] = (out.detach().clone(), x.grad.clone())


def together(*works):
    errors = threadkit.together(*works)
    torch.cuda.synchronize()
    assert not errors, errors


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("streams", [True, False], ids=["streams of their own", "one stream"])
@pytest.mark.parametrize("warm", [True, False], ids=["captured before", "new"])
@pytest.mark.parametrize(
    ("rows", "eager_thread"),
    [((256, 256), False), ((256, 128), False), ((256, 256), True)],
    ids=["replays", "captures of other shapes", "eager calls"],
)
def test_threads_that_share_a_module_sum_all_gradients(rows, eager_thread, warm, streams):
    eager, graphed, count = wide(), graph(wide(), warmup=2), 30
    if warm:
        for model in (eager, graphed):
            backwards(model, rows[0], [1, 2, 3], {})
    seeds = [range(1000 * (thread + 1), 1000 * (thread + 1) + count) for thread in range(2)]
    expected, found = {}, {}
    for thread in range(2):
        backwards(eager, rows[thread], seeds[thread], expected)
    torch.cuda.synchronize()

    def work(thread):
        stream = torch.cuda.Stream() if streams else torch.cuda.current_stream()
        reason = run_eagerly("a test") if eager_thread and thread else contextlib.nullcontext()
        with torch.cuda.stream(stream), reason:
            backwards(graphed, rows[thread], seeds[thread], found)
            stream.synchronize()

    together(lambda: work(0), lambda: work(1))
    assert found.keys() == expected.keys() and graphed.stats.replayed > 0
    assert all(
        torch.equal(*both)
        for key, pair in expected.items()
        for both in zip(pair, found[key], strict=True)
    )
    for (name, one), other in zip(eager.named_parameters(), graphed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_one_thread_may_change_its_stream():
    eager, graphed = wide(), graph(wide(), warmup=1)
    expected, found = {}, {}
    backwards(eager, 256, range(20), expected)
    for seed in range(20):
        with torch.cuda.stream(torch.cuda.Stream()):
            backwards(graphed, 256, [seed], found)
            torch.cuda.current_stream().synchronize()
    assert all(
        torch.equal(*both)
        for key, pair in expected.items()
        for both in zip(pair, found[key], strict=True)
    )
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(eager.parameters(), graphed.parameters(), strict=True)
    )


def dropping():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).cuda()


DRAWS = {
    "torch": lambda generator: torch.rand(4),
    "random": lambda generator: [random.random() for _ in range(4)],
    "cuda": lambda generator: torch.rand(4, device="cuda", generator=generator),
}
IN_CAPTURE_MODE = (
    "Offset increment outside graph capture"  # what torch says; docs/assumptions.md, Threads
)


def capture_ten(again=True):
    """again: the first backward has a gradient of another layout than captured, so its forward is
    run again."""
    for _ in range(10):
        graphed = graph(dropping(), warmup=0, strict=True)
        out = graphed(
            torch.randn(8, 4, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        )
        out.sum().backward() if again else out.backward(torch.ones_like(out))
        assert graphed.stats.captured == graphed.stats.replayed == 1


def assert_no_number_twice(drawn):
    numbers = [tuple(torch.as_tensor(found).tolist()) for found in drawn]
    assert numbers
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("draw", DRAWS)
def test_captures_beside_a_thread_that_launches_and_draws(draw):
    """Of the device, from a generator of its own."""
    drawn, own = [], torch.Generator("cuda").manual_seed(7)

    def work():
        torch.ones(1000, device="cuda").mul_(2).sum()
        drawn.append(DRAWS[draw](own))

    with beside(work):
        capture_ten()
    assert_no_number_twice(drawn)


def test_a_draw_from_the_devices_default_generator_beside_captures_succeeds_or_is_torchs_error():
    """Numbers of that generator are drawn by dry runs too, by operations that take no generator. A
    forward that is run again for its gradients draws from it, too, and is an error where the
    numbers are no longer the same."""
    drawn, errors = [], []

    def work():
        try:
            drawn.append(torch.rand(4, device="cuda"))
        except RuntimeError as error:
            errors.append(str(error))

    with beside(work):
        capture_ten(again=False)
    assert all(IN_CAPTURE_MODE in error for error in errors), set(errors)
    assert_no_number_twice(drawn)


def test_any_capture_of_torchs_refuses_draws_of_other_threads():
    """Negative control, without packgraph: when this fails, torch has lifted the limit."""
    begun, drawn, errors = threading.Event(), threading.Event(), []

    def draw():
        begun.wait(60)
        try:
            torch.rand(4, device="cuda")
        except RuntimeError as error:
            errors.append(str(error))
        drawn.set()

    torch.rand(4, device="cuda")
    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        begun.set()
        assert drawn.wait(60)
    assert len(errors) == 1
    assert IN_CAPTURE_MODE in errors[0]


def test_a_capture_leaves_all_random_states_as_they_were():
    states = lambda: (  # noqa: E731
        torch.get_rng_state().tolist(),
        torch.cuda.get_rng_state().tolist(),
        random.getstate(),
    )
    graphed, before = graph(dropping(), warmup=0, strict=True), states()
    graphed.build([(torch.ones(8, 4, device="cuda"),)])
    assert graphed.stats.captured == 1 and states() == before


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * random.random()


def test_draws_of_a_backward_are_refused_in_autograds_thread():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return DrawsInBackward.apply(self.linear(x))

    with (
        beside(lambda: random.random()),
        pytest.raises(CaptureError, match="cannot read"),
    ):
        graph(Module().cuda(), warmup=0, strict=True)(torch.ones(3, 4, device="cuda"))
