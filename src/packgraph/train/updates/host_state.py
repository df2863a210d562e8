r"""Optimizer state in host memory, brought to the device piece by piece for each update; what fits
stays on the device.

    back   | piece 0 | piece 1 |    | piece 2 |    ...       host ─▶ device
    main   | stays   | AdamW 0, stays | AdamW 1, stays | ...
    out                        | piece 0 |    | piece 1 |    device ─▶ host

A span is cut once, between two parameters: the state of those before is on the device, of those
behind on the host. So whatever stays, a parameter's state is one tensor (or the `Pieces` of this
rank's part), and checkpoints do not depend on it.

Two sets of buffers take turns, so the device holds two pieces of what travels, whatever the model.
Each piece is updated by the kernel that updates all of it on the device (AdamW, element by
element), so the bits are the same. Copies in both directions run at the same time; how they are
ordered is said in `graphs/copy_streams.py`. What stays is updated in equal shares while a piece is
on its way, which takes a twentieth of the time of a copy of as many elements. So the update takes
as long as the slower direction: 12 bytes each way for every element that travels.

After an update copies to the host may be under way. Whoever reads the state waits for them;
the next update waits by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from packgraph.graphs.copy_streams import Copy, CopyStreams, HostMemory
from packgraph.graphs.cuda.copy_streams import pinned
from packgraph.graphs.memory.budget import shown
from packgraph.parallel.flat_buffers import GradientBucket
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.updates.adamw import MASTER, MEANS, update_of
from packgraph.train.updates.rule import UpdateRule, slices_of

PIECE = 2**25  # elements: 128 MiB of float32, long enough for the full speed of a link
BUFFERS = 2  # sets, of a piece each, that take turns


@dataclass(frozen=True)
class StatePart:
    """State of elements `part` of a rank's own part of a span: of neighbouring parameters, or a
    piece of that. flats: float32 by name, where they are for good. hosts: the same memory for
    copies, where that is the host; else it is the span's device."""

    span: GradientBucket
    part: slice
    flats: dict[str, Tensor]
    hosts: dict[str, HostMemory]

    @property
    def nbytes(self) -> int:
        """Bytes of all flats."""
        return sum(flat.nbytes for flat in self.flats.values())

    @property
    def size(self) -> int:
        """Number of its elements."""
        return self.part.stop - self.part.start


class HostState(UpdateRule):
    """AdamW of spans whose state, masters among it, is on the host, but for what fits on the
    device: an `UpdateRule`.

    Args:
        spans: What this rank updates.
        copy_streams: Of eager work on the spans' device.
        config: Of AdamW.
        resident: Bytes of state that may stay on the device. Ranks may differ in it.
        piece: Elements that are brought to the device at a time.
    """

    def __init__(
        self,
        spans: Sequence[GradientBucket],
        copy_streams: CopyStreams,
        config: OptimizerConfig,
        resident: int = 0,
        piece: int = PIECE,
    ) -> None:
        super().__init__(())
        self._streams, self._config = copy_streams, config
        self._device = spans[0].parameters.device
        self._staying, self._moving = list[StatePart](), list[StatePart]()
        for span in spans:
            end = _boundary(span, resident)
            size = span.own_parameters.numel()
            here = _state_part(span, slice(0, end), on_host=False)
            self._staying.append(here)
            self._moving.append(_state_part(span, slice(end, size), on_host=True))
            resident -= here.nbytes
        self._pieces = [made for part in self._moving for made in _cut(part, piece)]
        beside = [made for part in self._staying for made in _cut(part, piece)]
        self._beside = _shares(beside, max(1, len(self._pieces)))
        longest = max((made.size for made in self._pieces), default=0)
        self._buffers = [
            {
                name: torch.empty(longest, dtype=torch.float32, device=self._device)
                for name in (MASTER, *MEANS)
            }
            for _ in range(BUFFERS)
        ]
        # Copies to the host from each set of buffers.
        self._leaving: list[list[Copy]] = [[] for _ in range(BUFFERS)]

    @property
    def resident(self) -> int:
        """Bytes of state that stay on the device."""
        return sum(part.nbytes for part in self._staying)

    @property
    def moved(self) -> int:
        """Bytes of state on the host, which each update copies in both directions."""
        return sum(part.nbytes for part in self._moving)

    def places(self) -> str:
        """State on the device and on the host, in words."""
        return f"{shown(self.resident)} on the device, {shown(self.moved)} on the host"

    def state_tensors(self) -> dict[str, Tensor]:
        """See `UpdateRule.state_tensors`; on the device and on the host, all of it live. The host
        waits for the device."""
        for copies in self._leaving:
            self._wait(copies)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        found: dict[str, Tensor] = {}
        for here, there in zip(self._staying, self._moving, strict=True):
            span = here.span
            for member in span.members:
                held = here if _start(span, member.place) < here.part.stop else there
                for key, flat in held.flats.items():
                    found[f"{member.name}.{key}"] = span.part(member, flat, held.part.start)
        return found

    @torch.no_grad()
    def step(
        self, learning_rate: Tensor, steps: Tensor, scale: Tensor | None, blocked: Tensor | None
    ) -> None:
        """Implements `UpdateRule.step`, but cannot be captured."""
        spans = [part.span for part in self._staying]
        update = update_of(self._config, spans, learning_rate, steps, scale, blocked)
        arriving = self._bring(0)
        for number, beside in enumerate(self._beside):
            for piece in beside:
                update(piece.span, piece.part, piece.flats)
            if number == len(self._pieces):  # nothing travels
                continue
            self._wait(arriving)
            arriving = self._bring(number + 1)
            piece, buffers = self._pieces[number], self._of(number)
            update(piece.span, piece.part, buffers)
            self._leaving[number % BUFFERS] = [
                self._streams.out([_bytes(buffers[name])], host)
                for name, host in piece.hosts.items()
            ]

    def _bring(self, number: int) -> list[Copy]:
        """Queue the state of a piece, if there is one, into buffers that an earlier one has
        left."""
        if number == len(self._pieces):
            return []
        self._wait(self._leaving[number % BUFFERS])
        buffers = self._of(number)
        return [
            self._streams.back(host, [_bytes(buffers[name])])
            for name, host in self._pieces[number].hosts.items()
        ]

    def _of(self, number: int) -> dict[str, Tensor]:
        """The buffers of a piece, as long as it is."""
        piece, buffers = self._pieces[number], self._buffers[number % BUFFERS]
        return {name: buffers[name][: piece.size] for name in piece.flats}

    def _wait(self, copies: list[Copy]) -> None:
        for copy in copies:
            self._streams.wait(copy)
        copies.clear()


def _cut(part: StatePart, piece: int) -> Iterator[StatePart]:
    first = part.part.start
    for inside in slices_of(part.part.stop - first, piece):
        flats = {name: flat[inside] for name, flat in part.flats.items()}
        place = slice(first + inside.start, first + inside.stop)
        yield StatePart(part.span, place, flats, _hosts(flats) if part.hosts else {})


def _shares(pieces: Sequence[StatePart], count: int) -> list[Sequence[StatePart]]:
    """`pieces` in `count` shares of about as many."""
    ends = [len(pieces) * number // count for number in range(count + 1)]
    return [pieces[start:stop] for start, stop in pairwise(ends)]


def _start(span: GradientBucket, place: slice) -> int:
    """Start of a parameter in this rank's own part."""
    return min(max(place.start - span.own.start, 0), span.own.stop - span.own.start)


def _boundary(span: GradientBucket, most: int) -> int:
    """Elements at the beginning of this rank's own part that are whole parameters, or the whole
    part, and have at most that many bytes of state."""
    ends = [0, *(_start(span, m.place) for m in span.members), span.own_parameters.numel()]
    of_element = len(_names(span)) * torch.float32.itemsize
    return max(end for end in ends if end * of_element <= most)


def _names(span: GradientBucket) -> Sequence[str]:
    """Names of AdamW's state: with a float32 copy of the values where the span is narrower."""
    return MEANS if span.own_parameters.dtype == torch.float32 else (*MEANS, MASTER)


def _state_part(span: GradientBucket, part: slice, *, on_host: bool) -> StatePart:
    """Running means of zeros and masters, pinned beside CUDA where they are on the host."""
    own = span.own_parameters[part]
    flats = {}
    for name in _names(span):
        if on_host and own.is_cuda:
            flat = pinned(own.numel() * torch.float32.itemsize).view(torch.float32)
        else:
            flat = torch.empty_like(own, dtype=torch.float32)
        flats[name] = flat.copy_(own.detach()) if name == MASTER else flat.zero_()
    return StatePart(span, part, flats, _hosts(flats) if on_host else {})


def _hosts(flats: Mapping[str, Tensor]) -> dict[str, HostMemory]:
    return {name: HostMemory((_bytes(flat),)) for name, flat in flats.items()}


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)
