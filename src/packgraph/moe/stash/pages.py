"""Pages for rows of which only the device knows how many there are: who holds which page, and the
rows in them.

    state    | header | ring of free device pages  N | ring of free host pages  M | trash |      int64, on the device
    record   | rows, fits, pages on the device, epoch | page of rows 0..P-1 | page of rows P..2P-1 | ... -1 |     int64
    buffer   | page 0: P rows | page 1 | ... | page N - 1 | trash row |        one per saved tensor of a layer, [., w]

A ring's head and tail only grow: tail - head pages are free, ring[head % N] is the next one. One
record serves all tensors of a layer that have the same rows: page p is rows p * P to (p + 1) * P of
*every* buffer, so one table and one reservation do for all of them, and since every layer saves the
same tensors nothing is wasted.

Reserving is arithmetic of one program; copying is parallel and knows only the record. An allocation
that does not fit is refused as a whole and sets the overflow flag, which refuses all later ones
until it is cleared. Required pages are counted whether they fit or not, so the high-water mark says
how many would have sufficed. Device pages go first, host pages (if there are any) take what is
left, page by page. Resetting starts a new epoch: records of an earlier one are void.

Here are the tensors and the functions in plain torch (static shapes, no host sync): they run on the
CPU and are the specification of the kernels. The order of work is that of one stream; every process
that reserves, copies and releases must be on it.

Idea: the paged stash of Megatron-LM (paged_stash.py, Apache-2.0), as described in its pull
requests; written anew, with one table per layer, reservation apart from copying, exact demand,
zeroed tails and spilling by pages.

`keep` reserves and puts, within the operation that makes the rows; `take` brings them back and
releases. Both change the pool (state and buffers), and no schema says so. That is meant: a pool is
memory like the allocator's, and nobody reads it but these functions. What orders them is data: a
take reads the record that a keep made. Reserves may run in any order, since any free page is as
good as any other. Had schemas declared the writes, a capture would copy gigabytes of pages to undo
them, compiled code would copy pages out and in, and backwards would be refused because a later
microbatch has used the pool. The consequence: what a capture or dry run does to a pool is not
undone. It takes pages in its forward and gives them back in its backward; if it fails in between,
they come back at the next reset.

The kernels: reserve and release by one program, copies by as many as the device holds. Copies go
tile by tile, 16 rows by up to 256 columns: a tile lies in one page, so the page table is read once
per tile and every row of it is a run of 16-byte vectors. How many tiles are live is read from the
record; the programs share them out among themselves, so a replay with few rows does little.
Bringing back writes every row, those behind the live ones as zeros, without reading anything for
them. Addresses are 64 bits wide. Host pages are pinned memory, which kernels reach over the bus; a
tile is in one of the two.
"""  # noqa: E501

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from packgraph.ops.kernels import HAS_TRITON, by_rows, tl, triton

# What a reset leaves alone comes first: the overflow flag, high-water marks (pages in demand, pages
# in host memory).
OVERFLOW, NEED_HI, SPILLED_HI, EPOCH, DEMAND, HEAD, TAIL, HOST_HEAD, HOST_TAIL, HEADER = range(10)
ROWS, FITS, ON_DEVICE, RECORD_EPOCH, RECORD_HEADER = range(5)
TILE_ROWS, TILE_COLUMNS = 16, 256
PROGRAMS_PER_PROCESSOR = 8
# The same numbers for kernels.
_OVERFLOW, _NEED_HI, _SPILLED_HI, _EPOCH, _DEMAND, _HEAD, _TAIL, _HOST_HEAD, _HOST_TAIL, _HEADER = (
    map(tl.constexpr, range(HEADER + 1))
)
_ROWS, _FITS, _ON_DEVICE, _RECORD_EPOCH, _RECORD_HEADER = map(
    tl.constexpr, range(RECORD_HEADER + 1)
)


class Pages:
    """The free pages of one pool. pages: on the device, host_pages: in host memory; both 0 only
    counts demand.

    state: int64 [HEADER + pages + host_pages + 1]. Raises ValueError for negative numbers.
    """

    BAKED = True

    def __init__(self, pages: int, host_pages: int, device: torch.device) -> None:
        if min(pages, host_pages) < 0:
            raise ValueError(
                f"a pool has no negative number of pages, but got {pages} and {host_pages} on the "
                "host"
            )
        self.pages, self.host_pages = pages, host_pages
        header = [0] * HEADER
        header[TAIL], header[HOST_TAIL] = pages, host_pages
        ids = torch.arange(pages + host_pages + 1, dtype=torch.int64)
        self._initial = torch.cat([torch.tensor(header), ids]).to(device)
        self.state = self._initial.clone()

    def reset(self) -> None:
        """All pages are free again: for the beginning of a step, when nothing is in flight. What is
        in flight is lost, overflow flag and marks stay. No host sync."""
        self.state[EPOCH] += 1
        self.state[DEMAND:].copy_(self._initial[DEMAND:])

    def clear(self) -> None:
        """Forget the overflow flag and the marks: once somebody has read them and acted on them. No
        host sync."""
        self.state[: SPILLED_HI + 1].zero_()


def record_size(rows: int, page_rows: int) -> int:
    """Numbers in the record of a tensor of `rows` rows."""
    return RECORD_HEADER + -(-rows // page_rows)


def naive_reserve(
    state: Tensor, offsets: Tensor, rows: int, page_rows: int, pages: int, host_pages: int
) -> Tensor:
    """Take pages for the first offsets[-1] (at most `rows`) rows; the record. Changes `state`,
    unseen by autograd.

    offsets: int [E], of which the last counts.
    """
    state = _unversioned(state)
    live = offsets.reshape(-1)[-1].long().clamp(0, rows)
    need = (live + page_rows - 1) // page_rows
    spare, host_spare = state[TAIL] - state[HEAD], state[HOST_TAIL] - state[HOST_HEAD]
    fits = (state[OVERFLOW] == 0) & (need <= spare + host_spare)
    on_device = torch.where(fits, torch.minimum(need, spare), 0)
    on_host = torch.where(fits, need - on_device, 0)
    slot = torch.arange(record_size(rows, page_rows) - RECORD_HEADER, device=state.device)
    ids = torch.full_like(slot, -1)
    if host_pages:
        place = HEADER + pages + (state[HOST_HEAD] + slot - on_device) % host_pages
        ids = torch.where(slot < on_device + on_host, state[place], ids)
    if pages:
        ids = torch.where(slot < on_device, state[HEADER + (state[HEAD] + slot) % pages], ids)
    record = torch.cat([torch.stack([live, fits.long(), on_device, state[EPOCH]]), ids])
    demand = state[DEMAND] + need
    state[NEED_HI] = torch.maximum(state[NEED_HI], demand)
    state[DEMAND] = demand
    state[HEAD] += on_device
    state[HOST_HEAD] += on_host
    state[SPILLED_HI] = torch.maximum(state[SPILLED_HI], host_pages - (host_spare - on_host))
    if pages + host_pages:  # without any pages demand is only counted
        state[OVERFLOW] = torch.maximum(state[OVERFLOW], (~fits).long())
    return record


def naive_put(
    buffer: Tensor, host: Tensor | None, source: Tensor, record: Tensor, page_rows: int
) -> None:
    """Copy the live rows of source [R, w] into their pages. buffer: [N * P + 1, w]; host: [M * P +
    1, w] or None."""
    row = torch.arange(source.shape[0], device=source.device)
    live = (row < record[ROWS]) & (record[FITS] == 1)
    for pool, place in _places(buffer, host, record, row, live, page_rows):
        _unversioned(pool).index_copy_(0, place, source.detach().to(pool.device))


def naive_take(
    state: Tensor, buffer: Tensor, host: Tensor | None, record: Tensor, rows: int, page_rows: int
) -> Tensor:
    """[R, w]: the live rows out of their pages, zero behind them; all zero for a record that is
    void."""
    row = torch.arange(rows, device=record.device)
    live = (row < record[ROWS]) & (record[FITS] == 1) & (record[RECORD_EPOCH] == state[EPOCH])
    out = buffer.new_zeros(rows, buffer.shape[1])
    for pool, place in _places(buffer, host, record, row, live, page_rows):
        out = torch.where((place < pool.shape[0] - 1)[:, None], pool[place].to(out.device), out)
    return out


def naive_release(
    state: Tensor, record: Tensor, page_rows: int, pages: int, host_pages: int
) -> None:
    """Give the record's pages back. A record of an earlier epoch has none to give, and sets the
    overflow flag: what was read by it may be another's.
    """
    state = _unversioned(state)
    valid = record[RECORD_EPOCH] == state[EPOCH]
    need = torch.where(valid, (record[ROWS] + page_rows - 1) // page_rows, 0)
    held = torch.where(record[FITS] == 1, need, 0)
    on_device = torch.minimum(record[ON_DEVICE], held)
    slot = torch.arange(record.numel() - RECORD_HEADER, device=state.device)
    trash = state.numel() - 1
    if pages:
        place = torch.where(slot < on_device, HEADER + (state[TAIL] + slot) % pages, trash)
        state.index_copy_(0, place, record[RECORD_HEADER:])
    if host_pages:
        place = HEADER + pages + (state[HOST_TAIL] + slot - on_device) % host_pages
        place = torch.where((slot >= on_device) & (slot < held), place, trash)
        state.index_copy_(0, place, record[RECORD_HEADER:])
    state[TAIL] += on_device
    state[HOST_TAIL] += held - on_device
    state[DEMAND] -= need
    if pages + host_pages:
        state[OVERFLOW] = torch.maximum(state[OVERFLOW], (~valid).long())


def _places(
    buffer: Tensor, host: Tensor | None, record: Tensor, row: Tensor, live: Tensor, page_rows: int
) -> Sequence[tuple[Tensor, Tensor]]:
    """Per tier: its memory, and the row there of each of our rows; those that are not there are at
    the trash row."""
    slot = row // page_rows
    page = record[RECORD_HEADER:][slot]
    here = live & (slot < record[ON_DEVICE])
    trash, pages = buffer.shape[0] - 1, (buffer.shape[0] - 1) // page_rows
    places = [(buffer, torch.where(here, page * page_rows + row % page_rows, trash))]
    if host is not None:
        there = torch.where(
            live & ~here, (page - pages) * page_rows + row % page_rows, host.shape[0] - 1
        )
        places.append((host, there.to(host.device)))
    return places


def _unversioned(tensor: Tensor) -> Tensor:
    """The same memory with a version counter of its own.

    A pool is memory like the allocator's: whoever saved it for backward means the place, not its
    contents, and must not be told that these have changed.
    """
    return tensor.data


# Loops are written with `while`: the interpreter cannot count to a number that is on the device.
# Numbers that differ between buckets are not specialised on: a capture must not meet code that is
# yet to be compiled.
@triton.jit(do_not_specialize=["last", "rows", "slots", "pages", "host_pages"])
def _reserve(  # type: ignore[no-untyped-def]
    state, offsets, record, last, rows, slots, pages, host_pages,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    live = tl.minimum(tl.maximum(tl.load(offsets + last).to(tl.int64), 0), rows)
    need = (live + PAGE - 1) // PAGE
    epoch, demand = tl.load(state + _EPOCH), tl.load(state + _DEMAND) + need
    head, host_head = tl.load(state + _HEAD), tl.load(state + _HOST_HEAD)
    spare, host_spare = tl.load(state + _TAIL) - head, tl.load(state + _HOST_TAIL) - host_head
    overflow, most, spilled = (
        tl.load(state + _OVERFLOW),
        tl.load(state + _NEED_HI),
        tl.load(state + _SPILLED_HI),
    )
    fits = (overflow == 0) & (need <= spare + host_spare)
    on_device = tl.where(fits, tl.minimum(need, spare), 0)
    held = tl.where(fits, need, 0)
    first = tl.full((), 0, tl.int64)
    while first < slots:
        slot = first + tl.arange(0, BLOCK)
        inside, near = slot < slots, slot < on_device
        far = (slot >= on_device) & (slot < held)
        near_page = tl.load(
            state + _HEADER + (head + slot) % tl.maximum(pages, 1), mask=inside & near, other=-1
        )
        far_page = tl.load(
            state + _HEADER + pages + (host_head + slot - on_device) % tl.maximum(host_pages, 1),
            mask=inside & far,
            other=-1,
        )
        tl.store(record + _RECORD_HEADER + slot, tl.where(near, near_page, far_page), mask=inside)
        first += BLOCK
    tl.debug_barrier()  # no thread may write what another has yet to read
    tl.store(record + _ROWS, live)
    tl.store(record + _FITS, tl.where(fits, 1, 0).to(tl.int64))
    tl.store(record + _ON_DEVICE, on_device)
    tl.store(record + _RECORD_EPOCH, epoch)
    tl.store(state + _DEMAND, demand)
    tl.store(state + _NEED_HI, tl.maximum(most, demand))
    tl.store(state + _HEAD, head + on_device)
    tl.store(state + _HOST_HEAD, host_head + held - on_device)
    tl.store(state + _SPILLED_HI, tl.maximum(spilled, host_pages - host_spare + held - on_device))
    if pages + host_pages > 0:
        tl.store(state + _OVERFLOW, tl.where(fits, overflow, 1))


@triton.jit(do_not_specialize=["slots", "pages", "host_pages"])
def _release(  # type: ignore[no-untyped-def]
    state, record, slots, pages, host_pages,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    valid = tl.load(record + _RECORD_EPOCH) == tl.load(state + _EPOCH)
    need = tl.where(valid, (tl.load(record + _ROWS) + PAGE - 1) // PAGE, 0)
    held = tl.where(tl.load(record + _FITS) == 1, need, 0)
    on_device = tl.minimum(tl.load(record + _ON_DEVICE), held)
    tail, host_tail = tl.load(state + _TAIL), tl.load(state + _HOST_TAIL)
    demand, overflow = tl.load(state + _DEMAND), tl.load(state + _OVERFLOW)
    first = tl.full((), 0, tl.int64)
    while first < slots:
        slot = first + tl.arange(0, BLOCK)
        page = tl.load(record + _RECORD_HEADER + slot, mask=slot < slots, other=0)
        inside, near = slot < tl.minimum(held, slots), slot < on_device
        tl.store(state + _HEADER + (tail + slot) % tl.maximum(pages, 1), page, mask=inside & near)
        place = _HEADER + pages + (host_tail + slot - on_device) % tl.maximum(host_pages, 1)
        tl.store(state + place, page, mask=inside & (slot >= on_device))
        first += BLOCK
    tl.debug_barrier()
    tl.store(state + _TAIL, tail + on_device)
    tl.store(state + _HOST_TAIL, host_tail + held - on_device)
    tl.store(state + _DEMAND, demand - need)
    if pages + host_pages > 0:
        tl.store(state + _OVERFLOW, tl.where(valid, overflow, 1))


@triton.jit(do_not_specialize=["pages"])
def _put(  # type: ignore[no-untyped-def]
    buffer, host, source, record, pages,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPILLS: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    live = tl.where(tl.load(record + _FITS) == 1, tl.load(record + _ROWS), 0)
    tile = tl.program_id(0).to(tl.int64)
    while tile < (live + ROWS - 1) // ROWS * across:
        first = tile // across * ROWS
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        row = first + tl.arange(0, ROWS)
        inside = (row < live)[:, None] & (column < WIDTH)[None, :]
        value = tl.load(source + row[:, None] * STRIDE + column[None, :], mask=inside)
        page = tl.load(record + _RECORD_HEADER + first // PAGE)
        at = first % PAGE + tl.arange(0, ROWS)
        if SPILLS:
            far = (page - pages) * PAGE + at
            tl.store(
                host + far[:, None] * WIDTH + column[None, :], value, mask=inside & (page >= pages)
            )
        near = page * PAGE + at
        tl.store(
            buffer + near[:, None] * WIDTH + column[None, :],
            value,
            mask=inside & (page >= 0) & (page < pages),
        )
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["pages", "rows"])
def _take(  # type: ignore[no-untyped-def]
    state, buffer, host, out, record, pages, rows,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPILLS: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    valid = (tl.load(record + _FITS) == 1) & (
        tl.load(record + _RECORD_EPOCH) == tl.load(state + _EPOCH)
    )
    live = tl.where(valid, tl.load(record + _ROWS), 0)
    tile = tl.program_id(0).to(tl.int64)
    while tile < (rows + ROWS - 1) // ROWS * across:
        first = tile // across * ROWS
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        row = first + tl.arange(0, ROWS)
        wanted = (row < live)[:, None] & (column < WIDTH)[None, :]
        page = tl.load(record + _RECORD_HEADER + first // PAGE, mask=first < live, other=0)
        near = page * PAGE + first % PAGE + tl.arange(0, ROWS)
        value = tl.load(
            buffer + near[:, None] * WIDTH + column[None, :],
            mask=wanted & (page >= 0) & (page < pages),
            other=0.0,
        )
        if SPILLS:
            far = near - pages.to(tl.int64) * PAGE
            spilled = tl.load(
                host + far[:, None] * WIDTH + column[None, :],
                mask=wanted & (page >= pages),
                other=0.0,
            )
            value = tl.where(page >= pages, spilled, value)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        tl.store(out + row[:, None] * WIDTH + column[None, :], value, mask=inside)
        tile += tl.num_programs(0)


def reserve_pages(
    state: Tensor, offsets: Tensor, rows: int, page_rows: int, pages: int, host_pages: int
) -> Tensor:
    """See `naive_reserve`."""
    record = state.new_empty(record_size(rows, page_rows))
    slots = record.numel() - RECORD_HEADER
    offsets = offsets.contiguous()
    # One warp: its threads read the header together, before any of them writes it.
    _reserve[(1,)](
        state,
        offsets,
        record,
        offsets.numel() - 1,
        rows,
        slots,
        pages,
        host_pages,
        PAGE=page_rows,
        BLOCK=256,
        num_warps=1,
    )
    return record


def release_pages(
    state: Tensor, record: Tensor, page_rows: int, pages: int, host_pages: int
) -> None:
    """See `naive_release`."""
    slots = record.numel() - RECORD_HEADER
    _release[(1,)](state, record, slots, pages, host_pages, PAGE=page_rows, BLOCK=256, num_warps=1)


def put_rows(
    buffer: Tensor, host: Tensor | None, source: Tensor, record: Tensor, page_rows: int
) -> None:
    """See `naive_put`."""
    source = by_rows(source)
    width = source.shape[1]
    _put[(_programs(record.device),)](
        buffer,
        buffer if host is None else host,
        source,
        record,
        (buffer.shape[0] - 1) // page_rows,
        WIDTH=width,
        STRIDE=source.stride(0),
        PAGE=page_rows,
        ROWS=TILE_ROWS,
        COLUMNS=_columns(width),
        SPILLS=host is not None,
    )


def take_rows(
    state: Tensor, buffer: Tensor, host: Tensor | None, record: Tensor, rows: int, page_rows: int
) -> Tensor:
    """See `naive_take`."""
    width = buffer.shape[1]
    out = buffer.new_empty(rows, width)
    _take[(_programs(record.device),)](
        state,
        buffer,
        buffer if host is None else host,
        out,
        record,
        (buffer.shape[0] - 1) // page_rows,
        rows,
        WIDTH=width,
        PAGE=page_rows,
        ROWS=TILE_ROWS,
        COLUMNS=_columns(width),
        SPILLS=host is not None,
    )
    return out


def _columns(width: int) -> int:
    return min(TILE_COLUMNS, triton.next_power_of_2(width))


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # the interpreter runs them one after another
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def keep(
    state: Tensor,
    buffers: Sequence[Tensor],
    hosts: Sequence[Tensor],
    sources: Sequence[Tensor],
    offsets: Tensor,
    page_rows: int,
    pages: int,
    host_pages: int,
) -> Tensor:
    """Reserves pages and puts the sources in them: the record.

    Part of an operation that makes them. By itself compiled code would be free to run it in the
    backward, which alone reads the record, and would rather reserve once more there than save it.
    """
    reserve, put, *_ = _functions(state)
    record = reserve(state, offsets, sources[0].shape[0], page_rows, pages, host_pages)
    for number, (buffer, source) in enumerate(zip(buffers, sources, strict=True)):
        put(buffer, hosts[number] if hosts else None, source, record, page_rows)
    return record


@torch.library.custom_op("packgraph::stash_take", mutates_args=())
def take(
    state: Tensor,
    buffers: Sequence[Tensor],
    hosts: Sequence[Tensor],
    record: Tensor,
    after: Tensor,
    rows: int,
    page_rows: int,
    pages: int,
    host_pages: int,
    release: bool,
) -> list[Tensor]:
    """The rows of each buffer, [R, w] with zeros behind the live ones.

    after: a tensor that must be there before. release: give the pages back afterwards. A result
    must be used: compilers drop what is not.
    """
    *_, take_one, release_all = _functions(state)
    taken = [
        take_one(state, buffer, hosts[number] if hosts else None, record, rows, page_rows)
        for number, buffer in enumerate(buffers)
    ]
    if release:
        release_all(state, record, page_rows, pages, host_pages)
    return taken


take.register_fake(
    lambda state, buffers, hosts, record, after, rows, *_: [
        buffer.new_empty(rows, buffer.shape[1]) for buffer in buffers
    ]
)


def _functions(state: Tensor) -> tuple[Callable[..., Any], ...]:
    """Functions that reserve, put, take and release: the kernels where they can run."""
    if HAS_TRITON and state.is_cuda:
        return reserve_pages, put_rows, take_rows, release_pages
    return naive_reserve, naive_put, naive_take, naive_release
