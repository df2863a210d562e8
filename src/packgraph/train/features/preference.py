"""Losses of pairs of answers (preferences) inside of what is captured.

    reference ─▶ log-probabilities ─┐  without gradients; frozen, in the same graph
    policy    ─▶ log-probabilities ─┴─▶ a score of each document ─▶ pairs 2k, 2k + 1 ─▶ loss [P]

A `PreferenceModel` stands for the model of a run where it is executed: it takes packs and the
number of pairs in the whole step, as a model takes that of their labels, so graphs, their banks,
whole steps and evaluations know nothing of pairs. Documents come in pairs (`train/data/pairs.py`),
whose number is a static shape; a pack with fewer has pairs of no tokens, which count nothing.

The reference shares every frozen parameter with the model: under adapters it is the base and takes
no memory, else a copy of all weights as they are when the run starts, or starts again.

    loss    score z of an answer    reward r    loss of a pair (c chosen, r rejected)
    dpo     log p - log p_ref       beta z      -log sigma(r_c - r_r)
    simpo   log p / tokens          beta z      -log sigma(r_c - r_r - margin)
    orpo    log p / tokens          beta z      -z_c - beta log sigma(odds_c - odds_r),
                                                odds = z - log(1 - exp z)

Sources: DPO, Rafailov et al. 2023, arXiv:2305.18290, equation 7; SimPO, Meng et al. 2024,
arXiv:2405.14734, equation 6; ORPO, Hong et al. 2024, arXiv:2403.07691, equations 3 to 7. Rewards of
orpo, which has none, are those of TRL.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from packgraph.graphs.stages import Stage, State, run_stages
from packgraph.integrations.transformers.model import PackedModel
from packgraph.models.decoder import DecoderModel
from packgraph.models.layers.prediction import LossSums
from packgraph.packing.batch import PackedBatch
from packgraph.train.config.sections import LossConfig
from packgraph.train.features.lora import take_out_adapters

# What is told of the pairs of a step, or of an evaluation: means over all of them.
FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
LARGEST_MEAN = -1e-6  # of log-probabilities in odds: those of a sure answer would be infinite


def dpo(scores: Tensor, rewards: Tensor, options: LossConfig) -> Tensor:
    """Losses [P] of scores and rewards [P, 2], chosen answers first, float32."""
    return -functional.logsigmoid(rewards[:, 0] - rewards[:, 1])


def simpo(scores: Tensor, rewards: Tensor, options: LossConfig) -> Tensor:
    """As `dpo`, with a margin."""
    margin = 1.0 if options.margin is None else options.margin
    return -functional.logsigmoid(rewards[:, 0] - rewards[:, 1] - margin)


def orpo(scores: Tensor, rewards: Tensor, options: LossConfig) -> Tensor:
    """As `dpo`, of the chosen answers' token losses and log odds."""
    below = scores.clamp(max=LARGEST_MEAN)
    odds = below - torch.log(-torch.expm1(below))
    better = functional.logsigmoid(odds[:, 0] - odds[:, 1])
    return -scores[:, 0] - options.strength * better


LOSSES: dict[str, Callable[[Tensor, Tensor, LossConfig], Tensor]] = {
    "dpo": dpo,
    "simpo": simpo,
    "orpo": orpo,
}


class PreferenceModel(nn.Module):
    """A model whose loss is one of pairs.

    Args:
        policy: The model that is trained; its parameters keep their names there.
        options: Name and constants of the loss.

    Attributes:
        reference: Frozen, in evaluation mode; None for a loss without one.
        sums: Of `FIGURES`, divided as the loss is, since they were taken last.
    """

    def __init__(self, policy: DecoderModel | PackedModel, options: LossConfig) -> None:
        super().__init__()
        self.policy, self.options = policy, options
        for module in policy.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # as TRL does: what is dropped would count as a preference
        self.reference = frozen_copy(policy) if options.has_reference else None
        self.sums = LossSums(len(FIGURES)).to(next(policy.parameters()).device)

    def begin(self, batch: PackedBatch, pairs_in_step: Tensor | None = None) -> State:
        """The state of a batch of pairs; under `reference` that of the reference."""
        state: State = self.policy.begin(batch, pairs_in_step, output="log_probabilities")
        if self.reference is None:
            return state
        return {**state, "reference": self.reference.begin(batch, output="log_probabilities")}

    def stages(self) -> Sequence[Stage]:
        """Those of the policy, whose head gives the loss, behind those of the reference, which are
        called `reference_...` and stand before the first layer."""
        *others, head = self.policy.stages()
        found = [*others, replace(head, run=self.run_head, owner=None)]
        if self.reference is None:
            return found
        before = []
        for stage in self.reference.stages():
            owner, method = stage.method
            name = f"reference_{stage.name}"
            before.append(replace(stage, name=name, layer=-1, run=beside(method), owner=owner))
        return [*before, *found]

    def end(self, state: State) -> Tensor:
        """The loss."""
        found: Tensor = state["output"]
        return found

    def forward(self, batch: PackedBatch, pairs_in_step: Tensor | None = None) -> Tensor:
        """Sum of the losses of the pairs of `batch` over the number of pairs, float32 [].

        pairs_in_step: int64 [] on the batch's device; None = those of this batch. 0 divides by 1.
        """
        return run_stages(self, batch, pairs_in_step)

    def run_head(self, state: State) -> State:
        """Stage `head`: the loss."""
        batch, count = state["batch"], state["tokens_in_step"]
        found = self.policy.run_head(state)["output"]
        if self.reference is not None:
            scores = by_pair(found - state["reference"]["output"], batch)
        else:
            scores = by_pair(found, batch) / by_pair(batch.loss_mask.float(), batch).clamp(min=1)
        rewards = scores * self.options.strength
        losses = LOSSES[self.options.name](scores, rewards, self.options)
        ends = batch.cu_seqlens[: 2 * len(losses) + 1]
        is_pair = (ends[1:] > ends[:-1])[1::2]
        count = (is_pair.sum() if count is None else count).clamp(min=1)
        self._count(rewards.detach(), is_pair, count)
        return {"output": torch.where(is_pair, losses, 0.0).sum() / count}

    @torch.no_grad()
    def _count(self, rewards: Tensor, is_pair: Tensor, count: Tensor) -> None:
        chosen, rejected = rewards.unbind(1)
        figures = torch.stack([chosen, rejected, (chosen > rejected).float(), chosen - rejected])
        self.sums.losses.add_(torch.where(is_pair, figures, 0.0).sum(1) / count)


@functools.cache
def beside(method: Callable[..., State]) -> Callable[[Any, State], State]:
    """Runs a stage of a reference, without gradients, on its part of the state: one function for
    all of its layers, so that they are compiled once."""

    @torch.no_grad()
    def run(owner: Any, state: State) -> State:
        return {**state, "reference": method(owner, state["reference"])}

    return run


def by_pair(values: Tensor, batch: PackedBatch) -> Tensor:
    """Sums of float32 [T] over the documents of each pair: [P, 2], of P = N // 2 pairs.
    Differentiable; by sums of rows [N, T] and not `index_add`, whose order may change."""
    numbers = torch.arange(batch.capacity.documents // 2 * 2, device=values.device)
    members = batch.document_ids == numbers[:, None]
    return torch.where(members, values, 0.0).sum(1).view(-1, 2)


def frozen_copy(model: DecoderModel | PackedModel) -> DecoderModel | PackedModel:
    """`model` without its adapters, frozen, in evaluation mode: what it trains is copied, what is
    frozen is shared."""
    shared = {id(value): value for value in model.parameters() if not value.requires_grad}
    found = copy.deepcopy(model, shared)
    take_out_adapters(found)
    return found.requires_grad_(False).eval()
