"""What modules are called with: structures, constants, views of each other, inputs read twice,
inputs that change."""

import dataclasses
from typing import NamedTuple

import torch
from corpus.entry import ALIGNMENT, INPUT_TWICE, WEIGHT_TWICE, Keywords, Own, add, one, one_grad
from torch.nn import functional

GROUP = "arguments"


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    scale: float = 1.0


def plain(m, x):
    return m.linear(x)


def two(m, x, y):
    return m.linear(x) * y


def case(name, function, inputs, **options):
    add(GROUP, name, lambda: Own(function), inputs, **options)


def _marked(draw):
    made = draw.rows()
    made.scale = 2.0
    return made


def alternate(*values):
    return lambda draw, step: (draw.rows(), values[step % len(values)])


for name, parts in {
    "keywords": (
        lambda m, *, x, y=None: m.linear(x) if y is None else m.linear(x) * y,
        lambda draw, step: (Keywords(x=draw.rows(), **({"y": draw.rows()} if step % 2 else {})),),
    ),
    "keywords in another order": (
        lambda m, x, y: two(m, x, y),
        lambda draw, step: (
            Keywords(x=draw.rows(), y=draw.rows())
            if step % 2
            else Keywords(y=draw.rows(), x=draw.rows()),
        ),
    ),
    "a dict": (
        lambda m, state: m.linear(state["x"]) * state["y"],
        lambda draw, step: ({"x": draw.rows(grad=True), "y": draw.rows()},),
    ),
    "a dict whose order changes": (
        lambda m, state: m.linear(state["x"]) * state["y"],
        lambda draw, step: (
            {"x": draw.rows(), "y": draw.rows()}
            if step % 2
            else {"y": draw.rows(), "x": draw.rows()},
        ),
    ),
    "a nested structure": (
        lambda m, s: m.linear(s["a"][0]) + s["a"][1][0] * s["b"],
        lambda draw, step: ({"a": [draw.rows(), (draw.rows(grad=True),)], "b": 2.0},),
    ),
    "a named tuple": (
        lambda m, pair: m.linear(pair.left) * pair.right,
        lambda draw, step: (Pair(draw.rows(), draw.rows(grad=True)),),
    ),
    "a dataclass": (
        lambda m, record: m.linear(record.x) * record.scale,
        lambda draw, step: (Record(draw.rows(), 1.0 + step % 2),),
    ),
    "a list that forward changes": (
        lambda m, xs: m.linear(xs.pop()),
        lambda draw, step: ([draw.rows(), draw.rows()],),
    ),
    "a dict that forward writes to": (
        lambda m, s: s.setdefault("h", m.linear(s["x"])) * 2,
        lambda draw, step: ({"x": draw.rows()},),
    ),
}.items():
    case(name, *parts)
for label, values in {
    "int": (1, 2),
    "bool": (True, False),
    "string": ("a", "bb"),
    "None or a number": (None, 2.0),
    "float": (0.5, 2.0),
    "minus zero": (0.0, -0.0),
    "int or the same float": (1, 1.0),
    "slice": (slice(0, 2), slice(0, 3)),
    "tuple of ints": ((1, 2), (2, 1)),
    "dtype": (torch.float32, torch.float64),
    "set": ({1}, {1, 2}),
}.items():

    def scaled(m, x, value):
        number = len(repr(value)) if not isinstance(value, (int, float)) else value
        return m.linear(x) * (
            number
            + (10.0 if isinstance(value, float) and str(value)[0] == "-" else 0.0)
            + (5.0 if type(value) is float else 0.0)
        )

    case(f"constant, {label}", scaled, alternate(*values))
for name, parts in {
    "a float that is another in every call": (
        lambda m, x, s: m.linear(x) * s,
        lambda draw, step: (draw.rows(), step / 7),
    ),
    "a 0-d tensor that is another in every call": (
        lambda m, x, s: m.linear(x) * s,
        lambda draw, step: (draw.rows(), draw.rows(1)[0]),
    ),
    "a function": (lambda m, x, f: f(m.linear(x)), alternate(torch.tanh, torch.sigmoid)),
    "a new lambda in every call": (
        lambda m, x, f: f(m.linear(x)),
        lambda draw, step: (draw.rows(), lambda y, step=step: y * (1 + step)),
    ),
    "a generator": (lambda m, xs: m.linear(next(xs)), lambda draw, step: (iter([draw.rows()]),)),
    "a numpy array": (
        lambda m, x, a: m.linear(x) * float(a.sum()),
        lambda draw, step: (draw.rows(), _array(step)),
    ),
    "shapes that change": (plain, lambda draw, step: (draw.rows(2 + step % 3, 4),)),
    "rank that changes": (plain, lambda draw, step: (draw.rows(*(2, 3, 4)[step % 2 :]),)),
    "dtype that changes": (
        lambda m, x: m.linear(x.float()),
        lambda draw, step: (draw.rows(dtype=torch.float64 if step % 2 else torch.float32),),
    ),
    "requires grad in turns": (plain, lambda draw, step: (draw.rows(grad=step % 2 == 0),)),
    "no rows": (plain, lambda draw, step: (draw.rows(0, 4) if step % 2 else draw.rows(),)),
    "always no rows": (plain, lambda draw, step: (draw.rows(0, 4),)),
    "attribute of an input": (
        lambda m, x: m.linear(x) * getattr(x, "scale", 1.0),
        lambda draw, step: (_marked(draw),),
    ),
    "0-d input": (
        lambda m, x, s: m.linear(x) * s,
        lambda draw, step: (draw.rows(), draw.rows(1).squeeze(0)),
    ),
    "transposed input": (plain, lambda draw, step: (draw.rows(4, 3).t(),)),
    "transposed input with a gradient": (
        plain,
        lambda draw, step: (draw.rows(4, 3).t().requires_grad_(),),
    ),
    "transposed in turns": (
        lambda m, x: m.linear(x).reshape(-1).view(4, 3),
        lambda draw, step: (draw.rows(4, 3).t() if step % 2 else draw.rows(),),
    ),
    "strided input": (plain, lambda draw, step: (draw.rows(3, 8)[:, ::2],)),
    "expanded input": (plain, lambda draw, step: (draw.rows(1, 4).expand(3, 4),)),
    "expanded input with a gradient": (
        plain,
        lambda draw, step: (draw.rows(1, 4, grad=True).expand(3, 4),),
    ),
    "overlapping input": (plain, lambda draw, step: (draw.rows(8).as_strided((3, 4), (2, 1)),)),
}.items():
    case(name, *parts)
case(
    "view at an odd offset",
    plain,
    lambda draw, step: (draw.rows(13)[1:].view(3, 4),),
    documented=ALIGNMENT,
)
for name, parts in {
    "the same tensor twice": (two, lambda draw, step: (draw.rows(),) * 2),
    "the same leaf twice": (two, lambda draw, step: (draw.rows(grad=True),) * 2),
    "the same leaf twice, in turns": (
        two,
        lambda draw, step: (
            (draw.rows(grad=True),) * 2
            if step % 2
            else (draw.rows(grad=True), draw.rows(grad=True))
        ),
    ),
    "two views of one tensor": (two, lambda draw, step: tuple(draw.rows(6, 4).split(3))),
    "two views of one leaf": (two, lambda draw, step: tuple(draw.rows(6, 4, grad=True).split(3))),
    "overlapping views": (two, lambda draw, step: (lambda t: (t[:3], t[1:]))(draw.rows(4, 4))),
    "overlapping views, one written": (
        lambda m, x, y: m.linear(x.add_(1.0)) * y,
        lambda draw, step: (lambda t: (t[:3], t[1:]))(draw.rows(4, 4)),
    ),
    "an input and its transpose": (
        lambda m, x, y: m.linear(x) @ y,
        lambda draw, step: (lambda t: (t, t.t()))(draw.rows()),
    ),
}.items():
    case(name, *parts)
case(
    "input written in place",
    lambda m, x: m.linear(x.mul_(2.0)),
    one,
    call=lambda m, a: (m(a[0]), a[0].clone()),
)
case("input written after use", lambda m, x: (m.linear(x), x.add_(1.0))[0], one)
case(
    "non-leaf input written in place",
    lambda m, x: m.linear(x.mul_(2.0)),
    one_grad,
    call=lambda m, a: (lambda h: (m(h), h * 1.0))(a[0] * 1.0),
)
for name, parts in {
    "input's metadata changed": (
        lambda m, x: m.linear(x.t_()),
        lambda draw, step: (draw.rows(4, 3),),
    ),
    "input detached": (lambda m, x: m.linear(x.detach()) + m.linear(x) * 0.5, one_grad),
    "input's requires_grad asked": (
        lambda m, x: m.linear(x) * (2.0 if x.requires_grad else 1.0),
        lambda draw, step: (draw.rows(grad=step % 3 == 0),),
    ),
    "input's is_leaf asked": (
        lambda m, x: m.linear(x) * (2.0 if x.is_leaf else 1.0),
        lambda draw, step: (draw.rows(grad=True) * 1.0 if step % 2 else draw.rows(grad=True),),
    ),
}.items():
    case(name, *parts)
case(
    "input's grad read in forward",
    lambda m, x: m.linear(x) + (0.0 if x.grad is None else x.grad),
    one_grad,
    call=lambda m, a: _with_grad(m, a[0]),
)
case("input's data pointer asked", lambda m, x: m.linear(x) * (1.0 + float(x.data_ptr() > 0)), one)
case(
    "input's grad_fn asked",
    lambda m, x: m.linear(x) * (1.0 if x.grad_fn is None else 3.0),
    one_grad,
    call=lambda m, a: m(a[0].exp()),
)
for name, parts in {
    "input unused": (
        lambda m, x, y: m.linear(x),
        lambda draw, step: (draw.rows(), draw.rows(grad=True)),
    ),
    "input only in a shape": (
        lambda m, x, y: m.linear(x) * y.shape[0],
        lambda draw, step: (draw.rows(), draw.rows(2 + step % 2)),
    ),
    "input's value on the host": (lambda m, x: m.linear(x) * float(x[0, 0]), one),
    "input's value in a branch": (
        lambda m, x: m.linear(x) if x.sum() > 0 else m.linear(x) * 3,
        one,
    ),
    "input's value picks a layer": (
        lambda m, x, n: m.linear(x) if int(n) % 2 else m.linear(m.linear(x)),
        lambda draw, step: (draw.rows(), torch.tensor(step, device=draw.device)),
    ),
    "length on the host": (
        lambda m, x, n: m.linear(x)[: int(n)],
        lambda draw, step: (draw.rows(), torch.tensor(1 + step % 3, device=draw.device)),
    ),
    "mask picks rows": (lambda m, x: m.linear(x)[x[:, 0] > 0].sum(), one),
    "nonzero": (
        lambda m, x: m.linear(x).reshape(-1)[torch.nonzero(x.reshape(-1) > 0)[:, 0]].sum(),
        one,
    ),
    "input tensor of a sparse layout": (
        lambda m, x, s: s @ m.linear(x),
        lambda draw, step: (draw.rows(), torch.eye(3, device=draw.device).to_sparse()),
    ),
    "int inputs": (
        lambda m, x, i: m.linear(x).index_select(0, i),
        lambda draw, step: (draw.rows(), draw.ids(5, words=3)),
    ),
    "bool input": (
        lambda m, x, k: m.linear(x).masked_fill(k, 0.0),
        lambda draw, step: (draw.rows(), draw.rows() > 0),
    ),
    "input on the CPU": (
        lambda m, x, c: m.linear(x) * c.to(x.device),
        lambda draw, step: (draw.rows(), draw.rows(4).cpu()),
    ),
    "CPU scalar tensor": (
        lambda m, x, c: m.linear(x) * c,
        lambda draw, step: (draw.rows(), torch.tensor(1.0 + step)),
    ),
    "nested tensor": (
        lambda m, x: m.linear(x).values() if hasattr(x, "values") else m.linear(x),
        lambda draw, step: (
            torch.nested.nested_tensor([draw.rows(2, 4), draw.rows(3, 4)], layout=torch.jagged),
        ),
    ),
}.items():
    case(name, *parts)
case(
    "parameter as an input",
    lambda m, x, w: functional.linear(m.linear(x), w),
    one,
    call=lambda m, a: m(a[0], m.linear.weight),
    documented=WEIGHT_TWICE,
)
case(
    "buffer as an input",
    lambda m, x, b: m.linear(x) + b,
    one,
    prepare=lambda m: m.register_buffer("extra", torch.ones(4, device=m.linear.weight.device)),
    call=lambda m, a: m(a[0], m.extra),
)
case(
    "output of the last call as an input",
    lambda m, x, h: torch.tanh(m.linear(x) + h),
    one,
    prepare=lambda m: _carry(m, None),
    call=lambda m, a: _recurrent(m, a[0], detach=True),
)
case("inputs under no_grad in turns", plain, one_grad, call=lambda m, a: _maybe_no_grad(m, a[0]))
case("inference tensor", plain, lambda draw, step: (_inference(draw),))
case("subclass of Tensor", plain, lambda draw, step: (draw.rows().as_subclass(_Subclass),))

for name, (make, given, call, documented) in {
    "input twice inside and twice outside": (
        lambda: Own(lambda m, x: m.linear(x) * x),
        one_grad,
        lambda m, a: (m(a[0]) + a[0].exp(), a[0] * 2),
        INPUT_TWICE,
    ),
    "input three times inside and once outside": (
        lambda: Own(lambda m, x: m.linear(x) * x + x.sin()),
        one_grad,
        lambda m, a: m(a[0]) * a[0],
        INPUT_TWICE,
    ),
    "input twice inside, non-leaf used outside before and after": (
        lambda: Own(lambda m, x: m.linear(x) * x),
        one_grad,
        lambda m, a: (lambda h: h.cos() + m(h) + h.tanh())(a[0].exp()),
        INPUT_TWICE,
    ),
    "input in two calls": (
        lambda: Own(lambda m, x: m.linear(x) * x),
        one_grad,
        lambda m, a: m(a[0]) + m(a[0]),
        INPUT_TWICE,
    ),
}.items():
    add("last bits", name, make, given, call=call, documented=documented)


class _Subclass(torch.Tensor):
    pass


def _array(step):
    import numpy

    return numpy.arange(3.0) * (1 + step % 2)


def _with_grad(m, x):
    x.grad = torch.ones_like(x)
    return m(x)


def _inference(draw):
    with torch.inference_mode():
        return draw.rows() * 1.0


def _carry(m, value):
    m.__dict__["carried"] = value


def _recurrent(m, x, detach):
    last = m.__dict__.get("carried")
    out = m(x, torch.zeros_like(x) if last is None else last)
    m.__dict__["carried"] = out.detach() if detach else out
    return out


def _maybe_no_grad(m, x):
    if float(x[0, 0].detach()) > 0:
        return m(x)
    with torch.no_grad():
        return m(x)
