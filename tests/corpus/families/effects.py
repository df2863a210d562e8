"""What forward does besides returning outputs: things left elsewhere, backwards of its own, random
states."""

import contextlib
import logging
import types
import weakref

import torch
from corpus.entry import Own, add, one, one_grad
from torch import nn

GROUP = "effects"
AUX: list = []
BOX = types.SimpleNamespace(value=None)
TABLE: dict = {}


def leave(name, effect, observe, use=None, **options):
    """`effect(m, h)` leaves something of the hidden values somewhere; `use` makes a further loss of
    it."""

    def make():
        AUX.clear()
        TABLE.clear()
        BOX.value = None
        return Own(
            _leaving(effect), other=nn.Linear(4, 4), held=types.SimpleNamespace(value=None), box=[]
        )

    def backward(m, loss, outputs, arguments, step):
        extra = use(m) if use is not None else None
        (loss if extra is None else loss + extra).backward()
        AUX.clear()

    add(
        GROUP, name, make, options.pop("inputs", one), backward=backward, observe=observe, **options
    )


def _leaving(effect):
    def forward(m, x):
        h = m.linear(x)
        effect(m, h)
        return m.other(h)

    return forward


def summed(tensors):
    return sum((t.square().mean() for t in tensors), torch.zeros(()))


for name, parts in {
    "auxiliary loss on a global list": (
        lambda m, h: AUX.append(h.square().mean()),
        lambda m: len(AUX),
        lambda m: sum(AUX),
    ),
    "hidden values on a global list": (
        lambda m, h: AUX.append(h),
        lambda m: len(AUX),
        lambda m: summed(AUX),
    ),
    "detached values on a global list": (
        lambda m, h: AUX.append(h.detach()),
        lambda m: [t.clone() for t in AUX],
    ),
    "a number on a global list": (lambda m, h: AUX.append(3), lambda m: len(AUX)),
    "a number of a tensor on a global list": (
        lambda m, h: AUX.append(float(h.detach().sum())),
        lambda m: list(AUX),
    ),
    "a global object's attribute": (
        lambda m, h: setattr(BOX, "value", h.square().mean()),
        lambda m: BOX.value,
        lambda m: BOX.value,
    ),
    "a held object's attribute": (
        lambda m, h: setattr(m.held, "value", h.square().mean()),
        lambda m: m.held.value,
        lambda m: m.held.value,
    ),
    "the module's attribute": (
        lambda m, h: setattr(m, "aux", h.square().mean()),
        lambda m: m.aux,
        lambda m: m.aux,
    ),
    "the module's attribute, detached": (
        lambda m, h: setattr(m, "aux", h.detach()),
        lambda m: m.aux,
    ),
    "a child's attribute": (
        lambda m, h: setattr(m.other, "aux", h.square().mean()),
        lambda m: m.other.aux,
        lambda m: m.other.aux,
    ),
    "the module's __dict__": (
        lambda m, h: m.__dict__.update(aux=h.square().mean()),
        lambda m: m.aux,
        lambda m: m.aux,
    ),
    "a list of the module": (
        lambda m, h: (m.box.clear(), m.box.append(h.mean())),
        lambda m: list(m.box),
        lambda m: m.box[0],
    ),
    "a global dict": (
        lambda m, h: TABLE.update(h=h.mean()),
        lambda m: dict(TABLE),
        lambda m: TABLE["h"],
    ),
    "a class attribute": (
        lambda m, h: setattr(type(m), "aux", h.mean()),
        lambda m: Own.aux,
        lambda m: Own.aux,
    ),
    "a function's attribute": (
        lambda m, h: setattr(summed, "aux", h.mean()),
        lambda m: summed.aux,
        lambda m: summed.aux,
    ),
    "a tensor's attribute": (
        lambda m, h: setattr(m.linear.weight, "aux", h.mean()),
        lambda m: m.linear.weight.aux,
        lambda m: m.linear.weight.aux,
    ),
    "a tuple in a global dict": (
        lambda m, h: TABLE.update(h=(h.mean(), 1)),
        lambda m: TABLE["h"],
        lambda m: TABLE["h"][0],
    ),
    "a closure": (
        lambda m, h: TABLE.update(f=lambda: h.mean()),
        lambda m: TABLE["f"](),
        lambda m: TABLE["f"](),
    ),
    "a weak reference to an output's part": (
        lambda m, h: TABLE.update(h=weakref.ref(h)),
        lambda m: TABLE["h"]() is None,
    ),
    "the graph's node": (lambda m, h: TABLE.update(h=h.grad_fn), lambda m: TABLE["h"].name()),
    "a reference cycle": (
        lambda m, h: TABLE.update(
            h=(lambda loop: (loop.append(loop), loop.append(h.mean()), loop)[2])([])
        ),
        lambda m: TABLE["h"][1],
        lambda m: TABLE["h"][1],
    ),
    "an exception that is kept": (
        lambda m, h: TABLE.update(e=_kept_exception(h)),
        lambda m: TABLE["e"].args[0],
    ),
    "the input is kept": (lambda m, h: TABLE.update(w=m.linear.weight), lambda m: TABLE["w"]),
    "written into a global tensor": (
        lambda m, h: TABLE.setdefault("sum", torch.zeros_like(h)).add_(h.detach()),
        lambda m: TABLE["sum"].clone(),
    ),
    "written into a held tensor": (lambda m, h: _into_held(m, h), lambda m: m.held.value.clone()),
    "counted on the host": (
        lambda m, h: TABLE.update(n=TABLE.get("n", 0) + 1),
        lambda m: TABLE["n"],
    ),
    "counted in an object": (
        lambda m, h: setattr(m.held, "n", getattr(m.held, "n", 0) + 1),
        lambda m: m.held.n,
    ),
    "counted on the class": (
        lambda m, h: setattr(Own, "calls", getattr(Own, "calls", 0) + 1),
        lambda m: None,
    ),
    "logged": (lambda m, h: logging.getLogger("corpus").debug("norm %s", h.shape), lambda m: None),
    "printed to a buffer": (
        lambda m, h: TABLE.setdefault("lines", []).append(f"{h.shape}"),
        lambda m: len(TABLE["lines"]),
    ),
    "backward inside": (lambda m, h: m.linear(h.detach()).sum().backward(), lambda m: None),
    "autograd.grad inside": (
        lambda m, h: m.__dict__.update(
            g=torch.autograd.grad(h.square().sum(), m.linear.weight, retain_graph=True)[0]
        ),
        lambda m: m.g,
    ),
    "backward of the hidden values inside": (
        lambda m, h: h.square().sum().backward(retain_graph=True),
        lambda m: None,
    ),
    "weight's data replaced inside": (
        lambda m, h: setattr(m.linear.weight, "data", m.linear.weight.data * 1.01),
        lambda m: None,
    ),
    "weight's data changed in place inside": (
        lambda m, h: m.other.bias.data.mul_(1.1),
        lambda m: None,
    ),
    "weight changed in place inside": (
        lambda m, h: _no_grad(lambda: m.other.bias.add_(0.1)),
        lambda m: None,
    ),
    "weight's norm limited inside": (
        lambda m, h: _no_grad(lambda: m.other.weight.renorm_(2, 0, 0.5)),
        lambda m: None,
    ),
    "hook on hidden values": (lambda m, h: h.register_hook(lambda g: g * 2), lambda m: None),
    "hook that reads the host": (
        lambda m, h: h.register_hook(lambda g: TABLE.update(g=g.clone())),
        lambda m: TABLE.get("g"),
    ),
    "hook on a node of the graph": (
        lambda m, h: h.grad_fn.register_hook(lambda gi, go: None),
        lambda m: None,
    ),
    "hook on a weight, in every call": (
        lambda m, h: m.linear.weight.register_hook(lambda g: g * 1.1),
        lambda m: None,
    ),
    "retain_grad inside": (
        lambda m, h: (h.retain_grad(), TABLE.update(h=h)),
        lambda m: TABLE["h"].grad,
    ),
    "gradient of a weight set inside": (
        lambda m, h: setattr(m.linear.weight, "grad", torch.ones_like(m.linear.weight)),
        lambda m: None,
    ),
    "gradients zeroed inside": (lambda m, h: m.zero_grad(), lambda m: None),
}.items():
    leave(name, *parts)
leave(
    "requires_grad switched inside",
    lambda m, h: m.linear.requires_grad_(not m.linear.weight.requires_grad),
    lambda m: m.linear.weight.requires_grad,
    inputs=one_grad,
)
leave("random state set", lambda m, h: torch.manual_seed(3), lambda m: torch.rand(2))
leave(
    "random state set back",
    lambda m, h: torch.random.set_rng_state(m.held.value),
    lambda m: torch.rand(2),
    prepare=lambda m: setattr(m.held, "value", torch.get_rng_state()),
)
for name, parts in {
    "random state forked": (lambda m, h: _forked(h), lambda m: torch.rand(2)),
    "Python's random state moved": (lambda m, h: __import__("random").random(), lambda m: None),
    "numpy's random state moved": (lambda m, h: __import__("numpy").random.rand(), lambda m: None),
    "gradient mode switched and left": (
        lambda m, h: torch.set_grad_enabled(True),
        lambda m: torch.is_grad_enabled(),
    ),
    "default dtype set": (
        lambda m, h: torch.set_default_dtype(torch.float32),
        lambda m: torch.get_default_dtype(),
    ),
    "a child replaced inside": (lambda m, h: setattr(m, "extra", nn.Identity()), lambda m: None),
    "a parameter registered inside": (lambda m, h: _lazy(m), lambda m: None),
    "a buffer registered inside": (
        lambda m, h: m.register_buffer("seen", h.detach().mean()),
        lambda m: m.seen,
    ),
    "a module hook registered inside": (
        lambda m, h: m.other.register_forward_pre_hook(lambda mod, a: (a[0] * 1.1,)),
        lambda m: None,
    ),
    "evaluation mode inside": (lambda m, h: m.other.eval(), lambda m: m.other.training),
    "mode of training switched": (lambda m, h: m.train(not m.training), lambda m: m.training),
    "exception caught inside": (lambda m, h: _caught(h), lambda m: None),
    "a warning inside": (
        lambda m, h: __import__("warnings").warn("from forward", UserWarning, stacklevel=2),
        lambda m: None,
    ),
    "a thread started inside": (lambda m, h: _in_thread(h), lambda m: TABLE["thread"]),
    "a host synchronisation inside": (lambda m, h: h.detach().cpu(), lambda m: None),
    "printed": (lambda m, h: repr(h), lambda m: None),
    "saved by torch.save": (
        lambda m, h: torch.save(h.detach(), __import__("io").BytesIO()),
        lambda m: None,
    ),
    "deep-copied": (
        lambda m, h: TABLE.update(c=__import__("copy").deepcopy(h.detach())),
        lambda m: TABLE["c"],
    ),
    "reference counts asked": (
        lambda m, h: TABLE.update(n=__import__("sys").getrefcount(h) > 0),
        lambda m: TABLE["n"],
    ),
    "an error in one call": (lambda m, h: _error(m), lambda m: None),
}.items():
    leave(name, *parts)
add(
    GROUP,
    "an error in one call, caught by the loop",
    lambda: Own(_leaving(lambda m, h: _error(m)), other=nn.Linear(4, 4)),
    call=lambda m, a: _retry(m, a),
)
add(
    GROUP,
    "a cache of keys and values",
    lambda: Own(_cached_values, cache=[]),
    one,
    call=lambda m, a: (m.cache.clear(), m(a[0]), m(a[0]))[2],
)
for name, parts in {
    "a cache over calls, detached": (lambda: Own(_cached_values, cache=[]), one),
    "memory bank in a buffer": (lambda: Bank(), one),
    "running mean in an attribute": (lambda: Own(_running, mean=torch.zeros(4)), one),
    "running mean in a list": (lambda: Own(_running_list, means=[torch.zeros(4)]), one),
    "a lazily made table": (lambda: Own(_lazy_table, table=None), one),
    "a lazily made table that grows": (
        lambda: Own(_growing, table=None),
        lambda draw, step: (draw.rows(2 + step % 4, 4),),
    ),
}.items():
    add(GROUP, name, *parts)
add(
    GROUP,
    "activations kept for a regulariser",
    lambda: Own(_keeps, kept={}),
    one,
    backward=lambda m, loss, outputs, arguments, step: (loss + m.kept["h"].abs().mean()).backward(),
)


def _kept_exception(h):
    try:
        raise ValueError(h.detach())
    except ValueError as error:
        return error.with_traceback(None)


def _into_held(m, h):
    if m.held.value is None:
        m.held.value = torch.zeros_like(h)
    m.held.value += h.detach()


def _no_grad(act):
    with torch.no_grad():
        act()


def _forked(h):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        torch.rand(2)


def _lazy(m):
    if not hasattr(m, "late"):
        m.late = nn.Parameter(torch.ones(4, device=m.linear.weight.device))


def _caught(h):
    with contextlib.suppress(RuntimeError):
        h.view(99)


def _in_thread(h):
    import threading

    thread = threading.Thread(target=lambda: TABLE.update(thread=h.detach().sum()))
    thread.start()
    thread.join()


def _error(m):
    m.__dict__["calls"] = m.__dict__.get("calls", 0) + 1
    if m.__dict__["calls"] == 4:
        raise ValueError("the fourth call")


def _retry(m, arguments):
    try:
        return m(*arguments)
    except ValueError:
        return m(*arguments)


def _cached_values(m, x):
    m.cache.append(m.linear(x).detach())
    return m.linear(x) + torch.stack(m.cache[-2:]).mean(0)


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("bank", torch.zeros(6, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = self.linear(x)
        with torch.no_grad():
            where = (self.place + torch.arange(3, device=x.device)) % 6
            self.bank.index_copy_(0, where, h.detach())
            self.place.add_(3)
        return h @ self.bank.t().clone()


def _running(m, x):
    h = m.linear(x)
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return h - m.mean


def _running_list(m, x):
    h = m.linear(x)
    m.means[0] = 0.9 * m.means[0] + 0.1 * h.detach().mean(0)
    return h - m.means[0]


def _lazy_table(m, x):
    if m.table is None:
        m.table = torch.arange(4.0, device=x.device).cos()
    return m.linear(x) * m.table


def _growing(m, x):
    if m.table is None or m.table.shape[0] < x.shape[0]:
        m.table = torch.arange(float(x.shape[0]), device=x.device).cos()
    return m.linear(x) * m.table[: x.shape[0], None]


def _keeps(m, x):
    m.kept["h"] = m.linear(x)
    return m.kept["h"].tanh()
