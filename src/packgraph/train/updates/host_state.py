r"""Optimizer state in host memory, brought to the device piece by piece for each update.

    back   | piece 0 | piece 1 |    | piece 2 |    ...       host ─▶ device
    main             | AdamW 0 | AdamW 1 |    | AdamW 2 |
    out                        | piece 0 |    | piece 1 |    device ─▶ host

Two sets of buffers take turns, so the device holds two pieces of the state, whatever the model.
Each piece is updated by the kernel that updates all of it on the device (AdamW, element by
element), so the bits are the same. Copies in both directions run at the same time; how they are
ordered is said in `graphs/copy_streams.py`. The update takes as long as the slower of the two: 12
bytes a parameter each way.

After an update copies to the host may be under way. Whoever reads the state waits for them
(`settle`); the next update waits by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from packgraph.graphs.copy_streams import Copy, CopyStreams, HostMemory
from packgraph.graphs.cuda.copy_streams import pinned
from packgraph.parallel.flat_buffers import GradientBucket
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.updates.adamw import (
    MEANS,
    Numbers,
    fused_adamw,
    in_one_kernel,
    narrow_adamw,
)
from packgraph.train.updates.rule import clipped, slices_of

PIECE = 2**25  # elements: 128 MiB of float32, long enough for the full speed of a link
MASTER = "master"


@dataclass(frozen=True)
class StatePiece:
    """Elements `part` of a rank's own part of a span; its state by name on the host."""

    span: GradientBucket
    part: slice
    hosts: dict[str, HostMemory]

    @property
    def gradients(self) -> Tensor:
        """Of the span's dtype, a view."""
        return self.span.own_gradients[self.part]

    @property
    def parameters(self) -> Tensor:
        """Of the span's dtype, a view."""
        return self.span.own_parameters[self.part]


class HostState:
    """AdamW of spans whose state, masters among it, is on the host: an `UpdateRule`.

    Args:
        spans: What this rank updates.
        copy_streams: Of eager work on the spans' device.
        config: Of AdamW.
        piece: Elements that are brought to the device at a time.
    """

    def __init__(
        self,
        spans: Sequence[GradientBucket],
        copy_streams: CopyStreams,
        config: OptimizerConfig,
        piece: int = PIECE,
    ) -> None:
        self._streams, self._config, self._piece = copy_streams, config, piece
        self._spans = [(span, _host_tensors(span)) for span in spans]
        self._pieces = [made for each in self._spans for made in self._cut(*each)]
        device = spans[0].parameters.device
        longest = max(made.gradients.numel() for made in self._pieces)
        self._buffers = [
            {
                name: torch.empty(longest, dtype=torch.float32, device=device)
                for name in (MASTER, *MEANS)
            }
            for _ in range(2)
        ]
        self._leaving: list[list[Copy]] = [[], []]  # copies to the host from each set of buffers

    def state_tensors(self) -> dict[str, Tensor]:
        """As `UpdateRule.state_tensors`, on the host, all of it live. The host waits for the
        device."""
        self._settle()
        return {
            f"{member.name}.{key}": span.part(member, flat)
            for span, hosts in self._spans
            for member in span.members
            for key, flat in hosts.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing: they are live."""

    def _settle(self) -> None:
        """Wait until the host has what was updated. The host waits for the device."""
        for copies in self._leaving:
            self._wait(copies)
        device = self._buffers[0][MASTER].device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    @torch.no_grad()
    def step(
        self, learning_rate: Tensor, steps: Tensor, scale: Tensor | None, blocked: Tensor | None
    ) -> None:
        """As `UpdateRule.step`, but cannot be captured."""
        narrow = any(in_one_kernel(piece.parameters) for piece in self._pieces)
        numbers = Numbers.of(learning_rate, steps, scale, blocked, self._config) if narrow else None
        ordinal = steps + 1
        arriving = self._bring(0)
        for number, piece in enumerate(self._pieces):
            self._wait(arriving)
            if number + 1 < len(self._pieces):
                arriving = self._bring(number + 1)
            if numbers is not None and in_one_kernel(piece.parameters):
                self._update_narrow(number, numbers)
            else:
                self._update(number, learning_rate, ordinal, scale, blocked)
            buffers = self._of(number)
            self._leaving[number % 2] = [
                self._streams.out([_bytes(buffers[name])], host)
                for name, host in piece.hosts.items()
            ]

    def _bring(self, number: int) -> list[Copy]:
        """Queue the state of a piece, into buffers that an earlier one has left."""
        self._wait(self._leaving[number % 2])
        buffers = self._of(number)
        return [
            self._streams.back(host, [_bytes(buffers[name])])
            for name, host in self._pieces[number].hosts.items()
        ]

    def _update_narrow(self, number: int, numbers: Numbers) -> None:
        piece, buffers = self._pieces[number], self._of(number)
        narrow_adamw(
            piece.parameters,
            piece.gradients,
            buffers[MASTER],
            buffers[MEANS[0]],
            buffers[MEANS[1]],
            numbers,
            self._config,
            decays=piece.span.decays,
        )

    def _update(
        self,
        number: int,
        learning_rate: Tensor,
        ordinal: Tensor,
        scale: Tensor | None,
        blocked: Tensor | None,
    ) -> None:
        piece, buffers = self._pieces[number], self._of(number)
        weight = piece.parameters
        master = buffers[MASTER] if MASTER in piece.hosts else weight
        fused_adamw(
            [master],
            [clipped(piece.gradients, scale)],
            [buffers[MEANS[0]]],
            [buffers[MEANS[1]]],
            self._config,
            learning_rate,
            ordinal,
            blocked,
            decays=piece.span.decays,
        )
        if master is not weight:
            weight.copy_(master)

    def _of(self, number: int) -> dict[str, Tensor]:
        """The buffers of a piece, as long as it is."""
        length = self._pieces[number].gradients.numel()
        return {name: flat[:length] for name, flat in self._buffers[number % 2].items()}

    def _wait(self, copies: list[Copy]) -> None:
        for copy in copies:
            self._streams.wait(copy)
        copies.clear()

    def _cut(self, span: GradientBucket, flats: Mapping[str, Tensor]) -> Iterator[StatePiece]:
        for part in parts_of(span, self._piece):
            hosts = {name: HostMemory((_bytes(flat[part]),)) for name, flat in flats.items()}
            yield StatePiece(span, part, hosts)


def parts_of(span: GradientBucket, piece: int = PIECE) -> list[slice]:
    """Pieces of this rank's own part of a span, in elements."""
    return list(slices_of(span.own_gradients.numel(), piece))


def _host_tensors(span: GradientBucket) -> dict[str, Tensor]:
    """Pinned beside CUDA: running means of zeros, and where the span is narrower than float32 a
    copy of its values."""
    own = span.own_parameters
    names = MEANS if own.dtype == torch.float32 else (*MEANS, MASTER)
    nbytes = own.numel() * torch.float32.itemsize
    made = {
        name: (
            pinned(nbytes).view(torch.float32)
            if own.is_cuda
            else torch.empty(own.numel(), dtype=torch.float32)
        )
        for name in names
    }
    for name, flat in made.items():
        flat.copy_(own.detach()) if name == MASTER else flat.zero_()
    return made


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)
