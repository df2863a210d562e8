"""Rows that ranks read from each other's memory: tokens to the rows of experts, and each token's
rows back as a sum.

    barrier | publish: own rows --> own memory | barrier | pull: rows of all ranks' memory --> result
    nobody reads it any more                     everyone has published

    to_experts     x [T, H], weights [T, k]   -->  values [R, H], weights [R]     each token is read once per rank
    from_experts   rows [R, H]                -->  [T, H]                         k rows per token, summed in order

The backward of one is the other one. Results are read or written in a fixed order, never added to:
nothing is atomic, and the same bits come out in every run. Each is one operation, which knows the
group by its name; the memory is its own, as a communicator's is: what is there between two calls
means nothing. Elsewhere than on CUDA it is an all-gather of everything, which needs no common
memory.
"""  # noqa: E501

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.moe.permute import RowPlan, combine_rows, plan_rows
from packgraph.ops import symmetric_memory
from packgraph.ops.attention.context import group_of
from packgraph.ops.collectives import all_gather_flat
from packgraph.ops.kernels import FLOATS, HAS_TRITON, by_rows, tl, triton
from packgraph.ops.symmetric_memory import NoSymmetricMemory, SymmetricMemory, hosts_problem

MULTIPLE = 8  # rows: 16 bytes of bfloat16 per column, what grouped products like
PUBLISHED = 4  # rows of a program
SPREAD_COLUMNS, COLLECT_COLUMNS, SPREAD_WARPS, COLLECT_WARPS = 2048, 1024, 4, 4
LOCATED = 1024


class PeerReadPlan(NamedTuple):
    """Plan of a rank's reads from the others. Pairs (token t, place j) of rank q are numbered (q *
    T + t) * k + j.

    row_of_pair: int32 [ranks * T, k], this rank's row of every rank's pairs, -1 where another
    rank's expert is chosen, in padding and beyond R. place_of_pair: int32 [T, k], rank * R + row of
    each own pair, -1 where it has none. offsets: int32 [experts of this rank], one past the last
    row of each. needed: int64 [], the most rows that any rank of the group needs.
    """

    row_of_pair: Tensor
    place_of_pair: Tensor
    offsets: Tensor
    needed: Tensor


def naive_plans(experts: Sequence[Tensor], num_experts: int, rows: int) -> list[PeerReadPlan]:
    """The specification of `plan_peer_read`. experts: int [T, k] of every rank.

    The naive twins are loops that read the host, for all ranks of a group in one process: lists
    have an entry for every rank. The tensors may require gradients: autograd of these loops is what
    the backwards of the operations mean.
    """
    ranks, (tokens, places) = len(experts), experts[0].shape
    here = torch.full((ranks, ranks, tokens, places), -1, dtype=torch.int32)  # by owner and sender
    place_of_pair = torch.full((ranks, tokens, places), -1, dtype=torch.int32)
    offsets, needed = torch.zeros(ranks, num_experts // ranks, dtype=torch.int32), [0] * ranks
    chosen = [rank.tolist() for rank in experts]
    for expert in range(num_experts):
        owner, own = divmod(expert, num_experts // ranks)
        for sender in range(ranks):
            for token in range(tokens):
                for place in range(places):
                    if chosen[sender][token][place] != expert:
                        continue
                    row = needed[owner]
                    needed[owner] += 1
                    if row < rows:
                        here[owner, sender, token, place] = row
                        place_of_pair[sender, token, place] = owner * rows + row
        offsets[owner, own] = min(needed[owner], rows)
    return [
        PeerReadPlan(
            here[rank].view(-1, places),
            place_of_pair[rank],
            offsets[rank],
            torch.tensor(max(needed)),
        )
        for rank in range(ranks)
    ]


def naive_to_experts(
    x: Sequence[Tensor], weights: Sequence[Tensor], plan: PeerReadPlan, rows: int
) -> tuple[Tensor, Tensor]:
    """The specification of `to_experts` on one rank. x: [T, H] and weights: [T, k] of every
    rank."""
    values: list[Tensor] = [x[0].new_zeros(x[0].shape[1])] * rows
    of_rows: list[Tensor] = [weights[0].new_zeros(())] * rows
    tokens = x[0].shape[0]
    for number, row_of_place in enumerate(plan.row_of_pair.tolist()):
        for place, row in enumerate(row_of_place):
            if row >= 0:
                values[row] = x[number // tokens][number % tokens]
                of_rows[row] = weights[number // tokens][number % tokens, place]
    return torch.stack(values), torch.stack(of_rows)


def naive_from_experts(y: Sequence[Tensor], plan: PeerReadPlan) -> Tensor:
    """The specification of `from_experts` on one rank. y: [R, H] of every rank."""
    wide = torch.promote_types(y[0].dtype, torch.float32)
    sums = []
    for places in plan.place_of_pair.tolist():
        total = torch.zeros(y[0].shape[1], dtype=wide, device=y[0].device)
        for place in places:
            if place >= 0:
                total = total + y[place // y[0].shape[0]][place % y[0].shape[0]].to(wide)
        sums.append(total.to(y[0].dtype))
    return torch.stack(sums)


def rows_for(pairs: int, factor: float, ranks: int) -> int:
    """R, the rows of a rank's experts where every rank routes T * k = `pairs` pairs: `factor` times
    the balanced load, and no more than can come."""
    return rounded(min(math.ceil(pairs * factor), pairs * ranks))


def rounded(rows: int) -> int:
    """Rows, rounded up to what grouped products like."""
    return -(-rows // MULTIPLE) * MULTIPLE


def weights_start(rows: int, width: int, dtype: torch.dtype) -> int:
    """The byte at which the weights begin."""
    return -(-rows * width * dtype.itemsize // 16) * 16


def bytes_for(rows: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of the memory of one rank: its tokens have no more weights than there are rows."""
    return weights_start(rows, width, dtype) + 4 * rows


def meet(memory: Tensor, group: str) -> None:
    """Wait on the device until all ranks are here, with everything that they launched before. Can
    be captured.

    memory: of these ranks, known to all since it was allocated, so that nothing is asked of the
    host.
    """
    from torch.distributed import _symmetric_memory as symmetric

    symmetric.rendezvous(memory, group).barrier()  # type: ignore[arg-type]


def symmetric_problem(device: torch.device, ranks: int) -> str | None:
    """Returns the reason why symmetric buffers cannot be had, None where they can. Host facts only,
    equal on all ranks of a host."""
    problem = symmetric_memory.symmetric_problem(device, ranks)
    if problem is None and not HAS_TRITON:
        return "the kernels that read it need Triton, which is not installed"
    return problem


class SymmetricBuffers:
    """Room on GPUs of one host for one exchange at a time, shared by all layers whose rows have
    this width and dtype: all use one stream, in one order on every rank.

    Args:
        members: The ranks.
        pairs: T * k of the largest bucket.
        factor: Room over a balanced load of it.
        width: Numbers of a row.
        dtype: Theirs.
        device: Of this rank.

    Attributes:
        memory: uint8, this rank's: rows [room, width], then weights float32 [room].
        peers: int64 [ranks], where it is on each rank, as this device sees it.
        rows: That it has room for.
        group: Name of the process group, "" = this process alone.
        rank: Of this process in it.

    Raises:
        NoSymmetricMemory: Where it cannot be had.
        RuntimeError: In a capture.
    """

    def __init__(
        self,
        members: dist.ProcessGroup,
        pairs: int,
        factor: float,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        ranks = dist.get_world_size(members)
        problem = symmetric_problem(device, ranks)
        if problem is None and dtype not in FLOATS:
            problem = f"rows travel in bfloat16, float16 or float32, not {dtype}"
        problem = hosts_problem(members) if problem is None else problem
        if problem is not None:
            raise NoSymmetricMemory(f"{problem}; use dispatcher = padded")
        self.members, self.pairs, self.factor = members, pairs, factor
        self.width, self.dtype, self.device = width, dtype, device
        self.rows = rows_for(pairs, factor, ranks)
        try:
            self.symmetric = SymmetricMemory(bytes_for(self.rows, width, dtype), members, device)
        except NoSymmetricMemory as error:
            raise NoSymmetricMemory(f"{error}; use dispatcher = padded") from error
        self.symmetric.barrier()  # builds what the first one builds
        self.memory = self.symmetric.memory
        self.peers = torch.tensor(self.symmetric.addresses, dtype=torch.int64, device=device)
        self.group, self.rank = str(members.group_name), dist.get_rank(members)

    def grown(self, factor: float) -> "SymmetricBuffers":
        """Others, with room for `factor` times a balanced load. Collective. Graphs that use the old
        ones must be captured anew."""
        return SymmetricBuffers(
            self.members, self.pairs, factor, self.width, self.dtype, self.device
        )


@triton.jit
def _publish(  # type: ignore[no-untyped-def]
    values, weights, total, rows, width, stride, to, weights_to,
    COUNTED: tl.constexpr, WEIGHTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """COUNTED: only the first `total` rows. WEIGHTS: of each row, PADDED to a power of two; 0 =
    there are none."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    if COUNTED:
        live = live & (row < tl.load(total))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = live[:, None] & (column < width)[None, :]
    found = tl.load(
        values + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0
    )
    tl.store(to + row.to(tl.int64)[:, None] * width + column[None, :], found, mask=inside)
    if WEIGHTS > 0:
        place = tl.arange(0, PADDED)
        chosen = live[:, None] & (place < WEIGHTS)[None, :] & (tl.program_id(1) == 0)
        number = row.to(tl.int64)[:, None] * WEIGHTS + place[None, :]
        tl.store(
            weights_to + number, tl.load(weights + number, mask=chosen, other=0.0), mask=chosen
        )


def publish(
    values: Tensor, weights: Tensor, memory: Tensor, room: int, offsets: Tensor | None = None
) -> None:
    """Copy rows [N, H] and their weights (float32 [N, ...], or [0]) to `memory`, uint8, which has
    `room` rows.

    offsets: int32 [E], only rows before offsets[-1] are copied; None = all.
    """
    values, weights = by_rows(values), weights.contiguous()
    rows, width = values.shape
    if not rows:
        return
    start, each = weights_start(room, width, values.dtype), weights.numel() // rows
    columns = min(1024, triton.next_power_of_2(width))
    _publish[(triton.cdiv(rows, PUBLISHED), triton.cdiv(width, columns))](
        values,
        weights,
        values if offsets is None else offsets[-1:],
        rows,
        width,
        values.stride(0),
        memory[:start].view(values.dtype),
        memory[start:].view(torch.float32),
        COUNTED=offsets is not None,
        WEIGHTS=each,
        PADDED=triton.next_power_of_2(max(each, 1)),
        ROWS=PUBLISHED,
        COLUMNS=columns,
    )


@triton.jit
def _spread(  # type: ignore[no-untyped-def]
    peers, row_of_pair, total, values, weights, tokens, rows, width, start, rank,
    RANKS: tl.constexpr, PLACES: tl.constexpr, PADDED: tl.constexpr, WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Also zeros in the row of the program's number, if that is empty. start: byte at which the
    weights begin."""
    number = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    first_tile = tl.program_id(1) == 0
    empty = (number < rows) & (number >= tl.load(total))
    nothing = tl.zeros([COLUMNS], values.dtype.element_ty)
    tl.store(values + number.to(tl.int64) * width + column, nothing, mask=inside & empty)
    if WEIGHTED:
        tl.store(weights + number, 0.0, mask=empty & first_tile)
    peer, token = (number + rank) % RANKS, (number // RANKS).to(tl.int64)
    there = token < tokens
    base = tl.load(peers + peer)
    pair = (peer.to(tl.int64) * tokens + token) * PLACES
    place = tl.arange(0, PADDED)
    row = tl.load(row_of_pair + pair + place, mask=there & (place < PLACES), other=-1)
    source = tl.multiple_of(base.to(tl.pointer_type(values.dtype.element_ty)), 16)
    wanted = tl.max(row, 0) >= 0
    found = tl.load(source + token * width + column, mask=inside & wanted, other=0.0)
    for choice in tl.static_range(PLACES):
        to = tl.load(row_of_pair + pair + choice, mask=there, other=-1)
        tl.store(
            values + tl.maximum(to, 0).to(tl.int64) * width + column,
            found,
            mask=inside & (to >= 0) & (to < rows),
        )
    if WEIGHTED:
        of_pair = (base + start).to(tl.pointer_type(tl.float32)) + token * PLACES + place
        live = (row >= 0) & (row < rows) & first_tile
        tl.store(weights + tl.maximum(row, 0), tl.load(of_pair, mask=live, other=0.0), mask=live)


def spread(
    peers: Tensor,
    row_of_pair: Tensor,
    offsets: Tensor,
    like: Tensor,
    weighted: bool,
    rows: int,
    room: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Published tokens to [R, H], and their weights to [R] ([0] if not `weighted`). like: [.., H],
    for the dtype.

    peers: int64 [ranks], addresses. row_of_pair: int32 [ranks * T, k]. rows: R. room: rows of the
    memories.

    A program per token of every rank reads it once and writes it to each of its rows here: top-k
    often chooses several experts of one rank. Peers' memory is found by a table of addresses on the
    device. A read over NVLink takes microseconds, so many small programs are under way at once,
    each with a few independent reads of 16 bytes per thread; neighbouring programs read from
    different peers.
    """
    ranks, (tokens, places), width = peers.shape[0], row_of_pair.shape, like.shape[1]
    values = like.new_empty(rows, width)
    weights = like.new_empty(rows if weighted else 0, dtype=torch.float32)
    columns = min(SPREAD_COLUMNS, triton.next_power_of_2(width))
    _spread[(max(tokens, rows), triton.cdiv(width, columns))](
        peers,
        row_of_pair,
        offsets[-1:],
        values,
        weights,
        tokens // ranks,
        rows,
        width,
        weights_start(room, width, like.dtype),
        rank,
        RANKS=ranks,
        PLACES=places,
        PADDED=triton.next_power_of_2(places),
        WEIGHTED=weighted,
        COLUMNS=columns,
        num_warps=SPREAD_WARPS,
    )
    return values, weights


@triton.jit
def _collect(  # type: ignore[no-untyped-def]
    peers, place_of_pair, sums, weights, rows, width, start,
    PLACES: tl.constexpr, PADDED: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(PLACES):
        found = tl.load(place_of_pair + token * PLACES + choice)
        place = tl.maximum(found, 0)
        base = tl.load(peers + place // rows)
        source = tl.multiple_of(base.to(tl.pointer_type(sums.dtype.element_ty)), 16)
        here = source + (place % rows).to(tl.int64) * width + column
        total += tl.load(here, mask=inside & (found >= 0), other=0.0).to(tl.float32)
    tl.store(sums + token * width + column, total, mask=inside)
    if WEIGHTED:
        choice = tl.arange(0, PADDED)
        chosen = (choice < PLACES) & (tl.program_id(1) == 0)
        found = tl.load(place_of_pair + token * PLACES + choice, mask=chosen, other=-1)
        place = tl.maximum(found, 0)
        base = tl.load(peers + place // rows)
        of_row = (base + start).to(tl.pointer_type(tl.float32)) + place % rows
        tl.store(
            weights + token * PLACES + choice,
            tl.load(of_row, mask=found >= 0, other=0.0),
            mask=chosen,
        )


def collect(
    peers: Tensor, place_of_pair: Tensor, like: Tensor, weighted: bool, rows: int, room: int
) -> tuple[Tensor, Tensor]:
    """Sums of published rows, float32 and rounded once: [T, H]; and each pair's weight: [T, k] ([0]
    if not `weighted`).

    peers, like, room: as `spread`. place_of_pair: int32 [T, k], rank * R + row, -1 = nothing. rows:
    R.

    A program per own token reads its k rows wherever they are, adds them up in the order of places,
    one after another, and writes the sum.
    """
    (tokens, places), width = place_of_pair.shape, like.shape[1]
    sums = like.new_empty(tokens, width)
    weights = like.new_empty(place_of_pair.shape if weighted else (0,), dtype=torch.float32)
    columns = min(COLLECT_COLUMNS, triton.next_power_of_2(width))
    _collect[(tokens, triton.cdiv(width, columns))](
        peers,
        place_of_pair,
        sums,
        weights,
        rows,
        width,
        weights_start(room, width, like.dtype),
        PLACES=places,
        PADDED=triton.next_power_of_2(places),
        WEIGHTED=weighted,
        COLUMNS=columns,
        num_warps=COLLECT_WARPS,
    )
    return sums, weights


@triton.jit
def _locate(  # type: ignore[no-untyped-def]
    experts, row_of_all, ends, here, places, offsets, needed, pairs, first, own, rows, rank,
    RANKS: tl.constexpr, RANKS_PADDED: tl.constexpr, COUNT: tl.constexpr,
    COUNT_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """first, own: this rank's first pair, and how many it has. COUNT: experts of a rank."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(experts + pair, mask=inside, other=-1)
    row = tl.load(row_of_all + pair, mask=inside, other=-1)
    owner = tl.minimum(tl.maximum(expert, 0) // COUNT, RANKS - 1)
    before = tl.load(ends + owner * COUNT - 1, mask=owner > 0, other=0)
    fits = (row >= 0) & (row - before < rows)
    tl.store(here + pair, tl.where(fits & (owner == rank), row - before, -1), mask=inside)
    tl.store(
        places + pair - first,
        tl.where(fits, owner * rows + row - before, -1),
        mask=(pair >= first) & (pair < first + own),
    )
    if tl.program_id(0) == 0:
        expert_here = tl.arange(0, COUNT_PADDED)
        end = tl.load(ends + rank * COUNT + expert_here, mask=expert_here < COUNT, other=0)
        before_here = tl.load(ends + rank * COUNT - 1, mask=rank > 0, other=0)
        tl.store(
            offsets + expert_here, tl.minimum(end - before_here, rows), mask=expert_here < COUNT
        )
        each = tl.arange(0, RANKS_PADDED)
        last = tl.load(ends + (each + 1) * COUNT - 1, mask=each < RANKS, other=0)
        begin = tl.load(ends + each * COUNT - 1, mask=(each > 0) & (each < RANKS), other=0)
        tl.store(needed, tl.max(last - begin, 0).to(tl.int64))


def locate_by_kernel(
    everyone: Tensor, row_of_all: Tensor, ends: Tensor, ranks: int, rank: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Kernel of `locate`. row_of_all: int32 [ranks * T, k], ends: int32
    [E]; of a plan of all pairs."""
    pairs, own = everyone.numel(), everyone.numel() // ranks
    count = ends.shape[0] // ranks
    here = torch.empty_like(everyone)
    places = everyone.new_empty(everyone.shape[0] // ranks, everyone.shape[1])
    offsets, needed = everyone.new_empty(count), everyone.new_empty((), dtype=torch.int64)
    _locate[(triton.cdiv(pairs, LOCATED),)](
        everyone,
        row_of_all,
        ends,
        here,
        places,
        offsets,
        needed,
        pairs,
        rank * own,
        own,
        rows,
        rank,
        RANKS=ranks,
        RANKS_PADDED=triton.next_power_of_2(ranks),
        COUNT=count,
        COUNT_PADDED=triton.next_power_of_2(count),
        BLOCK=LOCATED,
    )
    return here, places, offsets, needed


def plan_peer_read(
    experts: Tensor, num_experts: int, ranks: int, rank: int, rows: int, group: str
) -> PeerReadPlan:
    """The plan of `rank`, one of `ranks` that share `num_experts` experts in equal parts, in order.
    Collective.

    experts: int32 [T, k], -1 = routed nowhere; T is the same on all ranks. rows: R. group: name of
    the process group, "" = this process alone. Raises ValueError where places do not fit into 32
    bits.

    Finds where every routed pair of the group lies in the rows of experts; each rank does so by
    itself:

        experts of all ranks [ranks * T, k]   --plan_rows-->   rows of all experts in order
        e0 e1 | e2 e3                         cut by ranks     rows of rank 0 | rows of rank 1

    One all-gather of the chosen experts is all that ranks tell each other. Within an expert rows
    lie in the order of ranks, within a rank in the order of tokens: as one process would lay the
    tokens of all ranks. A rank has room for R rows; pairs beyond have none, and every rank knows
    which. No host sync.
    """
    if max(ranks * rows, ranks * experts.numel()) >= 2**31:
        raise ValueError(
            f"{ranks} ranks with {rows} rows for {experts.numel()} routed pairs each cannot be "
            "numbered "
            "in 32 bits: use fewer tokens per microbatch"
        )
    return PeerReadPlan(*_plan(experts, num_experts, ranks, rank, rows, group))


def of_all(x: Tensor, group: str) -> Tensor:
    """[ranks * N, ...]: x [N, ...] of all ranks of the group of that name, bit by bit; "" = x
    itself. Collective."""
    if not group:
        return x
    members, mine = group_of(group), x.contiguous().view(-1).view(torch.uint8)
    out = mine.new_empty(dist.get_world_size(members) * mine.numel())
    all_gather_flat(out, mine, group=members)
    return out.view(x.dtype).view(-1, *x.shape[1:])


def locate(
    everyone: Tensor, ordered: RowPlan, ranks: int, rank: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of a PeerReadPlan. everyone: int32 [ranks * T, k]; ordered: their plan, with a row
    for every pair."""
    if HAS_TRITON and everyone.is_cuda:
        return locate_by_kernel(everyone, ordered.row_of_pair, ordered.offsets, ranks, rank, rows)
    ends = ordered.offsets.view(ranks, -1)
    last = ends[:, -1]
    first = torch.cat((last.new_zeros(1), last[:-1]))
    owner = (everyone // ends.shape[1]).clamp(0, ranks - 1)
    row = ordered.row_of_pair - first[owner]
    fits = (ordered.row_of_pair >= 0) & (row < rows)
    place = torch.where(fits, owner * rows + row, -1).view(ranks, -1, everyone.shape[1])[rank]
    here = torch.where(fits & (owner == rank), row, -1)
    return (
        here,
        place.clone(),
        (ends[rank] - first[rank]).clamp(max=rows),
        (last - first).amax().long(),
    )


@torch.library.custom_op("packgraph::plan_pull", mutates_args=())
def _plan(
    experts: Tensor, num_experts: int, ranks: int, rank: int, rows: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    everyone = of_all(experts.int(), group)
    return locate(everyone, plan_rows(everyone, num_experts, everyone.numel()), ranks, rank, rows)


@_plan.register_fake
def _plan_shapes(
    experts: Tensor, num_experts: int, ranks: int, rank: int, rows: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, places = experts.shape

    def empty(*shape: int) -> Tensor:
        return experts.new_empty(shape, dtype=torch.int32)

    return (
        empty(ranks * tokens, places),
        empty(tokens, places),
        empty(num_experts // ranks),
        experts.new_empty((), dtype=torch.int64),
    )


def to_experts(
    x: Tensor, weights: Tensor, plan: PeerReadPlan, rows: int, buffers: SymmetricBuffers
) -> tuple[Tensor, Tensor]:
    """Rows of this rank's experts: [R, H] and float32 [R], both zero from offsets[-1] on.
    Differentiable. Collective.

    x: [T, H]. weights: float32 [T, k]. rows: R, the same on all ranks.
    """
    _check(x, max(x.shape[0], rows), buffers)
    values, of_rows = _to_experts(
        x,
        weights,
        *plan[:3],
        buffers.memory,
        buffers.peers,
        rows,
        buffers.rows,
        buffers.rank,
        buffers.group,
    )
    return values, of_rows


def from_experts(y: Tensor, plan: PeerReadPlan, buffers: SymmetricBuffers) -> Tensor:
    """The sum of each token's rows, in the order of its places, in float32: [T, H]. Differentiable.
    Collective.

    y: [R, H]; from offsets[-1] on it is not read.
    """
    _check(y, y.shape[0], buffers)
    sums, _ = _from_experts(
        y,
        _none(y),
        *plan[:3],
        buffers.memory,
        buffers.peers,
        y.shape[0],
        buffers.rows,
        buffers.rank,
        buffers.group,
    )
    return sums


def _check(x: Tensor, rows: int, buffers: SymmetricBuffers) -> None:
    if x.dtype != buffers.dtype or x.shape[1] != buffers.width:
        raise ValueError(
            f"rows {x.dtype} of width {x.shape[1]} do not go through symmetric buffers for "
            f"{buffers.dtype} of width {buffers.width}; make the buffers for the model's hidden "
            "size and "
            "the dtype of its activations"
        )
    if rows > buffers.rows:
        raise ValueError(
            f"{rows} rows do not go through symmetric buffers of {buffers.rows} rows: make them "
            "for the "
            "largest bucket and factor"
        )


def _none(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("packgraph::pull_to_experts", mutates_args=())
def _to_experts(
    x: Tensor,
    weights: Tensor,
    row_of_pair: Tensor,
    place_of_pair: Tensor,
    offsets: Tensor,
    memory: Tensor,
    peers: Tensor,
    rows: int,
    room: int,
    rank: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """weights: [T, k], or [0] where there are none. room: rows that the memory has."""
    if x.is_cuda:
        meet(memory, group)
        publish(x, weights, memory, room)
        meet(memory, group)
        return spread(peers, row_of_pair, offsets, x, weights.numel() > 0, rows, room, rank)
    numbers = torch.arange(row_of_pair.numel(), dtype=torch.int32)
    # One row more, for pairs that have none here.
    row = torch.where(row_of_pair >= 0, row_of_pair, rows).flatten().long()
    pair_of_row = torch.full((rows + 1,), -1, dtype=torch.int32).scatter(0, row, numbers)[:rows]
    live, pair = pair_of_row >= 0, pair_of_row.clamp(min=0).long()
    values = torch.where(live[:, None], of_all(x, group)[pair // row_of_pair.shape[1]], 0)
    if not weights.numel():
        return values, _none(x)
    return values, torch.where(live, of_all(weights.flatten(), group)[pair], 0)


@torch.library.custom_op("packgraph::pull_from_experts", mutates_args=())
def _from_experts(
    y: Tensor,
    weights: Tensor,
    row_of_pair: Tensor,
    place_of_pair: Tensor,
    offsets: Tensor,
    memory: Tensor,
    peers: Tensor,
    rows: int,
    room: int,
    rank: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """weights: [R], or [0] where there are none. Sums [T, H], and [T, k] of weights, 0 where a pair
    has no row."""
    if y.is_cuda:
        meet(memory, group)
        publish(y, weights, memory, room, offsets)
        meet(memory, group)
        return collect(peers, place_of_pair, y, weights.numel() > 0, rows, room)
    sums = combine_rows(of_all(y, group), RowPlan(place_of_pair, place_of_pair, offsets, offsets))
    if not weights.numel():
        return sums, _none(y)
    return sums, torch.where(
        place_of_pair >= 0, of_all(weights, group)[place_of_pair.clamp(min=0).long()], 0
    )


_to_experts.register_fake(
    lambda x, weights, row_of_pair, place_of_pair, offsets, memory, peers, rows, *_: (
        x.new_empty(rows, x.shape[1]),
        weights.new_empty(rows if weights.numel() else 0),
    )
)


_from_experts.register_fake(
    lambda y, weights, row_of_pair, place_of_pair, *_: (
        y.new_empty(place_of_pair.shape[0], y.shape[1]),
        weights.new_empty(place_of_pair.shape if weights.numel() else (0,)),
    )
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.rest = inputs[7:]
    ctx.save_for_backward(*inputs[2:7])


_to_experts.register_autograd(
    lambda ctx, *grads: (*_from_experts(*grads, *ctx.saved_tensors, *ctx.rest), *[None] * 9),
    setup_context=_save,
)
_from_experts.register_autograd(
    lambda ctx, *grads: (*_to_experts(*grads, *ctx.saved_tensors, *ctx.rest), *[None] * 9),
    setup_context=_save,
)
