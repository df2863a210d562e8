"""Ways to train: adversaries, penalties, surgery, adapters, averages, distillation, optimizers of
torch, schedules."""

import copy

import torch
from corpus.entry import Own, add, one, scalar
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

GROUP = "schemes"
STEPS = 7


def loop(name, make, drive):
    """drive: of (model, draw) is a generator that yields what must agree after each step."""

    def run(model, draw, done):
        for facts in drive(model, draw):
            done(**facts)

    add(GROUP, name, make, one, drive=run)


def net(dropout=0.0):
    return Own(
        lambda m, x: m.other(m.drop(torch.tanh(m.linear(x)))),
        other=nn.Linear(4, 4),
        drop=nn.Dropout(dropout),
    )


OPTIMIZERS = {
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9, nesterov=True),
    "Adam": lambda ps: torch.optim.Adam(ps, 0.01),
    "AdamW, amsgrad": lambda ps: torch.optim.AdamW(ps, 0.01, amsgrad=True),
    "Adam, foreach": lambda ps: torch.optim.Adam(ps, 0.01, foreach=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.01),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, 0.01),
    "Rprop": lambda ps: torch.optim.Rprop(ps, 0.01),
}
for label, optimizer in OPTIMIZERS.items():

    def trained_by(model, draw, optimizer=optimizer):
        made = optimizer(list(model.parameters()))
        schedule = torch.optim.lr_scheduler.StepLR(made, 3, 0.5)
        for step in range(STEPS):
            out = model(*one(draw(step), step))
            out.square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            made.step()
            schedule.step()
            made.zero_grad(set_to_none=step % 2 == 0)
            yield {"out": out}

    loop(label, lambda: net(0.1), trained_by)


def lbfgs(model, draw):
    made = torch.optim.LBFGS(list(model.parameters()), 0.1, max_iter=3)
    x = draw(0).rows()

    def closure():
        made.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        yield {"loss": made.step(closure)}


def adversaries(model, draw):
    """The graphed module is the discriminator; a generator outside trains through it."""
    device = model.linear.weight.device
    generator = nn.Linear(4, 4).to(device)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.05) for m in (model, generator))
    for step in range(STEPS):
        real, fake = draw(step).rows(), generator(draw(100 + step).rows())
        ours.zero_grad()
        (
            functional.softplus(-model(real)).mean()
            + functional.softplus(model(fake.detach())).mean()
        ).backward()
        ours.step()
        theirs.zero_grad()
        functional.softplus(-model(fake)).mean().backward()
        theirs.step()
        yield {
            "generator": [p.detach() for p in generator.parameters()],
            "gradients": [p.grad for p in model.parameters()],
        }


def wasserstein(model, draw):
    for step in range(STEPS):
        x = draw(step).rows(grad=True)
        score = model(x)
        slope = torch.autograd.grad(score.sum(), x, create_graph=True)[0]
        loss = score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        yield _stepped(model, loss)
        model.zero_grad()


def surgery(model, draw):
    """Gradients of three tasks are collected one by one and projected."""
    for step in range(STEPS):
        found = []
        for task in range(3):
            model.zero_grad()
            model(draw(10 * step + task).rows()).square().mean().backward()
            found.append([p.grad for p in model.parameters()])
        for parts in zip(list(model.parameters()), *found, strict=True):
            first, *others = parts[1:]
            for other in others:
                first = (
                    first
                    - torch.clamp((first * other).sum() / other.square().sum(), max=0.0) * other
                )
            parts[0].grad = first
        yield {"found": [[g.clone() for g in one] for one in found]}
        _sgd(model)
        model.zero_grad()


def sharpness(model, draw):
    """Sharpness-aware minimisation: up the slope, gradient there, back down."""
    for step in range(STEPS):
        x = draw(step).rows()
        model(x).square().mean().backward()
        with torch.no_grad():
            ups = [p.grad.sign() * 0.01 for p in model.parameters()]
            for parameter, up in zip(model.parameters(), ups, strict=True):
                parameter.add_(up)
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter, up in zip(model.parameters(), ups, strict=True):
                parameter.sub_(up)
        _sgd(model)
        yield {"loss": loss}
        model.zero_grad()


def averaged(model, draw):
    mean = AveragedModel(
        copy.deepcopy(model), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for step in range(STEPS):
        model(draw(step).rows()).square().mean().backward()
        _sgd(model)
        mean.update_parameters(model)
        model.zero_grad()
        with torch.no_grad():
            yield {"mean": mean(draw(step).rows())}


def distilled(model, draw):
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    for step in range(STEPS):
        x = draw(step).rows()
        loss = functional.mse_loss(model(x), teacher(x) * 2)
        yield _stepped(model, loss)
        model.zero_grad()


def contrastive(model, draw):
    for step in range(STEPS):
        left, right = model(draw(step).rows()), model(draw(50 + step).rows())
        loss = functional.cross_entropy(left @ right.t(), torch.arange(3, device=left.device))
        yield _stepped(model, loss)
        model.zero_grad()


def through_time(model, draw):
    for step in range(STEPS):
        state = draw(step).rows()
        for _ in range(3):
            state = torch.tanh(model(state))
        loss = state.square().mean()
        yield _stepped(model, loss)
        model.zero_grad()


def policy(model, draw):
    for step in range(STEPS):
        chances = torch.distributions.Categorical(logits=model(draw(step).rows()))
        action = chances.sample()
        loss = -(chances.log_prob(action) * action.float()).mean() - 0.1 * chances.entropy().mean()
        yield _stepped(model, loss, action=action)
        model.zero_grad()


def clipped_policy(model, draw):
    """Several epochs over what an evaluation without gradients has sampled."""
    for step in range(4):
        x = draw(step).rows()
        with torch.no_grad():
            old = functional.log_softmax(model(x), -1)
        for _ in range(3):
            new = functional.log_softmax(model(x), -1)
            loss = -torch.minimum((new - old).exp(), (new - old).exp().clamp(0.8, 1.2)).mean()
            yield _stepped(model, loss)
            model.zero_grad()


def attacked(model, draw):
    """Steps along the sign of the input's gradient, then a step of training."""
    for step in range(STEPS):
        x = draw(step).rows()
        for _ in range(2):
            x = x.detach().requires_grad_()
            x = x + 0.1 * torch.autograd.grad(model(x).square().mean(), x)[0].sign()
        loss = model(x.detach()).square().mean()
        yield _stepped(model, loss, x=x)
        model.zero_grad()


def microbatches(model, draw):
    for step in range(STEPS):
        outs = [model(draw(10 * step + n).rows()) for n in range(3)]
        sum(out.square().mean() for out in outs).backward()
        _sgd(model)
        yield {"outs": outs}
        model.zero_grad(set_to_none=False)


def finetuned(model, draw):
    """Layers thaw one after the other."""
    model.requires_grad_(False)
    layers = [model.other, model.linear]
    for step in range(STEPS):
        if step in (0, 4):
            layers[step // 4].requires_grad_(True)
        loss = model(draw(step).rows()).square().mean()
        yield _stepped(model, loss)
        model.zero_grad()


def restored(model, draw):
    saved = copy.deepcopy(model.state_dict())
    for step in range(STEPS):
        if step == 4:
            model.load_state_dict(saved)
        if step == 5:
            model.load_state_dict(copy.deepcopy(saved), assign=True)
        loss = model(draw(step).rows()).square().mean()
        yield _stepped(model, loss)
        model.zero_grad()


def evaluated(model, draw):
    for step in range(STEPS):
        loss = model(draw(step).rows()).square().mean()
        loss.backward()
        _sgd(model)
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            held = model(draw(90 + step).rows())
        outside = model(draw(91).rows(grad=True)).sum()
        outside.backward()
        model.train()
        yield {"loss": loss, "held": held}
        model.zero_grad()


def flat_buffer(model, draw):
    """One flat tensor of gradients for an all-reduce."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    for step in range(STEPS):
        flat.zero_()
        start = 0
        for parameter in parameters:
            parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        model(draw(step).rows()).square().mean().backward()
        flat.div_(2.0)
        yield {"flat": flat}
        _sgd(model)


def _stepped(model, loss, **facts):
    """What must agree after a backward and a step of descent."""
    loss.backward()
    _sgd(model)
    return {"loss": loss, **facts}


def _sgd(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.mul_(0.99).sub_(parameter.grad, alpha=0.05)


for drive in (
    lbfgs,
    adversaries,
    wasserstein,
    surgery,
    sharpness,
    averaged,
    distilled,
    contrastive,
    through_time,
    policy,
    clipped_policy,
    attacked,
    microbatches,
    finetuned,
    restored,
    evaluated,
    flat_buffer,
):
    loop(
        (drive.__doc__ or drive.__name__.replace("_", " ")).strip(".").split("\n")[0],
        lambda drive=drive: net(0.2 if drive in (microbatches, evaluated) else 0.0),
        drive,
    )


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it, as LoRA has it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.scale, self.merged, self.enabled = 2.0, False, True
        self.drop = nn.Dropout(0.1)
        self.adapters, self.active = {"default": (self.down, self.up)}, "default"

    def merge(self):
        with torch.no_grad():
            self.base.weight.add_(self.up.weight @ self.down.weight, alpha=self.scale)
        self.merged = True

    def forward(self, x):
        out = self.base(x)
        if self.merged or not self.enabled:
            return out * 1.0
        down, up = self.adapters[self.active]
        return out + up(down(self.drop(x))) * self.scale


def second(m):
    extra = (nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False))
    m.extra = nn.ModuleList(extra).to(m.base.weight.device)
    m.adapters["second"] = tuple(m.extra)
    m.active = "second"


for label, change in {
    "none": lambda m: None,
    "scale": lambda m: setattr(m, "scale", 4.0),
    "merged": lambda m: m.merge(),
    "disabled": lambda m: setattr(m, "enabled", False),
    "second adapter": second,
    "base in place": lambda m: m.base.weight.data.mul_(2),
    "adapter frozen": lambda m: m.down.requires_grad_(False),
    "base trained": lambda m: m.base.requires_grad_(True),
}.items():
    add(
        GROUP,
        f"adapter: {label}",
        Adapted,
        lambda draw, step: (draw.rows(grad=True),),
        mutate=change,
        backward=lambda m, loss, outputs, arguments, step: loss.backward(),
    )
add(
    GROUP,
    "prefix of learned rows",
    lambda: Own(
        lambda m, x: m.linear(torch.cat([m.prefix, x])),
        prefix=nn.Parameter(torch.randn(2, 4)),
    ),
    one,
    prepare=lambda m: m.linear.requires_grad_(False),
)
add(GROUP, "quantised weights", lambda: Own(_quantised), one)
add(GROUP, "loss of all outputs by hand", lambda: net(), one, loss=lambda out: scalar([out]) * 2)


def _quantised(m, x):
    scale = m.linear.weight.detach().abs().max() / 7
    rounded = (m.linear.weight / scale).round() * scale
    return functional.linear(
        x, m.linear.weight + (rounded - m.linear.weight).detach(), m.linear.bias
    )
