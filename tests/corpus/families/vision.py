"""Blocks as vision and diffusion libraries have them, written by hand at tiny widths."""

import math

import torch
from corpus.entry import GRADIENT_LAYOUT, Draw, add
from torch import nn
from torch.nn import functional

GROUP = "vision"


def image(draw: Draw, step: int):
    return (draw.rows(2, 3, 8, 8),)


def image_grad(draw: Draw, step: int):
    return (draw.rows(2, 3, 8, 8, grad=True),)


def norm(kind, width):
    return {
        "batch": nn.BatchNorm2d,
        "instance": lambda w: nn.InstanceNorm2d(w, affine=True),
        "group": lambda w: nn.GroupNorm(2, w),
        "none": lambda w: nn.Identity(),
    }[kind](width)


class Residual(nn.Module):
    """torchvision's basic block, with squeeze and excitation and stochastic depth as timm has
    them."""

    def __init__(self, width, kind="batch", squeeze=False, depth=0.0, inplace=True):
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second = norm(kind, width), norm(kind, width)
        self.act, self.depth = nn.ReLU(inplace=inplace), depth
        self.squeeze = (
            nn.Sequential(
                nn.AdaptiveAvgPool2d(1),
                nn.Conv2d(width, 2, 1),
                nn.SiLU(),
                nn.Conv2d(2, width, 1),
                nn.Sigmoid(),
            )
            if squeeze
            else None
        )

    def forward(self, x):
        h = self.second(self.two(self.act(self.first(self.one(x)))))
        if self.squeeze is not None:
            h = h * self.squeeze(h)
        if self.depth and self.training:
            keep = torch.empty(x.shape[0], 1, 1, 1, device=x.device).bernoulli_(1 - self.depth)
            h = h * keep.div_(1 - self.depth)
        h += x
        return self.act(h)


class ResNet(nn.Module):
    def __init__(self, last=False, **options):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1),
            norm(options.get("kind", "batch"), 4),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.blocks, self.head = (
            nn.Sequential(Residual(4, **options), Residual(4, **options)),
            nn.Linear(4, 5),
        )
        self.last = last

    def forward(self, x):
        x = x.to(memory_format=torch.channels_last) if self.last else x
        features = self.blocks(self.stem(x))
        return {"logits": self.head(features.mean((2, 3))), "features": features}


class Inverted(nn.Module):
    """MobileNet's inverted residual."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 1),
            nn.BatchNorm2d(6),
            nn.ReLU6(inplace=True),
            nn.Conv2d(6, 6, 3, padding=1, groups=6),
            nn.BatchNorm2d(6),
            nn.Hardswish(inplace=True),
            nn.Conv2d(6, 3, 1),
        )

    def forward(self, x):
        return x + self.body(x)


class Dense(nn.Module):
    """DenseNet: every layer reads all before it, from a list that grows."""

    def __init__(self, saving=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 2 * n, 2, 3, padding=1) for n in range(3))
        self.saving = saving

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            act = lambda *parts, layer=layer: torch.relu(layer(torch.cat(parts, 1)))  # noqa: E731
            found.append(
                torch.utils.checkpoint.checkpoint(act, *found, use_reentrant=False)
                if self.saving
                else act(*found)
            )
        return torch.cat(found, 1)


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.depthwise, self.norm = (
            nn.Conv2d(3, 3, 5, padding=2, groups=3),
            nn.LayerNorm(3, eps=1e-6),
        )
        self.up, self.down, self.gamma = (
            nn.Linear(3, 6),
            nn.Linear(6, 3),
            nn.Parameter(1e-1 * torch.ones(3)),
        )

    def forward(self, x):
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.gamma * self.down(functional.gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


class Attention(nn.Module):
    def __init__(self, width, heads=2, fused=True, drop=0.0):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.fused, self.drop = heads, fused, nn.Dropout(drop)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (
            self.qkv(x)
            .reshape(b, n, 3, self.heads, c // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        if self.fused:
            x = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=self.drop.p if self.training else 0.0
            )
        else:
            x = self.drop((q @ k.transpose(-2, -1) / math.sqrt(c // self.heads)).softmax(-1)) @ v
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    def __init__(self, width, depth=0.0, scale=False, **options):
        super().__init__()
        self.one, self.two, self.attention = (
            nn.LayerNorm(width),
            nn.LayerNorm(width),
            Attention(width, **options),
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.gamma = nn.Parameter(0.1 * torch.ones(width)) if scale else None
        self.depth = depth

    def path(self, h):
        h = h if self.gamma is None else h * self.gamma
        if self.depth and self.training:
            h = h * h.new_empty(h.shape[0], 1, 1).bernoulli_(1 - self.depth)
        return h

    def forward(self, x):
        x = x + self.path(self.attention(self.one(x)))
        return x + self.path(self.mlp(self.two(x)))


class ViT(nn.Module):
    """timm's vision transformer. pool: how tokens become one; dynamic: positions interpolated to
    the size."""

    def __init__(self, pool="token", dynamic=False, drop_patches=0.0, **options):
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8) * 0.02)
        self.blocks, self.norm, self.head = (
            nn.ModuleList(Block(8, **options) for _ in range(2)),
            nn.LayerNorm(8),
            nn.Linear(8, 5),
        )
        self.pool, self.dynamic, self.drop_patches = pool, dynamic, drop_patches

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        positions = self.positions
        if self.dynamic:
            side = int(math.sqrt(x.shape[1]))
            grid = positions[:, 1:].reshape(1, 2, 2, 8).permute(0, 3, 1, 2)
            grid = functional.interpolate(grid, (side, side), mode="bicubic", align_corners=False)
            positions = torch.cat([positions[:, :1], grid.flatten(2).transpose(1, 2)], 1)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + positions
        if self.drop_patches and self.training:
            kept = torch.rand(x.shape[:2], device=x.device).argsort(-1)[:, :3]
            x = x.gather(1, kept[..., None].expand(-1, -1, 8))
        middle = []
        for block in self.blocks:
            x = block(x)
            middle.append(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.pool == "token" else x.mean(1)), middle


class Windows(nn.Module):
    """Swin's windows: rolled, cut, attended, put back, with a table of relative positions."""

    def __init__(self, shift):
        super().__init__()
        self.embed, self.attention, self.shift = nn.Conv2d(3, 4, 1), Attention(4), shift
        self.table = nn.Parameter(torch.randn(9, 1) * 0.1)
        self.register_buffer("index", torch.arange(4).repeat(4, 1) % 9, persistent=False)

    def forward(self, x):
        x = self.embed(x).permute(0, 2, 3, 1).roll((-self.shift, -self.shift), (1, 2))
        b = x.shape[0]
        cut = x.reshape(b, 4, 2, 4, 2, 4).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4)
        out = self.attention(cut) + self.table[self.index.view(-1)].view(4, 4).mean()
        out = out.reshape(b, 4, 4, 2, 2, 4).permute(0, 1, 3, 2, 4, 5).reshape(b, 8, 8, 4)
        return out.roll((self.shift, self.shift), (1, 2))


class Timed(nn.Module):
    """A block of a diffusion UNet: scale and shift by the time's embedding."""

    def __init__(self, width, attends):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, width), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(8, 2 * width)
        self.attention = Attention(width) if attends else None
        self.context = (
            nn.MultiheadAttention(width, 2, kdim=4, vdim=4, batch_first=True) if attends else None
        )

    def forward(self, x, time, context):
        scale, shift = self.time(functional.silu(time))[:, :, None, None].chunk(2, 1)
        h = x + self.conv(functional.silu(self.norm(x) * (1 + scale) + shift))
        if self.attention is not None:
            flat = h.flatten(2).transpose(1, 2)
            flat = flat + self.attention(flat)
            flat = flat + self.context(flat, context, context, need_weights=False)[0]
            h = flat.transpose(1, 2).reshape(h.shape)
        return h


class UNet(nn.Module):
    """Down, middle, up with skips popped from a list. sampled: whether noise and time are drawn
    inside."""

    def __init__(self, sampled=False, saving=False):
        super().__init__()
        self.sampled, self.saving = sampled, saving
        self.into, self.down, self.out = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, 2, 1),
            nn.Conv2d(4, 3, 3, padding=1),
        )
        self.first, self.middle, self.last = Timed(4, False), Timed(4, True), Timed(4, False)
        self.join = nn.Conv2d(8, 4, 1)
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-2, 0.2, 10), 0))

    def forward(self, x, time, context):
        target = x
        if self.sampled:
            time = torch.randint(0, 10, (x.shape[0],), device=x.device)
            target = torch.randn_like(x)
            alpha = self.alphas[time][:, None, None, None]
            x = alpha.sqrt() * x + (1 - alpha).sqrt() * target
        waves = torch.exp(torch.arange(4, device=x.device) * -1.0)
        angles = time[:, None].float() * waves[None]
        embedded = torch.cat([angles.sin(), angles.cos()], -1)
        h = self.into(x)
        skips = [h]
        h = self.run(self.first, h, embedded, context)
        skips.append(h)
        h = self.run(self.middle, self.down(h), embedded, context)
        h = functional.interpolate(h, scale_factor=2.0, mode="nearest")
        h = (
            self.run(self.last, self.join(torch.cat([h, skips.pop()], 1)), embedded, context)
            + skips.pop()
        )
        h = self.out(h)
        return functional.mse_loss(h, target) if self.sampled else h

    def run(self, block, *arguments):
        if self.saving and self.training:
            return torch.utils.checkpoint.checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)


class Modulated(nn.Module):
    """A diffusion transformer's block: adaptive norms, gates that begin at zero, class dropout for
    guidance."""

    def __init__(self):
        super().__init__()
        self.classes, self.modulation = nn.Embedding(6, 8), nn.Linear(8, 24)
        self.norm, self.attention, self.into, self.out = (
            nn.LayerNorm(8, elementwise_affine=False),
            Attention(8),
            nn.Linear(3, 8),
            nn.Linear(8, 3),
        )

    def forward(self, x, labels):
        labels = torch.where(torch.rand(labels.shape, device=labels.device) < 0.3, 5, labels)
        shift, scale, gate = self.modulation(functional.silu(self.classes(labels)))[:, None].chunk(
            3, -1
        )
        h = self.into(x.flatten(2).transpose(1, 2))
        h = h + gate * self.attention(self.norm(h) * (1 + scale) + shift)
        return self.out(h).transpose(1, 2).reshape(x.shape)


class Quantised(nn.Module):
    """A VQ-VAE: nearest codes, straight-through gradients, codes moved by averages."""

    def __init__(self, averaged):
        super().__init__()
        self.encode, self.decode, self.averaged = (
            nn.Conv2d(3, 4, 2, 2),
            nn.ConvTranspose2d(4, 3, 2, 2),
            averaged,
        )
        if averaged:
            self.register_buffer("codes", torch.randn(5, 4))
            self.register_buffer("sizes", torch.ones(5))
        else:
            self.codes = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        z = self.encode(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, 4)
        picked = torch.cdist(flat, self.codes).argmin(-1)
        q = functional.embedding(picked, self.codes).view_as(z)
        commitment = (q.detach() - z).square().mean() + (q - z.detach()).square().mean()
        if self.averaged and self.training:
            with torch.no_grad():
                hot = functional.one_hot(picked, 5).float()
                self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_(hot.t() @ flat / self.sizes[:, None], alpha=0.1)
        q = z + (q - z).detach()
        return self.decode(q.permute(0, 3, 1, 2)), commitment, picked


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(192, 8), nn.Linear(4, 192)

    def forward(self, x):
        mean, log_variance = self.encode(x.flatten(1)).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return self.decode(z).view_as(x), divergence


class Mixed(nn.Module):
    """mixup inside: a permutation and a coefficient are drawn in forward. where: on the host or on
    the device."""

    def __init__(self, where):
        super().__init__()
        self.net, self.where = ResNet(), where

    def forward(self, x):
        order = torch.randperm(x.shape[0], device=x.device if self.where == "device" else "cpu").to(
            x.device
        )
        share = (
            torch.rand((), device=x.device)
            if self.where == "device"
            else float(torch.rand((), device="cpu"))
        )
        return self.net(x * share + x[order] * (1 - share))["logits"]


def diffusion(draw: Draw, step: int):
    return draw.rows(2, 3, 8, 8), draw.ids(2, words=10), draw.rows(2, 3, 4)


for kind in ("batch", "group", "instance", "none"):
    add(GROUP, f"ResNet, norm {kind}", lambda kind=kind: ResNet(kind=kind), image)
for label, options in {
    "squeeze and excitation": {"squeeze": True},
    "stochastic depth": {"depth": 0.5},
    "channels last": {"last": True},
    "not in place": {"inplace": False},
}.items():
    add(
        GROUP,
        f"ResNet, {label}",
        lambda options=options: ResNet(**options),
        image_grad,
        documented=GRADIENT_LAYOUT,
    )
add(
    GROUP,
    "ResNet, sizes change",
    ResNet,
    lambda draw, step: (draw.rows(2, 3, 8 + 4 * (step % 2), 8),),
)
add(
    GROUP,
    "ResNet, channels last in turns",
    ResNet,
    lambda draw, step: (
        image(draw, step)[0].contiguous(
            memory_format=torch.channels_last if step % 2 else torch.contiguous_format
        ),
    ),
)
for name, (make, given, mutate) in {
    "ResNet to channels last": (ResNet, image, lambda m: m.to(memory_format=torch.channels_last)),
    "ResNet, BatchNorm frozen": (
        ResNet,
        image,
        lambda m: [c.eval() for c in m.modules() if isinstance(c, nn.BatchNorm2d)],
    ),
    "ResNet, head exchanged": (
        ResNet,
        image,
        lambda m: setattr(m, "head", nn.Linear(4, 7).to(m.head.weight.device)),
    ),
    "ResNet, stem frozen": (ResNet, image, lambda m: m.stem.requires_grad_(False)),
}.items():
    add(GROUP, name, make, given, mutate=mutate)
for name, parts in {
    "inverted residual": (Inverted, image_grad),
    "DenseNet": (Dense, image_grad),
    "DenseNet, checkpointed": (lambda: Dense(saving=True), image_grad),
    "ConvNeXt": (ConvNeXt, image_grad),
}.items():
    add(GROUP, name, *parts)
for label, options in {
    "": {},
    ", mean": {"pool": "mean"},
    ", eager attention": {"fused": False, "drop": 0.2},
    ", depth and scale": {"depth": 0.3, "scale": True},
    ", patches dropped": {"drop_patches": 0.5},
}.items():
    add(GROUP, f"ViT{label}", lambda options=options: ViT(**options), image)
add(
    GROUP,
    "ViT, sizes change",
    lambda: ViT(dynamic=True),
    lambda draw, step: (draw.rows(1, 3, 8 + 4 * (step % 2), 8 + 4 * (step % 2)),),
)
add(
    GROUP,
    "ViT, attention switched",
    lambda: ViT(),
    image,
    mutate=lambda m: [setattr(b.attention, "fused", False) for b in m.blocks],
)
add(
    GROUP,
    "ViT, loss of a middle layer",
    lambda: ViT(),
    image,
    loss=lambda out: out[1][0].square().mean(),
)
for shift in (0, 1):
    add(GROUP, f"windows shifted by {shift}", lambda shift=shift: Windows(shift), image_grad)
add(GROUP, "UNet", UNet, diffusion)
add(GROUP, "UNet, noise drawn inside", lambda: UNet(sampled=True), diffusion)
add(GROUP, "UNet, checkpointed", lambda: UNet(saving=True), diffusion)
add(
    GROUP,
    "UNet, checkpointing switched on",
    UNet,
    diffusion,
    mutate=lambda m: setattr(m, "saving", True),
)
add(
    GROUP,
    "diffusion transformer",
    Modulated,
    lambda draw, step: (draw.rows(2, 3, 4, 4), draw.ids(2, words=5)),
)
for averaged in (False, True):
    add(
        GROUP,
        f"VQ-VAE, codes by averages {averaged}",
        lambda averaged=averaged: Quantised(averaged),
        image_grad,
    )
add(GROUP, "variational autoencoder", Variational, image)
for where in ("host", "device"):
    add(GROUP, f"mixup on the {where}", lambda where=where: Mixed(where), image)
