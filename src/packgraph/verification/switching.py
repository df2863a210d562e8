"""Steps that are hard on dynamic context parallelism: every microbatch has other groups than the
one before.

    wave    0   1   2   3     4 ...
    ranks   1   4   2   1     4          per row, on 4 ranks: whatever a graph or a communicator has
                                         left behind meets another size at once

And rows as they rarely come: one document that fills all ranks to the last token, as many documents
of one or two tokens as there are places, rows without any, lengths that no number of ranks divides.
"""

import random
from collections.abc import Callable, Sequence

from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

WAVES = (3, 4, 1, 6, 2)  # of the steps, in turn


class SwitchingSteps:
    """Endless steps for `world` ranks with `rank_tokens` tokens each; a `train.step.StepSource`.

    sizes: of groups, ascending. places: for documents, as a row may have them. The same for the
    same arguments.
    """

    def __init__(
        self,
        world: int,
        rank_tokens: int,
        sizes: Sequence[int],
        places: Sequence[int],
        vocabulary: int,
        seed: int = 1,
    ) -> None:
        self._world, self._rank_tokens, self._places = world, rank_tokens, sorted(places)
        self._sizes = [sizes[0], *reversed(sizes[1:])]
        self._vocabulary, self._draw = vocabulary, random.Random(seed)
        self._waves = self._steps = 0

    def next_step(self) -> list[PackedBatch]:
        """The packs of a step, wave by wave and by first rank."""
        packs: list[PackedBatch] = []
        for _ in range(WAVES[self._steps % len(WAVES)]):
            size = self._sizes[self._waves % len(self._sizes)]
            packs += [self._row(size * self._rank_tokens) for _ in range(self._world // size)]
            self._waves += 1
        self._steps += 1
        return packs

    def _row(self, tokens: int) -> PackedBatch:
        kinds: list[Callable[[int], list[int]]] = [
            self._some,
            lambda room: [room],
            self._tiny,
            lambda room: [],
        ]
        lengths = self._draw.choices(kinds, (3, 1, 1, 1))[0](tokens)
        places = next(places for places in self._places if places >= len(lengths))
        capacity = Capacity(tokens, places)
        if not lengths:
            return PackedBatch.empty(capacity)
        documents = [
            [self._draw.randrange(self._vocabulary) for _ in range(length)] for length in lengths
        ]
        return PackedBatch.build(documents, capacity)

    def _some(self, room: int) -> list[int]:
        found: list[int] = []
        while room > 1 and len(found) < self._places[-1]:
            found.append(min(room, 2 + int(self._draw.paretovariate(0.8) * 4) | 1))
            room -= found[-1]
        return found

    def _tiny(self, room: int) -> list[int]:
        found = [self._draw.randint(1, 2) for _ in range(min(self._places[-1], room // 2))]
        return [2, *found[1:]]
