"""The kernels of moe/peer_read/api.py and of the plan's tables: what they compute is what those
files' operations do.

    publish   rows --> own memory, as many as there are            a copy
    spread    a program per token of every rank: read it once, write it to each of its rows here
    collect   a program per own token: read its k rows wherever they are, add them up, write the sum

Peers' memory is found by a table of addresses on the device. A read over NVLink takes microseconds,
so many small programs are under way at once, each with a few independent reads of 16 bytes per
thread; neighbouring programs read from different peers. Top-k often chooses several experts of one
rank: `spread` sends such a token once. Offsets have 64 bits. Nothing is atomic, and sums over
places go in their order, one place after another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from packgraph.moe.peer_read.buffers import weights_start

PUBLISHED = 4  # rows of a program
SPREAD_COLUMNS, COLLECT_COLUMNS = 2048, 1024
SPREAD_WARPS, COLLECT_WARPS = 4, 4
LOCATED = 1024


@triton.jit
def _publish(  # type: ignore[no-untyped-def]
    values,
    weights,
    total,
    rows,
    width,
    stride,
    to,
    weights_to,
    COUNTED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
    values, weights = values if values.stride(1) == 1 else values.contiguous(), weights.contiguous()
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
    peers,
    row_of_pair,
    total,
    values,
    weights,
    tokens,
    rows,
    width,
    start,
    rank,
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
    peers,
    place_of_pair,
    sums,
    weights,
    rows,
    width,
    start,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
    experts,
    row_of_all,
    ends,
    here,
    places,
    offsets,
    needed,
    pairs,
    first,
    own,
    rows,
    rank,
    RANKS: tl.constexpr,
    RANKS_PADDED: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
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


def locate(
    everyone: Tensor, row_of_all: Tensor, ends: Tensor, ranks: int, rank: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Kernel of `locate` in moe/peer_read/api.py. row_of_all: int32 [ranks * T, k], ends: int32
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
