"""A model of transformers as a list of stages over packed batches.

    begin -> embed (-1) -> layer 0 -> layer 1 -> ... -> layer L-1 -> head (L) -> end

The model is held as it is, as the submodule `model`, and its modules are called in the order of its
own forward, each by its own `__call__`. Only what lies between them is done here: positions come
from the batch, masks and caches are left out, and the head is the chunked loss.

State: batch and tokens_in_step from `begin`; hidden [T, H] and rotary, the tables of positions by
type of layer, from `embed`; the head leaves the output alone. Rows of padding begin as exact zeros
and stay finite, so nothing that a padding token holds reaches a result.

Linear layers inside of layers, but for those at both ends, multiply in their dtype or in float8,
over the same parameters (`set_precision`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packgraph.graphs.stages import Stage, State, run_stages
from packgraph.integrations.transformers.experts import waits
from packgraph.integrations.transformers.families import (
    FAMILIES,
    PackedFamily,
    causal_model,
    check_outside,
    family_of,
    is_plain,
    takes_layer_type,
)
from packgraph.integrations.transformers.mixers import (
    BATCH,
    LayerCall,
    refuse_other_experts,
    refuse_other_ways,
    runner_of,
    scan_shape,
    use_ours,
)
from packgraph.integrations.transformers.proof import kind_of
from packgraph.integrations.transformers.proof import prove as prove_packed
from packgraph.mamba.shape import ranks_problem
from packgraph.models.rows import SharedRows, own_part
from packgraph.offloading.marks import offload_block
from packgraph.ops.attention.context import ContextGroup
from packgraph.ops.attention.zigzag import rank_rows
from packgraph.ops.float8.linear import LAYERS, float8_layers, float8_problems, multiply_by
from packgraph.ops.log_probabilities import (
    Output,
    check_output,
    linear_log_probabilities,
    naive_log_probabilities,
)
from packgraph.ops.loss import (
    IGNORED,
    check_count,
    is_word,
    linear_cross_entropy,
    step_count,
    token_count,
)
from packgraph.ops.names import NATIVE
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.tensor import own_rows
from packgraph.parallel.vocabulary import (
    all_rows,
    embed,
    head_cross_entropy,
    head_log_probabilities,
)

OTHER_BLOCKS = ("mlp", "moe")  # layers that read no other tokens, by their `block_type`


def packed(
    model: nn.Module,
    *,
    output: Output = "loss",
    precision: str = NATIVE,
    bf16_ends: int = 1,
    prove: bool = True,
) -> "PackedModel":
    """Makes a transformers model take packed batches, over the same parameters.

    Documents are kept apart in attention and in positions, the loss is computed in chunks without
    the whole logits, experts run as grouped products, and nothing waits for the host. The result
    has stages: `embed`, `layer` for each layer, and `head`.

    The model is not copied: it stays usable, and `result.model` is the model itself (without the
    wrapper of PEFT; adapters live in its layers). Its implementation of attention (and experts) is
    set to one that behaves as before in calls of the model itself, such as `generate`.

    Args:
        model: A `PreTrainedModel` with a language-model head, or what PEFT makes of one.
        output: What calls return that do not say it themselves: `loss`, the mean over the labels
            of the batch (or the sum of token losses divided by `tokens_in_step`); `hidden`, the
            states [T, H] that the head reads, zero in padding; `log_probabilities`, those of the
            labels, float32 [T], 0 where there is none; `log_probabilities_and_entropies`, [2, T],
            with entropies in the second row.
        precision: `bf16`, linear layers multiply in their dtype, or `fp8`: those that are
            `nn.Linear` inside of layers multiply in float8, over the same parameters, also in calls
            of the model itself. Adapters of PEFT do not, nor does the head. With
            `fp8_weight_gradients` gradients of their weights are in float8, too. `mxfp8`, for
            Blackwell, has never run on such a GPU.
        bf16_ends: With either, so many layers at the beginning and at the end stay `bf16`.
        prove: Of a family that is not in `packgraph.integrations.transformers.FAMILIES`, compare a
            small twin of the model with its own forward first, packed against one by one: hidden
            states, loss and every gradient. It takes less than a second for a small model, and is
            done once for a class and configuration. False leaves it out, for those who know.

    Returns:
        A module that is called with a `PackedBatch`.

    Raises:
        TypeError: If `model` is no such model.
        ValueError: If a setting cannot be packed, with all reasons, or the proof finds a
            difference, with the layer.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from packgraph.integrations.transformers import packed
        >>> config = LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> model = packed(LlamaForCausalLM(config))
        >>> batch, = packgraph.pack([[5, 6, 7], [8, 9]], [packgraph.Capacity(8, 2)])
        >>> model(batch).backward()
        >>> model.model.lm_head.weight.grad.shape
        torch.Size([16, 8])
    """
    check_output(output)
    family, causal = family_of(model), causal_model(model)
    mixers: Mapping[str, int] = {}
    if prove and causal.config.model_type not in FAMILIES:
        problem, mixers = prove_packed(causal, functools.partial(pack_twin, family))
        if problem is not None:
            raise ValueError(f"{type(causal).__name__} cannot be packed: {problem}")
    found = PackedModel(causal, family, output)
    for layer in found.layers:
        layer.token_mixers = mixers.get(kind_of(layer), layer.token_mixers)
    if problems := set_precision(found.layers, precision, bf16_ends):
        raise ValueError(f"{type(causal).__name__} cannot be packed: {'; '.join(problems)}")
    use_ours(causal)
    # As `save_pretrained` sets them: a first checkpoint then changes nothing that graphs watch.
    causal.config.architectures = [type(causal).__name__]
    causal.config.dtype = str(causal.dtype).removeprefix("torch.")
    return found  # a wrapper of PEFT is not called, and not watched


def pack_twin(family: PackedFamily, twin: Any) -> "PackedModel":
    """A twin of the proof over packed batches."""
    found = PackedModel(twin, family)
    for layer in found.layers:
        layer.token_mixers = 0  # the proof counts them
    use_ours(twin)
    return found


class PackedModel(SharedRows, nn.Module):
    """Returned by `packed`: a transformers model over packed batches, in stages.

    Args:
        model: The model, registered as the submodule `model`.
        family: What surrounds its layers.
        output: See `packed`.

    Attributes:
        counts_hits: The loss is float32 [2], the second number being the labels that the model
            finds most probable.
        noise: NEFTune's alpha, None for no noise: in training embeddings get noise within
            alpha / sqrt(tokens of their document * hidden size).

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from packgraph.integrations.transformers import packed
        >>> config = LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> [stage.name for stage in packed(LlamaForCausalLM(config)).stages()]
        ['embed', 'layer', 'head']
    """

    counts_hits: bool
    noise: float | None

    def __init__(self, model: nn.Module, family: PackedFamily, output: Output = "loss") -> None:
        super().__init__()
        self.model, self.family, self.output = model, family, output
        self.counts_hits, self.noise = False, None
        self.contexts = dict[int, ContextGroup]()
        self.layer_types: tuple[str, ...] = ()
        rotary = getattr(self.decoder, family.rotary) if family.rotary else None
        if rotary is not None and takes_layer_type(rotary):
            self.layer_types = tuple(self.config.layer_types)
        for layer in self.layers:
            layer.offload = offload_block
            other = getattr(layer, "block_type", "") in OTHER_BLOCKS
            layer.token_mixers = 0 if other else family.token_mixers

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Sets our implementations, which pickles do not hold."""
        super().__setstate__({"contexts": {}} | state)  # older pickles have none
        use_ours(self.causal)

    @property
    def causal(self) -> Any:
        """The PreTrainedModel with the head."""
        return causal_model(self.model)

    @property
    def decoder(self) -> Any:
        """Its decoder: embedding, layers and final norm."""
        return self.causal.base_model

    @property
    def config(self) -> Any:
        """Its config."""
        return self.causal.config

    def begin(
        self,
        batch: PackedBatch,
        tokens_in_step: Tensor | None = None,
        output: Output | None = None,
    ) -> State:
        """The state of a batch, which is checked by what the host knows of it."""
        check_output(output or self.output)
        check_count(tokens_in_step)
        if not torch.compiler.is_compiling():
            batch.check_words(self.config.vocab_size)
            if self.family.positions and self.numbers.start == 0 and batch.host.lengths:
                most, longest = self._positions.weight.shape[0], max(batch.host.lengths)
                if longest > most:
                    raise ValueError(
                        f"a document has {longest} tokens, but the model has learned positions "
                        f"for {most}; split documents when packing"
                    )
        state: State = {"batch": batch, "tokens_in_step": tokens_in_step}
        if (context := self.spread(batch)) is not None:
            state["context"] = context
        return state if output is None else {**state, "wanted": output}

    def stages(self) -> Sequence[Stage]:
        """`embed`, `layer` for each layer, `head`."""
        check_outside(self.causal, self.family)  # anybody may have changed it
        layers, inner, routed = self.layers, [], self.family.kind != "dense"
        if routed:
            refuse_other_experts(layers)
        windows = self.windows
        for index in self.numbers:
            layer = layers[index]
            if not hasattr(layer, "token_mixers"):
                raise ValueError(
                    f"layer {index} came after packed(model), which prepares layers; call it again"
                )
            run = layer_runner(self.layer_types[index] if self.layer_types else "", windows[index])
            why_not = waits(layer) if routed else ""
            inner.append(Stage("layer", index, run, why_not, owner=layer))
        head = [Stage("head", len(layers), self.run_head)] if self.last else []
        marks = bool(getattr(self.decoder, self.family.embedding)._forward_hooks)
        embed = Stage("embed", -1, self.run_embed, opaque=marks)  # a tracer does not mark leaves
        return [embed, *inner, *head]

    def end(self, state: State) -> Tensor:
        """The output."""
        found: Tensor = state["output" if self.last else "hidden"]
        return found

    def forward(
        self,
        batch: PackedBatch,
        tokens_in_step: Tensor | None = None,
        output: Output | None = None,
    ) -> Tensor:
        """The output for a batch: 0-d float32, or what `output` says, of this call or of `packed`.

        tokens_in_step: 0-d int64 or float32 on the batch's device, the labels that count in the
        whole step; None takes this batch's own count. A count of 0 divides by 1.
        """
        return run_stages(self, batch, tokens_in_step, output)

    def run_embed(self, state: State) -> State:
        """Stage `embed`: hidden states before the first layer, zero in padding, and tables of
        positions; this rank's rows where the batch is spread over ranks."""
        batch, context = state["batch"], state.get("context")
        tokens, padding, positions, tables = own_part(batch, context)
        if context is not None:
            state = {**state, "positions": positions, "tables": tables}
        hidden = (
            state["hidden"]
            if "hidden" in state
            else self._embedded(batch, tokens, padding, positions[None])
        )
        return {**state, "hidden": hidden, "rotary": self._rotary(hidden[None], positions[None])}

    def _embedded(
        self, batch: PackedBatch, tokens: Tensor, padding: Tensor, positions: Tensor
    ) -> Tensor:
        family, decoder = self.family, self.decoder
        embedding = getattr(decoder, family.embedding)
        legal = is_word(tokens, embedding.weight.shape[0])
        if isinstance(embedding.weight, DTensor):  # its module is not called
            hidden = embed(tokens, padding, embedding.weight, split_rows=self.split_rows)[None]
            if self.split_rows:
                mesh, whole = embedding.weight.device_mesh, (tokens, padding, legal)
                tokens, padding, legal = (own_rows(rows, mesh) for rows in whole)
            scale = getattr(embedding, "embed_scale", 1.0)  # as its own forward has it
            hidden = hidden * (scale.to(hidden.dtype) if isinstance(scale, Tensor) else scale)
            if embedding.padding_idx is not None:  # a row that is read and never trained
                untrained = tokens == embedding.padding_idx
                hidden = torch.where(untrained[None, :, None], hidden.detach(), hidden)
        else:
            # On CUDA an index outside the matrix would end the process.
            hidden = embedding(tokens.masked_fill(~legal, 0)[None])
        if self.noise is not None and self.training:
            if len(tokens) < len(batch.tokens) or isinstance(embedding.weight, DTensor):
                raise ValueError("noise of embeddings is not there yet with ranks that share a row")
            hidden = hidden + noise_of(batch, hidden, self.noise)
        if family.scale:
            hidden = hidden * self._factor(family.scale)
        if family.positions:
            hidden = hidden + self._positions(positions)
        if family.dropout:
            hidden = getattr(decoder, family.dropout)(hidden)
        nothing = torch.where(legal | padding, 0.0, torch.nan).to(hidden.dtype)
        live = legal & ~padding
        return torch.where(live[:, None], hidden[0], nothing[:, None])

    def run_head(self, state: State) -> State:
        """Stage `head`: final norm, and the output of the call."""
        batch, output = state["batch"], state.get("wanted", self.output)
        context, tables = state.get("context"), state.get("tables")
        rows = None if tables is None else tables.rows
        hidden = getattr(self.decoder, self.family.norm)(state["hidden"][None])[0]
        if output == "hidden":
            if self.split_rows:
                head = self.causal.get_output_embeddings().weight
                hidden = all_rows(hidden, head, rank_rows(batch.labels, context, rows, IGNORED))
            padding = rank_rows(batch.padding_mask, context, rows, True)
            return {"output": hidden.masked_fill(padding[:, None], 0.0)}
        tokens = state["tokens_in_step"]
        if tokens is None and context is not None:
            tokens = token_count(batch.labels)
        labels = rank_rows(batch.labels, context, rows, IGNORED)
        return {"output": self.read_head(hidden, labels, output, tokens)}

    def read_head(
        self, hidden: Tensor, labels: Tensor, output: Output, tokens_in_step: Tensor | None = None
    ) -> Tensor:
        """The output for states [T, H] that the head reads, in chunks of rows where the head is one
        matrix."""
        head, (scale, softcap) = self.causal.get_output_embeddings(), self.logit_scaling
        entropy = output == "log_probabilities_and_entropies"
        hits = self.counts_hits and output == "loss"
        if isinstance(head.weight, DTensor):
            total = self._split_head(hidden * scale, head.weight, labels, output)
        elif output == "loss" and is_plain(head):
            total = linear_cross_entropy(
                hidden, head.weight, labels, scale=scale, softcap=softcap, hits=hits
            )
        elif is_plain(head):
            total = linear_log_probabilities(
                hidden, head.weight, labels, scale=scale, softcap=softcap, entropy=entropy
            )
        else:
            logits = head(hidden)
            total = naive_log_probabilities(logits, labels, scale, softcap, entropy)
            total = -total.sum() if output == "loss" else total
            if hits:
                total = torch.stack((total, (logits.argmax(-1) == labels).sum().float()))
        if output != "loss":
            return total
        tokens = step_count(tokens_in_step, labels)
        return torch.stack((total[0] / tokens, total[1])) if hits else total / tokens

    def _split_head(
        self, hidden: Tensor, weight: DTensor, labels: Tensor, output: Output
    ) -> Tensor:
        """As `read_head`, with the vocabulary split over ranks: the sum, or rows."""
        if self.counts_hits:
            raise ValueError("a head that is split over tensor parallel ranks counts no hits")
        _, softcap = self.logit_scaling
        if output == "loss":
            return head_cross_entropy(hidden, weight, labels, softcap=softcap)
        entropy = output == "log_probabilities_and_entropies"
        return head_log_probabilities(hidden, weight, labels, entropy, softcap=softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [T, V] of states [T, H] that the head reads: for a few rows at a time."""
        scale, softcap = self.logit_scaling
        found: Tensor = self.causal.get_output_embeddings()(hidden) * scale
        return softcap * torch.tanh(found / softcap) if softcap else found

    @property
    def layers(self) -> list[Any]:
        """Its layers."""
        return list(getattr(self.decoder, self.family.layers))

    @property
    def numbers(self) -> range:
        """Numbers of the layers that are here."""
        return range(len(self.layers))

    @property
    def last(self) -> bool:
        """Whether norm and head are here."""
        return True

    @property
    def ends(self) -> dict[int, nn.Module]:
        """Embedding and head by the numbers of their stages, for `packgraph.shard`. (A matrix that
        is both stays whole.)"""
        head = self.causal.get_output_embeddings()
        return {-1: getattr(self.decoder, self.family.embedding), len(self.layers): head}

    def _factor(self, name: str) -> Any:
        """A factor as the model's forward has it: some keep that of their first config."""
        causal, decoder = self.causal, self.decoder
        return getattr(causal, name, getattr(decoder, name, getattr(self.config, name)))

    @property
    def logit_scaling(self) -> tuple[float, float]:
        """Scale and soft cap that make logits of the product with the head."""
        config, family = self.config, self.family
        scale = self._factor(family.factor) if family.factor else 1.0
        scale = scale / self._factor(family.divisor) if family.divisor else scale
        softcap = getattr(config, family.softcap) if family.softcap else None
        return float(scale), float(softcap or 0.0)

    @property
    def _positions(self) -> nn.Embedding:
        found: nn.Embedding = getattr(self.decoder, self.family.positions)
        return found

    @property
    def windows(self) -> list[int | None]:
        """The window of attention in each layer, as the model's masks have it."""
        config, layers = self.config, len(self.layers)
        window, kinds = (
            getattr(config, "sliding_window", None),
            getattr(config, "layer_types", None),
        )
        if kinds is None:
            return [window] * layers
        return [window if kinds[n] == "sliding_attention" else None for n in range(layers)]

    def scan_problems(self, ranks: int) -> list[str]:
        """Returns why so many ranks cannot share the heads of its mixers with a state."""
        mixers = [*filter(runner_of, self.modules())]
        told = [(type(one).__name__, ranks_problem(scan_shape(one), ranks)) for one in mixers]
        return list(dict.fromkeys(f"{name}: {problem}" for name, problem in told if problem))

    @property
    def only_by_heads(self) -> list[str]:
        """Features of the model, in words, for which ranks share rows by heads alone."""
        capped = getattr(self.config, "attn_logit_softcapping", None)
        sinks = any(name.endswith("sinks") for name, _ in self.named_parameters())
        scans = any(map(runner_of, self.modules()))
        found = {
            "attention with windows, soft caps or sinks": any(self.windows) or capped or sinks,
            "mixers with a state, which scan rows in their order": scans,
        }
        return [what for what, there in found.items() if there]

    def _rotary(self, hidden: Tensor, positions: Tensor) -> dict[str, Any]:
        """Tables of positions by type of layer; one without a name where all have the same."""
        if not self.family.rotary:
            return {}
        rotary = getattr(self.decoder, self.family.rotary)
        if not self.layer_types:  # time, height and width are one in text
            axes = positions.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else positions
            return {"": rotary(hidden, axes)}
        return {kind: rotary(hidden, positions, kind) for kind in sorted({*self.layer_types})}

    def extra_repr(self) -> str:
        return f"family={self.family.title}, output={self.output}"


class PackedPart(PackedModel):
    """One pipeline stage of a packed model: consecutive layers; the first stage has the embedding,
    the last one norm and head.

    Parameters keep the names that they have in the whole. A call takes the hidden states of the
    stage before, and gives those for the next one, but for the loss at the end.
    """

    def __init__(self, whole: PackedModel, numbers: range) -> None:
        """Takes `whole` apart: what other stages have is gone from it."""
        nn.Module.__init__(self)
        self.__dict__.update(vars(whole))
        self._here = numbers
        decoder, family, nothing = self.decoder, self.family, nn.Identity()
        layers = getattr(decoder, family.layers)
        embedding, head = getattr(decoder, family.embedding), self.causal.get_output_embeddings()
        for number in {*range(len(layers))} - {*numbers}:
            layers[number] = nn.Identity()
        self._ties = embedding.weight is head.weight
        if numbers.start and not (self.last and self._ties):
            setattr(decoder, family.embedding, nothing)
        if numbers.start and family.positions:
            setattr(decoder, family.positions, nothing)
        if not self.last:
            setattr(decoder, family.norm, nothing)
            self.causal.set_output_embeddings(nothing)

    @property
    def numbers(self) -> range:
        """Numbers of the layers that are here."""
        return self._here

    @property
    def last(self) -> bool:
        """Whether norm and head are here."""
        return self._here.stop == len(getattr(self.decoder, self.family.layers))

    @property
    def ends(self) -> dict[int, nn.Module]:
        """Those of the whole that are here; none where two stages have the same matrix."""
        here = {} if self._ties else super().ends
        return {n: end for n, end in here.items() if not isinstance(end, nn.Identity)}

    def begin(  # type: ignore[override]  # a stage has an input of its own
        self,
        batch: PackedBatch,
        tokens_in_step: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> State:
        """See `PackedModel.begin`; with the hidden states [T, H] of the stage before."""
        state = super().begin(batch, tokens_in_step)
        return state if hidden is None else {**state, "hidden": hidden}

    def forward(  # type: ignore[override]  # a stage has an input of its own
        self,
        batch: PackedBatch,
        tokens_in_step: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """The loss of the last stage, hidden states [T, H] of any other."""
        return run_stages(self, batch, tokens_in_step, hidden)


@functools.cache
def layer_runner(kind: str, window: int | None) -> Callable[[Any, State], State]:
    """Returns the function that runs a layer of this type, "" where all have one table of
    positions, and window: one function for all of them, so that they are compiled once."""

    def run_layer(layer: Any, state: State) -> State:
        batch: PackedBatch = state["batch"]
        call = LayerCall(batch, window, [], state.get("context"), state.get("tables"))
        given: dict[str, Any] = {BATCH: call}
        if state["rotary"]:
            given["position_embeddings"] = state["rotary"][kind]
        with layer.offload("layer", leave=(state["rotary"], batch)):
            found = layer(
                state["hidden"][None],
                attention_mask=None,
                position_ids=state.get("positions", batch.position_ids)[None],
                past_key_values=None,
                use_cache=False,
                **given,
            )
        refuse_other_ways(layer, call)
        hidden = found[0] if isinstance(found, tuple) else found
        return {**state, "hidden": hidden[0]}

    return run_layer


def noise_of(batch: PackedBatch, embedded: Tensor, alpha: float) -> Tensor:
    """Noise for embeddings [1, T, H] as NEFTune draws it for each document alone."""
    ends = batch.cu_seqlens
    lengths = torch.cat((ends[1:] - ends[:-1], ends[-1:])).clamp(min=1)  # the last of padding
    bounds = alpha / (lengths * embedded.shape[-1]).sqrt()
    drawn = torch.zeros_like(embedded).uniform_(-1, 1)
    return drawn * bounds[batch.document_ids][None, :, None].to(embedded.dtype)


def set_precision(layers: Sequence[Any], precision: str, ends: int) -> list[str]:
    """Let linear layers inside of `layers` multiply by `precision`, but for so many layers at both
    ends. Returns every reason why they cannot; then nothing is changed."""
    if precision not in LAYERS:
        return [f"precision {precision!r} is unknown; known are {', '.join(LAYERS)}"]
    if precision != NATIVE and (problems := precision_problems(layers, precision, ends)):
        return [f"precision = {precision}: {problem}" for problem in problems]
    for number, layer in enumerate(layers):
        inner = precision != NATIVE and ends <= number < len(layers) - ends
        layer.precision = precision if inner else NATIVE
        multiply_by(layer, layer.precision)
    return []


def precision_problems(layers: Sequence[Any], precision: str, ends: int) -> list[str]:
    """Every reason why layers between both ends cannot multiply by `precision`, one in float8."""
    if ends < 0:
        return [f"bf16_ends is {ends}, must not be negative"]
    if 2 * ends >= len(layers):
        return [f"bf16_ends {ends} leaves none of {len(layers)} layers"]
    found: list[str] = []
    for number, layer in enumerate(layers[ends : len(layers) - ends], ends):
        problems, linear = float8_layers(layer, precision)
        if any(hasattr(part, "is_concatenated") for part in layer.modules()):
            problems.append("experts of transformers, and their routers, are not there yet")
        if not linear:
            problems.append("it has no nn.Linear")
        found += [f"layer {number}: {problem}" for problem in problems]
    first = next((value for layer in layers for value in layer.parameters()), None)
    if first is not None and first.device.type == "cuda":
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cuda") else first.dtype
        found += float8_problems(first.device, dtype, precision=precision)
    return found
