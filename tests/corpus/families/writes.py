"""Buffers and parameters written in forward, tied weights, views and in-place operations inside."""

import torch
from corpus.entry import WEIGHT_TWICE, Own, add, one, one_grad, words
from torch import nn
from torch.nn import functional

GROUP = "writes"


def buffered(name, function, inputs=one, **options):
    def make():
        made = Own(function)
        made.register_buffer("count", torch.zeros((), dtype=torch.int64))
        made.register_buffer("mean", torch.zeros(4))
        made.register_buffer("table", torch.arange(12.0).view(3, 4), persistent=False)
        return made

    add(GROUP, name, make, inputs, **options)


def then(write):
    return lambda m, x: (lambda h: (write(m, h.detach()), h * m.mean.cos() + m.count)[1])(
        m.linear(x)
    )


WRITES = {
    "counted": lambda m, h: m.count.add_(1),
    "counted by +=": lambda m, h: _plus(m),
    "averaged": lambda m, h: m.mean.lerp_(h.mean(0), 0.1),
    "copied": lambda m, h: m.mean.copy_(h[0]),
    "assigned": lambda m, h: setattr(m, "mean", h.mean(0)),
    "assigned in turns": lambda m, h: setattr(m, "mean", m.mean + h.mean(0)),
    "row written": lambda m, h: m.table.__setitem__(1, h[0]),
    "row written by a mask": lambda m, h: m.table.__setitem__(h > 0, 0.0),
    "row written by an index": lambda m, h: m.table.__setitem__(m.count % 3, h[0]),
    "view written": lambda m, h: m.table.view(-1)[2:6].add_(1.0),
    "transpose written": lambda m, h: m.table.t().mul_(0.9),
    "data written": lambda m, h: m.mean.data.add_(0.1),
    "data assigned": lambda m, h: setattr(m.mean, "data", m.mean.data + 0.1),
    "filled": lambda m, h: m.mean.fill_(0.5),
    "zeroed and added": lambda m, h: m.mean.zero_().add_(h[0]),
    "rolled": lambda m, h: m.table.copy_(m.table.roll(1, 0)),
    "out=": lambda m, h: torch.add(m.mean, 0.1, out=m.mean),
    "scatter": lambda m, h: m.mean.scatter_add_(
        0, torch.zeros(1, dtype=torch.int64, device=h.device), h[0, :1]
    ),
    "random": lambda m, h: m.mean.normal_(),
    "swapped": lambda m, h: _swap(m),
    "resized": lambda m, h: m.table.resize_(4, 4).zero_(),
    "set_": lambda m, h: m.mean.set_(m.mean + 0.1),
    "in a foreach": lambda m, h: torch._foreach_add_([m.mean], 0.1),
    "with another buffer": lambda m, h: (m.mean.add_(m.table[0]), m.table.mul_(0.5)),
}
for label, write in WRITES.items():
    buffered(f"buffer {label}", then(write))
buffered("buffer written and returned", lambda m, x: (m.linear(x), m.mean.add_(1.0)))
buffered(
    "buffer read, then written",
    lambda m, x: (lambda out: (m.mean.add_(1.0), out)[1])(m.linear(x) * m.mean),
)
buffered(
    "buffer saved for backward, then written",
    lambda m, x: (lambda out: (m.mean.add_(1.0), out)[1])(
        m.linear(x).exp() * m.mean * m.linear.weight[0]
    ),
)
buffered(
    "buffer written by the loop",
    lambda m, x: m.linear(x) * m.mean,
    call=lambda m, a: (m.mean.add_(0.1), m(*a))[1],
)
buffered(
    "buffer replaced by the loop",
    lambda m, x: m.linear(x) * m.mean,
    call=lambda m, a: (setattr(m, "mean", m.mean + 0.1), m(*a))[1],
)
buffered(
    "buffer of another dtype",
    lambda m, x: m.linear(x) * m.mean.float(),
    mutate=lambda m: setattr(m, "mean", m.mean.double() + 1),
)
buffered(
    "buffer to None",
    lambda m, x: m.linear(x) if m.mean is None else m.linear(x) * m.mean,
    mutate=lambda m: setattr(m, "mean", None),
)
buffered(
    "buffer deleted and made again",
    lambda m, x: m.linear(x) * m.mean,
    mutate=lambda m: (
        m.__delattr__("mean"),
        m.register_buffer("mean", torch.ones(4, device=m.linear.weight.device)),
    ),
)
buffered(
    "buffer that needs a gradient",
    lambda m, x: m.linear(x) * m.mean,
    prepare=lambda m: m.mean.requires_grad_(),
    observe=lambda m: m.mean.grad,
)


def _plus(m):
    m.count += 1


def _swap(m):
    m.mean, m.other_mean = getattr(m, "other_mean", torch.ones_like(m.mean)), m.mean


class Tied(nn.Module):
    """A language model whose head shares the embedding's weight in one of several ways."""

    def __init__(self, form):
        super().__init__()
        self.embedding, self.form = nn.Embedding(11, 4), form
        self.mix, self.head = nn.Linear(4, 4), nn.Linear(4, 11, bias=False)
        if form == "parameter":
            self.head.weight = self.embedding.weight
        if form == "module":
            self.mix2 = self.mix
        if form == "data":
            self.head.weight.data = self.embedding.weight.data

    def forward(self, ids):
        h = torch.tanh(self.mix(self.embedding(ids)))
        if self.form == "module":
            h = self.mix2(h)
        if self.form == "function":
            return h @ self.embedding.weight.t()
        return functional.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


for form in ("parameter", "module", "function", "data", "none"):
    add(GROUP, f"tied by {form}", lambda form=form: Tied(form), words)
add(
    GROUP,
    "tied later",
    lambda: Tied("none"),
    words,
    mutate=lambda m: setattr(m.head, "weight", m.embedding.weight),
)
add(
    GROUP,
    "untied later",
    lambda: Tied("parameter"),
    words,
    mutate=lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach().clone())),
)
add(
    "last bits",
    "embedding inside and outside",
    lambda: Tied("function"),
    words,
    documented=WEIGHT_TWICE,
    call=lambda m, a: (m(*a), m.embedding(a[0]).sum(-1)),
)
add(
    "last bits",
    "weight twice inside and once outside",
    lambda: Own(lambda m, x: m.linear(m.linear(x))),
    call=lambda m, a: m(*a) @ m.linear.weight,
    documented=WEIGHT_TWICE,
)
add(
    "last bits",
    "two calls and a use between",
    lambda: Own(lambda m, x: m.linear(x)),
    documented=WEIGHT_TWICE,
    call=lambda m, a: m(m(*a) @ m.linear.weight),
)

INSIDE = {
    "add_": lambda m, h: h.add_(1.0),
    "mul_ of itself": lambda m, h: h.mul_(h.detach()),
    "relu_": lambda m, h: h.relu_(),
    "row written": lambda m, h: (h.__setitem__(0, 1.0), h)[1],
    "column written": lambda m, h: (h[:, 1].mul_(2.0), h)[1],
    "view written": lambda m, h: (h.view(-1)[3:7].zero_(), h)[1],
    "slice of a clone written": lambda m, h: (lambda c: (c[1:].add_(h[:2]), c)[1])(h.clone()),
    "index_put_": lambda m, h: h.index_put_(
        (torch.tensor([0, 2], device=h.device),), torch.ones(2, 4, device=h.device), accumulate=True
    ),
    "masked_fill_": lambda m, h: h.masked_fill_(h > 0, 0.5),
    "scatter_": lambda m, h: torch.zeros_like(h).scatter_(1, h.argmax(1, True), 1.0) + h,
    "index_add_": lambda m, h: torch.zeros_like(h).index_add_(
        0, torch.tensor([0, 0, 1], device=h.device), h
    ),
    "copy_": lambda m, h: torch.empty_like(h).copy_(h),
    "exp_ saved": lambda m, h: h.exp_().mul(2.0),
    "transpose_": lambda m, h: h.t_(),
    "unsqueeze_": lambda m, h: h.unsqueeze_(0),
    "resize by set_": lambda m, h: h.reshape(4, 3),
    "cumulative list": lambda m, h: torch.cat([h, h * 2]).chunk(2)[1],
    "out= of a view": lambda m, h: (
        torch.mul(h.detach(), 2.0, out=torch.empty(6, 4, device=h.device)[::2]) + h
    ),
    "split written": lambda m, h: h.split(2, 1)[0] * 3,
    "chunks exchanged": lambda m, h: torch.cat(h.chunk(2, 1)[::-1], 1),
    "detach_": lambda m, h: h.clone().detach_() + h,
    "data of a hidden value": lambda m, h: (setattr(h, "data", h.data * 2), h)[1],
    "requires_grad_ inside": lambda m, h: h.detach().requires_grad_() * 2 + h,
    "fill_diagonal_": lambda m, h: h.fill_diagonal_(1.0),
    "clamp_": lambda m, h: h.clamp_(-0.5, 0.5),
    "expanded then added": lambda m, h: h[:1].expand(3, 4) + h,
    "as_strided": lambda m, h: h.as_strided((2, 4), (4, 1), 4),
    "foreach": lambda m, h: sum(torch._foreach_mul([h, h + 1], 2.0)),
    "no_grad block": lambda m, h: _partly(h),
    "zeros_like": lambda m, h: torch.zeros_like(h) + h,
    "empty filled": lambda m, h: torch.empty_like(h).fill_(2.0) * h,
    "tensor of numbers": lambda m, h: h * torch.tensor([1.0, 2.0, 3.0, 4.0], device=h.device),
    "tensor of nothing": lambda m, h: torch.cat([torch.tensor([], device=h.device), h.flatten()]),
    "arange and meshgrid": lambda m, h: (
        h
        * torch.meshgrid(
            torch.arange(3.0, device=h.device), torch.arange(4.0, device=h.device), indexing="ij"
        )[0]
    ),
    "full of a number": lambda m, h: h * torch.full((4,), 2.5, device=h.device),
    "from_numpy": lambda m, h: (
        h * torch.from_numpy(__import__("numpy").ones(4, dtype="float32")).to(h.device)
    ),
    "as_tensor of a list": lambda m, h: h * torch.as_tensor([1.0] * 4).to(h.device),
    "new_tensor": lambda m, h: h * h.new_tensor([1.0, 2.0, 3.0, 4.0]),
    "one_hot": lambda m, h: functional.one_hot(h.argmax(1), 4) * h,
    "finfo mask": lambda m, h: (
        h + torch.triu(torch.full((3, 4), torch.finfo(h.dtype).min, device=h.device), 1)
    ).softmax(-1),
    "linspace": lambda m, h: h * torch.linspace(0, 1, 4, device=h.device),
    "where with a number": lambda m, h: torch.where(h > 0, h, 0.1),
}
for label, inside in INSIDE.items():
    add(
        GROUP,
        f"inside: {label}",
        lambda inside=inside: Own(lambda m, x: inside(m, m.linear(x))),
        one_grad,
    )


def _partly(h):
    with torch.no_grad():
        scale = h.abs().mean()
    return h / scale
