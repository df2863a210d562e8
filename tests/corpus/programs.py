"""Random programs: a module's class and the loop that trains it, as source text that runs by
itself.

A program is two lists of lines. Each line of forward makes a value of others by name, [rows, 4], so
that a line can be replaced by one of its operands; each line of the loop can be left out. That is
how a failing program is made small.
"""

import itertools
import random
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from corpus.entry import (
    INFINITE,
    LOSS_IN_A_THREAD,
    SAVED_UNREAD,
    WEIGHT_TWICE,
    WIDTH,
    Draw,
    Entry,
    one,
    scalar,
    trained,
)
from corpus.facts import Verdict, together
from corpus.loops import check
from torch import Tensor, nn

STEPS, MOST_VALUES = 4, 7

# {a} and {b} are values made before, {n} is a small number.
PURE = [
    "torch.tanh({a})",
    "{a} + {b}",
    "{a} * {b}.sigmoid()",
    "self.one({a})",
    "self.two({a})",
    "{a} @ self.one.weight.t()",
    "{a}.relu()",
    "{a}.softmax(-1)",
    "{a} * {n}.5",
    "self.norm({a})",
    "{a} * self.weight.mean()",
    "{a} - {b}.mean(0)",
    "torch.where({a} > 0, {a}, {b})",
    "({a} * {a} + 0.5).sqrt()",
    "{a}.cumsum(0) * 0.5",
    "{a} @ self.frozen",
    "{a}.masked_fill({b} > 1, 0.25)",
    "{a}[{b}.sum(1).argsort()]",
    "torch.cat([{a}, {b}], 1)[:, ::2]",
    "({a} @ {b}.t()).softmax(-1) @ {b}",
    "Square.apply({a}) * 0.3",
    "{a} * torch.full((4,), {n}.0, device=x.device)",
    "torch.zeros_like({a}).scatter_add(0, {b}.argsort(0), {a})",
]
RANDOM = [
    "self.drop({a})",
    "{a} + torch.randn_like({a}) * 0.1",
    "{a} * torch.rand({a}.shape, device=x.device)",
    "functional.dropout({a}, 0.2, self.training)",
]
STATE = [
    "{a} * self.scale",
    "{a} * self.config.scale",
    "{a} * self.config.inner.scale",
    "{a} * self.table['s']",
    "{a} * self.items[0]",
    "{a} * self.factor",
    "{a} * SCALE",
    "{a} * TABLE['s']",
    "{a} * self.pair.left",
    "self.act({a})",
    "({a} if self.config.flag else {b})",
    "{a} * float(self.array[0])",
    "{a} * self.held[0]",
    "self.teacher[0]({a})",
    "{a} * (1.0 + len(self.names))",
    "helper({a})",
]
ALIASES = [
    "{a}.view(-1).view_as({a})",
    "{a}.t().t()",
    "{a}.detach()",
    "{a}.expand_as({a})",
    "{a}.clone()",
    "{a}.reshape(2, -1).reshape({a}.shape)",
    "torch.stack({a}.unbind(1), 1)",
    "{a}.t().contiguous().t()",
    "{a}[:]",
]
IN_PLACE = [
    "({a} * 1.0).mul_({b}.detach())",
    "write({a}.clone(), {n})",
    "{a}.clone().t_().t()",
    "({a} + 0.0).relu_()",
    "{a}.add_(0.5)",
    "{a}.clone().index_fill_(1, torch.tensor([1], device=x.device), 0.5)",
    "{a}.clone().exp_()",
]
COMPLEX = [
    "torch.complex({a}, {b}).conj().imag",
    "(torch.fft.fft({a}) * self.z).real",
    "torch.fft.irfft(torch.fft.rfft({a}), n=4)",
    "({a} * torch.exp(1j * self.phase)).imag",
    "torch.view_as_real(torch.polar({a}.abs(), {b})).sum(-1)",
    "(torch.complex({a}, {b}) @ self.z.diag().conj()).real",
    "(torch.complex({a}, {b}).mH @ torch.complex({b}, {a})).real[:1] + {a}",
    "(torch.complex({a}, {b}) * torch.complex({a}, {b}).conj()).real",
    "(-torch.complex({a}, {b}).conj()).imag.clone()",
    "torch.fft.ifft(torch.fft.fft({a}).conj()).abs()",
]
WRITES = [
    "kept(self.mean.lerp_({a}.detach().mean(0), 0.1), {a})",
    "kept(self.count.add_(1), {a})",
    "kept(setattr(self, 'mean', self.mean * 0.9 + {a}.detach().mean(0)), {a})",
    "{a} * self.mean.cos()",
    "{a} + self.count",
    "self.batch({a})",
    "kept(self.mean.mul_(0.9), {a})",
]
ODD = [
    "kept(setattr(self, 'aux', {a}.square().mean()), {a})",
    "kept(AUX.append({a}.detach()), {a})",
    "kept({a}.register_hook(lambda g: g * 2) if {a}.requires_grad else None, {a})",
    "checkpoint(self.two, {a}, use_reentrant=False)",
    "unless_grad(lambda: {a} * 0.5) + {a}",
    "kept(setattr(self, 'scale', self.scale + 0.25), {a})",
    "{a} * (1.0 + ({a}.sum().item() > 0))",
    "kept(self.config.__dict__.update(n={n}), {a})",
    "torch.func.functional_call(self.two, {{'weight': self.weight}}, ({a},))",
]
KINDS = [
    (PURE, 9),
    (RANDOM, 2),
    (STATE, 5),
    (ALIASES, 3),
    (IN_PLACE, 2),
    (COMPLEX, 3),
    (WRITES, 2),
    (ODD, 1),
]

RETURNED = [
    "{a}",
    "{a}",
    "{a}",
    "{a}.t()",
    "{a}[:, 1:]",
    "{a}.sum()",
    "{a}.detach()",
    "({a}, {b})",
    "{{'h': {a}}}",
    "{a} > 0",
    "torch.complex({a}, {b}).conj()",
    "x",
    "{a}.mean(0)",
    "None",
    "{a}.double()",
    "self.weight",
    "self.mean",
]

MUTATIONS = [
    "m.scale = 2.0",
    "m.config.scale = 3.0",
    "m.config.inner.scale = 0.5",
    "m.table['s'] = 2.0",
    "m.items[0] = 2.0",
    "type_of(m).factor = 2.0",
    "globals().update(SCALE=2.0)",
    "TABLE['s'] = 2.0",
    "m.pair = m.pair._replace(left=2.0)",
    "m.act = torch.sigmoid",
    "m.config.flag = False",
    "m.array[0] = 2.0",
    "m.held[0] = m.held[0] * 2",
    "m.names.add('b')",
    "m.teacher[0].weight.data.mul_(2)",
    "m.teacher[0] = nn.Linear(4, 4).to(m.weight.device)",
    "m.drop.p = 0.7",
    "globals().update(helper=other_helper)",
    "m.one.weight.requires_grad_(False)",
    "m.one.requires_grad_(True)",
    "m.frozen.data.mul_(2)",
    "silent(lambda: m.frozen.mul_(0.5))",
    "m.mean.fill_(0.5)",
    "m.mean = m.mean + 1",
    "m.one = nn.Linear(4, 4).to(m.weight.device)",
    "m.weight = nn.Parameter(m.weight.detach() * 2)",
    "m.batch.eval()",
    "m.weight.data = m.weight.data * 2",
    "m.two.weight = m.one.weight",
    "m.load_state_dict(m.state_dict())",
    "m.weight.grad = torch.ones_like(m.weight)",
    "m.one.weight.grad = flat(m).view(4, 4)",
    "m.norm.eps = 0.5",
    "handles.append(m.weight.register_hook(lambda g: g * 2))",
    "[handle.remove() for handle in handles]",
    "handles.append(m.one.weight.register_post_accumulate_grad_hook(halve))",
    "torch.manual_seed(3)",
    "m.batch.train()",
    "saved.append(m.weight.grad)",
    "m.weight.grad = None",
    "m.train()",
    "m.config = copy.deepcopy(m.config)",
]
BETWEEN = [
    "hook({o}, lambda g: g * 2)",
    "hook({o}, lambda g: g + 1)",
    "retain({o})",
    "m.weight.register_hook(lambda g: g * 2)",
    "silent(lambda: m.frozen.mul_(1.5))",
    "silent(lambda: m.mean.add_(1))",
    "torch.rand(2, device=m.weight.device)",
    "m.config.scale = 1.5",
    "written({o})",
    "m.zero_grad()",
    "evaluated(m, {x})",
    "m.weight.grad = None",
    "silent(lambda: m.two.weight.mul_(1.1))",
    "saved.append({o})",
]
BACKWARD = ["back({o})"] * 6 + [
    "back({o}, first=1)",
    "back({o}, last=1)",
    "back({o}, first=1)",
    "asked(m, {o})",
    "asked(m, {o}, first=1)",
    "back({o}, inputs=[m.weight])",
    "back({o}, inputs=[p for p in m.parameters() if p.requires_grad][::2])",
    "back({o}, retain_graph=True); back({o}, last=1)",
    "penalty(m, {o})",
    "in_thread(lambda: back({o}))",
    "pass",
    "back({o}, scale=0.0)",
    "back({o}, scale=float('inf'))",
]


@dataclass(frozen=True)
class Line:
    """A line of forward. value: the name it makes; expression: of what; operand: a value that can
    stand for it."""

    value: str
    expression: str
    operand: str

    def __str__(self) -> str:
        return f"{self.value} = {self.expression}"


@dataclass(frozen=True)
class Program:
    """lines: of forward. returned: the outputs' expressions. loop: lines of the loop, of all
    steps."""

    seed: int
    lines: tuple[Line, ...]
    returned: tuple[str, ...]
    loop: tuple[str, ...]

    @property
    def text(self) -> str:
        forward = [str(line) for line in self.lines] + [f"return ({', '.join(self.returned)},)"]
        body = "\n".join(f"        {line}" for line in forward)
        loop = "\n".join(f"    {line}" for line in self.loop)
        return (
            f"class Program(Parts):\n    def forward(self, x):\n        v0 = x\n{body}\n\n\n"
            f"def loop(m, draw, done):\n    handles, saved = [], []\n{loop}\n"
        )


def generate(seed: int) -> Program:
    """The program of a seed."""
    luck = random.Random(seed)
    names, lines = ["v0"], []
    tables, weights = zip(*KINDS, strict=True)
    for number in range(1, luck.randint(3, MOST_VALUES)):
        template = luck.choice(luck.choices(tables, weights)[0])
        operand = luck.choice(names[-2:])
        expression = template.format(a=operand, b=luck.choice(names), n=luck.randint(1, 3))
        lines.append(Line(f"v{number}", expression, operand))
        names.append(f"v{number}")
    returned = [names[-1]] + [
        luck.choice(RETURNED).format(a=luck.choice(names[1:]), b=luck.choice(names[1:]))
        for _ in range(luck.choice([0, 0, 1, 1, 2]))
    ]
    read = " ".join([*(line.expression for line in lines), *returned])
    return Program(seed, tuple(lines), tuple(returned), tuple(_loop(luck, read)))


def _mutation(luck: random.Random, read: str) -> str:
    """Mostly of something that forward reads."""
    named = {
        line: re.findall(
            r"\b(?!type_of|copy|float|load_state|manual|data|grad)[A-Za-z]{3,}\b", line
        )
        for line in MUTATIONS
    }
    fitting = [
        line
        for line, names in named.items()
        if any(re.search(rf"\b{name}\b", read) for name in names)
    ]
    return luck.choice(fitting if fitting and luck.random() < 0.75 else MUTATIONS)


def _loop(luck: random.Random, read: str) -> list[str]:
    """Some plain steps, so that there is something to replay, and then what users do."""
    quiet = luck.choice([0, 1, 2, 2])
    most, shapes = luck.choice([1, 1, 1, 2]), luck.choice([[3], [3], [3], [3], [2, 4]])
    grad = luck.choice([False, True])
    usual = luck.choice(BACKWARD[:9])
    lines = []
    for step in range(STEPS):
        rough = step >= quiet
        if rough and luck.random() < 0.4:
            lines.append(_mutation(luck, read))
        flight = [f"{step}{number}" for number in range(luck.randint(1, most))]
        for name in flight:
            lines.append(f"x{name} = draw({int(name)}).rows({luck.choice(shapes)}, 4, grad={grad})")
            lines.append(f"o{name} = m(x{name})")
            if rough and luck.random() < 0.25:
                lines.append(luck.choice(BETWEEN).format(o=f"o{name}", x=f"x{name}"))
        for name in luck.sample(flight, len(flight)):
            backward = luck.choice(BACKWARD) if rough and luck.random() < 0.4 else usual
            lines.append(backward.format(o=f"o{name}"))
        noted = ", ".join(f"o{name}=o{name}, g{name}=x{name}.grad" for name in flight)
        lines.append(f"done({noted}, saved=[*saved])")
        lines.append("descend(m)")
        lines.append(f"m.zero_grad(set_to_none={luck.random() < 0.6})")
    return lines


class Square(torch.autograd.Function):
    """A Function of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def _parts() -> type[nn.Module]:
    """The class that programs derive from, anew: they change its attributes."""
    from collections import namedtuple

    import numpy

    class Parts(nn.Module):
        factor = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.norm = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.LayerNorm(WIDTH),
            )
            self.batch, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.5)
            self.frozen = nn.Parameter(torch.eye(WIDTH) * 1.2, requires_grad=False)
            self.z = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
            self.phase = nn.Parameter(torch.randn(WIDTH))
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.scale, self.table, self.items, self.names = 1.0, {"s": 1.0}, [1.0, 2.0], {"a"}
            self.config = SimpleNamespace(scale=1.0, flag=True, inner=SimpleNamespace(scale=1.0))
            self.pair, self.act = namedtuple("Pair", "left right")(1.0, 2.0), torch.tanh
            self.array, self.held = numpy.ones(2), [torch.ones(WIDTH)]
            self.teacher = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    return Parts


def _losses(
    outputs: Any, first: int | None = None, last: int | None = None, scale: float = 1.0
) -> Tensor | None:
    found = trained(outputs)[slice(-last if last else None, first)]
    return scalar(found) * scale if found else None


def back(
    outputs: Any,
    first: int | None = None,
    last: int | None = None,
    scale: float = 1.0,
    **options: Any,
) -> None:
    loss = _losses(outputs, first, last, scale)
    if loss is not None:
        loss.backward(**options)


def asked(m: Any, outputs: Any, first: int | None = None) -> None:
    """Gradients by autograd.grad, added to what is there."""
    loss, parameters = _losses(outputs, first), [p for p in m.parameters() if p.requires_grad]
    if loss is None:
        return
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
    ):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def penalty(m: Any, outputs: Any) -> None:
    loss = _losses(outputs)
    if loss is not None:
        found = torch.autograd.grad(
            loss,
            [p for p in m.parameters() if p.requires_grad],
            create_graph=True,
            allow_unused=True,
        )
        (loss + sum(g.abs().square().sum() for g in found if g is not None)).backward()


def _first(outputs: Any) -> list[Tensor]:
    return [t for t in trained(outputs) if not t.is_leaf][:1]


def written(outputs: Any) -> None:
    for tensor in _first(outputs):
        tensor.mul_(1.5)


def hook(outputs: Any, function: Callable[[Tensor], Tensor]) -> None:
    for tensor in _first(outputs):
        tensor.register_hook(function)


def retain(outputs: Any) -> None:
    for tensor in _first(outputs):
        tensor.retain_grad()


def evaluated(m: Any, x: Tensor) -> None:
    m.eval()
    with torch.no_grad():
        m(x)
    m.train()


def silent(change: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return change()


def write(tensor: Tensor, row: int) -> Tensor:
    tensor[:, row].mul_(2.0)
    return tensor


def kept(_: Any, tensor: Tensor) -> Tensor:
    return tensor


def descend(m: Any) -> None:
    with torch.no_grad():
        for parameter in m.parameters():
            if parameter.grad is not None:
                parameter.mul_(0.98).sub_(parameter.grad, alpha=0.02)


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def flat(m: Any) -> Tensor:
    m.flat = torch.zeros(WIDTH * WIDTH, device=m.weight.device)
    return m.flat


def type_of(m: Any) -> Any:
    """The class of the module, or of the one that it wraps."""
    return next(
        kind for kind in (type(m), type(getattr(m, "module", m))) if hasattr(kind, "factor")
    )


def _namespace() -> dict[str, Any]:
    import copy

    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    own = (
        Square,
        back,
        asked,
        penalty,
        written,
        hook,
        retain,
        evaluated,
        silent,
        write,
        kept,
        descend,
        halve,
        flat,
        type_of,
    )
    return {
        **{function.__name__: function for function in own},
        "torch": torch,
        "nn": nn,
        "functional": functional,
        "copy": copy,
        "checkpoint": checkpoint,
        "Parts": _parts(),
        "SCALE": 1.0,
        "TABLE": {"s": 1.0},
        "AUX": [],
        "unless_grad": silent,
        "in_thread": together,
        "helper": lambda x: x * 1.0,
        "other_helper": lambda x: x * 2.0,
    }


_NUMBERS = itertools.count()


def entry_of(program: Program) -> Entry:
    """The program as an entry of the corpus; every run gets names of its own."""
    code = compile(program.text, "<string>", "exec")
    current: dict[str, Any] = {}

    def make() -> nn.Module:
        nonlocal current
        name = f"program_{next(_NUMBERS)}"  # tracers look code up by the name of its module
        module = sys.modules[name] = ModuleType(name)
        current = vars(module)
        current.update(_namespace(), __name__=name)
        weakref.finalize(current["Parts"], sys.modules.pop, name, None)
        exec(code, current)
        return current["Program"]()

    def drive(model: Any, draw: Callable[[int], Draw], done: Callable[..., None]) -> None:
        current["loop"](model, draw, done)

    documented = WEIGHT_TWICE if "self.weight" in program.returned else ""
    if any("in_thread" in line for line in program.loop):
        documented = LOSS_IN_A_THREAD
    elif any("written(" in line for line in program.loop) and "torch.complex(" in program.text:
        documented = SAVED_UNREAD
    elif "self.z" in program.text and not documented:
        documented = INFINITE
    return Entry(
        f"program {program.seed}", "programs", make, one, drive=drive, documented=documented
    )


def judged(program: Program, device: str = "cpu") -> Verdict:
    """The verdict on one program."""
    return check(entry_of(program), "own", device)


def smaller(program: Program, kind: str, device: str = "cpu") -> Program:
    """As few lines as still end in a verdict of that kind."""
    again = True
    while again:
        again = False
        for candidate in _candidates(program):
            verdict = judged(candidate, device)
            if verdict.kind == kind and "NameError" not in verdict.what:
                program, again = candidate, True
                break
    return program


def _candidates(program: Program) -> list[Program]:
    loop, lines = program.loop, program.lines
    found = [
        replace(program, loop=loop[:n] + loop[n + size :])
        for size in (6, 2, 1)
        for n in range(len(loop) - size, -1, -1)
    ]
    found += [
        replace(program, returned=program.returned[:n] + program.returned[n + 1 :])
        for n in range(len(program.returned))
        if len(program.returned) > 1
    ]
    found += [
        replace(program, lines=lines[:n] + lines[n + 1 :]) for n in range(len(lines) - 1, -1, -1)
    ]
    found += [
        replace(
            program, lines=(*lines[:n], replace(line, expression=line.operand), *lines[n + 1 :])
        )
        for n, line in enumerate(lines)
        if line.expression != line.operand
    ]
    return found
