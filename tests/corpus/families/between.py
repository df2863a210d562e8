"""What happens between forward and backward, and around the module: changes, hooks, patches, modes
of autograd."""

import torch
from corpus.entry import Own, add, one, one_grad
from torch import nn
from torch.autograd import forward_ad

GROUP = "between"


def model():
    made = Own(
        lambda m, x: torch.tanh(m.linear(x) @ m.frozen * m.scale) @ m.other.weight,
        other=nn.Linear(4, 4),
        frozen=nn.Parameter(torch.eye(4) * 2, requires_grad=False),
    )
    made.register_buffer("scale", torch.full((4,), 1.5))
    return made


def between(name, act, make=model, inputs=one_grad, late=4, **options):
    """`act` happens between forward and backward, from step `late` on."""

    def backward(m, loss, outputs, arguments, step):
        if step >= late:
            act(m, loss, outputs, arguments)
        loss.backward()

    add(GROUP, name, make, inputs, backward=backward, **options)


def quietly(change):
    def act(m, *_):
        with torch.no_grad():
            change(m)

    return act


CHANGES = {
    "frozen parameter": lambda m: m.frozen.mul_(2),
    "buffer": lambda m: m.scale.add_(1),
    "trained weight": lambda m: m.linear.weight.mul_(2),
    "last weight": lambda m: m.other.weight.mul_(2),
    "unused bias": lambda m: m.other.bias.add_(1),
    "bias": lambda m: m.linear.bias.add_(1),
    "a view of the frozen parameter": lambda m: m.frozen[0].zero_(),
    "weight through .data": lambda m: m.other.weight.data.mul_(2),
    "buffer through .data": lambda m: m.scale.data.add_(1),
    "weight by numpy": lambda m: m.frozen.data.cpu().numpy().__setitem__((0, 0), 5.0),
    "weight's data replaced": lambda m: setattr(m.other.weight, "data", m.other.weight.data * 2),
    "frozen parameter replaced": lambda m: setattr(
        m, "frozen", nn.Parameter(m.frozen * 2, requires_grad=False)
    ),
    "buffer replaced": lambda m: setattr(m, "scale", m.scale * 2),
    "parameter frozen": lambda m: m.linear.weight.requires_grad_(False),
    "evaluation mode": lambda m: m.eval(),
    "training attribute": lambda m: setattr(m, "extra", 3.0),
    "state loaded": lambda m: m.load_state_dict(m.state_dict()),
    "gradients set to None": lambda m: m.zero_grad(),
    "gradients set to zero": lambda m: m.zero_grad(set_to_none=False),
}
for label, change in CHANGES.items():
    between(f"{label} changes", quietly(change))
between(
    "input changes in place", lambda m, loss, outputs, arguments: arguments[0].add_(1.0), inputs=one
)
between("output changes in place", lambda m, loss, outputs, arguments: outputs.data.add_(1.0))
between(
    "output that its own gradient needs changes in place",
    lambda m, loss, outputs, arguments: outputs.detach().mul_(2),
    lambda: Own(lambda m, x: m.linear(x).exp()),
    loss=lambda out: out.sum(),
)
between(
    "hook on a parameter is added", lambda m, *_: m.linear.weight.register_hook(lambda g: g * 3)
)
between(
    "hook on a parameter is removed",
    lambda m, *_: m.__dict__["handle"].remove(),
    prepare=lambda m: m.__dict__.update(handle=m.linear.weight.register_hook(lambda g: g * 3)),
)
between(
    "post-accumulate hook is added",
    lambda m, *_: m.linear.weight.register_post_accumulate_grad_hook(_halved),
)
between(
    "hook on the output is added",
    lambda m, loss, outputs, arguments: outputs.register_hook(lambda g: g * 3),
)
between(
    "hook on the input is added",
    lambda m, loss, outputs, arguments: arguments[0].register_hook(lambda g: g * 3),
)
between(
    "hook on the output's node",
    lambda m, loss, outputs, arguments: outputs.grad_fn.register_hook(
        lambda gi, go: m.__dict__.setdefault("count", []).append(1)
    ),
    observe=lambda m: len(m.__dict__.get("count", [])),
)
for name, function in {
    "another forward": lambda m, loss, outputs, arguments: m(arguments[0]),
    "another forward and backward": lambda m, loss, outputs, arguments: (
        m(arguments[0]).sum().backward()
    ),
    "an evaluation": lambda m, loss, outputs, arguments: (m.eval(), m(arguments[0]), m.train()),
    "random numbers are drawn": lambda m, loss, outputs, arguments: torch.rand(3),
    "seeded": lambda m, loss, outputs, arguments: torch.manual_seed(1),
    "a step of descent": quietly(lambda m: [p.sub_(0.01) for p in m.parameters()]),
    "the input gets a gradient": lambda m, loss, outputs, arguments: setattr(
        arguments[0], "grad", torch.ones_like(arguments[0])
    ),
}.items():
    between(name, function)
between(
    "retain_grad on the output",
    lambda m, loss, outputs, arguments: (outputs.retain_grad(), m.__dict__.update(out=outputs)),
    observe=lambda m: m.__dict__["out"].grad if "out" in m.__dict__ else None,
)
between("the module moves nowhere", lambda m, *_: m.to(m.linear.weight.device))
between("deepcopy", lambda m, *_: __import__("copy").deepcopy(m))


def _halved(parameter):
    parameter.grad.mul_(0.5)


def patched(name, patch, make=model, **options):
    add(GROUP, name, make, one_grad, mutate=patch, **options)


patched("forward patched", lambda m: _patch(m, lambda x, old: old(x) * 2))
patched(
    "forward patched for keywords",
    lambda m: setattr(m, "forward", lambda x: torch.tanh(m.linear(x))),
)
add(
    GROUP,
    "forward patched before the first call",
    model,
    one_grad,
    prepare=lambda m: _patch(m, lambda x, old: old(x) * 2),
)
add(
    GROUP,
    "forward of the inner module patched before the first call",
    model,
    one_grad,
    prepare=lambda m: _patch(getattr(m, "module", m), lambda x, old: old(x) * 2),
)
patched("__call__ of the class patched", lambda m: None, lambda: _CallsTwice())
for label, register in {
    "forward hook": lambda m: m.register_forward_hook(lambda mod, args, out: out * 2),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda mod, args: (args[0] * 2,)),
    "full backward hook": lambda m: m.register_full_backward_hook(lambda mod, gi, go: (gi[0] * 2,)),
    "hook on a child": lambda m: m.linear.register_forward_hook(lambda mod, args, out: out * 2),
    "pre-hook on a child": lambda m: m.linear.register_forward_pre_hook(
        lambda mod, args: (args[0] * 2,)
    ),
    "backward hook on a child": lambda m: m.linear.register_full_backward_hook(
        lambda mod, gi, go: None
    ),
    "state dict hook": lambda m: m.register_state_dict_post_hook(lambda *a: None),
}.items():
    patched(f"{label} added", register)
    add(GROUP, f"{label} from the start", model, one_grad, prepare=register)
add(GROUP, "global forward hook", model, one_grad, call=lambda m, a: _globally(m, a))


def _patch(m, replacement):
    old = m.forward
    m.forward = lambda x: replacement(x, old)


class _CallsTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __call__(self, x):
        return super().__call__(x) * 2

    def forward(self, x):
        return self.linear(x)


def _globally(m, arguments):
    handle = nn.modules.module.register_module_forward_hook(
        lambda mod, args, out: out * 1.5 if isinstance(mod, nn.Linear) else None
    )
    try:
        return m(*arguments)
    finally:
        handle.remove()


def _forward_mode(m, arguments):
    x = arguments[0].detach()
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(m(forward_ad.make_dual(x, torch.ones_like(x))))
        return primal.clone(), torch.zeros_like(primal) if tangent is None else tangent.clone()


def _weight_tangent(m, arguments):
    with forward_ad.dual_level():
        weight = m.linear.weight
        del m.linear._parameters["weight"]
        m.linear.weight = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        try:
            primal, tangent = forward_ad.unpack_dual(m(*arguments))
        finally:
            del m.linear.weight
            m.linear.register_parameter("weight", weight)
        return primal.detach().clone(), torch.zeros_like(
            primal
        ) if tangent is None else tangent.detach().clone()


for name, (make, given, call) in {
    "forward-mode tangent of a weight": (model, one, _weight_tangent),
    "forward-mode tangent of the input": (model, one, _forward_mode),
    "torch.func.jvp": (
        model,
        one,
        lambda m, a: torch.func.jvp(m, (a[0],), (torch.ones_like(a[0]),)),
    ),
    "torch.func.vjp": (model, one, lambda m, a: _vjp(m, a[0])),
    "torch.func.grad": (model, one, lambda m, a: torch.func.grad(lambda x: m(x).sum())(a[0])),
    "torch.func.vmap": (model, one, lambda m, a: torch.func.vmap(m)(a[0][:, None])),
    "torch.func.functional_call of other weights": (
        model,
        one,
        lambda m, a: torch.func.functional_call(m, {"linear.weight": m.linear.weight * 2}, a),
    ),
}.items():
    add(GROUP, name, make, given, call=call)
add(
    GROUP,
    "detect_anomaly",
    model,
    one_grad,
    call=lambda m, a: _anomaly(m, a),
    backward=lambda m, loss, outputs, arguments, step: loss.backward(),
)
add(
    GROUP,
    "detect_anomaly around the backward",
    model,
    one_grad,
    backward=lambda m, loss, outputs, arguments, step: _within(
        torch.autograd.detect_anomaly(check_nan=True), loss.backward
    ),
)
add(
    GROUP,
    "detect_anomaly finds NaN",
    lambda: Own(lambda m, x: (m.linear(x) * 0.0).sqrt() * 0.0),
    one,
    backward=lambda m, loss, outputs, arguments, step: (
        _within(torch.autograd.detect_anomaly(check_nan=True), loss.backward)
        if step == 5
        else loss.backward()
    ),
)
add(
    GROUP,
    "detect_anomaly in one step",
    model,
    one_grad,
    backward=lambda m, loss, outputs, arguments, step: (
        _within(torch.autograd.detect_anomaly(check_nan=True), loss.backward)
        if step == 4
        else loss.backward()
    ),
)
for name, (make, given, call) in {
    "saved-tensor hooks": (
        model,
        one_grad,
        lambda m, a: _within(
            torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2),
            lambda: m(*a),
        ),
    ),
    "saved tensors to the host": (
        model,
        one_grad,
        lambda m, a: _within(torch.autograd.graph.save_on_cpu(), lambda: m(*a)),
    ),
    "mutation of saved tensors allowed": (
        model,
        one_grad,
        lambda m, a: _within(
            torch.autograd.graph.allow_mutation_on_saved_tensors(), lambda: m(*a) * 1.0
        ),
    ),
    "dispatch mode around the call": (
        model,
        one_grad,
        lambda m, a: _within(_Doubling(), lambda: m(*a)),
    ),
    "function mode around the call": (
        model,
        one_grad,
        lambda m, a: _within(_TanhIsSigmoid(), lambda: m(*a)),
    ),
    "profiler around the call": (
        model,
        one_grad,
        lambda m, a: _within(torch.profiler.profile(), lambda: m(*a)),
    ),
    "checkpointed": (
        model,
        one_grad,
        lambda m, a: torch.utils.checkpoint.checkpoint(m, *a, use_reentrant=False),
    ),
    "checkpointed, reentrant": (
        model,
        one_grad,
        lambda m, a: torch.utils.checkpoint.checkpoint(m, *a, use_reentrant=True),
    ),
    "inside a custom Function": (model, one_grad, lambda m, a: _Inside.apply(a[0], m)),
    "backward inside a hook": (model, one_grad, lambda m, a: _backward_in_hook(m, a[0])),
    "forward inside a hook": (model, one_grad, lambda m, a: _forward_in_hook(m, a[0])),
}.items():
    add(GROUP, name, make, given, call=call)


def _vjp(m, x):
    out, pull = torch.func.vjp(m, x)
    return out, pull(torch.ones_like(out))[0]


def _within(context, act):
    with context:
        return act()


def _anomaly(m, arguments):
    with torch.autograd.detect_anomaly(check_nan=True):
        return m(*arguments)


class _Doubling(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.tanh.default else out


class _TanhIsSigmoid(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (torch.sigmoid if func is torch.tanh else func)(*args, **(kwargs or {}))


class _Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.m = m
        ctx.save_for_backward(x)
        with torch.no_grad():
            return m(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.m(x)
        out.backward(gradient)
        return x.grad, None


def _backward_in_hook(m, x):
    out = m(x)
    out.register_hook(lambda g: m(x.detach()).sum().backward())
    return out


def _forward_in_hook(m, x):
    out = m(x)
    out.register_hook(lambda g: g + m(x.detach()).detach())
    return out
