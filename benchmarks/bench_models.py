"""The models and microbatches that benchmarks run: known shapes, fresh values, lengths of documents
and which part of a decoder is run.

    model     batch ─▶ embedding ─▶ layers ─▶ norm, head, loss        backward from the loss
    layers    batch, hidden [T, H] ─▶ layers ─▶ hidden [T, H]         backward from a gradient that
                                                                      comes in, [T, H]

Layers alone are what the middle of a pipeline runs, and what figures of other libraries are of: a
head of 152k words costs as much as ten small layers and hides what happens in them.
"""

import copy
import dataclasses
import math
import random
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packgraph.bench.comparison import shared_copy
from packgraph.models.config import DecoderConfig, ExpertConfig
from packgraph.models.decoder import DecoderModel
from packgraph.models.layers.decoder import DecoderLayer
from packgraph.models.stack import DecoderStack
from packgraph.packing.batch import PackedBatch
from packgraph.packing.buckets.cost import FLASH4, CostModel
from packgraph.packing.buckets.lengths import LengthHistogram, PackingPolicy
from packgraph.packing.buckets.planner import BucketRequest, choose_buckets
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack_stream
from packgraph.train.config.presets import hybrid_1_6b, hybrid_tiny, moonlight, moonlight_tiny
from packgraph.train.features.context import decoder_cost
from packgraph.train.plan import FEWEST_SIZES, MULTIPLES

PARTS = ("model", "layers")


def _all_experts(model: DecoderConfig, layers: int) -> DecoderConfig:
    """A slice of `model` whose layers all have experts."""
    return dataclasses.replace(
        model, num_layers=layers, experts=dataclasses.replace(model.experts, first_dense=0)
    )


SHAPES = MappingProxyType(
    {
        "tiny": DecoderConfig(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=64,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            tie_embeddings=True,
        ),
        "qwen3-0.6b": DecoderConfig(
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            tie_embeddings=True,
        ),
        "qwen3-4b": DecoderConfig(
            vocab_size=151_936,
            hidden_size=2560,
            intermediate_size=9728,
            num_layers=8,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            tie_embeddings=True,
        ),
        "qwen3-8b": DecoderConfig(
            vocab_size=151_936,
            hidden_size=4096,
            intermediate_size=12_288,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
        ),
        # The public workload of dynamic context parallelism says layers and hidden size; the rest
        # is chosen here.
        "gpt-2048": DecoderConfig(
            vocab_size=32_768,
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=12,
            num_heads=16,
            num_kv_heads=16,
            head_dim=128,
            qk_norm=False,
        ),
        "moonlight": _all_experts(moonlight().model, 8),
        "moonlight-tiny": _all_experts(moonlight_tiny().model, 2),
        "hybrid": hybrid_1_6b().model,
        "hybrid-dense": dataclasses.replace(
            hybrid_1_6b().model, num_layers=16, pattern="M-M-M-M*-M-M-M-*", experts=ExpertConfig()
        ),
        "hybrid-tiny": dataclasses.replace(hybrid_tiny().model, num_layers=3, pattern="M*E"),
    }
)
LONGEST = 8192
WINDOW = 256  # documents that wait to be packed, as in the trainer
SEEN = 4000  # documents that are planned by; the benchmark's own are others
ANOTHER_SEED = 1_000_003


def shape(name: str, layers: int | None = None) -> DecoderConfig:
    """The shape called `name`, with another number of layers if given."""
    return SHAPES[name] if layers is None else dataclasses.replace(SHAPES[name], num_layers=layers)


def dtype_on(device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def draw_lengths(count: int, limit: int, *, mean: float, sigma: float, seed: int) -> list[int]:
    """`count` lognormal lengths in tokens with that mean and sigma, from 2 to `limit` and
    LONGEST."""
    generator = random.Random(seed)
    drawn = (generator.lognormvariate(math.log(mean) - sigma**2 / 2, sigma) for _ in range(count))
    return [max(2, min(limit, LONGEST, round(length))) for length in drawn]


def draw_batches(
    capacity: Capacity, count: int, vocabulary: int, *, mean: float, sigma: float, seed: int
) -> list[PackedBatch]:
    """`count` packs on the host of documents with lognormal lengths (see `draw_lengths`).

    The same for the same arguments. Packed as the trainer packs its stream, WINDOW documents
    waiting, and taken from its middle: at its beginning long documents go first, and what its end
    leaves over is hardly a pack.
    """
    average = sum(draw_lengths(4000, capacity.bound, mean=mean, sigma=sigma, seed=seed)) / 4000
    in_packs = 2 * count * min(capacity.documents, 1 + capacity.tokens / average)
    lengths = draw_lengths(
        3 * WINDOW + round(in_packs), capacity.bound, mean=mean, sigma=sigma, seed=seed
    )
    generator = np.random.default_rng(seed)
    documents = (generator.integers(vocabulary, size=length) for length in lengths)
    packs: list[PackedBatch] = []
    passed = 0
    for pack in pack_stream(documents, [capacity], window=WINDOW):
        packs += [pack] if passed >= 2 * WINDOW else []
        passed += pack.num_documents
        if len(packs) == count:
            return packs
    raise AssertionError(f"{len(lengths)} documents made only {len(packs)} of {count} packs")


def planned_buckets(
    config: DecoderConfig,
    tokens: int,
    most: int,
    attention: str,
    documents: int | None,
    *,
    mean: float,
    sigma: float,
    seed: int,
) -> tuple[Capacity, ...]:
    """The buckets that a run on documents of such lengths would choose for itself, ascending; the
    last one holds what all others hold.

    tokens: of a row. most: buckets. attention: the backend, which says what a place for a document
    costs. documents: the most that a row may have; None leaves that to the lengths.
    """
    multiple = next(
        tile
        for tile in MULTIPLES
        if tokens % tile == 0 and (tile == 1 or tokens >= FEWEST_SIZES * tile)
    )
    request = BucketRequest(
        policy=PackingPolicy(documents=WINDOW),
        max_tokens=tokens,
        max_buckets=most,
        multiple=multiple,
        layers=config.num_layers,
        cost=decoder_cost(config, measured=FLASH4 if attention == "flash" else CostModel()),
    )
    lengths = draw_lengths(SEEN, tokens, mean=mean, sigma=sigma, seed=seed + ANOTHER_SEED)
    found = choose_buckets(LengthHistogram.of(lengths), request).capacities
    limit = max(bucket.documents for bucket in found) if documents is None else documents
    buckets = {Capacity(bucket.tokens, min(bucket.documents, limit)) for bucket in found}
    return tuple(sorted(buckets | {Capacity(tokens, limit)}))


def refit(batch: PackedBatch, capacity: Capacity) -> PackedBatch:
    """The same documents, on the host, in another shape. Raises ValueError when they do not fit."""
    documents = batch.tokens[: batch.num_tokens].split(list(batch.lengths))
    return PackedBatch.build(documents, capacity)


def zero_gradients(modules: Iterable[torch.nn.Module]) -> None:
    """Give every parameter a `.grad` of zeros, in place where there is one."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()


def squared_gradients(modules: Iterable[torch.nn.Module]) -> float:
    """Sum of the squares of all gradients, in float32; waits for the device."""
    norms = [
        torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        for module in modules
        for parameter in module.parameters()
        if parameter.grad is not None
    ]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


def build_part(
    part: str, config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> DecoderStack:
    """The part of a decoder of this shape, with fresh values."""
    if part == "model":
        return DecoderModel(config, device=device, dtype=dtype)
    with torch.device("meta"):
        layers = {number: DecoderLayer(config, number) for number in range(config.num_layers)}
        model = DecoderStack(config, layers, first=False, last=False)
    model.to(dtype).to_empty(device=device)
    model.reset_parameters(seed=0)
    return model


def twin(model: DecoderStack, attention: str) -> DecoderStack:
    """A `shared_copy` with another attention backend (a name, or auto)."""
    config = dataclasses.replace(model.config, attention_backend=attention)
    return shared_copy(model, {id(model.config): config})


class TimedPart:
    """Forward and backward of a part for microbatches of at most `tokens` places, at least `real`
    of them used.

    What comes in from other parts of the model is drawn once; its gradient is zero from row `real`
    on, so that it is zero in all padding, whatever the shape that a way runs its documents in.
    """

    def __init__(self, model: DecoderStack, tokens: int, real: int, seed: int = 0) -> None:
        self.model: torch.nn.Module = model
        self.config, self.real = model.config, real
        self.hidden: Tensor | None = None
        self.gradient: Tensor | None = None
        if not model.first:
            like = next(model.parameters())
            generator = torch.Generator(like.device).manual_seed(seed)
            shape = tokens, model.config.hidden_size
            self.hidden, self.gradient = (
                torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
                for _ in range(2)
            )
            self.gradient[real:] = 0.0

    def by(self, model: torch.nn.Module) -> "TimedPart":
        """The same work with the same inputs, done by another form of the model."""
        other = copy.copy(self)
        other.model = model
        return other

    def arguments(self, batch: PackedBatch) -> tuple[Any, ...]:
        """The model's arguments for one microbatch. Hidden states are a new leaf each time."""
        if self.hidden is None:
            return (batch,)
        return batch, None, self.hidden[: batch.capacity.tokens].detach().requires_grad_()

    def incoming(self, batch: PackedBatch) -> Tensor | None:
        """The gradient of the output for one microbatch; None: the output is a loss."""
        return None if self.gradient is None else self.gradient[: batch.capacity.tokens]

    def score(self, out: Tensor) -> float:
        """Number that tells outputs apart: a loss itself, of hidden states the root mean square of
        rows with a document."""
        out = out.detach()
        return float(out if out.dim() == 0 else out[: self.real].float().square().mean().sqrt())
