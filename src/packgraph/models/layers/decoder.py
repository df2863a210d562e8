"""One pre-norm decoder layer and its stages: a mixer, a feed-forward branch, or one after the
other.

    hidden --+-- norm -- self_attn -- dropout --(+)--+-- norm -- mlp -- dropout --(+)-- hidden
             +----------------------------------+    +----------------------------+
    |<------------------ attn ------------------->|<------------- mlp -------------->|

A layer with another mixer has its stage in the place of `attn`, such as `mamba`; a layer with
experts five `moe_*` stages in the place of `mlp`; a layer of one branch has those of it alone. Each
stage reads and replaces `hidden` in the state; the rest of the model does not know them.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from packgraph.graphs import fallback
from packgraph.graphs.checkpointed import FULL
from packgraph.graphs.stages import Stage, State
from packgraph.models.branches import KINDS
from packgraph.models.config import DecoderConfig
from packgraph.models.layers.attention import GroupedQueryAttention, LatentAttention
from packgraph.models.layers.mamba import MambaMixer
from packgraph.models.layers.mlp import FeedForward, RMSNorm
from packgraph.models.layers.moe import MoEBlock
from packgraph.offloading.marks import Mark, offload_block

Mixer = GroupedQueryAttention | LatentAttention | MambaMixer
MIXERS: Mapping[str, Callable[[DecoderConfig], Mixer]] = MappingProxyType(
    {
        "attn": lambda config: (
            LatentAttention(config) if config.latent.enabled else GroupedQueryAttention(config)
        ),
        "mamba": MambaMixer,
    }
)
# Names of modules as in Hugging Face checkpoints, where they are not those of stages.
ATTRIBUTES = MappingProxyType({"attn": "self_attn"})
COMPILED_ROUTER = (
    "moe stages cannot be recomputed in compiled code, whose routers would count their load twice: "
    "name the other stages, such as attn or attn,mlp, or leave compiling out"
)


class DecoderLayer(nn.Module):
    """Branches of a layer as its config says, each with pre-norm, residual and dropout.

    mixer: name of its branch that exchanges information between tokens; empty = it has none.
    recompute: of stages by name, what the backward computes again (`graphs/stages.py`). precision:
    of its linear layers and experts; layers of different ones share no compiled code.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.dropout = config.dropout
        self.offload: Mark = offload_block
        self.recompute: dict[str, str] = {}
        self.branches = config.branches(index)
        config = config.of_layer(index)
        self.precision = config.precision
        self.mixer = self.branches[0] if KINDS[self.branches[0]].is_mixer else ""
        if self.mixer:
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            module = MIXERS[self.mixer](config)
            self.add_module(ATTRIBUTES.get(self.mixer, self.mixer), module)
        if self.branches[-1] in ("mlp", "moe"):
            self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            moe = self.branches[-1] == "moe"
            self.mlp = MoEBlock(config) if moe else FeedForward(config, config.intermediate_size)

    @property
    def reads(self) -> tuple[str, ...]:
        """Entries of the state that the mixer reads beside hidden."""
        return self._mixer.reads if self.mixer else ()

    def stages(self) -> Sequence[Stage]:
        return [stage for branch in self.branches for stage in self._stages_of(branch)]

    def _stages_of(self, branch: str) -> Sequence[Stage]:
        again = self.recompute
        if branch != "moe":
            run = self.run_mixer if branch == self.mixer else self.run_mlp
            return [Stage(branch, self.index, run, recompute=again.get(branch, ""))]
        moe_runs = {
            "moe_router": self.run_router,
            "moe_preprocess": self.run_preprocess,
            "moe_dispatch": self.run_dispatch,
            "moe_experts": self.run_experts,
            "moe_combine": self.run_combine,
        }
        why_not = self._moe.dispatcher.why_not
        return [
            Stage(name, self.index, run, why_not.get(name, ""), again.get(name, ""))
            for name, run in moe_runs.items()
        ]

    def run_mixer(self, state: State) -> State:
        """Stage of the mixer's name: reads hidden and what the mixer reads; replaces hidden."""
        hidden = state["hidden"]
        with self.offload(f"{self.mixer}_norm"):
            normed = self.input_layernorm(hidden)
        branch = self._mixer(normed, *(state.get(name) for name in self.reads))
        return {**state, "hidden": hidden + self._drop(branch)}

    def run_mlp(self, state: State) -> State:
        """Stage `mlp`: reads and replaces hidden."""
        hidden = state["hidden"]
        with self.offload("mlp_norm"):
            normed = self.post_attention_layernorm(hidden)
        branch = self.mlp(normed)
        return {**state, "hidden": hidden + self._drop(branch)}

    def run_router(self, state: State) -> State:
        """Stage `moe_router`: reads hidden and batch; see MoEBlock for what it and the next ones
        add to the state."""
        compiles = torch.compiler.is_compiling() and not fallback.READING
        if compiles and self.recompute.get("moe_router") == FULL:
            raise ValueError(COMPILED_ROUTER)
        with self.offload("mlp_norm"):
            normed = self.post_attention_layernorm(state["hidden"])
        return self._moe.run_router(state, normed)

    def run_preprocess(self, state: State) -> State:
        """Stage `moe_preprocess`."""
        return self._moe.run_preprocess(state)

    def run_dispatch(self, state: State) -> State:
        """Stage `moe_dispatch`."""
        return self._moe.run_dispatch(state)

    def run_experts(self, state: State) -> State:
        """Stage `moe_experts`."""
        return self._moe.run_experts(state)

    def run_combine(self, state: State) -> State:
        """Stage `moe_combine`: replaces hidden."""
        state, branch = self._moe.run_combine(state)
        return {**state, "hidden": state["hidden"] + self._drop(branch)}

    @property
    def _mixer(self) -> Mixer:
        found: Mixer = getattr(self, ATTRIBUTES.get(self.mixer, self.mixer))
        return found

    @property
    def _moe(self) -> MoEBlock:
        assert isinstance(self.mlp, MoEBlock)
        return self.mlp

    def _drop(self, branch: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return branch
        # The bits of F.dropout, by one operation on all devices: recomputation can keep its mask.
        return torch.native_dropout(branch, self.dropout, True)[0]
