"""Threads that train one module or several, and what goes on beside a capture; turns make sums
repeatable."""

import threading

import torch
from corpus.entry import Own, add, one
from corpus.facts import together
from torch import nn

GROUP = "threads"


def net():
    return Own(
        lambda m, x: m.other(m.drop(torch.tanh(m.linear(x)))),
        other=nn.Linear(4, 4),
        drop=nn.Dropout(0.0),
    )


def loop(name, drive, make=net):
    def run(model, draw, done):
        for facts in drive(model, draw):
            done(**facts)

    add(GROUP, name, make, one, drive=run)


def one_thread_of_its_own(model, draw):
    for step in range(6):
        found = []
        together(
            lambda step=step, found=found: (
                found.append(model(draw(step).rows())),
                found[0].square().mean().backward(),
            )
        )
        yield {"out": found[0]}
        model.zero_grad()


def forward_here_backward_there(model, draw):
    for step in range(6):
        out = model(draw(step).rows())
        together(out.square().mean().backward)
        yield {"out": out}
        model.zero_grad()


def two_backwards_at_once(model, draw):
    """Gradients of inputs and of outputs are compared; sums of two are the same in both orders."""
    for step in range(8):
        xs = [draw(10 * step + n).rows(grad=True) for n in (0, 1)]
        outs = [model(x) for x in xs]
        together(*(out.square().mean().backward for out in outs))
        yield {"x": [x.grad for x in xs]}
        model.zero_grad()


def two_loops_at_once(model, draw):
    """Both threads run forward and backward, ten rounds each. Only inputs get gradients: sums have
    no order."""
    for step in range(4):
        found = {}

        def train(n, step=step, found=found):
            for round_ in range(10):
                x = draw(100 * step + 10 * n + round_).rows(grad=True)
                out = model(x)
                out.square().mean().backward(inputs=[x])
                found[n, round_] = (out.detach(), x.grad)

        together(lambda: train(0), lambda: train(1))
        yield {"found": [found[key] for key in sorted(found)]}
        model.zero_grad()


def drawing_beside_a_capture(model, draw):
    """A data loader draws from its own generator while the module captures."""
    generator, found = torch.Generator().manual_seed(3), []
    stop = threading.Event()

    def draws():
        while not stop.is_set() and len(found) < 5000:
            found.append(torch.rand((), generator=generator))

    thread = threading.Thread(target=draws)
    thread.start()
    try:
        for step in range(6):
            model(draw(step).rows()).square().mean().backward()
            yield {}
            model.zero_grad()
    finally:
        stop.set()
        thread.join()
    again = torch.Generator().manual_seed(3)
    yield {"alike": all(bool(a == torch.rand((), generator=again)) for a in found)}


def threads_drawing_from_the_global_generator(model, draw):
    """No two draws of another thread are alike, whatever the module does beside it."""
    found, stop = [], threading.Event()

    def draws():
        while not stop.is_set() and len(found) < 2000:
            found.append(torch.rand(4, device="cpu"))

    thread = threading.Thread(target=draws)
    thread.start()
    outs = []
    try:
        for step in range(8):
            model(draw(step).rows(2 + step % 3, 4)).square().mean().backward()
            outs.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad()
    finally:
        stop.set()
        thread.join()
    torch.manual_seed(1)  # where the generator stands depends on the threads
    yield {"outs": outs, "distinct": len({tuple(t.tolist()) for t in found}) == len(found)}


def thread_changes_the_module(model, draw):
    for step in range(6):
        if step == 4:
            together(lambda: setattr(model.drop, "p", 1.0))
        out = model(draw(step).rows())
        out.square().mean().backward()
        yield {"out": out}
        model.zero_grad()


def thread_under_no_grad(model, draw):
    """Gradient mode belongs to a thread."""
    for step in range(6):
        found = []
        with torch.no_grad():
            together(lambda step=step, found=found: found.append(model(draw(step).rows())))
        found[0].square().mean().backward()
        yield {"out": found[0], "trains": found[0].requires_grad}
        model.zero_grad()


for drive in (
    one_thread_of_its_own,
    forward_here_backward_there,
    two_backwards_at_once,
    two_loops_at_once,
    drawing_beside_a_capture,
    threads_drawing_from_the_global_generator,
    thread_changes_the_module,
    thread_under_no_grad,
):
    loop(drive.__name__.replace("_", " "), drive)
