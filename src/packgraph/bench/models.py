"""The models and microbatches that benchmarks run: known shapes, fresh values, documents of lognormal length."""
import dataclasses
import math
import random
import zlib
from collections.abc import Iterable
from types import MappingProxyType

import torch

from packgraph.models.dense import DenseConfig, DenseModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack

SHAPES = MappingProxyType({
    "tiny": DenseConfig(vocab_size=320, hidden_size=32, intermediate_size=64, num_layers=4, num_heads=4,
                        num_kv_heads=2, head_dim=8, tie_embeddings=True),
    "qwen3-0.6b": DenseConfig(vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28,
                              num_heads=16, num_kv_heads=8, head_dim=128, tie_embeddings=True),
    "4b-8layers": DenseConfig(vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_layers=8,
                              num_heads=32, num_kv_heads=8, head_dim=128, tie_embeddings=True),
    "qwen3-8b": DenseConfig(vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_layers=36,
                            num_heads=32, num_kv_heads=8, head_dim=128),
})
LONGEST = 8192


def shape(name: str, layers: int | None = None) -> DenseConfig:
    """The shape called `name`, with another number of layers if given."""
    return SHAPES[name] if layers is None else dataclasses.replace(SHAPES[name], num_layers=layers)


def dtype_on(device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class FreshModel(DenseModel):
    """A decoder whose fresh values are drawn on its own device: large shapes are ready in a second."""

    def reset_parameters(self, seed: int) -> None:
        """As DecoderStack does it, but not the same values on every kind of device."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() < 2:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                    continue
                generator = torch.Generator(parameter.device)
                generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)


def draw_batches(capacity: Capacity, count: int, vocabulary: int, *, mean: float, sigma: float, seed: int
                 ) -> list[PackedBatch]:
    """`count` packs on the host of documents with lognormal lengths (of that mean and sigma, at most LONGEST).

    The same for the same arguments. Half as many documents again are drawn and packed by best fit; the fullest packs
    are taken, in their order, so that what the end of a stream leaves over is not among them.
    """
    generator = random.Random(seed)
    limit = min(LONGEST, capacity.bound)
    documents: list[list[int]] = []
    total = 0
    while total < 1.5 * count * capacity.tokens or len(documents) < count:
        length = round(generator.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))
        length = max(2, min(limit, length))
        documents.append([generator.randrange(vocabulary) for _ in range(length)])
        total += length
    packs = pack(documents, [capacity])
    kept = sorted(sorted(range(len(packs)), key=lambda index: -packs[index].num_tokens)[:count])
    return [packs[index] for index in kept]


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
    norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float32) for module in modules
             for parameter in module.parameters() if parameter.grad is not None]
    return float(torch.stack(norms).square().sum()) if norms else 0.0
