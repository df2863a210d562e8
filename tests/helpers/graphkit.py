"""A small staged model, and training loops that return everything two runs must agree on, bit by
bit."""

import random

import torch
import torch.nn.functional as functional
from torch import nn

from packgraph.graphs.stages import Stage, run_stages

WIDTH, WORDS = 16, 11


class Stages(nn.Module):
    """Runs its stages on one tensor, the entry `x` of their state."""

    def begin(self, x):
        return {"x": x}

    def end(self, state):
        return state["x"]

    def forward(self, *args):
        return run_stages(self, *args)


class Toy(Stages):
    """Embedding (tied to the head), attention and mlp layers with dropout, an auxiliary output, a
    counting buffer."""

    def __init__(self, layers=2, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)
            )
            for _ in range(layers)
        )
        self.layers, self.dropout = layers, dropout
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def begin(self, ids, x):
        return {"ids": ids, "x": x}

    def end(self, state):
        return {"loss": state["loss"], "aux": state["aux"], "hidden": state["hidden"]}

    def stages(self):
        stages = [Stage("embed", -1, self.embed)]
        for layer in range(self.layers):
            stages.append(
                Stage("attn", layer, lambda state, layer=layer: self.attend(state, layer))
            )
            stages.append(Stage("mlp", layer, lambda state, layer=layer: self.mix(state, layer)))
        return [*stages, Stage("head", self.layers, self.head)]

    def embed(self, state):
        self.calls.add_(1)
        hidden = self.embedding(state["ids"]) + state["x"]
        position = torch.arange(hidden.shape[0], device=hidden.device).float()
        return {
            **state,
            "hidden": hidden,
            "rotary": (position.cos(), position.sin()),
            "aux": hidden.mean(),
        }

    def attend(self, state, layer):
        hidden, (cos, _) = state["hidden"], state["rotary"]
        weights = (hidden @ hidden.T).softmax(-1)
        out = functional.dropout(
            weights @ self.attention[layer](hidden), self.dropout, self.training
        )
        return {**state, "hidden": hidden + out * cos[:, None]}

    def mix(self, state, layer):
        hidden = state["hidden"]
        mixed = hidden + self.mlps[layer](hidden)
        return {**state, "hidden": mixed, "aux": state["aux"] + mixed.pow(2).mean()}

    def head(self, state):
        logits = state["hidden"] @ self.embedding.weight.T
        return {**state, "loss": functional.cross_entropy(logits, state["ids"])}


def make_toy(**options):
    torch.manual_seed(1)
    return Toy(**options)


def toy_inputs(tokens, device="cpu"):
    ids = torch.randint(0, WORDS, (tokens,), device=device)
    return ids, torch.randn(tokens, WIDTH, device=device, requires_grad=True)


def toy_loss(out):
    return out["loss"] + 0.1 * out["aux"] + out["hidden"].pow(2).mean()


def train(
    model,
    *,
    steps,
    seed=3,
    sizes=(8, 12, 6),
    in_flight=4,
    set_to_none=True,
    between=None,
    device="cpu",
):
    """Train with changing shapes, microbatch counts and backward orders; per step everything that
    must agree.

    between(model, step): called before every forward and backward (tests poison and churn memory
    there).
    """
    torch.manual_seed(seed)
    order = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trace = []
    touch = between or (lambda model, step: None)
    for step in range(steps):
        inputs = [
            toy_inputs(order.choice(sizes), device) for _ in range(order.randint(1, in_flight))
        ]
        outs = []
        for pair in inputs:
            touch(model, step)
            outs.append(model(*pair))
        for index in order.sample(range(len(outs)), len(outs)):
            touch(model, step)
            toy_loss(outs[index]).backward()
        facts = {
            f"output {i} {name}": t.detach().clone()
            for i, out in enumerate(outs)
            for name, t in out.items()
        }
        facts |= {f"input gradient {i}": pair[1].grad.clone() for i, pair in enumerate(inputs)}
        facts |= {f"gradient {name}": p.grad.clone() for name, p in model.named_parameters()}
        facts |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
        facts["rng"] = torch.cuda.get_rng_state() if device != "cpu" else torch.get_rng_state()
        optimizer.step()
        facts |= {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
        trace.append(facts)
        optimizer.zero_grad(
            set_to_none=set_to_none if isinstance(set_to_none, bool) else step % 2 == 0
        )
    return trace


def poison_free_slots(model, step):
    """Overwrite the memory of every slot that no microbatch owns."""
    for slot in list(model.slots._free):
        slot.poison()
