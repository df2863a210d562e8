"""Do ranks that hold copies of a tensor, or of a part of it, hold the same bits?

Replicas have copies of all parameters, tensor parallel ranks of what is not split, pipeline stages
of what is tied. Whatever updates copies must give all of them the same bits: a difference in the
last one would grow unseen.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pieces import parts_of
from packgraph.verification.compare import bits


def copies(mesh: Mesh, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, bool]]:
    """The name of every tensor of which several ranks hold the same part, and whether all copies
    are equal.

    tensors: what this rank has, by name. Collective. What is compared is the sum of all bits as
    integers: two copies that differ by chance in more than one element and have equal sums would
    not be told apart.
    """
    mine = {
        (name, corner, tuple(part.shape)): int(bits(part).sum(dtype=torch.int64))
        for name, tensor in tensors.items()
        for corner, part in parts_of(tensor)
    }
    every: list[Any] = [mine]
    if mesh.world > 1:
        every = [None] * mesh.world
        dist.all_gather_object(every, mine)
    found: dict[Any, list[int]] = defaultdict(list)
    for sums in every:
        for place, value in sums.items():
            found[place].append(value)
    equal: dict[str, bool] = {}
    for (name, _, _), values in found.items():
        if len(values) > 1:
            equal[name] = equal.get(name, True) and len(set(values)) == 1
    yield from equal.items()
