"""What modules return: containers, views, aliases of inputs, parameters and each other, every dtype
and layout."""

import dataclasses
from collections import OrderedDict, UserDict
from types import SimpleNamespace
from typing import NamedTuple

import torch
from corpus.entry import Own, add, one, one_grad, scalar, tensors_in, trained

GROUP = "outputs"


class Result(NamedTuple):
    loss: torch.Tensor
    hidden: torch.Tensor


@dataclasses.dataclass
class Record:
    loss: torch.Tensor
    hidden: torch.Tensor
    note: str = "a"


class Custom:
    def __init__(self, loss, hidden):
        self.loss, self.hidden = loss, hidden


def case(name, function, inputs=one, **options):
    add(GROUP, name, lambda: Own(function), inputs, **options)


def parts(m, x):
    h = m.linear(x)
    return h.square().mean(), h


CONTAINERS = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"loss": a, "hidden": b},
    "OrderedDict": lambda a, b: OrderedDict(loss=a, hidden=b),
    "named tuple": Result,
    "dataclass": Record,
    "nested": lambda a, b: {"a": [(a, None), {"b": b}], "c": 3, "d": "text"},
    "with None": lambda a, b: (None, a, None, b),
    "namespace": lambda a, b: SimpleNamespace(a=a, b=b),
    "object of a class": Custom,
    "UserDict": lambda a, b: UserDict(a=a, b=b),
    "with constants": lambda a, b: (a, 3, 2.5, "s", b, True),
    "empty parts": lambda a, b: (a, (), [], {}, b),
    "with a shape": lambda a, b: (a, b, b.shape),
    "with a function": lambda a, b: (a, b, torch.tanh),
    "dict with tensors as order": lambda a, b: {0: a, 1: b},
}
for label, make in CONTAINERS.items():
    case(f"in a {label}", lambda m, x, make=make: make(*parts(m, x)))
case(
    "None",
    lambda m, x: (m.linear(x), None)[1],
    loss=lambda out: torch.zeros((), requires_grad=True),
)
case(
    "nothing but a number",
    lambda m, x: (m.linear(x), 3)[1],
    loss=lambda out: torch.zeros((), requires_grad=True),
)
case("a constant tensor", lambda m, x: (m.linear(x), torch.ones(3, device=x.device)))
case("a host number of a tensor", lambda m, x: (m.linear(x), float(x.sum())))

VIEWS = {
    "transposed": lambda h: h.t(),
    "transposed, contiguous": lambda h: h.t().contiguous(),
    "expanded": lambda h: h[:1].expand(5, 4),
    "every other column": lambda h: h[:, ::2],
    "one row": lambda h: h[1],
    "one number": lambda h: h[0, 0],
    "reshaped": lambda h: h.reshape(2, 6),
    "flat": lambda h: h.flatten(),
    "diagonal": lambda h: h.diagonal(),
    "unfolded": lambda h: h.flatten().unfold(0, 4, 2),
    "permuted": lambda h: h.reshape(3, 2, 2).permute(2, 0, 1),
    "channels last": lambda h: h.reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "narrowed": lambda h: h.narrow(1, 1, 2),
    "empty": lambda h: h[:0],
    "as strided, overlapping": lambda h: h.as_strided((3, 3), (2, 1)),
    "movedim": lambda h: h.reshape(3, 2, 2).movedim(0, 2),
    "flipped": lambda h: h.flip(1),
    "no view": lambda h: h * 1.0,
    "itself": lambda h: h,
    "sum": lambda h: h.sum(),
    "two dimensions of one": lambda h: h[None, :, None],
    "half": lambda h: h.half(),
    "double": lambda h: h.double(),
    "bfloat16": lambda h: h.bfloat16(),
    "complex": lambda h: torch.complex(h, h * 2),
    "detached": lambda h: h.detach(),
}
for label, view in VIEWS.items():
    case(label, lambda m, x, view=view: view(m.linear(x)))
    if label not in ("no view", "sum", "detached"):
        case(
            f"{label}, and what it is a view of",
            lambda m, x, view=view: (lambda h: (h, view(h)))(m.linear(x)),
        )
case("transposed, then used by an optimizer of inputs", lambda m, x: m.linear(x).t(), one_grad)
case(
    "dtypes",
    lambda m, x: (lambda h: (h, h > 0, h.argmax(1), h.to(torch.int32), h.to(torch.uint8)))(
        m.linear(x)
    ),
)
case(
    "integers only",
    lambda m, x: m.linear(x).argmax(1),
    loss=lambda out: torch.zeros((), requires_grad=True),
)
case("split in three", lambda m, x: m.linear(x).split(1))
case("unbound", lambda m, x: m.linear(x).unbind(0))
case(
    "chunked, all but one used",
    lambda m, x: m.linear(x).chunk(2, 1),
    loss=lambda out: scalar(out[:1]),
)
case("one tensor twice", lambda m, x: (lambda h: (h, h))(m.linear(x)))
case(
    "one tensor three times in containers",
    lambda m, x: (lambda h: {"a": h, "b": [h, (h,)]})(m.linear(x)),
)
case(
    "one tensor twice, each used once",
    lambda m, x: (lambda h: (h, h))(m.linear(x)),
    loss=lambda out: out[0].exp().sum() + out[1].sin().sum(),
)
case("one tensor twice and used inside", lambda m, x: (lambda h: (h, h, h.exp()))(m.linear(x)))
case(
    "identity of outputs is asked",
    lambda m, x: (lambda h: (h, h))(m.linear(x)),
    loss=lambda out: out[0].sum() * (2.0 if out[0] is out[1] else 1.0),
)
for name, given in {
    "two equal tensors": (lambda m, x: (lambda h: (h * 2, h * 2))(m.linear(x)),),
    "the input itself": (lambda m, x: (m.linear(x), x), one_grad),
    "the input itself, twice": (lambda m, x: (m.linear(x), x, x), one_grad),
    "the input itself, without gradient": (lambda m, x: (m.linear(x), x),),
    "only the input": (lambda m, x: x, one_grad),
    "a view of the input": (lambda m, x: (m.linear(x), x[:, 1:]), one_grad),
    "a view of the input without gradient": (lambda m, x: (m.linear(x), x.t()),),
}.items():
    case(name, *given)
case(
    "identity of an input is asked",
    lambda m, x: (m.linear(x), x),
    call=lambda m, a: (lambda out: (out[0] * (2.0 if out[1] is a[0] else 1.0),))(m(*a)),
)
for name, function in {
    "the input, written in place": lambda m, x: (m.linear(x), x.add_(1.0)),
    "a parameter": lambda m, x: (m.linear(x), m.linear.weight),
    "only a parameter": lambda m, x: m.linear.weight,
    "a view of a parameter": lambda m, x: (m.linear(x), m.linear.weight.t()),
    "a slice of a parameter and a product": lambda m, x: (m.linear(x), m.linear.weight[:2] * 2),
    "a parameter's data": lambda m, x: (m.linear(x), m.linear.weight.data),
    "a parameter detached": lambda m, x: (m.linear(x), m.linear.weight.detach()),
}.items():
    case(name, function)
add(GROUP, "a buffer", lambda: _with_buffer(lambda m, x: (m.linear(x), m.table)))
add(
    GROUP,
    "a buffer written by forward",
    lambda: _with_buffer(lambda m, x: (m.linear(x), m.table.add_(1.0))),
)
add(
    GROUP,
    "a view of a buffer written later",
    lambda: _with_buffer(
        lambda m, x: (lambda v: (m.table.add_(1.0), (m.linear(x), v))[1])(m.table[:2])
    ),
)
case("a new leaf", lambda m, x: (m.linear(x), torch.ones(3, device=x.device, requires_grad=True)))
case(
    "more outputs in some calls",
    lambda m, x: tuple(m.linear(x) for _ in range(1 + x.shape[0] % 2)),
    lambda draw, step: (draw.rows(2 + step % 2, 4),),
)
case(
    "a container that changes with the key",
    lambda m, x: [m.linear(x)] if x.shape[0] == 2 else {"h": m.linear(x)},
    lambda draw, step: (draw.rows(2 + step % 2, 4),),
)
case(
    "output left to the garbage collector",
    lambda m, x: m.linear(x),
    call=lambda m, a: (m(a[0]), m(a[0]))[0],
)
case("output held for long", lambda m, x: m.linear(x), call=lambda m, a: _held(m, m(*a)))
case("output of a sparse layout", lambda m, x: (m.linear(x), m.linear(x).detach().to_sparse()))
case("hooks on outputs", lambda m, x: m.linear(x), call=lambda m, a: _hooked(m(*a)))
case(
    "retained gradients of outputs",
    lambda m, x: m.linear(x),
    call=lambda m, a: _retained(m, m(*a)),
    observe=lambda m: [t.grad for t in m.__dict__["seen"]],
)
for name, (function, call) in {
    "grad_fn asked": (
        lambda m, x: m.linear(x),
        lambda m, a: (lambda out: out * (2.0 if out.grad_fn is not None else 1.0))(m(*a)),
    ),
    "is_leaf, _base and strides asked": (
        lambda m, x: m.linear(x).t(),
        lambda m, a: (
            lambda out: out * (1.0 + out.is_leaf + 2.0 * out.is_contiguous() + out.stride()[0])
        )(m(*a)),
    ),
    "written in place by the caller": (
        lambda m, x: m.linear(x),
        lambda m, a: m(*a).mul_(2.0).add_(1.0),
    ),
    "written in place, then read by the next call": (
        lambda m, x: torch.tanh(m.linear(x)),
        lambda m, a: m(m(*a).detach().mul_(0.5)),
    ),
    "exponential written in place": (lambda m, x: m.linear(x).exp(), lambda m, a: m(*a).add_(1.0)),
}.items():
    case(name, function, call=call)
ALIASES = {
    "base and view": lambda h: (h, h[:, :2]),
    "base and transpose": lambda h: (h, h.t()),
    "two views": lambda h: (h[:, :3], h[:, 1:]),
    "split": lambda h: tuple(h.split(2, 1)),
    "itself twice": lambda h: (h, h),
}
for label, alias in ALIASES.items():
    for which in (0, 1):
        case(
            f"aliases ({label}), number {which} written",
            lambda m, x, alias=alias: alias(m.linear(x)),
            call=lambda m, a, which=which: _write(m(*a), which),
        )
        case(
            f"aliases ({label}), number {which} written without gradients",
            lambda m, x, alias=alias: alias(m.linear(x)),
            call=lambda m, a, which=which: _write(m(*a), which, quietly=True),
        )
case(
    "detached alias written",
    lambda m, x: (lambda h: (h, h.detach()))(m.linear(x)),
    call=lambda m, a: _write(m(*a), 1),
)
case(
    "input alias written by the caller",
    lambda m, x: (m.linear(x), x.view(-1)),
    call=lambda m, a: (lambda out: (out[0], out[1].add_(1.0), a[0].clone()))(m(*a)),
)
case(
    "parameter alias written by the caller",
    lambda m, x: (m.linear(x), m.linear.weight.detach()),
    call=lambda m, a: _write(m(*a), 1),
)
case(
    "all outputs in one loss, in another order",
    lambda m, x: (lambda h: (h, h * 2, h.exp()))(m.linear(x)),
    loss=lambda out: scalar(trained(out)[::-1]),
)
case("one hundred outputs", lambda m, x: [m.linear(x) * n for n in range(100)])
case(
    "outputs as keys of a dict by identity",
    lambda m, x: (m.linear(x), m.linear(x)),
    loss=lambda out: sum(
        n * t.sum() for n, t in enumerate({id(t): t for t in tensors_in(out)}.values(), 1)
    ),
)


def _with_buffer(function):
    made = Own(function)
    made.register_buffer("table", torch.arange(4.0))
    return made


def _held(m, out):
    m.__dict__.setdefault("outputs", []).append(out)
    return out, [old.detach() for old in m.__dict__["outputs"]]


def _hooked(out):
    out.register_hook(lambda g: g * 3)
    out.register_hook(lambda g: g + 1)
    return out


def _retained(m, out):
    out.retain_grad()
    m.__dict__.setdefault("seen", []).append(out)
    m.__dict__["seen"] = m.__dict__["seen"][-2:]
    return out


def _write(out, which, quietly=False):
    if quietly:
        with torch.no_grad():
            out[which].mul_(2.0)
    else:
        out[which].mul_(2.0)
    return tuple(part * 1.0 for part in out)


def _first_hooked(out):
    if out[0].requires_grad:
        out[0].register_hook(lambda g: g * 3)
    return out


def _first_retained(m, out):
    if out[0].requires_grad:
        out[0].retain_grad()
        m.__dict__["seen"] = out[0]
    return out


DEPENDENT = {
    "hook": lambda m, a: _first_hooked(m(*a)),
    "retained gradient": lambda m, a: _first_retained(m, m(*a)),
}
for label, call in DEPENDENT.items():
    case(
        f"{label} of an output that another one depends on",
        lambda m, x: (lambda h: (h, h.exp()))(m.linear(x)),
        call=call,
        loss=lambda out: out[1].square().sum(),
        observe=lambda m: m.__dict__["seen"].grad if "seen" in m.__dict__ else None,
    )
