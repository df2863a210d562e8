"""A case is a loop of its own, run twice in processes of their own: without graphs, and with them.

    @case
    def a_global():
        train(Own(lambda m, x: m.l(x) * SCALE), late(lambda m: setg(2.0)))

    cases(a_global=lambda: train(...))  # the same, for what is one expression

Cases patch torch, replace builtins and die: so each run is a fork, and what it has recorded (`rec`)
comes back through a pipe. Verdicts:

    equal       bit by bit, and graphs were replayed
    fallback    bit by bit; calls ran eagerly, under counted reasons
    LAST BITS   the same but for the order of sums
    SILENT      something else
    CRASH       an error, which eager code does not raise, or a process that is gone
"""

import os
import pickle
import random
import select
import signal
import sys
import time
import traceback
import types
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from corpus.facts import ANY_ERROR, ASKED
from torch import nn

import packgraph
import packgraph.graphs.front  # which each fork would load for itself

CASES: dict[str, Any] = {}
EQUAL, FALLBACK, LAST_BITS, SILENT, CRASH = "equal", "fallback", "LAST BITS", "SILENT", "CRASH"
GOOD = (EQUAL, FALLBACK)
LIMIT = 90  # seconds of a run
CLOSED = "closed"
hset = types.ModuleType("hset", "A user's module of settings.")
hset.SCALE = 1.0
sys.modules["hset"] = hset


class _Run(NamedTuple):
    """Values recorded by a case, the error that ended it, and counts of its graphs."""

    values: list[Any]
    error: str | None
    replayed: int
    reasons: dict[str, int]


class Verdict(NamedTuple):
    """How a case ended."""

    kind: str
    what: str


_graphed: list[Any] | None = None  # in a run with graphs
_recorded: list[Any] = []


def cases(**named):
    """Registers cases that are one expression each."""
    if twice := named.keys() & CASES.keys():
        raise ValueError(f"there are two cases called {min(twice)}")
    CASES.update(named)


def case(function):
    """Registers a case under its name."""
    cases(**{function.__name__: function})
    return function


def G(module, **options):
    """The module, graphed in a run with graphs."""
    if _graphed is None:
        return module
    _graphed.append(packgraph.graph(module, **options))
    return _graphed[-1]


def rec(*values):
    """Records values to be compared: tensors bit by bit, all else by its repr."""
    for value in values:
        if isinstance(value, torch.Tensor):
            _recorded.append(_numbers(value.detach()))
        elif isinstance(value, tuple | list):
            rec(*value)
        elif isinstance(value, dict):
            rec(*(part for pair in value.items() for part in pair))
        else:
            _recorded.append((type(value).__name__, repr(value)))


def _numbers(tensor):
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor.resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    wide = tensor if tensor.dtype is torch.int64 else tensor.double()
    return str(tensor.dtype), wide.contiguous().numpy().copy()


def X(seed, *shape):
    """The same normal numbers for each seed."""
    return torch.randn(*(shape or (3, 4)), generator=torch.Generator().manual_seed(seed))


class Lin(nn.Module):
    """Two layers."""

    def __init__(self, n=4):
        super().__init__()
        self.l, self.o = nn.Linear(n, n), nn.Linear(n, n)


class Own(Lin):
    """Two layers, a forward given from outside, and what that reads."""

    def __init__(self, function, buffers=None, **parts):
        super().__init__()
        self.function = function
        for name, buffer in (buffers or {}).items():
            self.register_buffer(name, buffer)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.function(self, *args)


def late(change, at=5):
    """A change before one step."""
    return lambda m, i, g: change(m) if i == at else None


def total(out):
    """A loss of all outputs."""
    if isinstance(out, torch.Tensor):
        return out.sum() if out.is_floating_point() and out.requires_grad else 0.0
    if isinstance(out, dict):
        return sum(map(total, out.values()))
    return sum(map(total, out)) if isinstance(out, tuple | list) else 0.0


def train(
    m,
    change=None,
    steps=8,
    inp=X,
    back=None,
    opt=None,
    call=None,
    observe=None,
    grad=True,
    keep=False,
    **options,
):
    """The common loop. change: of (module, step, graphed), before each step. call: of (graphed,
    input, step). back: of (outputs, module, input, step). grad: inputs need gradients. keep:
    gradients accumulate."""
    g = G(m, **options)
    optimizer = opt(m) if opt else None
    for i in range(steps):
        if change:
            change(m, i, g)
        x = inp(i)
        is_tensor = isinstance(x, torch.Tensor)
        if grad and is_tensor and x.is_floating_point() and x.is_leaf:
            x.requires_grad_()
        if call:
            out = call(g, x, i)
        else:
            out = g(*x) if isinstance(x, tuple) else g(x)
        rec(f"step {i}", out)
        if back:
            back(out, m, x, i)
        elif isinstance(loss := total(out), torch.Tensor):
            loss.backward()
        rec([p.grad for p in m.parameters()], x.grad if is_tensor and x.is_leaf else None)
        if optimizer:
            optimizer.step()
        if observe:
            rec(observe(m))
        if not keep:
            for p in m.parameters():
                p.grad = None
    rec(list(m.parameters()), list(m.buffers()))
    return g


def _run_here(name, graphs):
    """Within a process of its own."""
    global _graphed
    _graphed, error = [] if graphs else None, None
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with warnings.catch_warnings(action="ignore"):
        try:
            CASES[name]()
        except ANY_ERROR as raised:
            where = traceback.extract_tb(raised.__traceback__)[-1]
            error = (
                f"{type(raised).__name__}: {str(raised)[:300]} ({where.filename}:{where.lineno})"
            )
    stats = [packgraph.control(g).stats for g in _graphed or ()]
    reasons = {
        reason: count
        for each in stats
        for reason, count in each.fallbacks.items()
        if reason not in (*ASKED, CLOSED)
    }
    return _Run(_recorded, error, sum(each.replayed for each in stats), reasons)


def run(name, graphs):
    """What a case leaves in a process of its own; in words if that does not end by itself."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reads)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            with os.fdopen(writes, "wb") as stream:
                stream.write(pickle.dumps(_run_here(name, graphs)))
        finally:
            os._exit(0)
    os.close(writes)
    found, end = b"", time.monotonic() + LIMIT
    with os.fdopen(reads, "rb", buffering=0) as stream:
        while select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
            part = stream.read(1 << 20)
            if not part:
                break
            found += part
        else:
            os.kill(child, signal.SIGKILL)
            found = b""
    _, status = os.waitpid(child, 0)
    return pickle.loads(found) if found else f"the process has ended with status {status}"


def judge(name):
    """The verdict on a case.

    Raises:
        RuntimeError: Its run without graphs has an error.
    """
    eager, graphs = run(name, False), run(name, True)
    if isinstance(eager, str) or eager.error:
        raise RuntimeError(f"{name} without graphs: {getattr(eager, 'error', eager)}")
    if isinstance(graphs, str):
        return Verdict(CRASH, graphs)
    counts = f"{graphs.replayed} replays, {graphs.reasons}"
    if found := _difference(eager.values, graphs.values, cut=bool(graphs.error)):
        return Verdict(LAST_BITS if found[1] < 1e-5 else SILENT, f"{found[0]}; {counts}")
    if graphs.error:
        return Verdict(CRASH, f"{graphs.error}; {counts}")
    return Verdict(FALLBACK if graphs.reasons or not graphs.replayed else EQUAL, counts)


def _difference(mine, other, cut):
    """The first difference in words, and how large it is. cut: one may be shorter."""
    step = ""
    for number, (one, two) in enumerate(zip(mine, other, strict=False)):
        step = one[1] if one[0] == "str" and "step" in one[1] else step
        size = _distance(one, two)
        if size:
            return f"{step}, value {number}: {one!s:.60}, with graphs {two!s:.60}", size
    same = cut or len(mine) == len(other)
    return None if same else (f"{len(mine)} values, with graphs {len(other)}", np.inf)


def _distance(one, two):
    """Of two values, relative to the largest number; 0 = they have the same bits."""
    if not isinstance(one[1], np.ndarray) or not isinstance(two[1], np.ndarray):
        return 0.0 if type(one[1]) is type(two[1]) and one == two else np.inf
    a, b = one[1], two[1]
    if one[0] != two[0] or a.shape != b.shape:
        return np.inf
    same = ((a == b) & (np.signbit(a) == np.signbit(b))) | ((a != a) & (b != b))
    if same.all():
        return 0.0
    gap = np.abs(a.astype(float) - b.astype(float)).max() / max(np.abs(a).max(), 1e-30)
    return np.inf if not gap >= 1e-30 else float(gap)
