"""The stash's kernels: reserve and release by one program, copies by as many as the device holds.

Copies go tile by tile, 16 rows by up to 256 columns: a tile lies in one page, so the page table is
read once per tile and every row of it is a run of 16-byte vectors. How many tiles are live is read
from the record; the programs share them out among themselves, so a replay with few rows does
little. Bringing back writes every row, those behind the live ones as zeros, without reading
anything for them. Addresses are 64 bits wide. Host pages are pinned memory, which kernels reach
over the bus; a tile is in one of the two.

The specification of each function is its namesake `naive_...` in `pages.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from packgraph.moe.stash import pages as layout

TILE_ROWS, TILE_COLUMNS = 16, 256
PROGRAMS_PER_PROCESSOR = 8
_OVERFLOW, _NEED_HI = tl.constexpr(layout.OVERFLOW), tl.constexpr(layout.NEED_HI)
_SPILLED_HI, _EPOCH = tl.constexpr(layout.SPILLED_HI), tl.constexpr(layout.EPOCH)
_DEMAND, _HEADER = tl.constexpr(layout.DEMAND), tl.constexpr(layout.HEADER)
_HEAD, _TAIL = tl.constexpr(layout.HEAD), tl.constexpr(layout.TAIL)
_HOST_HEAD, _HOST_TAIL = tl.constexpr(layout.HOST_HEAD), tl.constexpr(layout.HOST_TAIL)
_ROWS, _FITS, _ON_DEVICE = (
    tl.constexpr(layout.ROWS),
    tl.constexpr(layout.FITS),
    tl.constexpr(layout.ON_DEVICE),
)
_RECORD_EPOCH, _RECORD_HEADER = (
    tl.constexpr(layout.RECORD_EPOCH),
    tl.constexpr(layout.RECORD_HEADER),
)


# Loops are written with `while`: the interpreter cannot count to a number that is on the device.
# Numbers that differ between buckets are not specialised on: a capture must not meet code that is
# yet to be compiled.
@triton.jit(do_not_specialize=["last", "rows", "slots", "pages", "host_pages"])
def _reserve(  # type: ignore[no-untyped-def]
    state,
    offsets,
    record,
    last,
    rows,
    slots,
    pages,
    host_pages,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    state,
    record,
    slots,
    pages,
    host_pages,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    buffer,
    host,
    source,
    record,
    pages,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPILLS: tl.constexpr,
):
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
    state,
    buffer,
    host,
    out,
    record,
    pages,
    rows,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPILLS: tl.constexpr,
):
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
    record = state.new_empty(layout.record_size(rows, page_rows))
    slots = record.numel() - layout.RECORD_HEADER
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
    slots = record.numel() - layout.RECORD_HEADER
    _release[(1,)](state, record, slots, pages, host_pages, PAGE=page_rows, BLOCK=256, num_warps=1)


def put_rows(
    buffer: Tensor, host: Tensor | None, source: Tensor, record: Tensor, page_rows: int
) -> None:
    """See `naive_put`."""
    source = source if source.stride(1) == 1 else source.contiguous()
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
