"""The models and microbatches that benchmarks run: known shapes, fresh values, documents of
lognormal length."""

import dataclasses
import math
import random
import zlib
from collections.abc import Iterable
from types import MappingProxyType

import numpy as np
import torch

from packgraph.models.config import ExpertConfig
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.models.initial import DrawsParameters
from packgraph.models.layers.moe import moe_blocks
from packgraph.models.stack import DecoderStack
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack_stream
from packgraph.train.presets import hybrid_1_6b, hybrid_tiny, moonlight, moonlight_tiny


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


def shape(name: str, layers: int | None = None) -> DecoderConfig:
    """The shape called `name`, with another number of layers if given."""
    return SHAPES[name] if layers is None else dataclasses.replace(SHAPES[name], num_layers=layers)


def dtype_on(device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class FreshModel(DecoderModel):
    """A decoder whose fresh values are drawn on its own device: large shapes are ready in a
    second."""

    def reset_parameters(self, seed: int) -> None:
        """As DecoderStack does it, but not the same values on every kind of device."""
        draw_parameters(self, seed)


def draw_parameters(model: DecoderStack, seed: int) -> None:
    """Give a decoder fresh values, drawn on its own device: the same for a name and a seed on that
    kind of device."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator = torch.Generator(parameter.device)
            generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            parameter.normal_(0.0, model.config.initializer_range, generator=generator)
        for name, module in model.named_modules():
            if isinstance(module, DrawsParameters):
                generator = torch.Generator(model.rotary.inv_freq.device)
                module.draw_parameters(generator.manual_seed(zlib.crc32(f"{seed} {name}".encode())))
        for block in moe_blocks([model]):  # buffers, which may lie in fresh memory
            block.gate.reset_balance()
            block.forget_demand()


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
