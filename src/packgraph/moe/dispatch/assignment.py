"""Which of a layer's experts are on which rank: equal parts in order, expert e on rank e // (E /
ranks)."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ExpertAssignment:
    """num_experts: of the layer. ranks: that share them; rank: of this process among them."""

    num_experts: int
    ranks: int
    rank: int

    @staticmethod
    def over(num_experts: int, group: dist.ProcessGroup | None) -> "ExpertAssignment":
        """The experts of a layer shared by the ranks of `group`; None = this process has all.
        Raises ValueError."""
        ranks, rank = (
            (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        )
        if problem := assignment_problem(num_experts, ranks):
            raise ValueError(problem)
        return ExpertAssignment(num_experts, ranks, rank)

    @property
    def count(self) -> int:
        """Experts of each rank."""
        return self.num_experts // self.ranks

    @property
    def first(self) -> int:
        """The first expert of this rank."""
        return self.rank * self.count


def assignment_problem(num_experts: int, ranks: int) -> str | None:
    """Why `ranks` ranks cannot share the experts of a layer, None where they can."""
    if num_experts % ranks == 0:
        return None
    return (
        f"{num_experts} experts cannot be shared equally by {ranks} ranks: parallel.ep must divide "
        "their number"
    )
