"""Documents of a trainer as packed batches, and capacities for them.

    evaluation   examples of a microbatch -- PackingCollator --> {"packs": [PackedBatch, ...], ...}
    training     examples of a step, of all its microbatches -- pack_step --> packs

Labels in examples stand where Hugging Face has them, at their token; a packed batch has them
shifted. Nothing here needs transformers.
"""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from packgraph.packing.batch import PackedBatch
from packgraph.packing.bins import pack_lengths
from packgraph.packing.buckets.cost import FLASH4
from packgraph.packing.buckets.lengths import LengthHistogram, PackingPolicy
from packgraph.packing.buckets.planner import BucketRequest, choose_buckets
from packgraph.packing.capacity import Capacity, CapacitySet, read_capacities
from packgraph.packing.document import BOUNDARIES, Document, read_item
from packgraph.packing.pack import Overlong, PackReport, check_choice, fitting_parts

EXAMPLES, PACKS, REPORT, CONTENTS = "examples", "packs", "report", "contents"
MOST = 4  # capacities that are chosen: each takes a capture, and a compilation
WORTH = 0.01  # share of the places, or of the time, that a further one must save
MOST_STEPS = 500  # of the data that are packed to see how many documents stand in a row


class PackingCollator:
    """Packs the examples of a microbatch, as `collate_fn` of a data loader.

    Args:
        capacities: The static shape or shapes that packs may have.
        overlong: What becomes of a document longer than every capacity: `error`, `split` or `drop`.

    Raises:
        ValueError: If `capacities` or `overlong` is illegal.

    Examples:
        >>> from packgraph.integrations.transformers import PackingCollator
        >>> collate = PackingCollator(packgraph.Capacity(tokens=8, documents=4))
        >>> found = collate([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8]}])
        >>> [batch.labels.tolist() for batch in found["packs"]]
        [[6, 7, -100, -100, -100, -100, -100, -100]]
    """

    def __init__(
        self, capacities: Capacity | Iterable[Capacity], *, overlong: Overlong = "error"
    ) -> None:
        check_choice(overlong)
        self.capacities, self.overlong = read_capacities(capacities), overlong

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """The packs of `examples` under `packs`, their `PackReport` under `report`, and under
        `contents` what stands in each pack: pairs of an example's number and a document.

        examples: what `packgraph.pack` takes, one by one; of mappings, entries that say nothing
        about tokens are ignored.
        """
        return self.pack(read_examples(examples)[EXAMPLES])

    def pack(self, examples: Sequence[Sequence[Document]]) -> dict[str, Any]:
        """Does the same for examples whose documents were read."""
        allowed, report = CapacitySet(self.capacities), PackReport()
        parts = [
            (number, part)
            for number, documents in enumerate(examples)
            for document in documents
            for part in fitting_parts(
                document, allowed.longest, self.overlong, report, f"document {number}"
            )
        ]
        packs, contents = list[PackedBatch](), list[list[tuple[int, Document]]]()
        for row in pack_lengths([len(part) for _, part in parts], allowed, window=None):
            contents.append([parts[member] for member in row.members])
            documents = [document for _, document in contents[-1]]
            packs.append(PackedBatch.of_documents(documents, row.capacity(allowed)))
            report.count_pack(len(documents), row.tokens, packs[-1].capacity.tokens)
        return {PACKS: packs, REPORT: report, CONTENTS: contents}

    def pack_step(
        self, examples: Sequence[Sequence[Document]]
    ) -> tuple[list[PackedBatch], PackReport]:
        """Packs the documents of all microbatches of a step together. Examples that are rows of
        several documents stay as they are where that takes fewer rows."""
        ways = [[examples]]
        if any(len(documents) > 1 for documents in examples):
            ways.append([[documents] for documents in examples])
        found = []
        for groups in ways:
            made, total = [self.pack(group) for group in groups], PackReport()
            for one in made:
                add_report(total, one[REPORT])
            found.append(([pack for one in made for pack in one[PACKS]], total))
        return min(found, key=lambda way: (way[1].packs, way[1].places))


def add_report(total: PackReport, more: PackReport) -> None:
    """Adds the counts of `more` to `total`."""
    known, added = total.state_dict(), more.state_dict()
    total.load_state_dict({name: known[name] + added[name] for name in known})


def read_examples(examples: Sequence[Any]) -> dict[str, list[list[Document]]]:
    """Reads the documents of each example, as `collate_fn` of a loader whose steps are packed as a
    whole."""
    return {EXAMPLES: [list(read_item(item, f"document {n}")) for n, item in enumerate(examples)]}


def step_capacities(
    dataset: Any, examples: int, microbatches: int, others: Iterable[Any] = ()
) -> list[Capacity]:
    """Chooses capacities for steps of `microbatches` times `examples` examples of `dataset`.

    The largest is at most that of the largest microbatch, so a step takes about the memory that it
    takes unpacked. Sums of capacities lie close to what steps have, so rows are full.

    Args:
        dataset: For training. All lengths are read.
        examples: Of a microbatch.
        microbatches: Of a step.
        others: Data sets whose single documents must fit, too.

    Raises:
        ValueError: If the lengths of a data set are not known beforehand, or there are no
            documents.
    """
    rows = [row for row in document_lengths(dataset) if row]
    if not rows:
        raise ValueError("the data set for training has no documents")
    totals, steps = [sum(row) for row in rows], _groups(rows, examples * microbatches)
    longest = max(totals + [n for some in others for row in document_lengths(some) for n in row])
    largest = max(longest, *map(sum, _groups(totals, examples)))
    lengths, cost = LengthHistogram.of(totals), replace(FLASH4, document_us=0.0)
    plans = [
        choose_buckets(
            lengths,
            BucketRequest(
                policy=PackingPolicy(documents=examples * microbatches, batches=True),
                max_tokens=tokens,
                max_buckets=MOST,
                cost=cost,
                worth=WORTH,
            ),
        )
        for tokens in sorted({largest, max(longest, largest // 2)})
    ]
    best = min(plans, key=lambda plan: plan.sample.cost_us(cost))
    sizes = CapacitySet([Capacity(size.tokens, size.tokens) for size in best.capacities])
    documents = max(
        len(row.members)
        for step in steps[:: -(-len(steps) // MOST_STEPS)]
        for row in pack_lengths([n for lengths in step for n in lengths], sizes, window=None)
    )
    return [Capacity(size.tokens, min(documents, size.tokens)) for size in sizes.sorted]


def _groups(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[first : first + size] for first in range(0, len(values), size)]


def document_lengths(dataset: Any) -> list[list[int]]:
    """Lengths of the documents in each row.

    Raises ValueError for a row without tokens or with padding, and for a data set whose rows cannot
    be known beforehand.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"capacities must be given, because {type(dataset).__name__} does not tell the lengths "
            "of its documents beforehand: capacities=[packgraph.Capacity(tokens=..., "
            "documents=...)]"
        )
    if (found := _lengths_of_table(dataset)) is not None:
        return found
    return [
        [len(document) for document in read_item(dataset[index], f"row {index} of the data set")]
        for index in range(len(dataset))
    ]


def _lengths_of_table(dataset: Any) -> list[list[int]] | None:
    """The lengths, from columns alone; None where rows must be looked at one by one."""
    columns = set(getattr(dataset, "column_names", ())) & {*BOUNDARIES, "attention_mask"}
    if not is_table(dataset) or columns - {"seq_lengths", "attention_mask"}:
        return None
    table = dataset.select_columns(["input_ids", *columns]).with_format("arrow")[:]
    compute = importlib.import_module("pyarrow.compute")
    if "attention_mask" in columns:
        masks = table["attention_mask"]
        if compute.min(compute.list_flatten(masks)).as_py() == 0:
            row = next(row for row, mask in enumerate(masks.to_pylist()) if not all(mask))
            raise ValueError(
                f"row {row} of the data set: attention_mask has zeros, so input_ids holds padding; "
                "pass it without padding"
            )
    if "seq_lengths" in columns:
        found: list[list[int]] = table["seq_lengths"].to_pylist()
        return found
    lengths: list[int] = compute.list_value_length(table["input_ids"]).to_pylist()
    if 0 in lengths:
        raise ValueError(f"row {lengths.index(0)} of the data set is empty; leave it out")
    return [[length] for length in lengths]


def is_table(dataset: Any) -> bool:
    """Tells whether `dataset`, of the library `datasets`, has a column of token ids as read."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "with_format")):
        return False
    return "input_ids" in dataset.column_names and dataset.format["type"] != "custom"
