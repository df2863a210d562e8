"""The operations of the stash as torch sees them: reserve, put, keep, take. Kernels on CUDA, plain
torch elsewhere.

They change the pool (state and buffers), and their schemas do not say so. That is meant: a pool is
memory like the allocator's, and nobody reads it but these operations. What orders them is data: a
put reads the record that a reserve made, a take reads record and token. Reserves may run in any
order, since any free page is as good as any other. Had the schemas declared the writes, a capture
would copy gigabytes of pages to undo them, compiled code would copy pages out and in, and backwards
would be refused because a later microbatch has used the pool. The consequence: what a capture or
dry run does to a pool is not undone. It takes pages in its forward and gives them back in its
backward; if it fails in between, they come back at the next reset.

Each returns a tensor even where nothing is to be said (a token): an operation without results would
be left out by compilers and recorders.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from packgraph.moe.stash.pages import (
    naive_put,
    naive_release,
    naive_reserve,
    naive_take,
    record_size,
)

HAS_TRITON = importlib.util.find_spec("triton") is not None


@torch.library.custom_op("packgraph::stash_reserve", mutates_args=())
def reserve(
    state: Tensor, offsets: Tensor, rows: int, page_rows: int, pages: int, host_pages: int
) -> Tensor:
    """The record (int64) of pages for the first offsets[-1] of `rows` rows, see
    `pages.naive_reserve`."""
    if _by_kernel(state):
        from packgraph.moe.stash.kernel import reserve_pages

        return reserve_pages(state, offsets, rows, page_rows, pages, host_pages)
    return naive_reserve(state, offsets, rows, page_rows, pages, host_pages)


@reserve.register_fake
def _reserve_shape(
    state: Tensor, offsets: Tensor, rows: int, page_rows: int, pages: int, host_pages: int
) -> Tensor:
    return state.new_empty(record_size(rows, page_rows))


@torch.library.custom_op("packgraph::stash_put", mutates_args=())
def put(
    buffers: Sequence[Tensor],
    hosts: Sequence[Tensor],
    sources: Sequence[Tensor],
    record: Tensor,
    page_rows: int,
) -> Tensor:
    """Copy the live rows of each source [R, w] to the record's pages of its buffer; a token.

    hosts: as many as buffers, or none.
    """
    _put(buffers, hosts, sources, record, page_rows)
    return _token(record)


@put.register_fake
def _put_shape(
    buffers: Sequence[Tensor],
    hosts: Sequence[Tensor],
    sources: Sequence[Tensor],
    record: Tensor,
    page_rows: int,
) -> Tensor:
    return _token(record)


@torch.library.custom_op("packgraph::stash_keep", mutates_args=())
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
    """Reserve and put in one: the record.

    For compiled code, which is free to run what only the backward reads in the backward, and would
    rather reserve once more there than save a record. As one operation it runs once, and saving the
    record is cheaper than the sources.
    """
    rows = sources[0].shape[0]
    if _by_kernel(state):
        from packgraph.moe.stash.kernel import reserve_pages

        record = reserve_pages(state, offsets, rows, page_rows, pages, host_pages)
    else:
        record = naive_reserve(state, offsets, rows, page_rows, pages, host_pages)
    _put(buffers, hosts, sources, record, page_rows)
    return record


@keep.register_fake
def _keep_shape(
    state: Tensor,
    buffers: Sequence[Tensor],
    hosts: Sequence[Tensor],
    sources: Sequence[Tensor],
    offsets: Tensor,
    page_rows: int,
    pages: int,
    host_pages: int,
) -> Tensor:
    return state.new_empty(record_size(sources[0].shape[0], page_rows))


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
    """The rows of each buffer, [R, w] with zeros behind the live ones, then a token.

    after: the token of the put, or again the record. release: give the pages back afterwards.
    """
    kernels = _by_kernel(state)
    taken = []
    for number, buffer in enumerate(buffers):
        host = hosts[number] if hosts else None
        if kernels:
            from packgraph.moe.stash.kernel import take_rows

            taken.append(take_rows(state, buffer, host, record, rows, page_rows))
        else:
            taken.append(naive_take(state, buffer, host, record, rows, page_rows))
    if release and kernels:
        from packgraph.moe.stash.kernel import release_pages

        release_pages(state, record, page_rows, pages, host_pages)
    elif release:
        naive_release(state, record, page_rows, pages, host_pages)
    return [*taken, _token(record)]


@take.register_fake
def _take_shapes(
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
    return [*(buffer.new_empty(rows, buffer.shape[1]) for buffer in buffers), _token(record)]


def _put(
    buffers: Sequence[Tensor],
    hosts: Sequence[Tensor],
    sources: Sequence[Tensor],
    record: Tensor,
    page_rows: int,
) -> None:
    for number, (buffer, source) in enumerate(zip(buffers, sources, strict=True)):
        host = hosts[number] if hosts else None
        if _by_kernel(record):
            from packgraph.moe.stash.kernel import put_rows

            put_rows(buffer, host, source, record, page_rows)
        else:
            naive_put(buffer, host, source, record, page_rows)


def _by_kernel(tensor: Tensor) -> bool:
    return HAS_TRITON and tensor.is_cuda


def _token(like: Tensor) -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device=like.device)
