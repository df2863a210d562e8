r"""AdamW whose two running means take one byte an element each, and a float32 scale a block of 256
(Dettmers et al. 2021, arXiv:2110.02861).

    flat    |       block 0       |       block 1       | ...     256 elements of a rank's own part
    scale   |   largest |x| of 0  |   largest |x| of 1  | ...     float32
    codes   | c c c c c c c c c c | c c c c c c c c c c | ...     uint8: table[c] is about x / scale

Tables are those of dynamic quantisation: seven powers of ten, and the more steps between two of
them the larger they are. They differ from the paper's in two places. Both ends of a table are
exactly 1, so that values that were quantised have the same codes again: a checkpoint holds float32
values by parameter, which any layout can load, and the layout that saved them gets the same bits.
The table of squares has no 0 (Li et al. 2023, arXiv:2309.01507, section 3.2): a square that became
0 would make the next step of its element huge, one that became the smallest value makes it small.

Blocks lie in flat spans, so parts of spans (ZeRO stage 1) and of matrices serve as whole ones do.
Another layout has other blocks, where values are rounded once more. Vectors (norms, biases) are few
and stay with `AdamW`. Temporary memory is that of a piece (`PIECE`).
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from packgraph.parallel.pieces import parts_of
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.updates.adamw import MEANS
from packgraph.train.updates.rule import Updated, UpdateRule, put, slices_of, write_parameters

BLOCK = 256  # elements
BYTES = 2 * (1 + 4 / BLOCK)  # of state, of an element
PASSES = 20  # over state and masters that its operations take, counted
POWERS = 7  # of ten
LEAST_SCALE = 1e-30  # below it a block is 0; products with a table's smallest are normal above it


@functools.lru_cache
def magnitudes(doubled: bool) -> tuple[float, ...]:
    """Positive values of a table, sorted, the last of them 1. Between two powers of ten there are
    1, 2, 4, .. 64 steps, or twice as many."""
    found: list[float] = []
    for power in range(POWERS):
        steps = 2 ** (power + doubled)
        edges = [0.1 + 0.9 * edge / steps for edge in range(steps + 1)]
        means = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        found += [mean * 10.0 ** (power - POWERS + 1) for mean in means]
    return (*found, 1.0) if doubled else (*found[:-1], 1.0)


class CodeTable(NamedTuple):
    """The values of 255 codes, float32, sorted, and the 254 edges between those that are nearest
    to a number."""

    values: Tensor
    edges: Tensor

    @staticmethod
    def of(values: Sequence[float], device: torch.device) -> "CodeTable":
        edges = [(low + high) / 2 for low, high in itertools.pairwise(values)]
        both = [torch.tensor(v, dtype=torch.float32, device=device) for v in (values, edges)]
        return CodeTable(*both)

    @staticmethod
    def signed(device: torch.device) -> "CodeTable":
        """From -1 to 1, with 0."""
        half = magnitudes(doubled=False)
        return CodeTable.of((*(-value for value in reversed(half)), 0.0, *half), device)

    @staticmethod
    def unsigned(device: torch.device) -> "CodeTable":
        """From 3.25e-7 to 1."""
        return CodeTable.of(magnitudes(doubled=True), device)


class Quantized:
    """Values of so many elements: codes and scales. At first all are 0."""

    def __init__(self, size: int, table: CodeTable) -> None:
        device = table.values.device
        self._table = table
        zero = torch.bucketize(torch.zeros(1, device=device), table.edges).byte()
        self.codes = zero.expand(size).clone()
        self.scales = torch.zeros(math.ceil(size / BLOCK), dtype=torch.float32, device=device)

    def values(self, part: slice) -> Tensor:
        """Float32. part: whole blocks."""
        found = self._table.values.index_select(0, self.codes[part].int())
        scales = self.scales[_blocks(part)]
        return found.view(len(scales), -1).mul_(scales[:, None]).view(-1)

    def set(self, part: slice, values: Tensor, blocked: Tensor | None = None) -> None:
        """Quantise float32 `values` into a part of whole blocks, if not blocked."""
        scales, codes = self.scales[_blocks(part)], self.codes[part]
        blocks = values.view(len(scales), -1)
        largest = blocks.abs().amax(-1)
        largest.masked_fill_(largest < LEAST_SCALE, 0.0)
        shares = blocks / largest.masked_fill(largest == 0, 1.0)[:, None]
        found = torch.bucketize(shares, self._table.edges, out_int32=True).view(-1).byte()
        put(codes, found, blocked)
        put(scales, largest, blocked)


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, math.ceil(part.stop / BLOCK))


def parts_in_blocks(size: int) -> list[slice]:
    """Pieces of whole blocks; what is less than a block comes last, alone."""
    whole = size - size % BLOCK
    return [*slices_of(whole), *([slice(whole, size)] if whole < size else [])]


class AdamW8bit(UpdateRule):
    """Updates of spans that decay."""

    def __init__(self, updated: Sequence[Updated], config: OptimizerConfig) -> None:
        super().__init__(updated)
        self._config = config
        device = self.updated[0].values.device
        tables = (CodeTable.signed(device), CodeTable.unsigned(device))
        self._quantized = [
            [Quantized(each.values.numel(), table) for table in tables] for each in self.updated
        ]

    @torch.no_grad()
    def step(
        self, learning_rate: Tensor, steps: Tensor, scale: Tensor | None, blocked: Tensor | None
    ) -> None:
        """See `UpdateRule.step`."""
        (beta1, beta2), config = self._config.betas, self._config
        ordinal = steps + 1
        rate = learning_rate / (1 - torch.pow(beta1, ordinal))
        correction = 1 - torch.pow(beta2, ordinal)
        for each, (means, squares) in zip(self.updated, self._quantized, strict=True):
            kept = 1 - learning_rate * (config.weight_decay if each.span.decays else 0.0)
            for part in parts_in_blocks(each.values.numel()):
                weight, gradient = each.values[part], each.gradient(part, scale)
                mean = means.values(part).lerp_(gradient, 1 - beta1)
                square = squares.values(part).mul_(beta2)
                square.addcmul_(gradient, gradient, value=1 - beta2)
                divisor = (square / correction).sqrt_().add_(config.eps)
                updated = weight * kept - (mean / divisor).mul_(rate)
                means.set(part, mean, blocked)
                squares.set(part, square, blocked)
                put(weight, updated, blocked)
        write_parameters(self.updated)

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies of the running means in float32, in host memory: as a whole they would take four
        times the state's memory on the device. `load` takes them back."""
        found: dict[str, Tensor] = {}
        for each, state in zip(self.updated, self._quantized, strict=True):
            for key, quantized in zip(MEANS, state, strict=True):
                flat = torch.empty(each.values.numel(), dtype=torch.float32)
                for part in parts_in_blocks(flat.numel()):
                    flat[part] = quantized.values(part).cpu()
                found |= each.named(key, flat)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Quantise them."""
        for each, state in zip(self.updated, self._quantized, strict=True):
            for key, quantized in zip(MEANS, state, strict=True):
                flat = torch.zeros(each.values.numel(), dtype=torch.float32)
                for name, place in each.named(key, flat).items():
                    for (_, into), (_, loaded) in zip(
                        parts_of(place), parts_of(tensors[name]), strict=True
                    ):
                        into.copy_(loaded)
                for part in parts_in_blocks(flat.numel()):
                    quantized.set(part, flat[part].to(quantized.scales.device))
