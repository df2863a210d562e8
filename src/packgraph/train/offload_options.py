"""What a run can be told about activations that wait on the host."""

from dataclasses import dataclass

from packgraph.graphs.memory.budget import budget_bytes
from packgraph.offloading.knobs import OffloadKnobs


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Which activations wait in pinned host memory between forward and backward, to fit longer
    rows. Until there is a plan all that may move does, so the host needs room for what `modules`
    save.

    modules: activations that may move to the host; of attn_norm, qkv_linear, core_attn, attn_proj,
        mamba_norm, mamba_scan, mlp_norm, mlp_act, expert_fc1 and moe_act; none = nothing. With
        graph.compile any of them means all that a layer saves.
    budget: device memory that these activations may hold at a time, as 4GiB or 512MiB; of groups of
        all microbatches in flight together: what has to move for that with the least waiting moves.
        With one microbatch in flight they may hold more wherever all else was seen to take less
        than at its most. none = no such limit.
    lost: share of a microbatch's time that may be lost to waiting for copies, such as 0.01: what
        saves most memory within that moves, by what graphs take once they have run for two steps;
        that may be less than at first. none = the options below alone decide, else they say what
        may move.
    fraction: of the groups (one module of one layer each) that may move, those first in the forward
        move.
    min_bytes: tensors and groups smaller than that stay.
    margin: groups that stay because the backward needs them first; none = the last one of each
        module.
    delta_bytes_per_pp_rank: bytes more that stay on each later rank of a pipeline, which has less
        in flight.
    in_flight: copies to the host at one time; more hide more of the copying and hold more memory.
    delay_until_replay: copies of eager stages between graphs are queued after the next graph's
        launch.
    """

    modules: tuple[str, ...] = ()
    budget: str | None = None
    lost: float | None = None
    fraction: float = 1.0
    min_bytes: int = 2**20
    margin: int | None = None
    delta_bytes_per_pp_rank: int = 0
    in_flight: int = 2
    delay_until_replay: bool = True

    def __post_init__(self) -> None:
        self.knobs()
        self.budget_bytes()
        if self.lost is not None and not 0 <= self.lost < 1:
            raise ValueError(f"lost must be a share of the time, 0 to 1, got {self.lost}")
        if self.lost is not None and self.budget is not None:
            raise ValueError("budget and lost are two ways to say how much moves: give one of them")

    def budget_bytes(self) -> int | None:
        """The budget in bytes. Raises ValueError when its text is none, or a share of a memory of
        unknown size."""
        return None if self.budget is None else budget_bytes(self.budget, None)

    def knobs(self) -> OffloadKnobs:
        """As plans take them. Raises ValueError with all reasons."""
        return OffloadKnobs(
            fraction=self.fraction,
            min_bytes=self.min_bytes,
            margin=self.margin,
            delta_bytes_per_pp_rank=self.delta_bytes_per_pp_rank,
            in_flight=self.in_flight,
        )
