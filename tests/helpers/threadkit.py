"""Threads of tests, and a module whose gradients do not depend on their order."""

import contextlib
import threading

import torch
from torch import nn


def together(*works):
    """Run all at once; what any of them raised."""
    errors, start = [], threading.Barrier(len(works))

    def run(work):
        try:
            start.wait()
            work()
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    return errors


@contextlib.contextmanager
def beside(work):
    """Another thread calls `work` again and again while the block runs."""
    stop, errors = threading.Event(), []

    def run():
        try:
            while not stop.is_set():
                work()
        finally:
            if not stop.is_set():
                errors.append("it ended early")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive() and not errors, errors


class Wide(nn.Module):
    """Whole numbers in float64, whose sums are exact: gradients do not depend on the order of
    threads. (In float32 they would from 2**24 on, which the biases' gradients exceed.)"""

    def __init__(self, width=256):
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, dtype=torch.float64) for _ in range(2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape))

    def forward(self, x):
        return self.second(self.first(x).relu())


def whole(rows, seed, width=256):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (rows, width), generator=generator).double()


def gradients(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def looking(does):
    """An operation that returns a copy of its argument, and calls `does`, which no tracer sees."""

    def look(x: torch.Tensor) -> torch.Tensor:
        does()
        return x.clone()

    made = torch.library.custom_op(f"threadkit::look{id(does)}", look, mutates_args=())
    made.register_fake(torch.empty_like)
    return made
