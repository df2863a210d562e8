"""Routing of tokens to experts, in the ways that people write it, and other gathers and
scatters."""

import torch
from corpus.entry import GRADIENT_LAYOUT, Draw, add
from torch import nn
from torch.nn import functional

GROUP = "routing"
EXPERTS, WIDTH = 3, 4


def tokens(draw: Draw, step: int):
    return (draw.rows(6, WIDTH, grad=True),)


class Experts(nn.Module):
    """form: how tokens reach experts; k: how many each token gets; balance: how the auxiliary loss
    leaves."""

    def __init__(self, form, k=2, balance="output", noise=False, bias=False):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 6), nn.SiLU(), nn.Linear(6, WIDTH))
            for _ in range(EXPERTS)
        )
        self.stacked = (
            nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)
            if form in ("bmm", "grouped", "padded")
            else None
        )
        if self.stacked is not None:
            del self.experts
        self.form, self.k, self.balance, self.noise = form, k, balance, noise
        self.register_buffer("load", torch.zeros(EXPERTS))
        self.register_buffer("offset", torch.zeros(EXPERTS) if bias else None)

    def forward(self, x):
        logits = self.router(x)
        if self.noise:
            logits = logits + torch.randn_like(logits) * 0.1
        weights = logits.softmax(-1)
        scores = weights if self.offset is None else weights + self.offset
        picked = scores.topk(self.k, -1).indices
        chosen = weights.gather(-1, picked)
        chosen = chosen / chosen.sum(-1, keepdim=True)
        with torch.no_grad():
            counts = functional.one_hot(picked, EXPERTS).sum((0, 1)).float()
            self.load.add_(counts)
            if self.offset is not None:
                self.offset.add_(0.01 * torch.sign(counts.mean() - counts))
        out = getattr(self, f"by_{self.form}")(x, picked, chosen)
        loss = (weights.mean(0) * counts).sum()
        if self.balance == "attribute":
            self.loss = loss
            return out
        return (out, loss) if self.balance == "output" else out

    def by_mask(self, x, picked, chosen):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (chosen * (picked == number)).sum(-1, keepdim=True)
            out = out + expert(x) * share
        return out

    def by_where(self, x, picked, chosen):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(picked == number)
            out.index_add_(0, rows, expert(x[rows]) * chosen[rows, slots, None])
        return out

    def by_host(self, x, picked, chosen):
        out = torch.zeros_like(x)
        for number in picked.unique().tolist():
            rows, slots = torch.where(picked == number)
            out.index_add_(0, rows, self.experts[number](x[rows]) * chosen[rows, slots, None])
        return out

    def by_bmm(self, x, picked, chosen):
        spread = torch.einsum("td,edf->tef", x, self.stacked)
        return (spread.gather(1, picked[..., None].expand(-1, -1, WIDTH)) * chosen[..., None]).sum(
            1
        )

    def by_grouped(self, x, picked, chosen):
        flat = picked.flatten()
        order = flat.argsort(stable=True)
        rows = x[order // self.k]
        done = torch.einsum("td,tdf->tf", rows, self.stacked[flat[order]])
        return torch.zeros_like(x).index_add(
            0, order // self.k, done * chosen.flatten()[order, None]
        )

    def by_padded(self, x, picked, chosen):
        mask = functional.one_hot(picked, EXPERTS).float()
        place = mask.flatten(0, 1).cumsum(0).view_as(mask) * mask
        fits = (place > 0) & (place <= 4)
        dispatch = functional.one_hot((place - 1).clamp(0, 3).long(), 4) * fits[..., None]
        routed = torch.einsum("tkec,td->ecd", dispatch.float(), x)
        return torch.einsum(
            "tkec,tk,ecd->td", dispatch.float(), chosen, torch.bmm(routed, self.stacked)
        )


for form in ("mask", "where", "host", "bmm", "grouped", "padded"):
    add(
        GROUP,
        f"experts by {form}",
        lambda form=form: Experts(form),
        tokens,
        documented=GRADIENT_LAYOUT,
    )
    add(
        GROUP,
        f"experts by {form}, one each, noise",
        lambda form=form: Experts(form, k=1, noise=True),
        tokens,
        documented=GRADIENT_LAYOUT,
    )
add(
    GROUP,
    "balance on an attribute",
    lambda: Experts("mask", balance="attribute"),
    tokens,
    backward=lambda m, loss, outputs, arguments, step: (loss + 0.1 * m.loss).backward(),
)
add(
    GROUP,
    "balance not used",
    lambda: Experts("mask"),
    tokens,
    backward=lambda m, loss, outputs, arguments, step: outputs[0].square().sum().backward(),
)
add(
    GROUP,
    "balance without a loss",
    lambda: Experts("bmm", balance="nothing"),
    tokens,
    documented=GRADIENT_LAYOUT,
)
add(GROUP, "offset learned without gradients", lambda: Experts("grouped", bias=True), tokens)
add(
    GROUP,
    "k changes",
    lambda: Experts("bmm", k=1),
    tokens,
    mutate=lambda m: setattr(m, "k", 2),
    documented=GRADIENT_LAYOUT,
)
add(
    GROUP,
    "an expert is frozen",
    lambda: Experts("mask"),
    tokens,
    mutate=lambda m: m.experts[0].requires_grad_(False),
)
add(
    GROUP,
    "an expert is added",
    lambda: Experts("mask"),
    tokens,
    mutate=lambda m: m.experts.append(
        nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(m.router.weight.device)
    ),
)
add(
    GROUP,
    "number of tokens changes",
    lambda: Experts("grouped"),
    lambda draw, step: (draw.rows(4 + step % 3, WIDTH),),
)


class Pooling(nn.Module):
    """Reductions of tokens by document, by index: what packed batches and graph networks do."""

    def __init__(self, form):
        super().__init__()
        self.linear, self.form = nn.Linear(WIDTH, WIDTH), form

    def forward(self, x, where):
        h = self.linear(x)
        if self.form == "scatter_reduce":
            return torch.zeros(3, WIDTH, device=x.device).scatter_reduce(
                0, where[:, None].expand_as(h), h, "amax", include_self=False
            )
        if self.form == "segment":
            return torch.segment_reduce(
                h, "mean", lengths=torch.bincount(where, minlength=3), axis=0, unsafe=True
            )
        if self.form == "index_add":
            return torch.zeros(3, WIDTH, device=x.device).index_add(0, where, h)
        if self.form == "sparse":
            adjacency = torch.sparse_coo_tensor(
                torch.stack([where, torch.arange(6, device=x.device)]),
                torch.ones(6, device=x.device),
                (3, 6),
            )
            return torch.sparse.mm(adjacency, h)
        if self.form == "one_hot":
            return functional.one_hot(where, 3).float().t() @ h
        if self.form == "message":
            return h + torch.zeros_like(h).index_add(0, where, self.linear(h[where.flip(0)]))
        if self.form == "searchsorted":
            return h * torch.searchsorted(where.sort().values, where)[:, None]
        return torch.stack([h[where == n].sum(0) for n in range(3)])


for form in (
    "scatter_reduce",
    "segment",
    "index_add",
    "sparse",
    "one_hot",
    "message",
    "searchsorted",
    "boolean",
):
    add(
        GROUP,
        f"pooling by {form}",
        lambda form=form: Pooling(form),
        lambda draw, step: (draw.rows(6, WIDTH, grad=True), draw.ids(6, words=3)),
    )
