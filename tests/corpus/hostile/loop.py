"""Arguments, keys, outputs, autograd, settings of torch, copies of modules."""

import contextlib
import os
import pickle
import sys

import torch
from corpus.hostile.kit import G, Own, X, case, cases, late, rec, train
from torch import nn

HERE = sys.modules[__name__]
SCALE = 1.0


# ---- arguments
@case
def same_tensor_twice():
    def call(g, x, i):
        return g(x, x)

    train(Own(lambda m, q, k: m.l(q) if q is k else m.o(q + k)), call=call)


@case
def buffer_passed_late_and_written_inside():
    def forward(self, x):
        self.b.mul_(0.5)
        return self.l(x)

    train(
        Own(forward, buffers={"b": torch.ones(3, 4)}),
        call=lambda g, x, i: g(x if i < 5 else (g.b if True else x)),
        grad=False,
    )


@case
def batch_norm_statistics_as_argument():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(4)
            self.l = nn.Linear(4, 4)

        def forward(self, x, m):
            return self.l(self.bn(x)) - m

    train(M(), call=lambda g, x, i: g(x, torch.zeros(4) if i < 5 else g.bn.running_mean))


cases(
    is_contiguous_asked_from_the_start=lambda: train(
        Own(lambda m, x: m.l(x) if x.is_contiguous() else m.o(x)),
        inp=lambda i: X(i, 3, 8)[:, :4],
        grad=False,
    ),
    as_strided_of_a_slice=lambda: train(
        Own(lambda m, x: m.l(torch.as_strided(x, (2, 4), (x.stride(0) if False else 8, 1))[:, :4])),
        inp=lambda i: X(i, 3, 8)[:, :4],
        grad=False,
    ),
)


@case
def contiguous_returned():
    def back(out, m, x, i):
        rec(out[1].is_contiguous())
        out[1].view(-1)
        out[1].mul_(2.0)
        rec(x)
        out[0].sum().backward()

    train(
        Own(lambda m, x: (m.l(x), x.contiguous())),
        inp=lambda i: X(i, 3, 8)[:, :4],
        grad=False,
        back=back,
    )


cases(
    parameter_argument_in_turns=lambda: train(
        Own(lambda m, x: m.l(x) * (2.0 if isinstance(x, nn.Parameter) else 1.0)),
        inp=lambda i: nn.Parameter(X(i)) if i == 5 else X(i).requires_grad_(),
    ),
)


class Label(str):
    pass


def label(v):
    r = Label("a")
    r.scale = v
    return r


cases(
    attribute_of_a_string_argument=lambda: train(
        Own(lambda m, x, given: m.l(x) * given.scale),
        inp=lambda i: (X(i), label(1.0 if i < 5 else 2.0)),
    ),
)


class Batch:
    def __init__(self, x):
        self.x = x

    def scaled(self):
        return self.x * SCALE


@case
def registered_pytree_argument_with_method():
    import torch.utils._pytree as pt

    pt.register_pytree_node(Batch, lambda b: ([b.x], None), lambda xs, c: Batch(xs[0]))

    train(
        Own(lambda m, b: m.l(b.scaled())),
        late(lambda m: setattr(HERE, "SCALE", 2.0)),
        inp=lambda i: (Batch(X(i)),),
    )


cases(
    zero_dim_and_empty_inputs=lambda: train(
        Own(lambda m, x, a, e: (m.l(x) * a + e.sum(), torch.cat([e, e]))),
        inp=lambda i: (X(i), torch.tensor(1.0 + i), torch.zeros(0, 4)),
    ),
)


@case
def default_device_in_turns():
    def call(g, x, i):
        with torch.device("cpu") if i % 2 else contextlib.nullcontext():
            return g(x)

    train(Own(lambda m, x: m.l(x) * torch.ones(4)), call=call)


# ---- outputs
@case
def numpy_of_an_output_kept():
    kept = []

    def back(out, m, x, i):
        kept.append(out.detach().numpy())
        out.sum().backward()
        rec([torch.from_numpy(k.copy()) for k in kept])

    train(nn.Linear(4, 4), back=back)


cases(
    parameter_holding_output=lambda: train(Own(lambda m, x: (m.l(x), nn.Parameter(torch.ones(2))))),
)


@case
def storage_of_a_gradient_kept():
    kept = []

    def back(out, m, x, i):
        out.sum().backward()
        kept.append(m.weight.grad.untyped_storage())
        rec([k.tolist() for k in kept])

    train(nn.Linear(4, 4), back=back)


@case
def gradient_hook_on_the_gradient_tensor():
    def back(out, m, x, i):
        out.sum().backward()
        rec(m.weight.grad._version, m.weight.grad.is_leaf)

    train(nn.Linear(4, 4), back=back)


@case
def grad_dtype_float32_of_bf16():
    m = nn.Linear(4, 4).bfloat16()
    for p in m.parameters():
        p.grad_dtype = torch.float32
    train(m, inp=lambda i: X(i).bfloat16(), keep=True)


@case
def sparse_embedding_and_dense_gradients():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(7, 4, sparse=True)
            self.l = nn.Linear(4, 4)

        def forward(self, i):
            return self.l(self.e(i))

    train(
        M(),
        inp=lambda i: torch.tensor([1, 2, i % 7]),
        opt=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )


@case
def jacobian_of_the_module():
    m = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    g = G(m)
    for i in range(6):
        if i < 3:
            g(X(i)).sum().backward()
        else:
            rec(torch.autograd.functional.jacobian(g, X(i)))


@case
def hook_on_a_parameter_raises():
    def back(out, m, x, i):
        if i == 5:

            def bad(g):
                raise KeyError("hook")

            h = m.l.weight.register_hook(bad)
            try:
                out.sum().backward()
            except KeyError:
                rec("raised")
            h.remove()
        else:
            out.sum().backward()

    train(Own(lambda m, x: m.o(torch.tanh(m.l(x)))), back=back, keep=True)


@case
def error_between_forward_and_backward():
    def back(out, m, x, i):
        try:
            if i % 3 == 2:
                raise ValueError
            out.sum().backward()
        except ValueError:
            pass

    train(nn.Linear(4, 4), back=back, slots=2)


@case
def other_shapes_accumulate():
    m = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    g = G(m)
    for i in range(12):
        g(X(i, 1 + i % 3, 4)).pow(2).sum().backward()
        rec([p.grad for p in m.parameters()])


cases(
    swap_tensors_of_a_weight=lambda: train(
        Own(lambda m, x: m.o(torch.tanh(m.l(x)))),
        late(lambda m: torch.utils.swap_tensors(m.l.weight, nn.Parameter(torch.ones(4, 4)))),
    ),
)


@case
def pickle_of_the_graphed():
    m = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    g = G(m)
    for i in range(6):
        g(X(i)).sum().backward()
    c = pickle.loads(pickle.dumps(g))
    rec(c(X(9)).detach())


@case
def graphed_inside_graphed_and_alone():
    inner = nn.Linear(4, 4)
    gi = G(inner)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.i = gi
            self.o = nn.Linear(4, 4)

        def forward(self, x):
            return self.o(torch.tanh(self.i(x)))

    m = M()
    g = G(m)
    for i in range(10):
        (g(X(i)).sum() if i % 2 else gi(X(i)).pow(2).sum()).backward()
        rec([p.grad for p in m.parameters()])


@case
def fork_after_capture():
    m = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    g = G(m)
    for i in range(4):
        g(X(i)).sum().backward()
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        g(X(7)).sum().backward()
        os.write(w, m[0].weight.grad.numpy().tobytes())
        os._exit(0)
    os.waitpid(pid, 0)
    rec(repr(os.read(r, 1000)))
    g(X(8)).sum().backward()
    rec(m[0].weight.grad)


# ---- settings
@case
def fast_path_switched_on_later():
    m = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    torch.backends.mha.set_fastpath_enabled(False)
    g = G(m)
    with torch.no_grad():
        for i in range(8):
            if i == 5:
                torch.backends.mha.set_fastpath_enabled(True)
            rec(f"step {i}", g(X(i, 2, 5, 16)))


@case
def user_function_compiled_by_own_backend():
    def backend(gm, ex):
        return lambda *a: tuple(o * 2 for o in gm(*a))

    act = torch.compile(lambda x: torch.tanh(x), backend=backend)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x):
            return act(self.l(x))

    train(M())


@case
def saved_tensor_hooks_inside():
    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.to(torch.bfloat16), lambda t: t.float()
        ):
            return self.o(torch.tanh(self.l(x)))

    train(Own(forward))


@case
def per_sample_functional_call_inside():
    def forward(self, x):
        p = dict(self.l.named_parameters())
        return torch.func.vmap(lambda r: torch.func.functional_call(self.l, p, (r,)))(x)

    train(Own(forward))


@case
def amp_custom_function():
    class Fn(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w.t(), x.t() @ g

    def call(g, x, i):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return g(x)

    train(Own(lambda m, x: Fn.apply(m.l(x), m.o.weight)), call=call)


@case
def weight_norm_and_spectral_norm():
    m = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    )
    train(m, opt=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))


cases(
    load_state_dict_assign=lambda: train(
        Own(lambda m, x: m.o(torch.tanh(m.l(x)))),
        lambda m, i, g: (
            m.load_state_dict({k: v.clone() * 1.1 for k, v in m.state_dict().items()}, assign=True)
            if i % 3 == 0
            else None
        ),
        steps=10,
    ),
)


@case
def hidden_state_passed_back():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.r = nn.GRUCell(4, 4)

        def forward(self, x, h):
            return self.r(x, h)

    m = M()
    g = G(m)
    for i in range(5):
        h = torch.zeros(3, 4)
        outs = []
        for k in range(4):
            h = g(X(10 * i + k), h)
            outs.append(h)
        sum(o.sum() for o in outs).backward()
        rec(outs, [p.grad for p in m.parameters()])
        for p in m.parameters():
            p.grad = None
