"""Precisions, autocast, and global modes that change while a module trains."""

import contextlib

import torch
from corpus.entry import AUTOCAST_CALLS, WEIGHT_TWICE, Own, add, one, one_grad
from torch import nn
from torch.cuda import is_current_stream_capturing

GROUP = "modes"


def net(dtype=torch.float32):
    return Own(
        lambda m, x: m.norm(m.other(torch.tanh(m.linear(x)))),
        other=nn.Linear(4, 4),
        norm=nn.LayerNorm(4),
    ).to(dtype)


for dtype in (torch.float16, torch.bfloat16, torch.float64):
    add(
        GROUP,
        f"{dtype}",
        lambda dtype=dtype: net(dtype),
        lambda draw, step, dtype=dtype: (draw.rows(dtype=dtype, grad=True),),
    )
    add(
        GROUP,
        f"weights of {dtype} from float32",
        lambda: net(),
        lambda draw, step: (draw.rows(),),
        mutate=lambda m, dtype=dtype: m.to(dtype),
        call=lambda m, a: m(a[0].to(m.linear.weight.dtype)),
    )
    add(GROUP, f"output in {dtype}", lambda dtype=dtype: Own(lambda m, x: m.linear(x).to(dtype)))


def autocast(x, **options):
    return torch.autocast(x.device.type, dtype=torch.bfloat16, **options)


def casted(m, a, **options):
    with autocast(a[0], **options):
        return m(*a)


def _inside(m, x):
    with autocast(x):
        return m.other(m.linear(x))


def _partly(m, x):
    with autocast(x):
        h = m.linear(x)
    with autocast(x, enabled=False):
        return m.other(h.float())


def _losses(m, a):
    with autocast(a[0]):
        out = m(*a)
        return out.float().square().mean(), out


def _two(m, a):
    with autocast(a[0]):
        return m(*a) + m(a[0] * 2)


def _toggled(m, a):
    m.__dict__["n"] = m.__dict__.get("n", 0) + 1
    return casted(m, a, enabled=m.__dict__["n"] % 2 == 0)


add(GROUP, "autocast around", net, one_grad, call=casted)
add(GROUP, "autocast around, loss inside", net, one_grad, call=_losses)
add(
    GROUP,
    "autocast around, no cache",
    net,
    one_grad,
    call=lambda m, a: casted(m, a, cache_enabled=False),
)
add(GROUP, "autocast inside", lambda: Own(_inside, other=nn.Linear(4, 4)), one_grad)
add(GROUP, "autocast inside, partly off", lambda: Own(_partly, other=nn.Linear(4, 4)), one_grad)
add(GROUP, "autocast in turns", net, one_grad, call=_toggled)
add(
    "last bits",
    "autocast, two calls in one backward",
    net,
    one_grad,
    call=_two,
    documented=AUTOCAST_CALLS,
)
add(
    "last bits",
    "autocast, two calls in one region",
    lambda: Own(lambda m, x: m.linear(x)),
    one,
    call=_two,
    documented=AUTOCAST_CALLS,
)
add(
    GROUP,
    "autocast of a weight used twice",
    lambda: Own(lambda m, x: m.linear(torch.tanh(m.linear(x)))),
    call=casted,
)
add(
    GROUP,
    "gradient scaler's scale",
    net,
    one_grad,
    backward=lambda m, loss, outputs, arguments, step: (
        (loss * 512.0).backward(),
        [p.grad.div_(512.0) for p in m.parameters()],
    ),
)


def under(name, enter, **options):
    """Some of the calls run under what `enter` gives."""

    def call(m, a):
        m.__dict__["n"] = m.__dict__.get("n", 0) + 1
        with enter() if m.__dict__["n"] > 4 else contextlib.nullcontext():
            return m(*a)

    add(
        GROUP, name, options.pop("make", net), options.pop("inputs", one_grad), call=call, **options
    )


@contextlib.contextmanager
def setting(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


for name, function in {
    "no_grad later": torch.no_grad,
    "inference mode later": torch.inference_mode,
    "set_grad_enabled(False) later": lambda: torch.set_grad_enabled(False),
    "multithreading off in autograd": lambda: torch.autograd.set_multithreading_enabled(False),
}.items():
    under(name, function)
under(
    "default dtype double",
    lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    make=lambda: Own(
        lambda m, x: (m.linear(x).double() * torch.ones(4, device=x.device).sqrt() / 3).sum()
    ),
)
under(
    "default dtype double, of a product",
    lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    make=lambda: Own(lambda m, x: (m.linear(x).argmax(1) / 3).sum() * m.linear(x)),
)
under(
    "default device",
    lambda: torch.device("cpu"),
    make=lambda: Own(lambda m, x: m.linear(x) * torch.ones(4).to(x.device)),
)
for name, function in {
    "matmul precision": lambda: setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "deterministic algorithms": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "flush of denormals": lambda: setting(lambda: False, torch.set_flush_denormal, True),
    "number of threads": lambda: setting(torch.get_num_threads, torch.set_num_threads, 1),
}.items():
    under(name, function)
under(
    "dropout under fork_rng",
    lambda: torch.random.fork_rng(devices=[]),
    make=lambda: Own(lambda m, x: m.drop(m.linear(x)), drop=nn.Dropout(0.5)),
)
for label, act in {
    "train(False) of a child": lambda m: m.drop.train(False),
    "training set by hand": lambda m: setattr(m.drop, "training", False),
    "eval of the whole": lambda m: m.eval(),
    "requires_grad_(False) of the whole": lambda m: m.requires_grad_(False),
    "double": lambda m: m.double(),
    "to(device)": lambda m: m.to(m.linear.weight.device),
    "deepcopy and load": lambda m: m.load_state_dict(__import__("copy").deepcopy(m.state_dict())),
    "half and float": lambda m: m.half().float(),
    "share_memory": lambda m: m.share_memory(),
    "apply": lambda m: m.apply(
        lambda c: setattr(c, "p", 0.0) if isinstance(c, nn.Dropout) else None
    ),
    "weights initialised again": lambda m: m.linear.reset_parameters(),
    "type": lambda m: m.type(torch.float64),
}.items():
    add(
        GROUP,
        f"mutated: {label}",
        lambda: Own(lambda m, x: m.drop(m.linear(x)), drop=nn.Dropout(0.3)),
        one_grad,
        mutate=act,
        call=lambda m, a: m(a[0].to(m.linear.weight.dtype)),
        backward=lambda m, loss, outputs, arguments, step: (
            loss.backward() if loss.requires_grad else None
        ),
    )
for asking, is_captured in (
    ("torch", lambda: torch.cuda.is_current_stream_capturing()),
    ("torch, by name", lambda: is_current_stream_capturing()),
    ("torch's C code", lambda: torch._C._cuda_isCurrentStreamCapturing()),
    ("whether its stream is another", lambda: torch.cuda.current_stream().cuda_stream != 0),
):
    add(
        GROUP,
        f"asks whether it is captured, {asking}",
        lambda is_captured=is_captured: Own(
            lambda m, x: m.linear(x) * (2.0 if x.is_cuda and is_captured() else 1.0)
        ),
        one,
    )
add(
    GROUP,
    "training flag read",
    lambda: Own(lambda m, x: m.linear(x) * (2.0 if m.training else 1.0)),
    one,
)
add(
    GROUP,
    "grad mode read",
    lambda: Own(lambda m, x: m.linear(x) * (2.0 if torch.is_grad_enabled() else 1.0)),
    one,
)
add(
    GROUP,
    "random state seeded by the loop",
    lambda: Own(lambda m, x: m.drop(m.linear(x)), drop=nn.Dropout(0.3)),
    one,
    call=lambda m, a: (torch.manual_seed(7), m(*a))[1],
)
add(
    GROUP,
    "random state restored by the loop",
    lambda: Own(lambda m, x: m.drop(m.linear(x)), drop=nn.Dropout(0.3)),
    one,
    call=lambda m, a: _twice_alike(m, a),
    documented=WEIGHT_TWICE,
)


def _twice_alike(m, a):
    state = torch.cuda.get_rng_state() if a[0].is_cuda else torch.get_rng_state()
    first = m(*a)
    (torch.cuda.set_rng_state if a[0].is_cuda else torch.set_rng_state)(state)
    return first, m(*a)
