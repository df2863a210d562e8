"""Microbatches of a trainer as packed batches, and capacities for them.

    examples of a data loader -- PackingCollator --> {"packs": [PackedBatch, ...], "report": ...}

Labels in examples stand where Hugging Face has them, at their token; a packed batch has them
shifted. Nothing here needs transformers.
"""

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from packgraph.packing.capacity import Capacity, read_capacities
from packgraph.packing.document import BOUNDARIES, read_item
from packgraph.packing.pack import Overlong, PackReport, check_choice, pack

PACKS, REPORT = "packs", "report"
QUANTILES = (0.5, 0.9, 1.0)  # of microbatches that have a capacity of that size
STEP = 64  # tokens that sizes of capacities are multiples of


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
        """The packs of `examples` under `packs`, and their `PackReport` under `report`.

        examples: what `packgraph.pack` takes, one by one; of mappings, entries that say nothing
        about tokens are ignored.
        """
        report = PackReport()
        packs = pack(examples, self.capacities, overlong=self.overlong, report=report)
        return {PACKS: packs, REPORT: report}


def microbatch_capacities(
    dataset: Any, examples: int, others: Iterable[Any] = ()
) -> list[Capacity]:
    """Capacities for microbatches of so many consecutive examples of `dataset`: half of the
    microbatches, nine in ten, and all of them fit in one row. All lengths are read.

    others: data sets whose single documents must fit, too. Raises ValueError for a data set whose
    lengths are not known beforehand, or one without documents.
    """
    rows = [row for row in document_lengths(dataset) if row]
    if not rows:
        raise ValueError("the data set for training has no documents")
    groups = [
        [length for row in rows[first : first + examples] for length in row]
        for first in range(0, len(rows), examples)
    ]
    every = [rows, *map(document_lengths, others)]
    longest = max(length for some in every for row in some for length in row)
    totals = np.quantile([sum(group) for group in groups], QUANTILES, method="higher")
    sizes = {-(-max(int(total), longest) // STEP) * STEP for total in totals}
    documents = max(map(len, groups))
    return [Capacity(size, documents) for size in sorted(sizes)]


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
