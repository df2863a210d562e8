"""A plan of buckets as a table for people, and as values for programs."""

from typing import Any

from packgraph.packing.buckets.cost import GIBIBYTE
from packgraph.packing.buckets.lengths import PackedRows
from packgraph.packing.buckets.planner import BucketPlan
from packgraph.packing.buckets.sets import Fills
from packgraph.viz.drawing import aligned, counted

FEWEST_ROWS = 2  # held out, of which a share is told
HEADER = ("bucket", "rows", "tokens used", "documents used", "pool")


def describe_plan(plan: BucketPlan, unseen: PackedRows) -> str:
    """The chosen buckets, what they cost and what they leave empty. unseen: held out documents,
    packed into them."""
    request, buckets, cost = plan.request, len(plan.capacities), plan.request.cost
    held_out = f"{unseen.padding:.2%} in {unseen.rows:,} rows of documents that were held out; "
    if unseen.rows < FEWEST_ROWS:
        held_out = ""
    lines = [
        *aligned([HEADER, *_table(plan)]),
        "",
        f"padding   {plan.sample.padding:.2%} of the places for tokens; {held_out}"
        f"{plan.alone.padding:.2%} with the largest bucket alone",
        f"time      {plan.sample.above_bound(cost):.1%} above rows in shapes of their own, by the "
        "model of costs; "
        f"{plan.alone.above_bound(cost):.1%} with the largest bucket alone",
        f"memory    {plan.memory_bytes / GIBIBYTE:.2f} GiB predicted: "
        f"{counted(request.slots, 'slot')} with a pool of "
        f"{max(plan.pool_bytes) / GIBIBYTE:.2f} GiB and the graphs of {counted(buckets, 'bucket')}",
        f"capture   {plan.capture_seconds:.1f} s predicted: {counted(buckets, 'bucket')} x "
        f"{counted(request.layers, 'layer')} x {counted(request.slots, 'slot')}",
        *(f"note      {note}" for note in plan.notes),
        f"use       --graph.capacities {capacities_option(plan)}",
    ]
    return "\n".join(lines) + "\n"


def plan_values(plan: BucketPlan, unseen: PackedRows) -> dict[str, Any]:
    """The plan as JSON-able values: tokens, bytes, seconds, and shares between 0 and 1."""
    buckets = [
        {
            "tokens": capacity.tokens,
            "documents": capacity.documents,
            "rows": _rows(fills) / plan.sample.rows,
            "tokens_used": _mean(fills, 0),
            "documents_used": _mean(fills, 1),
            "pool_bytes": pool,
        }
        for (capacity, fills), pool in zip(plan.sample.fills, plan.pool_bytes)
    ]
    cost = plan.request.cost
    return {
        "capacities": capacities_option(plan),
        "buckets": buckets,
        "padding": plan.sample.padding,
        "padding_held_out": unseen.padding,
        "padding_alone": plan.alone.padding,
        "above_bound": plan.sample.above_bound(cost),
        "above_bound_alone": plan.alone.above_bound(cost),
        "memory_bytes": plan.memory_bytes,
        "graph_bytes": plan.request.graph_bytes,
        "slots": plan.request.slots,
        "layers": plan.request.layers,
        "capture_seconds": plan.capture_seconds,
        "notes": list(plan.notes),
    }


def capacities_option(plan: BucketPlan) -> str:
    """The buckets as the value of an option."""
    return ",".join(f"{found.tokens}x{found.documents}" for found in plan.capacities)


def _table(plan: BucketPlan) -> list[tuple[str, ...]]:
    return [
        (
            f"{capacity.tokens}x{capacity.documents}",
            f"{_rows(fills) / plan.sample.rows:.1%}",
            *(
                (f"{_mean(fills, 0) / capacity.tokens:.1%}", f"{_mean(fills, 1):.1f}")
                if fills
                else ("-", "-")
            ),
            f"{pool / GIBIBYTE:.2f} GiB",
        )
        for (capacity, fills), pool in zip(plan.sample.fills, plan.pool_bytes)
    ]


def _rows(fills: Fills) -> int:
    return sum(fills.values())


def _mean(fills: Fills, axis: int) -> float:
    """Tokens (axis 0) or documents (1) of a row on average; 0 without rows."""
    return sum(fill[axis] * rows for fill, rows in fills.items()) / max(1, _rows(fills))
