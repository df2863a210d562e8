"""The feed-forward branch with experts, in five stages over an explicit state.

    hidden -+- norm -- gate -- top-k -- plan -- rows by expert -- experts -- sum per token -(+)-(+)-
    hidden
            |     +-------------------------- shared experts -------------------------------+    |
            +------------------------------------------------------------------------------------+
            |<--- moe_router --->|<- moe_preprocess ->|<- moe_dispatch ->|<- moe_experts ->|<- moe_combine ->|

Between the stages stand, in the state: moe_input [T, H] and moe_routing from the router, moe_shared
[T, H] where there are shared experts; moe_plan from moe_preprocess; moe_rows from moe_dispatch;
moe_made [R, H] from the experts. The last stage takes them all out again. Padding rows have expert
-1 from the router on, whatever they hold. Where experts work on another width than the hidden size,
tokens are brought to it by the router's stage, and back from it by the last.
"""  # noqa: E501

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from packgraph.graphs.saved_tensors import in_backward
from packgraph.graphs.stages import State
from packgraph.models.branches import routed_width
from packgraph.models.config import DecoderConfig
from packgraph.models.layers.mlp import FeedForward
from packgraph.moe.balance import (
    attach,
    batch_loss,
    document_loss,
    expert_counts,
    load_loss,
    z_loss,
)
from packgraph.moe.dispatch.dispatcher import Dispatching, ExpertRows
from packgraph.moe.experts import Experts
from packgraph.moe.router_product import router_logits
from packgraph.moe.routing import drop_beyond, route
from packgraph.moe.stash.stash import Stash, stashed_experts
from packgraph.offloading.marks import Mark, offload_block
from packgraph.ops.attention.zigzag import rank_rows
from packgraph.ops.linear import linear_layer
from packgraph.ops.loss import step_count, token_count
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.tensor import own_rows, whole_rows

BETWEEN = ("moe_input", "moe_routing", "moe_shared", "moe_plan", "moe_rows", "moe_made")


class Gate(nn.Module):
    """Logits of the router, [T, H] -> float32 [T, E], and what balances experts; named as in
    Hugging Face checkpoints.

    e_score_correction_bias: float32 [E] whatever the model's dtype, where the config has a bias.
    load: int64 [E], how many tokens each expert got in the forwards of training since `balance` has
    read it last; no part of the state_dict. step_load: the same of the whole step before on all
    ranks, where there is a `batch_loss`; a part of the optimizer's state.
    """

    e_score_correction_bias: Tensor | None
    load: Tensor
    step_load: Tensor | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        count = config.experts.count
        self.weight = nn.Parameter(torch.empty(count, config.hidden_size))
        bias = torch.zeros(count, dtype=torch.float32) if config.experts.score_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.register_buffer("load", torch.zeros(count, dtype=torch.int64), persistent=False)
        step_load = torch.zeros(count, dtype=torch.int64) if config.experts.batch_loss else None
        self.register_buffer("step_load", step_load, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits in float32, under autocast too: rounded logits would make ties, and
        choices that differ between layouts."""
        with torch.autocast(x.device.type, enabled=False):
            return router_logits(x, self.weight)

    def reset_balance(self) -> None:
        """A bias of zero, and nothing counted."""
        self.load.zero_()
        if self.step_load is not None:
            self.step_load.zero_()
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        if (
            bias is not None
            and self.e_score_correction_bias is not None
            and self.e_score_correction_bias.dtype != torch.float32
        ):
            device = self.e_score_correction_bias.device
            self.e_score_correction_bias = (
                bias.to(device)
                if bias.device.type != "meta"
                else torch.zeros_like(bias, device=device)
            )
        return self


class MoEBlock(Dispatching):
    """Router, experts and shared experts of one layer.

    Stages that wait for the host with this dispatcher are named, with the reason, in
    `dispatcher.why_not`. stash: where what experts save for the backward of training is kept; None
    = as it is, all R rows of it. row_mesh: the ranks that hidden states are split over by rows
    (tensor parallelism with sequence), None = none.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.experts.count)
        self.settings = config.experts
        self.gate = Gate(config)
        self.experts = Experts(
            config.experts.count,
            routed_width(config),
            config.experts.intermediate_size,
            config.activation,
            config.precision,
        )
        latent, hidden, by = config.experts.latent_size, config.hidden_size, config.precision
        self.fc1_latent_proj = linear_layer(by, hidden, latent) if latent else None
        self.fc2_latent_proj = linear_layer(by, latent, hidden) if latent else None
        width = config.experts.shared * config.experts.intermediate_size
        self.shared_experts = FeedForward(config, width) if width else None
        self.stash: Stash | None = None
        self.row_mesh: DeviceMesh | None = None
        self.offload: Mark = offload_block

    def run_router(self, state: State, x: Tensor) -> State:
        """x: [T, H] or this rank's rows of it, the normed hidden state. Chooses experts, attaches
        the losses to hidden, counts the load."""
        batch: PackedBatch = state["batch"]
        settings = self.settings
        padding = rank_rows(batch.padding_mask, state.get("context"), state.get("rows"), True)
        x = whole_rows(x, self.row_mesh)
        logits = self.gate(x)
        scored = route(logits, padding, self.gate.e_score_correction_bias, settings)
        routing = scored.routing
        if settings.drop_factor:
            most = math.ceil(
                settings.drop_factor * padding.numel() * settings.per_token / settings.count
            )
            routing = drop_beyond(routing, settings.count, most)
        rows = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        found = {**state, "moe_input": rows, "moe_routing": routing}
        if self.shared_experts is not None:
            found["moe_shared"] = self.shared_experts(x)
        if self.training:
            # A recomputation has counted before. Compiled routers are not recomputed.
            if torch.compiler.is_compiling() or not in_backward():
                with torch.no_grad():
                    self.gate.load.add_(expert_counts(scored.routing.experts, settings.count))
            loss = self._loss(logits, scored.scores, scored.routing.experts, state, ~padding)
            if loss is not None:
                of_step = step_count(state["tokens_in_step"], batch.labels)
                share = token_count(batch.labels) / of_step  # of the loss tokens
                found["hidden"] = attach(state["hidden"], loss, share)
        return found

    def _loss(
        self, logits: Tensor, scores: Tensor, experts: Tensor, state: State, valid: Tensor
    ) -> Tensor | None:
        """The auxiliary loss of a microbatch, each part a mean over its tokens or documents; of
        this rank's rows, their share of it."""
        settings, context = self.settings, state.get("context")
        batch: PackedBatch = state["batch"]
        documents = batch.capacity.documents
        parts = []
        if factor := settings.load_loss:
            parts.append(factor * load_loss(scores, experts, valid, context))
        if (load := self.gate.step_load) is not None:
            parts.append(settings.batch_loss * batch_loss(scores, load, valid, context))
        if factor := settings.document_loss:
            ids = rank_rows(batch.document_ids, context, state.get("rows"), documents)
            parts.append(factor * document_loss(scores, experts, ids, valid, documents, context))
        if factor := settings.z_loss:
            parts.append(factor * z_loss(logits, valid, context))
        return torch.stack(parts).sum() if parts else None

    def run_preprocess(self, state: State) -> State:
        """Adds moe_plan."""
        return {**state, "moe_plan": self.plan(state["moe_routing"])}

    def run_dispatch(self, state: State) -> State:
        """Adds moe_rows."""
        rows = self.dispatcher.dispatch(state["moe_input"], state["moe_routing"], state["moe_plan"])
        return {
            key: value for key, value in state.items() if key not in ("moe_input", "moe_routing")
        } | {"moe_rows": rows}

    def run_experts(self, state: State) -> State:
        """Replaces moe_rows by moe_made."""
        rows: ExpertRows = state["moe_rows"]
        if self.stash is not None and self.learns():
            made = stashed_experts(self.experts, *rows, self.stash)
        else:
            with self.offload("expert_fc1", leave=rows.offsets):
                h = self.experts.first(rows.values, rows.offsets)
            with self.offload("moe_act", leave=rows.offsets):
                made = self.experts.second(h, rows.weights, rows.offsets)
        return {key: value for key, value in state.items() if key != "moe_rows"} | {
            "moe_made": made
        }

    def held_memory(self) -> list[Tensor]:
        """The pages of the stash, which offloading must leave where they are."""
        if self.stash is None:
            return []
        tiers = (self.stash.buffers, self.stash.hosts)
        return [pages for tier in tiers for column in tier.values() for pages in column]

    def run_combine(self, state: State) -> tuple[State, Tensor]:
        """Takes everything of the experts out of the state; returns the branch [T, H] beside it."""
        branch = self.dispatcher.combine(state["moe_made"], state["moe_plan"])
        if self.fc2_latent_proj is not None:
            branch = self.fc2_latent_proj(branch)
        branch = own_rows(branch, self.row_mesh)
        if "moe_shared" in state:
            branch = branch + state["moe_shared"]
        return {key: value for key, value in state.items() if key not in BETWEEN}, branch


def moe_blocks(chunks: Sequence[nn.Module]) -> list[MoEBlock]:
    """All layers with experts in these chunks, in order."""
    return [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, MoEBlock)
    ]
