"""How gradients are asked for, of what, and who owns them: partial losses, autograd.grad, higher
orders."""

import torch
from corpus.entry import WEIGHT_TWICE, Own, add, one, one_grad, scalar, tensors_in, trained
from torch import nn

GROUP = "gradients"


def several(m, x):
    h = m.linear(x)
    return {"a": h, "b": m.other(h), "c": h.relu().sum(), "d": h.detach()}


def model():
    return Own(several, other=nn.Linear(4, 4))


def parameters(m):
    return [p for p in m.parameters() if p.requires_grad]


def asked(name, backward, make=model, inputs=one_grad, **options):
    add(GROUP, name, make, inputs, backward=backward, **options)


def give(m, gradients, targets):
    for target, gradient in zip(targets, gradients, strict=True):
        if gradient is not None:
            target.grad = (
                gradient.detach() if target.grad is None else target.grad + gradient.detach()
            )


def by_grad(pick, **options):
    """autograd.grad of the loss with respect to what `pick` takes of parameters and arguments."""

    def backward(m, loss, outputs, arguments, step):
        targets = pick(parameters(m), arguments)
        give(m, torch.autograd.grad(loss, targets, **options), targets)

    return backward


def by_inputs(pick, **options):
    return lambda m, loss, outputs, arguments, step: loss.backward(
        inputs=pick(parameters(m), arguments), **options
    )


PICKS = {
    "all parameters": lambda ps, xs: ps,
    "some parameters": lambda ps, xs: ps[:2],
    "one parameter": lambda ps, xs: ps[1:2],
    "the input": lambda ps, xs: [xs[0]],
    "input and a weight": lambda ps, xs: [xs[0], ps[0]],
    "in reverse": lambda ps, xs: ps[::-1],
}
for label, pick in PICKS.items():
    asked(f"autograd.grad of {label}", by_grad(pick, allow_unused=True))
    asked(f"backward(inputs={label})", by_inputs(pick))
for name, function in {
    "autograd.grad without allow_unused": by_grad(lambda ps, xs: ps),
    "autograd.grad, materialize_grads": by_grad(
        lambda ps, xs: ps, allow_unused=True, materialize_grads=True
    ),
    "autograd.grad with retain_graph, then backward": lambda m, loss, outputs, arguments, step: (
        give(m, torch.autograd.grad(loss, parameters(m), retain_graph=True), parameters(m)),
        loss.backward(),
    ),
    "autograd.grad of an output to an output": lambda m, loss, outputs, arguments, step: (
        lambda g: (outputs["b"].sum() * g.sum().detach()).backward()
    )(torch.autograd.grad(outputs["b"].sum(), outputs["a"], retain_graph=True)[0]),
    "backward twice with retain_graph": lambda m, loss, outputs, arguments, step: (
        loss.backward(retain_graph=True),
        loss.backward(),
    ),
    "backward twice without retain_graph": lambda m, loss, outputs, arguments, step: (
        loss.backward(),
        loss.backward(),
    ),
    "backward of each output by itself": lambda m, loss, outputs, arguments, step: [
        t.sum().backward(retain_graph=True) for t in trained(outputs)
    ],
    "backward of one output, then of another": lambda m, loss, outputs, arguments, step: (
        outputs["a"].sum().backward(retain_graph=True),
        outputs["b"].sum().backward(),
    ),
    "backward with a gradient given": lambda m, loss, outputs, arguments, step: outputs[
        "b"
    ].backward(torch.ones_like(outputs["b"]) * (1 + step)),
    "backward with an expanded gradient": lambda m, loss, outputs, arguments, step: outputs[
        "b"
    ].backward(torch.ones((), device=outputs["b"].device).expand(3, 4)),
    "backward with a transposed gradient": lambda m, loss, outputs, arguments, step: outputs[
        "b"
    ].backward(torch.randn(4, 3).to(outputs["b"].device).t()),
    "autograd.backward of two tensors": lambda m, loss, outputs, arguments, step: (
        torch.autograd.backward([outputs["a"].sum(), outputs["b"].mean()])
    ),
    "no backward in some steps": lambda m, loss, outputs, arguments, step: (
        loss.backward() if step % 3 else None
    ),
    "no backward at all": lambda m, loss, outputs, arguments, step: None,
    "zero times the loss": lambda m, loss, outputs, arguments, step: (loss * 0.0).backward(),
    "loss of NaN": lambda m, loss, outputs, arguments, step: (
        loss * float("nan") if step == 3 else loss
    ).backward(),
    "loss scaled": lambda m, loss, outputs, arguments, step: (loss * 1024.0).backward(),
    "jacobian row by row": lambda m, loss, outputs, arguments, step: [
        give(
            m,
            torch.autograd.grad(
                outputs["b"][0, n], parameters(m), retain_graph=True, allow_unused=True
            ),
            parameters(m),
        )
        for n in range(4)
    ],
    "batched gradients": lambda m, loss, outputs, arguments, step: give(
        m,
        [
            None if g is None else g.sum(0)
            for g in (
                torch.autograd.grad(
                    outputs["b"],
                    parameters(m),
                    torch.eye(12, device=arguments[0].device).view(12, 3, 4),
                    is_grads_batched=True,
                    allow_unused=True,
                )
            )
        ],
        parameters(m),
    ),
}.items():
    asked(name, function)


def second_order(pick):
    def backward(m, loss, outputs, arguments, step):
        gradients = torch.autograd.grad(
            loss, pick(parameters(m), arguments), create_graph=True, allow_unused=True
        )
        (loss + sum(g.square().sum() for g in gradients if g is not None)).backward()

    return backward


def smooth():
    return Own(lambda m, x: m.other(torch.tanh(m.linear(x))), other=nn.Linear(4, 4))


for name, parts in {
    "gradient penalty on the input": (second_order(lambda ps, xs: [xs[0]]), smooth),
    "gradient penalty on parameters": (second_order(lambda ps, xs: ps), smooth),
    "backward(create_graph=True), then the norm": (
        lambda m, loss, outputs, arguments, step: (
            loss.backward(create_graph=True),
            sum(p.grad.square().sum() for p in parameters(m)).backward(),
        ),
        smooth,
    ),
    "create_graph without a second backward": (
        lambda m, loss, outputs, arguments, step: loss.backward(create_graph=True),
        smooth,
    ),
    "Hessian times a vector": (
        lambda m, loss, outputs, arguments, step: (
            lambda gs: torch.autograd.backward(
                sum((g * p.detach()).sum() for g, p in zip(gs, parameters(m), strict=True))
            )
        )(torch.autograd.grad(loss, parameters(m), create_graph=True)),
        smooth,
    ),
    "create_graph in one step of four": (
        lambda m, loss, outputs, arguments, step: (
            second_order(lambda ps, xs: ps)(m, loss, outputs, arguments, step)
            if step % 4 == 3
            else loss.backward()
        ),
        smooth,
    ),
}.items():
    asked(name, *parts)

# Losses of part of the outputs.
PARTS = {
    "the first": lambda out: [out[0]],
    "the last": lambda out: [out[-1]],
    "none but detached": lambda out: [out[0]],
    "all": lambda out: list(out),
}
for label, part in PARTS.items():
    asked(
        f"loss of {label} of three",
        lambda m, loss, outputs, arguments, step, part=part: scalar(part(outputs)).backward(),
        lambda: Own(
            lambda m, x: (lambda h: (h, m.other(h), m.third(h)))(m.linear(x)),
            other=nn.Linear(4, 4),
            third=nn.Linear(4, 4),
        ),
    )
asked(
    "another output in every step",
    lambda m, loss, outputs, arguments, step: outputs[step % 3].square().sum().backward(),
    lambda: Own(
        lambda m, x: (lambda h: (h, m.other(h), m.third(h)))(m.linear(x)),
        other=nn.Linear(4, 4),
        third=nn.Linear(4, 4),
    ),
)
asked(
    "an output joins late",
    lambda m, loss, outputs, arguments, step: (
        outputs[0].sum() + (outputs[1].sum() if step > 4 else 0.0)
    ).backward(),
    lambda: Own(lambda m, x: (m.linear(x), m.other(x)), other=nn.Linear(4, 4)),
)
asked(
    "an output leaves early",
    lambda m, loss, outputs, arguments, step: (
        outputs[0].sum() + (outputs[1].sum() if step < 3 else 0.0)
    ).backward(),
    lambda: Own(lambda m, x: (m.linear(x), m.other(x)), other=nn.Linear(4, 4)),
)
INFINITE = {
    "sqrt of zero": lambda h: (h * 0.0).abs().sqrt(),
    "log of zero": lambda h: (h * 0.0).log(),
    "norm of zero": lambda h: (h * 0.0).norm(),
    "reciprocal of zero": lambda h: 1 / (h * 0.0),
    "std of equals": lambda h: (h * 0.0).std(),
    "acos of one": lambda h: torch.acos(h * 0.0 + 1.0),
}
for label, infinite in INFINITE.items():
    asked(
        f"unused output, {label}",
        lambda m, loss, outputs, arguments, step: outputs[0].square().sum().backward(),
        lambda infinite=infinite: Own(lambda m, x: (lambda h: (h, infinite(h)))(m.linear(x))),
    )
for name, parts in {
    "unused output owns a weight": (
        lambda m, loss, outputs, arguments, step: outputs[0].square().sum().backward(),
        lambda: Own(lambda m, x: (m.linear(x), m.other(x)), other=nn.Linear(4, 4)),
    ),
    "a leaf among the outputs": (
        lambda m, loss, outputs, arguments, step: outputs[0].square().sum().backward(),
        lambda: Own(lambda m, x: (m.linear(x), m.scale), scale=nn.Parameter(torch.ones(3))),
    ),
    "a leaf among the outputs, used": (
        lambda m, loss, outputs, arguments, step: (
            outputs[0].square().sum() + (outputs[1].sum() if step % 2 else 0.0)
        ).backward(),
        lambda: Own(lambda m, x: (m.linear(x), m.scale), scale=nn.Parameter(torch.ones(3))),
    ),
    "another key has as many outputs": (
        lambda m, loss, outputs, arguments, step: outputs[step % 2].sum().backward(),
        lambda: Own(lambda m, x: (m.linear(x), m.other(x)), other=nn.Linear(4, 4)),
        lambda draw, step: (draw.rows(2 + step % 2, 4),),
    ),
    "zeros for an output": (
        lambda m, loss, outputs, arguments, step: torch.autograd.backward(
            outputs, [torch.ones_like(outputs[0]), torch.zeros_like(outputs[1])]
        ),
        lambda: Own(lambda m, x: (m.linear(x), m.other(x)), other=nn.Linear(4, 4)),
    ),
    "part of an output": (
        lambda m, loss, outputs, arguments, step: outputs[:, step % 4].sum().backward(),
        lambda: Own(lambda m, x: m.linear(x)),
    ),
    "loss of the last word only": (
        lambda m, loss, outputs, arguments, step: outputs[0][-1].sum().backward(),
        lambda: Own(lambda m, x: (m.linear(x), m.other(x)), other=nn.Linear(4, 4)),
    ),
    "inputs that need a gradient in vain": (
        lambda m, loss, outputs, arguments, step: outputs[0].sum().backward(),
        lambda: Own(lambda m, x, y: (m.linear(x), y * 2), other=nn.Linear(4, 4)),
        lambda draw, step: (draw.rows(grad=True), draw.rows(grad=True)),
    ),
}.items():
    asked(name, *parts)

# Gradients that are the user's own.


def flat_gradients(m):
    flat = torch.zeros(20, device=m.linear.weight.device)
    m.linear.weight.grad, m.linear.bias.grad = flat[:16].view(4, 4), flat[16:]
    m.__dict__["flat"] = flat


def linear():
    return Own(lambda m, x: m.linear(x))


def owned(name, backward, **options):
    asked(name, backward, linear, **options)


owned(
    "a flat gradient buffer, once",
    lambda m, loss, outputs, arguments, step: loss.backward(),
    mutate=flat_gradients,
    observe=lambda m: m.__dict__.get("flat"),
    loops=("accumulate",),
)
owned(
    "a flat gradient buffer, in every step",
    lambda m, loss, outputs, arguments, step: (flat_gradients(m), loss.backward()),
    observe=lambda m: m.__dict__.get("flat"),
)
owned(
    "a gradient given before backward",
    lambda m, loss, outputs, arguments, step: (
        setattr(m.linear.weight, "grad", torch.ones(4, 4, device=loss.device)),
        loss.backward(),
    ),
)
owned(
    "a transposed gradient given before backward",
    lambda m, loss, outputs, arguments, step: (
        setattr(m.linear.weight, "grad", torch.ones(4, 4, device=loss.device).t()),
        loss.backward(),
    ),
)
owned(
    "a shared gradient of two parameters",
    lambda m, loss, outputs, arguments, step: (
        setattr(m.linear.bias, "grad", torch.ones(4, device=loss.device)),
        loss.backward(),
    ),
)
for name, (function, observe) in {
    "gradients saved, then dropped": (
        lambda m, loss, outputs, arguments, step: (
            loss.backward(),
            m.__dict__.setdefault("kept", []).append(m.linear.weight.grad),
            setattr(m.linear.weight, "grad", None),
        ),
        lambda m: list(m.__dict__["kept"]),
    ),
    "gradients' views saved, then dropped": (
        lambda m, loss, outputs, arguments, step: (
            loss.backward(),
            m.__dict__.setdefault("kept", []).append(m.linear.weight.grad.view(-1)[3:]),
            setattr(m.linear.weight, "grad", None),
        ),
        lambda m: list(m.__dict__["kept"]),
    ),
    "gradients saved and kept": (
        lambda m, loss, outputs, arguments, step: (
            loss.backward(),
            m.__dict__.setdefault("kept", []).append(m.linear.weight.grad),
        ),
        lambda m: list(m.__dict__["kept"]),
    ),
    "gradients saved, zeroed in place": (
        lambda m, loss, outputs, arguments, step: (
            loss.backward(),
            m.__dict__.setdefault("kept", []).append(m.linear.weight.grad),
            m.zero_grad(set_to_none=False),
            scalar([m.linear.weight]).backward(),
        ),
        lambda m: list(m.__dict__["kept"]),
    ),
}.items():
    owned(name, function, observe=observe)
for name, function in {
    "gradient's data replaced": lambda m, loss, outputs, arguments, step: (
        loss.backward(),
        setattr(m.linear.weight.grad, "data", m.linear.weight.grad * 2),
    ),
    "gradients clipped in place": lambda m, loss, outputs, arguments, step: (
        loss.backward(),
        nn.utils.clip_grad_norm_(list(m.parameters()), 0.5),
    ),
    "gradients exchanged between parameters": lambda m, loss, outputs, arguments, step: (
        loss.backward(),
        setattr(m.linear.weight, "grad", m.linear.weight.grad.t()),
    ),
    "gradients of another dtype": lambda m, loss, outputs, arguments, step: (
        loss.backward(),
        setattr(m.linear.weight, "grad", m.linear.weight.grad.double().float()),
    ),
    "gradients averaged by hand, in place": lambda m, loss, outputs, arguments, step: (
        loss.backward(),
        [p.grad.div_(2) for p in m.parameters()],
    ),
}.items():
    owned(name, function)
owned(
    "the loss uses a parameter, too",
    lambda m, loss, outputs, arguments, step: (
        loss + 0.1 * m.linear.weight.square().sum()
    ).backward(),
    documented=WEIGHT_TWICE,
)
owned(
    "the loss multiplies by a parameter",
    lambda m, loss, outputs, arguments, step: (
        (outputs @ m.linear.weight.t()).square().sum()
    ).backward(),
    documented=WEIGHT_TWICE,
)
owned(
    "hooks on a parameter",
    lambda m, loss, outputs, arguments, step: loss.backward(),
    prepare=lambda m: m.linear.weight.register_hook(lambda g: g * 2),
)
owned(
    "hook on a parameter that sees zeros",
    lambda m, loss, outputs, arguments, step: loss.backward(),
    prepare=lambda m: m.linear.weight.register_hook(lambda g: torch.where(g == 0, 1.0, g)),
)
owned(
    "hook on a parameter, added later",
    lambda m, loss, outputs, arguments, step: loss.backward(),
    mutate=lambda m: m.linear.weight.register_hook(lambda g: g * 2),
)
owned(
    "hook on a parameter, removed later",
    lambda m, loss, outputs, arguments, step: loss.backward(),
    prepare=lambda m: m.__dict__.update(handle=m.linear.weight.register_hook(lambda g: g * 2)),
    mutate=lambda m: m.__dict__["handle"].remove(),
)
owned(
    "post-accumulate hook",
    lambda m, loss, outputs, arguments, step: loss.backward(),
    prepare=lambda m: m.linear.weight.register_post_accumulate_grad_hook(_halved),
)
owned(
    "optimizer in the backward",
    lambda m, loss, outputs, arguments, step: loss.backward(),
    prepare=lambda m: [p.register_post_accumulate_grad_hook(_sgd) for p in m.parameters()],
)
owned(
    "post-accumulate hook, added later",
    lambda m, loss, outputs, arguments, step: loss.backward(),
    mutate=lambda m: m.linear.weight.register_post_accumulate_grad_hook(_sgd),
)
owned(
    "a hook on the accumulation node",
    lambda m, loss, outputs, arguments, step: loss.backward(),
    prepare=lambda m: m.__dict__.update(
        node=torch.autograd.graph.get_gradient_edge(m.linear.weight).node,
        handle=torch.autograd.graph.get_gradient_edge(m.linear.weight).node.register_hook(
            lambda *g: m.__dict__.setdefault("count", []).append(1)
        ),
    ),
    observe=lambda m: len(m.__dict__.get("count", [])),
)
owned(
    "a hook on many tensors",
    lambda m, loss, outputs, arguments, step: (
        torch.autograd.graph.register_multi_grad_hook(
            list(m.parameters()),
            lambda gs: m.__dict__.setdefault("seen", []).append([g.clone() for g in gs]),
        ),
        loss.backward(),
    ),
    observe=lambda m: m.__dict__.get("seen", [])[-1:],
)
owned(
    "parameter in two groups of tied modules",
    lambda m, loss, outputs, arguments, step: loss.backward(),
    mutate=lambda m: setattr(m, "tied", m.linear),
)
for label, change in {
    "frozen": lambda m: m.linear.weight.requires_grad_(False),
    "bias frozen": lambda m: m.linear.bias.requires_grad_(False),
    "replaced": lambda m: setattr(m.linear, "weight", nn.Parameter(m.linear.weight.detach() * 2)),
    "data replaced": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data * 2),
    "copied in": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "assigned": lambda m: m.load_state_dict(
        {k: v * 2 for k, v in m.state_dict().items()}, assign=True
    ),
    "to double and back": lambda m: m.double().float(),
    "bias to None": lambda m: setattr(m.linear, "bias", None),
    "resized": lambda m: setattr(m, "linear", nn.Linear(4, 6).to(m.linear.weight.device)),
}.items():
    owned(
        f"parameter {label}",
        lambda m, loss, outputs, arguments, step: loss.backward() if loss.requires_grad else None,
        mutate=change,
    )
asked(
    "frozen first, trained later",
    lambda m, loss, outputs, arguments, step: loss.backward(),
    smooth,
    prepare=lambda m: m.linear.requires_grad_(False),
    mutate=lambda m: m.linear.requires_grad_(True),
)


def _halved(parameter):
    parameter.grad.mul_(0.5)


def _sgd(parameter):
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


asked(
    "number of tensors in outputs asked",
    lambda m, loss, outputs, arguments, step: (loss * len(tensors_in(outputs))).backward(),
    inputs=one,
)
asked(
    "hook on a parameter that a partial loss leaves out",
    lambda m, loss, outputs, arguments, step: (
        (outputs[0] if step > 3 else outputs[0] + outputs[1]).sum().backward()
    ),
    lambda: Own(lambda m, x: (m.linear(x), m.other(x)), other=nn.Linear(4, 4)),
    prepare=lambda m: m.other.weight.register_hook(lambda g: g * 2),
)
asked(
    "two calls in one backward, accumulated",
    lambda m, loss, outputs, arguments, step: [
        (m(arguments[0]) + m(arguments[0].cos())).square().sum().backward() for _ in range(3)
    ],
    lambda: Own(lambda m, x: torch.tanh(m.linear(x))),
    documented=WEIGHT_TWICE,
)
