"""Verify a model of whose training state only one fits: the eager run first, then the graph run.

    eager run   step 1 .. n    ─▶ digests of every moment, on the host; then all its memory is freed
    graph run   step 1 .. n    ─▶ digests of the same moments, compared step by step

The invariant: the report is that of the lockstep comparison (`verify.py`), except that a difference
names step, kind and tensor, but no elements: those of the eager run are gone. What is compared and
when is the same (`compare_points`), each run begins with the same seeds and keeps its random
states to itself anyway, and a step that lacks room for experts is made again by the run that lacks
it.

A `Digest` is 128 bits of a tensor, made where the tensor lies, to compare it with one that does not
exist at the same time:

    a tensor's bits     w0 w1 w2 ... wn | w0 w1 w2 ... wn | w0 w1 0      words of 32 bits in row-major order, in slices
    keys of level 0     k0 k1 k2 ... kn   the same for every slice       two rows of odd numbers of 64 bits
    sums of a slice     k0 w0 + k1 w1 + ... + kn wn modulo 2^64          one for each row of keys
    sums of a tensor    those of its only slice; or those of the tensor that the sums of its slices
                        make, by the keys
                        of the next level

The invariant: equal shape, dtype and bits give equal sums on every device and at every stride,
since integers are added up modulo 2^64, in whatever order.

How likely is it that different tensors have equal sums? Let word i of a slice differ, by d: a
number other than 0 and below 2^32 in size, so 2^t times an odd number, with t at most 31. If no
other word differs, k_i d is not 0 modulo 2^64, as k_i is odd: the sums differ for certain.
Otherwise they are equal only where k_i d is what the other words make up for, and at most 2^t of
the 2^63 odd numbers k_i give that: a chance of 2^-32 at most, and of 2^-64 for both rows, whose
keys are drawn apart (2^-126 where d is odd). Words that change places are such a difference. Each
further level, whose keys are drawn anew, adds the same chance once more; tensors of up to 2^42
words have two levels. Keys are random, but always the same ones: no model is made to meet them.
"""  # noqa: E501

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from packgraph.graphs.memory.allocator import free_memory
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pieces import rectangles
from packgraph.train.config.sections import TrainConfig
from packgraph.train.feed import Packs
from packgraph.verification.compare import Difference, as_integers, first_unequal
from packgraph.verification.compared_run import (
    ComparedRun,
    Moment,
    Step,
    compare_points,
    some_in_flight,
    steps_of,
)
from packgraph.verification.verify import (
    SILENT,
    VerificationProgress,
    VerifyReport,
    with_graphs,
    without_graphs,
)

SLICE_WORDS = (
    2**22
)  # 16 MiB: more than the GPU needs to be busy; keys and products of a slice are 64 MiB each
ROWS = 2
SEED = 20_260_714
DIFFERS = (
    "its bits differ (of the eager run there is only a digest, so neither elements nor sizes can "
    "be told)"
)


@dataclass(frozen=True)
class Digest:
    """Digest of a tensor, on the host."""

    shape: torch.Size
    dtype: torch.dtype
    sums: tuple[int, ...]


def first_digest_difference(
    step: int, expected: Mapping[str, Digest], found: Mapping[str, Digest]
) -> Difference | None:
    """The first name (in `expected`'s order) whose digests are not equal; None when all are."""
    return first_unequal(
        step, expected, found, lambda left, right: None if left.sums == right.sums else DIFFERS
    )


class Digester:
    """Makes digests on `device`, and keeps the keys for them there.

    slice_words: even, at least 8; those with other slices make other digests.
    """

    def __init__(self, device: torch.device, slice_words: int = SLICE_WORDS) -> None:
        assert slice_words >= 8 and slice_words % 2 == 0, (
            "a word of 64 bits must not be cut, a level must be smaller"
        )
        self._device, self._slice_words = device, slice_words
        self._keys: list[Tensor] = []

    def digests(self, moments: Iterable[Moment[Tensor]]) -> list[Moment[Digest]]:
        """The digests of all that is held at each of these moments, taken while it lasts. Waits for
        the device once, at the end."""
        taken = [
            {
                kind: {
                    name: (tensor.shape, tensor.dtype, self.sums(tensor))
                    for name, tensor in tensors.items()
                }
                for kind, tensors in moment.items()
            }
            for moment in moments
        ]
        launched = [
            sums for moment in taken for values in moment.values() for *_, sums in values.values()
        ]
        known = iter(torch.stack(launched).tolist())
        return [
            {
                kind: {
                    name: Digest(shape, dtype, tuple(next(known)))
                    for name, (shape, dtype, _) in values.items()
                }
                for kind, values in moment.items()
            }
            for moment in taken
        ]

    @torch.no_grad()
    def sums(self, tensor: Tensor) -> Tensor:
        """The sums of a digest, int64 [2] on the device, where the device may still be at work on
        them."""
        return self._sums(tensor, 0)

    def _sums(self, tensor: Tensor, level: int) -> Tensor:
        values = as_integers(tensor)
        if values.is_contiguous():
            values = values.view(-1)
        keys = self._keys_of(level)
        count, longest = values.numel(), self._slice_words * 4 // values.element_size()
        slices = (
            self._words(values, start, min(start + longest, count))
            for start in range(0, count, longest)
        )
        found = [(keys[:, : len(words)] * words).sum(dim=1) for words in slices]
        if len(found) > 1:
            return self._sums(torch.stack(found), level + 1)
        return found[0] if found else torch.zeros(ROWS, dtype=torch.int64, device=self._device)

    def _words(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Elements start .. stop in row-major order as words, int32, the last one filled up with
        zeros."""
        num_bytes = (stop - start) * values.element_size()
        words = torch.zeros(-(-num_bytes // 4), dtype=torch.int32, device=self._device)
        place, position = words.view(torch.uint8)[:num_bytes].view(values.dtype), 0
        for corner, sizes in rectangles(start, stop, values.shape):
            part = values[
                tuple(slice(first, first + size) for first, size in zip(corner, sizes, strict=True))
            ]
            place[position : position + math.prod(sizes)].view(sizes).copy_(part)
            position += math.prod(sizes)
        return words

    def _keys_of(self, level: int) -> Tensor:
        """int64 [2, slice_words], drawn on the host, so that they are the same on every device."""
        while len(self._keys) <= level:
            generator = torch.Generator().manual_seed(SEED + len(self._keys))
            drawn = torch.randint(
                -(2**63), 2**63 - 1, (ROWS, self._slice_words), generator=generator
            )
            self._keys.append((drawn | 1).to(self._device))
        return self._keys[level]


Digests = list[list[Moment[Digest]]]  # of every step, of its moments


def verify_sequential(
    title: str,
    config: TrainConfig,
    open_packs: Callable[[], Packs],
    device: torch.device,
    *,
    mesh: Mesh | None = None,
    in_flight: Callable[[int], bool] = some_in_flight,
    budget: Callable[[int], int] | None = None,
    progress: VerificationProgress = SILENT,
) -> VerifyReport:
    """Variant of `verify` with one run in memory at a time.

    open_packs: the packs from their beginning; called once for each run, and must give the same
    both times.
    """
    apart = SequentialRuns(open_packs, device, mesh, in_flight, budget, progress)
    return apart.graph_run(title, config, apart.eager_run(config))


@dataclass(frozen=True)
class SequentialRuns:
    """Runs on the same packs, one in memory at a time; the arguments are those of
    `verify_sequential`.

    One eager run is enough for graph runs of all granularities, with and without a stash.
    """

    open_packs: Callable[[], Packs]
    device: torch.device
    mesh: Mesh | None = None
    in_flight: Callable[[int], bool] = some_in_flight
    budget: Callable[[int], int] | None = None
    progress: VerificationProgress = SILENT

    @cached_property
    def _digester(self) -> Digester:
        return Digester(self.device)

    def eager_run(self, config: TrainConfig) -> Digests:
        """Train eagerly; what `graph_run` compares with."""
        with self._run(without_graphs(config)) as side:
            return [digests for _, digests in self._steps("eager run", side, config)]

    def graph_run(self, title: str, config: TrainConfig, expected: Digests) -> VerifyReport:
        """Train with graphs, and compare with an eager run of as many steps."""
        report = VerifyReport(title)
        with self._run(with_graphs(config)) as side:
            for eager, (step, graph) in zip(
                expected, self._steps("graph run", side, config), strict=True
            ):
                for before, now in zip(eager, graph, strict=True):
                    report.compare(step, before, now, first_digest_difference)
                report.count(step)
            report.read_counts(side)
        return report

    def _steps(
        self, phase: str, side: ComparedRun, config: TrainConfig
    ) -> Iterator[tuple[Step, list[Moment[Digest]]]]:
        steps = steps_of(config, self.open_packs(), self.in_flight, self.budget)
        for step in self.progress.of(phase, config.run.steps, steps):
            yield step, self._digester.digests(compare_points(side, step, config))

    def _run(self, config: TrainConfig) -> contextlib.closing[ComparedRun]:
        """A run, where nothing is left of the one before."""
        free_memory(self.device)
        return contextlib.closing(ComparedRun(config, self.device, self.mesh))
