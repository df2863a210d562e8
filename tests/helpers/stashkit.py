"""A small staged model with experts, whose saved activations may go to a stash."""

import torch
import torch.nn.functional as functional
from graphkit import WIDTH, WORDS
from torch import nn

from packgraph.graphs.stages import Stage, run_stages
from packgraph.moe.dispatch.dispatcher import LocalDispatcher, Routing
from packgraph.moe.experts import Experts
from packgraph.moe.stash.stash import stashed_experts

EXPERTS, TOP_K, INNER = 4, 2, 24
COLUMNS = {(torch.float32, WIDTH): 1, (torch.float32, 2 * INNER): 1}  # that experts save


def make_experts():
    experts = Experts(EXPERTS, WIDTH, INNER)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


class ExpertToy(nn.Module):
    """Layers of attention and experts; inputs and outputs as graphkit's Toy.

    Its last tokens are routed nowhere: as many as half of its first id, so that live rows change
    from call to call.
    """

    def __init__(self, stash=None, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.routers = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(layers))
        self.experts = nn.ModuleList(make_experts() for _ in range(layers))
        self.dispatcher = LocalDispatcher(EXPERTS)
        self.stash, self.layers = stash, layers

    def begin(self, ids, x):
        return {"ids": ids, "x": x}

    def end(self, state):
        return {"loss": state["loss"], "aux": state["aux"], "hidden": state["hidden"]}

    def forward(self, ids, x):
        return run_stages(self, ids, x)

    def stages(self):
        stages = [Stage("embed", -1, self.embed)]
        for layer in range(self.layers):
            for name in ("attn", "moe_router", "moe_dispatch", "moe_experts", "moe_combine"):
                run = getattr(self, name)
                stages.append(
                    Stage(name, layer, lambda state, run=run, layer=layer: run(state, layer))
                )
        return [*stages, Stage("head", self.layers, self.head)]

    def embed(self, state):
        hidden = self.embedding(state["ids"]) + state["x"]
        return {**state, "hidden": hidden, "aux": hidden.mean()}

    def attn(self, state, layer):
        return {**state, "hidden": state["hidden"] + self.attention[layer](state["hidden"]).tanh()}

    def moe_router(self, state, layer):
        weights, experts = self.routers[layer](state["hidden"]).softmax(-1).topk(TOP_K)
        token = torch.arange(weights.shape[0], device=weights.device)
        live = (token < weights.shape[0] - state["ids"][0] // 2)[:, None]
        return {
            **state,
            "routing": Routing(torch.where(live, experts, -1).int(), torch.where(live, weights, 0)),
        }

    def moe_dispatch(self, state, layer):
        plan = self.dispatcher.preprocess(state["routing"])
        return {
            **state,
            "plan": plan,
            "rows": self.dispatcher.dispatch(state["hidden"], state["routing"], plan),
        }

    def moe_experts(self, state, layer):
        rows, experts = state["rows"], self.experts[layer]
        given = rows.values.to(experts.down_proj.dtype), rows.weights, rows.offsets
        if self.stash is None:
            return {**state, "made": experts(*given)}
        return {**state, "made": stashed_experts(experts, *given, self.stash)}

    def moe_combine(self, state, layer):
        hidden = state["hidden"] + self.dispatcher.combine(state["made"], state["plan"])
        kept = {
            key: value
            for key, value in state.items()
            if key not in ("routing", "plan", "rows", "made")
        }
        return {**kept, "hidden": hidden, "aux": state["aux"] + hidden.pow(2).mean()}

    def head(self, state):
        logits = state["hidden"] @ self.embedding.weight.T
        return {**state, "loss": functional.cross_entropy(logits, state["ids"])}


def make_expert_toy(stash=None, **options):
    torch.manual_seed(1)
    return ExpertToy(stash, **options)


def poison_pages(stash):
    """NaN in every page that nobody holds, and in the trash rows. Reads the device."""
    state, pages, rows = stash.pages.state, stash.pages.pages, stash.page_rows
    free = free_pages(state.tolist(), pages, stash.pages.host_pages)
    for tier, start in ((stash.buffers, 0), (stash.hosts, pages)):
        for memory in (memory for memories in tier.values() for memory in memories):
            memory.data[-1] = float("nan")
            for page in free:
                if start <= page < start + (memory.shape[0] - 1) // rows:
                    memory.data[(page - start) * rows : (page - start + 1) * rows] = float("nan")


def free_pages(state, pages, host_pages):
    """The pages that are free, by a state as a list of numbers."""
    from packgraph.moe.stash.pages import HEAD, HEADER, HOST_HEAD, HOST_TAIL, TAIL

    ring, host_ring = (
        state[HEADER : HEADER + pages],
        state[HEADER + pages : HEADER + pages + host_pages],
    )
    free = [ring[i % pages] for i in range(state[HEAD], state[TAIL])] if pages else []
    free += (
        [host_ring[i % host_pages] for i in range(state[HOST_HEAD], state[HOST_TAIL])]
        if host_pages
        else []
    )
    return free
