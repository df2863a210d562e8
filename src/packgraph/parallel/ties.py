"""Parameters that several stages of a pipeline hold: a tied embedding is the first one's table and
the last one's head.

    first stage   embed_tokens   gradient of the rows it looked up ──┐
                                                                     ├─▶ one sum, the same bits on
                                                                     both ─▶ one update
    last stage    embed_tokens   gradient of the head ───────────────┘

What has the same name on several ranks of a pipeline is one parameter. The invariant: copies start
equal (fresh and loaded values go by name), get equal gradients and are updated alike, so they stay
equal in every bit.
"""

from collections.abc import Sequence

import torch.distributed as dist

from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pipeline.links import pipelines


def shared_names(
    names: Sequence[Sequence[str]], pipeline: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """name -> the ranks of `pipeline` (global, in stage order) that hold it, where there is more
    than one.

    names: by rank, of all ranks. In order of the names, so every process gets the same.
    """
    holders = {
        name: tuple(rank for rank in pipeline if name in set(names[rank]))
        for name in sorted({name for rank in pipeline for name in names[rank]})
    }
    return {name: ranks for name, ranks in holders.items() if len(ranks) > 1}


def tie_groups(mesh: Mesh, names: Sequence[str]) -> dict[str, dist.ProcessGroup]:
    """The parameters of this rank that other stages hold too, each with the group of the ranks that
    hold it.

    names: of this rank's parameters. Collective: every process of the mesh calls it. The first
    stage that holds a parameter is rank 0 of its group.
    """
    if mesh.size("pp") == 1:
        return {}
    everyones: list[list[str]] = [[] for _ in range(mesh.world)]
    dist.all_gather_object(everyones, list(names))
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    mine: dict[str, dist.ProcessGroup] = {}
    for pipeline in pipelines(mesh):
        for name, ranks in shared_names(everyones, pipeline).items():
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks))
            if mesh.rank in ranks:
                mine[name] = groups[ranks]
    return mine
