"""Own autograd Functions, checkpoints, torch.func and operators of one's own inside forward."""

import torch
from corpus.entry import GRADIENT_LAYOUT, Own, add, one_grad
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

GROUP = "functions"


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class KeptOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.x, ctx.scale = x.detach().clone(), scale
        return x.sin() * scale

    @staticmethod
    def backward(ctx, gradient):
        return ctx.x.cos() * ctx.scale * gradient, None


class Several(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, x + y, (x > y)

    @staticmethod
    def backward(ctx, first, second, third):
        x, y = ctx.saved_tensors
        zero = torch.zeros_like(x)
        first, second = zero if first is None else first, zero if second is None else second
        return first * y + second, first * x + second


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Straight(torch.autograd.Function):
    """Rounds forward, passes gradients straight through."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        order = x.argsort(-1)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        return x.gather(-1, order), order

    @staticmethod
    def backward(ctx, gradient, _):
        return torch.zeros_like(gradient).scatter(-1, ctx.saved_tensors[0], gradient)


class Recomputing(torch.autograd.Function):
    """Runs autograd again inside its backward, as checkpoints and reversible layers do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        with torch.no_grad():
            return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = torch.tanh(x @ weight)
        return torch.autograd.grad(out, (x, weight), gradient)


class WritesWeightGrad(torch.autograd.Function):
    """Adds to a weight's .grad by itself, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.detach()

    @staticmethod
    def backward(ctx, gradient):
        (x,), weight = ctx.saved_tensors, ctx.weight
        grown = x.t() @ gradient
        weight.grad = grown if weight.grad is None else weight.grad + grown
        return gradient @ weight.detach().t(), None


class Counting(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        Counting.calls += 1
        return gradient


class Mean(torch.autograd.Function):
    """Gradients depend on the host's knowledge of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (2.0 if float(gradient.sum()) > 0 else 0.5)


class NoneBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return None


class Dropping(torch.autograd.Function):
    """Draws random numbers in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (torch.rand_like(gradient) < 0.5)


def fn(name, function, **parts):
    add(
        GROUP, name, lambda: Own(function, **{key: make() for key, make in parts.items()}), one_grad
    )


for name, function in {
    "saved tensors": lambda m, x: Square.apply(m.linear(x)),
    "tensors kept on the context": lambda m, x: KeptOnContext.apply(m.linear(x), 2.0),
    "several outputs": lambda m, x: Several.apply(m.linear(x), x),
    "one of several outputs": lambda m, x: Several.apply(m.linear(x), x)[1],
    "in place": lambda m, x: InPlace.apply(m.linear(x) * 1.0),
    "straight-through rounding": lambda m, x: Straight.apply(m.linear(x) * 3),
}.items():
    fn(name, function)
fn(
    "gradient reversal",
    lambda m, x: m.other(Reversed.apply(m.linear(x), 0.5)),
    other=lambda: nn.Linear(4, 4),
)
fn("undifferentiable output", lambda m, x: Undifferentiable.apply(m.linear(x)))
fn("recomputing", lambda m, x: Recomputing.apply(m.linear(x), m.linear.weight))
fn(
    "gradient written by itself",
    lambda m, x: WritesWeightGrad.apply(m.linear(x), m.w),
    w=lambda: nn.Parameter(torch.randn(4, 4)),
)
for name, function in {
    "backward that counts": lambda m, x: Counting.apply(m.linear(x)),
    "backward that asks the host": lambda m, x: Mean.apply(m.linear(x)),
    "backward that returns None": lambda m, x: (NoneBack.apply(m.linear(x)), m.linear(x)),
    "backward that draws": lambda m, x: Dropping.apply(m.linear(x)),
    "nested": lambda m, x: Square.apply(Straight.apply(Square.apply(m.linear(x)))),
}.items():
    fn(name, function)
add(
    GROUP,
    "context holds what changes",
    lambda: Own(lambda m, x: KeptOnContext.apply(m.linear(x), m.scale), scale=1.0),
    one_grad,
    mutate=lambda m: setattr(m, "scale", 2.0),
)
add(
    GROUP,
    "count of backwards",
    lambda: Own(lambda m, x: Counting.apply(m.linear(x))),
    one_grad,
    prepare=lambda m: setattr(Counting, "calls", 0),
    observe=lambda m: Counting.calls,
)


def block():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 4))


for reentrant in (False, True):
    form = "reentrant" if reentrant else "not reentrant"
    for label, keep in {"": True, ", random state not kept": False}.items():
        fn(
            f"checkpoint, {form}{label}",
            lambda m, x, reentrant=reentrant, keep=keep: checkpoint(
                m.block, m.linear(x), use_reentrant=reentrant, preserve_rng_state=keep
            ),
            block=block,
        )
    fn(
        f"checkpoint of the whole, {form}",
        lambda m, x, reentrant=reentrant: checkpoint(
            lambda y: m.block(m.linear(y)), x, use_reentrant=reentrant
        ),
        block=block,
    )
    fn(
        f"checkpoints nested, {form}",
        lambda m, x, reentrant=reentrant: checkpoint(
            lambda y: m.linear(checkpoint(m.block, y, use_reentrant=reentrant)),
            m.linear(x),
            use_reentrant=reentrant,
        ),
        block=block,
    )
    fn(
        f"checkpoint of two calls, {form}",
        lambda m, x, reentrant=reentrant: checkpoint(
            m.block,
            checkpoint(m.block, m.linear(x), use_reentrant=reentrant),
            use_reentrant=reentrant,
        ),
        block=block,
    )
    fn(
        f"checkpoint_sequential, {form}",
        lambda m, x, reentrant=reentrant: checkpoint_sequential(
            m.block, 2, m.linear(x), use_reentrant=reentrant
        ),
        block=block,
    )
    fn(
        f"checkpoint with BatchNorm, {form}",
        lambda m, x, reentrant=reentrant: checkpoint(m.norm, m.linear(x), use_reentrant=reentrant),
        norm=lambda: nn.BatchNorm1d(4),
    )
add(
    GROUP,
    "checkpointing switched on",
    lambda: Own(
        lambda m, x: (
            checkpoint(m.block, m.linear(x), use_reentrant=False)
            if m.saving
            else m.block(m.linear(x))
        ),
        block=block(),
        saving=False,
    ),
    one_grad,
    mutate=lambda m: setattr(m, "saving", True),
)
fn(
    "checkpoint, selective",
    lambda m, x: checkpoint(m.block, m.linear(x), use_reentrant=False, context_fn=_selective),
    block=block,
)
fn(
    "functional_call of scaled weights",
    lambda m, x: torch.func.functional_call(
        m.block, {"0.weight": m.block[0].weight * 2}, (m.linear(x),)
    ),
    block=block,
)
fn(
    "functional_call of made weights",
    lambda m, x: torch.func.functional_call(
        m.child, {"weight": m.linear(x).t() @ m.linear(x), "bias": m.linear.bias}, (x,)
    ),
    child=lambda: nn.Linear(4, 4),
)
fn(
    "functional_call of a stack of models",
    lambda m, x: torch.stack(
        [
            torch.func.functional_call(m.linear, {"weight": w, "bias": m.linear.bias}, (x,))
            for w in m.stack.unbind(0)
        ]
    ),
    stack=lambda: nn.Parameter(torch.randn(2, 4, 4)),
)
fn("vmap", lambda m, x: torch.func.vmap(m.linear)(x))
add(
    GROUP,
    "vmap of a stack of weights",
    lambda: Own(
        lambda m, x: torch.func.vmap(lambda w: x @ w)(m.stack),
        stack=nn.Parameter(torch.randn(2, 4, 4)),
    ),
    one_grad,
    documented=GRADIENT_LAYOUT,
)
for name, function in {
    "torch.func.grad inside": lambda m, x: (
        m.linear(x) + torch.func.grad(lambda y: m.linear(y).square().sum())(x)
    ),
    "torch.func.jvp inside": lambda m, x: torch.func.jvp(m.linear, (x,), (torch.ones_like(x),)),
    "torch.func.jacrev inside": lambda m, x: torch.func.jacrev(lambda y: m.linear(y).tanh())(x[0]),
    "autograd.grad inside, graph kept": lambda m, x: (
        lambda h: (
            m.linear(x) + torch.autograd.grad(m.linear(h).tanh().sum(), h, create_graph=True)[0]
        )
    )(x.detach().requires_grad_()),
    "energy and its forces": lambda m, x: (
        lambda p: (lambda e: (e, -torch.autograd.grad(e, p, create_graph=True)[0]))(
            m.linear(p).tanh().sum()
        )
    )(x.detach().requires_grad_()),
    "inner step of descent": lambda m, x: _inner(m, x),
}.items():
    fn(name, function)
fn(
    "torch.jit.script",
    lambda m, x: m.scripted(m.linear(x)),
    scripted=lambda: torch.jit.script(_scripted),
)
fn(
    "torch.compile inside, eager backend",
    lambda m, x: m.compiled(m.linear(x)),
    compiled=lambda: torch.compile(torch.tanh, backend="eager"),
)
fn(
    "einops by hand",
    lambda m, x: m.linear(x).reshape(3, 2, 2).permute(1, 0, 2).reshape(2, -1).contiguous(),
)
fn("while loop on the host", lambda m, x: _until(m, x))
fn("fixed point of ten steps", lambda m, x: _fixed(m, x))


def _selective():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    save = [torch.ops.aten.addmm.default]
    return create_selective_checkpoint_contexts(
        lambda ctx, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if op in save else CheckpointPolicy.PREFER_RECOMPUTE
        )
    )


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def _inner(m, x):
    weight = m.linear.weight
    gradient = torch.autograd.grad(
        (x.detach() @ weight).square().mean(), weight, create_graph=True
    )[0]
    return x @ (weight - 0.1 * gradient)


def _until(m, x):
    for _ in range(5):
        x = m.linear(x)
        if float(x.detach().norm()) < 3:
            break
    return x


def _fixed(m, x):
    z = torch.zeros_like(x)
    with torch.no_grad():
        for _ in range(10):
            z = torch.tanh(m.linear(z) * 0.3 + x)
    return torch.tanh(m.linear(z) * 0.3 + x)
