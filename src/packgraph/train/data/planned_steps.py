"""The stream of a run whose steps are planned as a whole: which documents share a row, on how many
ranks.

    documents ─▶ wait, in order of arrival ─▶ parallel/context/plan.py for one step ─▶ its packs,
    wave by wave

Enough documents wait to fill a step, and `data.window` more for its gaps; what finds no room waits
for the next one, at the front. All ranks read the whole stream and make the same plan, so nothing
is sent. The state is that of `Microbatches`, to be taken between two steps: of plans it knows only
the costs that the run has measured, so that a run that goes on makes the plans that it would have
made; it may go on with other ranks.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.document import Document
from packgraph.parallel.context.plan import ContextPlan, plan_context
from packgraph.parallel.context.request import ContextCost, ContextRequest
from packgraph.train.data.config import DataConfig
from packgraph.train.data.microbatches import Microbatches
from packgraph.train.data.source import DocumentSource
from packgraph.train.data.tokenizer import Tokenizer

Tag = tuple[int, int]


class PlannedSteps(Microbatches):
    """Planned steps on the host; as `Microbatches`, but `next_step` takes the place of `next`.

    plan: of the step that was taken last, None before the first. Its figures are summed up for
    `summary`. request: of the next step.
    """

    def __init__(
        self,
        config: DataConfig,
        source: DocumentSource,
        tokenizer: Tokenizer,
        capacities: Iterable[Capacity],
        request: ContextRequest,
        multiple: int = 1,
    ) -> None:
        """capacities: of the largest group. request: of every step; its waves are the microbatches
        of a rank. multiple: of places that documents take up in any row."""
        self.request = self._estimated = request
        self.plan: ContextPlan | None = None
        self._balances: list[float] = []
        self._sizes: Counter[int] = Counter()
        super().__init__(config, source, tokenizer, capacities, multiple)

    def __next__(self) -> PackedBatch:
        """Raises TypeError: single packs of a planned step mean nothing."""
        raise TypeError("these packs are planned a step at a time; take them by next_step()")

    def next_step(self) -> list[PackedBatch]:
        """The packs of the next step, wave by wave and by first rank; empty at the end of the data.

        Raises DataError for a document that cannot be used.
        """
        while not self._enough() and self._add_next():
            pass
        waiting = self._waiting
        if not len(waiting):
            return []
        self.plan = plan_context(
            [self._capacities.places(length) for length in waiting.lengths], self.request
        )
        groups = [group for wave in self.plan.waves for group in wave]
        self._balances.append(self.plan.balance)
        self._sizes.update(group.size for group in groups)
        packs = [
            self._pack([waiting.documents[place] for place in group.documents], group.bucket)
            for group in groups
        ]
        waiting.keep(self.plan.left)
        return packs

    @property
    def is_measured(self) -> bool:
        """Whether plans go by costs that were measured, not by estimates."""
        return self.request is not self._estimated

    def plan_by(self, cost: ContextCost) -> None:
        """Plan by these costs, which were measured, from the next step on."""
        self.request = replace(self._estimated, cost=cost)

    def state_dict(self) -> dict[str, Any]:
        """As Microbatches, with the costs that were measured, if any were."""
        return super().state_dict() | (
            {"cost": vars(self.request.cost)} if self.is_measured else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As Microbatches. How rows are cut follows from this run, not from the one that the costs
        were measured in."""
        self.request = self._estimated
        super().load_state_dict(state)
        if "cost" in state:
            self.plan_by(ContextCost(**state["cost"] | {"zigzag": self._estimated.cost.zigzag}))

    def summary(self) -> dict[str, Any]:
        """Of all steps planned by this process: balance, the lower bound of a step's time over its
        prediction, and how many rows were shared by how many ranks; by which costs the last of them
        were planned."""
        if not self._balances:
            return {}
        return {
            "cost": vars(self.request.cost),
            "cost_is_measured": self.is_measured,
            "balance_mean": sum(self._balances) / len(self._balances),
            "balance_least": min(self._balances),
            "rows_by_ranks": {str(size): count for size, count in sorted(self._sizes.items())},
        }

    def _pack(self, documents: Sequence[Document], bucket: Capacity) -> PackedBatch:
        batch = PackedBatch.of_documents(documents, bucket)
        self.report.count_pack(batch.num_documents, batch.num_tokens, bucket.tokens)
        return batch

    def _enough(self) -> bool:
        """Whether documents wait that fill a step, and a window of others behind them."""
        assert self.request.waves is not None
        room = self.request.waves * self.request.world * self.request.tokens
        return self._waiting.behind(room) >= self._config.window

    def _new_window(self) -> "InOrder":
        self._waiting = InOrder()
        return self._waiting


class InOrder:
    """Documents that wait in order of arrival, with tags."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.lengths: list[int] = []
        self._tags: list[Tag] = []
        self._through: list[int] = []  # tokens of all documents up to each

    def __len__(self) -> int:
        return len(self.documents)

    def add(self, document: Document, tag: Tag) -> None:
        """Let a document wait."""
        self._through.append((self._through[-1] if self._through else 0) + len(document))
        self.documents.append(document)
        self.lengths.append(len(document))
        self._tags.append(tag)

    def tags(self) -> Iterator[Tag]:
        """Of all that wait, in order."""
        return iter(self._tags)

    def behind(self, tokens: int) -> int:
        """How many documents wait behind the first ones that have `tokens` tokens together."""
        return len(self) - bisect_left(self._through, tokens) - 1

    def keep(self, places: Sequence[int]) -> None:
        """Go on with the documents at these places, in this order."""
        kept = [(self.documents[place], self._tags[place]) for place in places]
        self.documents, self.lengths, self._tags, self._through = [], [], [], []
        for document, tag in kept:
            self.add(document, tag)
