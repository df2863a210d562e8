"""Who runs which packs of a step.

    replicas    every pack goes to one replica, largest first                       `step.own_share`
    groups      packs stand in the order of the plan, and each is run by the ranks  `groups_share`
                of its group: how many follows from its tokens, which of them from its place in
                    the step

The invariant: every rank knows the share of every other, from host ints alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packgraph.packing.batch import PackedBatch
from packgraph.parallel.mesh import Mesh
from packgraph.train.step import own_share


@dataclass(frozen=True)
class MicrobatchAssignment:
    """How steps are shared out. replicas: ranks, or groups of them, with microbatches of their own;
    replica: this one.

    together: replicas that share experts; see `own_share`. rank_tokens: of any row, where rows are
    those of groups of a changing size (dynamic context parallelism) and a replica is a rank of dp x
    cp; None: replicas are those of dp.
    """

    replicas: int = 1
    replica: int = 0
    together: int = 1
    rank_tokens: int | None = None

    @staticmethod
    def of(mesh: Mesh, rank_tokens: int | None = None) -> "MicrobatchAssignment":
        """That of a run over `mesh`."""
        if rank_tokens is None:
            return MicrobatchAssignment(mesh.size("dp"), mesh.place["dp"], mesh.size("ep"))
        place = mesh.place["dp"] * mesh.size("cp") + mesh.place["cp"]
        return MicrobatchAssignment(
            mesh.size("dp") * mesh.size("cp"), place, rank_tokens=rank_tokens
        )

    def share(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """This replica's packs of a step."""
        return self.share_of(batches, self.replica)

    def share_of(self, batches: Sequence[PackedBatch], replica: int) -> list[PackedBatch]:
        """The packs of a step that a replica runs, in its order. Raises ValueError for groups that
        are no waves."""
        if self.rank_tokens is None:
            return own_share(batches, self.replicas, replica, self.together)
        return [
            batch
            for batch, ranks in groups_of(batches, self.rank_tokens, self.replicas)
            if replica in ranks
        ]


def groups_of(
    batches: Sequence[PackedBatch], rank_tokens: int, world: int
) -> Iterator[tuple[PackedBatch, range]]:
    """Every pack of a planned step with the ranks of its group, of `world`.

    Packs stand wave by wave, and in a wave by their first rank; so their sizes, tokens /
    rank_tokens, say the rest. Raises ValueError where they do not add up to whole waves of aligned
    groups.
    """
    first = 0
    for batch in batches:
        size, rest = divmod(batch.capacity.tokens, rank_tokens)
        if rest or not size or first % size or first + size > world:
            raise ValueError(
                f"a pack of {batch.capacity.tokens} tokens cannot start at rank {first} of {world} "
                "ranks "
                f"with {rank_tokens} tokens each: groups of a step must fill wave after wave"
            )
        yield batch, range(first, first + size)
        first = (first + size) % world
    if first:
        raise ValueError(
            f"the last wave of a step ends at rank {first} of {world}: its groups must cover all "
            "ranks"
        )
