"""A decoder as a list of stages: embedding, layers, head. The layers bring their own stages.

    begin -> embed (-1) -> layer 0's stages -> ... -> layer L-1's stages -> head (L) -> end

A pipeline stage is a stack of consecutive layers. Only the first has the embedding; the others
begin with the hidden states of the stage before, and their `embed` makes just the tables that all
layers share. Only the last has a head; the others end with hidden states.

State: batch, tokens_in_step and, where the row is spread over ranks, context from `begin`; hidden
[T, H] from `embed`, and for layers that read them rotary (cos, sin; empty where positions turn
nothing), attention (metadata) and documents (int32 [T], -1 in padding, of all ranks' rows); the
head leaves output alone. Padding rows of hidden start as exact zeros, so that nothing a padding
token holds reaches a result, and stay finite from there on; their gradients are zeros from the head
on.

Where the row is cut in zigzag, `embed` adds rows, which say what of the row is this rank's.

Layers of multi-token prediction (`layers/prediction.py`) stand before the head, each between two
stages, `mtp_embed` and `mtp_head`. The first of them has the norm that the head has otherwise.
State within: mtp_depth (how many have begun) and mtp_trunk [T, H], which the head reads; from
`mtp_head` on mtp_loss, float32 []. The head adds its gradient to that of the loss, not its value:
that stays the loss of the next token.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packgraph.graphs.parameters import is_sharded
from packgraph.graphs.stages import Stage, State, run_in_order, run_stages
from packgraph.mamba.conv import live_document_ids
from packgraph.models.branches import head_sizes
from packgraph.models.config import DecoderConfig
from packgraph.models.layers.attention import RotaryEmbedding
from packgraph.models.layers.mlp import RMSNorm
from packgraph.models.layers.moe import Gate, MoEBlock
from packgraph.models.layers.prediction import LossSums, PredictionLayer, ahead
from packgraph.models.rows import SharedRows, own_part
from packgraph.models.values import DrawsParameters, draw_normal, generator_of
from packgraph.ops.attention.api import BackendChoice, attention_metadata, choose_backend
from packgraph.ops.attention.context import ContextGroup
from packgraph.ops.attention.zigzag import rank_rows
from packgraph.ops.log_probabilities import Output, check_output
from packgraph.ops.loss import IGNORED, check_count, step_count
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.deferred import values_of
from packgraph.parallel.vocabulary import (
    all_rows,
    embed,
    head_cross_entropy,
    head_log_probabilities,
)


class DecoderStack(SharedRows, nn.Module):
    """Embedding, layers and head of a decoder over packed microbatches; implements
    `plan.stages.Staged`.

    config: sizes and options of the whole decoder. layers: modules with `stages()`, by their
    number in the whole. first, last: whether this part has the embedding, and norm and head.
    Parameters are named as in Hugging Face checkpoints without the leading `model.`; with tied
    embeddings there is no `lm_head`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: Mapping[int, nn.Module],
        *,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.first, self.last = config, first, last
        self.contexts = dict[int, ContextGroup]()
        predicts = last and config.mtp_layers > 0
        if first or predicts or (last and config.tie_embeddings):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        if last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            if not config.tie_embeddings:
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp_sums = LossSums(config.mtp_layers) if predicts else None
        latent = config.latent
        turned = latent.rope_dim if latent.enabled else round(config.rotary_share * config.head_dim)
        self.rotary = RotaryEmbedding(turned, config.rope_theta, latent.scaling)
        reads = {entry for layer in layers.values() for entry in getattr(layer, "reads", ())}
        self.attends, self.scans = "attention" in reads, "documents" in reads

    @property
    def head_weight(self) -> Tensor:
        """The [V, H] matrix of the head."""
        return self.embed_tokens.weight if self.config.tie_embeddings else self.lm_head.weight

    @property
    def ends(self) -> dict[int, nn.Module]:
        """Embedding and head by the numbers of their stages, where one stage alone reads them."""
        several = self.config.mtp_layers > 0  # depths read both, each in stages of its own
        if self.config.tie_embeddings or several:
            return {}
        first = {-1: self.embed_tokens} if self.first else {}
        return first | ({self.config.depth: self.lm_head} if self.last else {})

    def begin(
        self,
        batch: PackedBatch,
        tokens_in_step: Tensor | None = None,
        hidden: Tensor | None = None,
        context: int | None = None,
        output: Output = "loss",
    ) -> State:
        check_output(output)
        check_count(tokens_in_step)
        if isinstance(batch, PackedBatch) and not torch.compiler.is_compiling():
            # Compiled code would be made again for every number that it has looked at.
            batch.check_words(self.config.vocab_size)
        state: State = {"batch": batch, "tokens_in_step": tokens_in_step}
        if output != "loss":
            state["wanted"] = output
        if (spread := self.spread(batch, context)) is not None:
            state["context"] = spread
        return state if hidden is None else {**state, "hidden": hidden}

    def stages(self) -> Sequence[Stage]:
        found = [Stage("embed", -1, self.run_embed)]
        for layer in self.layers.values():
            own: Sequence[Stage] = layer.stages()  # type: ignore[operator]
            if isinstance(layer, PredictionLayer):
                before = Stage("mtp_embed", layer.index, self.run_mtp_embed)
                # By itself or with the head, not with the layer: a segment that reads a tied matrix
                # twice would sum its gradients in another order.
                after = Stage("mtp_head", self.config.depth, self.run_mtp_head)
                own = [before, *own, after]
            found += own
        return [*found, Stage("head", self.config.depth, self.run_head)] if self.last else found

    def end(self, state: State) -> Tensor:
        return state["output" if self.last else "hidden"]

    def forward(
        self,
        batch: PackedBatch,
        tokens_in_step: Tensor | None = None,
        hidden: Tensor | None = None,
        context: int | None = None,
        output: Output = "loss",
    ) -> Tensor:
        """Sum of the token losses of `batch` divided by `tokens_in_step`: 0-d float32; or what
        `output` says.

        tokens_in_step: 0-d int64 or float32 on the batch's device, the labels that count in the
        whole step; None takes this batch's own count. A count of 0 divides by 1. hidden: [T, H]
        from the pipeline stage before, for every stage but the first. A stage that is not the last
        returns its hidden states [T, H]. context: a host constant, the number of ranks that the row
        is spread over, all of which get the whole batch; None = as many as the model was spread
        over. Hidden states are then this rank's rows [T / context, H], and the loss is the sum over
        them. output: a host constant; `log_probabilities` gives those of the labels, float32 [T], 0
        where there is none, `log_probabilities_and_entropies` gives [2, T], with entropies in the
        second row, `hidden` the normed states [T, H] that the head reads, zero in padding; all of
        this rank's rows where rows are spread. Raises ValueError for a number that the model has no
        group for or that does not divide T, and for documents that do not fit in T when they are
        padded as zigzag needs it.
        """
        return run_stages(self, batch, tokens_in_step, hidden, context, output)

    def logits(self, batch: PackedBatch) -> Tensor:
        """Logits [T, V] of all rows (of this rank's, where rows are spread); those of padding mean
        nothing but are finite. Raises RuntimeError where the head is sharded."""
        layers = self.config.num_layers
        stages = [stage for stage in self.stages() if stage.layer < layers]
        if is_sharded(self.head_weight):
            raise RuntimeError("logits of a model whose head is sharded: nobody has all of it here")
        state = run_in_order(stages, self.begin(batch))
        return F.linear(self.norm(state["hidden"]), self.head_weight)

    def run_embed(self, state: State) -> State:
        """Stage `embed`: token embeddings, zero in padding (first stage only); what all layers read
        of the batch."""
        batch, context = state["batch"], state.get("context")
        tokens, padding, positions, tables = own_part(batch, context)
        if tables is not None:
            state = {**state, "rows": tables.rows}
        hidden: Tensor = (
            state["hidden"]
            if not self.first
            else embed(tokens, padding, self.embed_tokens.weight, split_rows=self.split_rows)
        )
        found: State = {**state, "hidden": hidden}
        if self.attends:
            found["rotary"] = self.rotary(positions, hidden.dtype) if self.rotary.head_dim else ()
            found["attention"] = attention_metadata(
                batch,
                self.attention_choice(hidden.dtype).name,
                finite_padding=True,
                context=context,
                tables=tables,
            )
        if self.scans:
            found["documents"] = live_document_ids(batch)
        return found

    def run_mtp_embed(self, state: State) -> State:
        """Stage `mtp_embed`: adds mtp_embedding, of the tokens that this depth reads."""
        batch, context, rows = state["batch"], state.get("context"), state.get("rows")
        depth = state.get("mtp_depth", 0) + 1
        tokens = ahead(batch.tokens, batch.document_ids, depth, 0)
        begun = {}
        if depth == 1:
            normed = self.norm(state["hidden"])
            begun = {"mtp_trunk": normed, "hidden": normed}
        # Where a document has no token so many steps later, or this is padding.
        ended = batch.padding_mask | ahead(batch.padding_mask, batch.document_ids, depth, True)
        embedding = embed(
            rank_rows(tokens, context, rows, 0),
            rank_rows(ended, context, rows, True),
            self.embed_tokens.weight,
            split_rows=self.split_rows,
        )
        return {**state, **begun, "mtp_depth": depth, "mtp_embedding": embedding}

    def run_mtp_head(self, state: State) -> State:
        """Stage `mtp_head`: adds this depth's loss to mtp_loss; hidden is what the next stage
        reads."""
        batch, depth = state["batch"], state["mtp_depth"]
        layer = self.layers[str(self.config.num_layers + depth - 1)]
        assert isinstance(layer, PredictionLayer) and self.mtp_sums is not None
        normed = layer.normed(state["hidden"])
        found = {**state, "hidden": normed}
        if depth == self.config.mtp_layers:
            found["hidden"] = found.pop("mtp_trunk")
            del found["mtp_depth"]
        if state.get("wanted", "loss") != "loss":
            return found
        labels = ahead(batch.labels, batch.document_ids, depth, IGNORED)
        own = rank_rows(labels, state.get("context"), state.get("rows"), IGNORED)
        total = head_cross_entropy(normed, self.head_weight, own)
        loss = total / step_count(state["tokens_in_step"], batch.labels)
        if self.training and torch.is_grad_enabled():
            self.mtp_sums.add(depth - 1, loss)
        share = loss * (self.config.mtp_loss_weight / self.config.mtp_layers)
        return {**found, "mtp_loss": share + state["mtp_loss"] if depth > 1 else share}

    def run_head(self, state: State) -> State:
        """Stage `head`: final norm, logits and loss; nothing but the output is left in the
        state."""
        batch, context, rows = state["batch"], state.get("context"), state.get("rows")
        hidden, wanted = state["hidden"], state.get("wanted", "loss")
        if self.mtp_sums is None:
            hidden = self.norm(hidden)
        own = rank_rows(batch.labels, context, rows, IGNORED)
        if wanted == "hidden":
            padding = rank_rows(batch.padding_mask, context, rows, True)
            whole = all_rows(hidden, self.head_weight, own)
            return {"output": whole.masked_fill(padding[:, None], 0.0)}
        if wanted != "loss":
            entropy = wanted == "log_probabilities_and_entropies"
            return {"output": head_log_probabilities(hidden, self.head_weight, own, entropy)}
        total = head_cross_entropy(hidden, self.head_weight, own)
        loss = total / step_count(state["tokens_in_step"], batch.labels)
        if (further := state.get("mtp_loss")) is not None:
            loss = loss + (further - further.detach())
        return {"output": loss if rows is None else loss + rows.excess}

    def normal_parameters(self) -> dict[str, nn.Parameter]:
        """The matrices, and stacks of them, whose first values are normal, by name."""
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if parameter.dim() >= 2 and ".conv1d." not in name
        }

    def reset_parameters(self, seed: int) -> None:
        """Normal matrices, norms of one, biases of zero; the same for a seed on every device
        (`models/values.py`). Deferred parameters stay so."""
        matrices = self.normal_parameters().items()
        here = [(name, matrix) for name, matrix in matrices if values_of(matrix) is None]
        draw_normal(here, seed, self.config.initializer_range)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, RMSNorm):
                    module.weight.fill_(1.0)
                elif isinstance(module, Gate):
                    module.reset_balance()
                elif isinstance(module, MoEBlock):
                    module.forget_demand()
                elif isinstance(module, LossSums):
                    module.take()
                elif isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()
            for name, module in self.named_modules():
                if isinstance(module, DrawsParameters):
                    module.draw_parameters(generator_of(seed, name))

    def attention_choice(self, dtype: torch.dtype | None = None) -> BackendChoice:
        """The attention backend of calls made now, and why it is no faster one.

        dtype: of the hidden states, where autocast does not say another; None takes that of the
        parameters.
        """
        if self.config.attention_backend != "auto":
            return BackendChoice(self.config.attention_backend, "asked for")
        device = self.rotary.inv_freq.device
        dtype = next(self.parameters()).dtype if dtype is None else dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        return choose_backend(device, dtype, *head_sizes(self.config))

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self.config).items())
