"""The key of a call: everything that Python branches on or that a launch bakes.

Tensors count by shape, dtype, device and whether they need a gradient; their values are data and never part of the
key. Everything else among the arguments (numbers, strings, capacities, optional arguments left out) counts by value.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from packgraph.graphs import fallback
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity


class _Structure:
    """A hashable tree structure (torch's own is not hashable when it holds dicts)."""

    def __init__(self, spec: TreeSpec) -> None:
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash((self.spec.num_leaves, self.spec.num_nodes))


@dataclass(frozen=True)
class Signature:
    """key: hashable identity of a call's variant. nbytes: bytes of its tensor arguments, the size of its bucket."""

    key: tuple[Any, ...]
    nbytes: int


def modes(device_type: str) -> tuple[Any, ...]:
    """Global settings that change which kernels run."""
    autocast = torch.is_autocast_enabled(device_type)
    return (
        torch.get_autocast_dtype(device_type) if autocast else None,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def signature(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> Signature:
    """The signature of a call. Raises TypeError for an argument that cannot be part of a key (unhashable)."""
    leaves, spec = tree_flatten((args, kwargs))
    facts: list[Any] = []
    nbytes = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            facts.append((tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad))
            nbytes += leaf.numel() * leaf.element_size()
        else:
            hash(leaf)
            facts.append((type(leaf), leaf))
    return Signature((_Structure(spec), tuple(facts), modes(device_type)), nbytes)


def _batches(args: Any) -> list[PackedBatch]:
    is_batch = lambda leaf: isinstance(leaf, PackedBatch)  # noqa: E731
    return [leaf for leaf in tree_leaves(args, is_leaf=is_batch) if is_batch(leaf)]


def undeclared(args: tuple[Any, ...], kwargs: dict[str, Any], capacities: Sequence[Capacity]) -> str | None:
    """Why this call lies outside the declared capacities, or None. Without declared capacities every shape may be."""
    if not capacities:
        return None
    batches = _batches((args, kwargs))
    for batch in batches:
        if batch.capacity not in capacities:
            most = max(capacity.documents for capacity in capacities)
            return fallback.DOCUMENTS if batch.capacity.documents > most else fallback.UNDECLARED
    if batches:
        return None
    first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
    tokens = {capacity.tokens for capacity in capacities}
    if first is None or first.dim() == 0 or not set(first.shape[:2]) & tokens:
        return fallback.UNKNOWN_SHAPE
    return None

