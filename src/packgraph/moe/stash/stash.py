"""The paged stash: what experts save for backward lies in pages, not in tensors of worst-case size.

A layer's expert tensors have R rows, static and enough for the worst routing, of which n are live:
a number on the device. Kept from forward to backward they cost R rows per layer and microbatch in
flight. With the stash

    forward     values -- first product --> h      values, h -> pages      h -- activation, second product --> made
    backward    pages -> h: of the second product and the activation       pages -> values: of the first; pages are free

so memory is one layer's worst case, reused by the next layer, plus the sum of what is live, over
all layers and microbatches.

    stash = Stash(device)
    stash.allocate(pages, columns=columns_of(experts))    # now it stashes; before the first capture
    stash.attach(model)                                   # captures leave the pool as it was
    made = stashed_experts(experts, values, weights, offsets, stash)

* Pages are data. Which page a row is in is decided on the device at every replay, so graphs of all
  slots share one pool and their forwards and backwards may replay in any order. What a graph's
  backward must know (the record) is an ordinary tensor in the graphs' own memory, written by its
  forward. There is one record per layer and microbatch for all tensors, see `pages.py`.
* The same kernels on the same rows as `experts.Experts` without a stash, so the same bits.
* Two operations with gradients of their own, and not saved-tensor hooks around ordinary code, since
  compiled code calls no hooks. Two of them, since the gradients of both kinds of matrices would
  stand beside each other else.
* Pages go back when both backwards have run. A forward without backward, or a backward that is
  asked for what follows the first product alone (`torch.autograd.grad` of down_proj, say), keeps
  its pages until the next `Pages.reset`, which belongs at the beginning of every step.
* What a compiler may do with it: forward and backward are traced into one graph, which is then cut
  in two. That rows are taken in the backward, and not in the forward to be kept there, is data: a
  take waits for a gradient (`after`). Rows of the first product come back when the second one's
  gradients are there, so that [R, w] tensors follow one another.
* What a checkpoint drops is not stashed, nor what a backward computes again.
* A layer whose backward follows its forward at once (the last layer of the last chunk) need not be
  stashed.
"""  # noqa: E501

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from packgraph.graphs.saved_tensors import are_others
from packgraph.moe.experts import Experts, activation, activation_backward
from packgraph.moe.stash.pages import (
    DEMAND,
    NEED_HI,
    OVERFLOW,
    SPILLED_HI,
    Pages,
    keep,
    record_size,
    take,
)
from packgraph.ops.linear import autocast, matrices_gradient, product, rows_gradient

Column = tuple[torch.dtype, int]  # of a saved tensor: dtype and width
AGAIN = (
    "backward through stashed experts a second time: their pages went back to the pool after the "
    "first "
    "(retain_graph=True has no effect on a stash). Add the losses before backward, or run the "
    "forward again"
)


class Stash:
    """One pool of pages for all layers and microbatches of a rank.

    page_rows: rows of a page. columns: how many tensors of each dtype and width one layer saves at
    most.
    """

    def __init__(self, device: torch.device | str, page_rows: int = 64) -> None:
        """Raises ValueError for a page that is no multiple of 16 rows: copies go 16 rows at a
        time."""
        if page_rows < 1 or page_rows % 16:
            raise ValueError(f"a page of {page_rows} rows: it must be a positive multiple of 16")
        self.device, self.page_rows = torch.device(device), page_rows
        self.columns: dict[Column, int] = {}
        self.pages = Pages(0, 0, self.device)
        self.buffers: dict[Column, list[Tensor]] = {}
        self.hosts: dict[Column, list[Tensor]] = {}

    def allocate(
        self, pages: int, host_pages: int = 0, columns: Mapping[Column, int] | None = None
    ) -> None:
        """Make the pool; tensors are stashed from now on. columns: by default those of the pool
        before.

        Graphs captured before go on without pages, or with those they were captured with, unless
        the new pool is attached to their module: then they are captured again. Nothing may be in
        flight. Raises ValueError without pages, or when nothing is known of what there is to stash.
        """
        self.columns = dict(self.columns if columns is None else columns)
        if pages < 1 or not self.columns:
            raise ValueError(
                f"a stash of {pages} pages for {len(self.columns)} kinds of tensors cannot be "
                "made: give it a page or more, and the columns of its layers (`columns_of`)"
            )
        self.buffers, self.hosts = {}, {}  # the old ones go before there are new ones
        self.pages = Pages(pages, host_pages, self.device)
        self.buffers = {column: self._memory(column, pages, self.device) for column in self.columns}
        self.hosts = {
            column: self._memory(column, host_pages, torch.device("cpu")) if host_pages else []
            for column in self.columns
        }

    def attach(self, module: torch.nn.Module) -> None:
        """Tell graphs of `module` of the pool, once it is allocated: its state becomes a buffer of
        `module`, not saved.

        Buffers are put back when a capture is over. Without that, a capture that runs a forward and
        not its backward (it failed in between; on CUDA also when an eager stage follows) keeps its
        pages until the next reset. And a pool that is replaced is seen: the graphs are captured
        again.
        """
        module.register_buffer("stash_state", self.pages.state, persistent=False)

    def _memory(self, column: Column, pages: int, device: torch.device) -> list[Tensor]:
        dtype, width = column
        pinned = (
            device.type == "cpu" and self.device.type == "cuda"
        )  # the kernels write to it over the bus
        return [
            torch.empty(
                pages * self.page_rows + 1, width, dtype=dtype, device=device, pin_memory=pinned
            )
            for _ in range(self.columns[column])
        ]

    def nbytes(self) -> int:
        """Bytes of all pages on the device."""
        return sum(memory.nbytes for column in self.buffers.values() for memory in column)

    def overflow_flag(self) -> Tensor:
        """Returns whether something did not fit since `Pages.clear`: bool [], on the device, a
        tensor of its own."""
        return self.pages.state[OVERFLOW] != 0

    def need_hi(self) -> Tensor:
        """Most pages that were in demand at once since `Pages.clear`, there or not: int64 []."""
        return self.pages.state[NEED_HI].clone()

    def spilled_hi(self) -> Tensor:
        """Most host pages in use at once since `Pages.clear`: int64 []."""
        return self.pages.state[SPILLED_HI].clone()

    def in_use(self) -> Tensor:
        """Pages in demand now: int64 []. 0 when every forward has had its backward."""
        return self.pages.state[DEMAND].clone()

    def memory(self, columns: Sequence[Column]) -> tuple[list[Tensor], list[Tensor]] | None:
        """The pages for a layer's tensors of these columns, in order: on the device, and on the
        host if there are any.

        None where nothing is stashed: before there are pages, and where what is saved is somebody
        else's. Raises RuntimeError where the pool has no column for one.
        """
        if not self.buffers or (not torch.compiler.is_compiling() and are_others()):
            return None
        places = [(column, columns[:place].count(column)) for place, column in enumerate(columns)]
        for (dtype, width), number in places:
            if number >= self.columns.get((dtype, width), 0):
                raise RuntimeError(
                    f"a layer saves {number + 1} tensors of {dtype} and width {width}, but the "
                    f"stash has pages for {self.columns.get((dtype, width), 0)}: it was allocated "
                    "for other layers. Give Stash.allocate the columns of these (`columns_of`)"
                )
        hosts = places if self.pages.host_pages else []
        return (
            [self.buffers[column][number] for column, number in places],
            [self.hosts[column][number] for column, number in hosts],
        )


def columns_of(experts: Experts) -> dict[Column, int]:
    """Counts the columns that these experts keep for their backward: the rows of tokens, and those
    before the activation."""
    dtype, shape = experts.first_proj.dtype, experts.first_proj.shape
    return dict(Counter((dtype, width) for width in (shape[2], shape[1])))


def stashed_experts(
    experts: Experts, values: Tensor, weights: Tensor, offsets: Tensor, stash: Stash
) -> Tensor:
    """`experts(values, weights, offsets)`, [R, H]; values and h, which its backward needs, are in
    pages until then.

    values: [R, H]; weights: float32 [R]; offsets: int32 [E]; h: [R, 2I], without a gate [R, I].
    Where there is nothing to differentiate, and before there are pages, nothing is stashed. Fit for
    torch.compile. Raises RuntimeError where the stash was allocated for other columns, and in a
    second backward.
    """
    matrices = experts.first_proj, experts.down_proj
    differentiable = any(x.requires_grad for x in (values, weights, *matrices))
    if not torch.is_grad_enabled() or not differentiable:
        return experts(values, weights, offsets)
    values, first, down = autocast(values, *matrices)
    memory = stash.memory([(values.dtype, values.shape[1]), (values.dtype, first.shape[1])])
    if memory is None:
        return experts(values, weights, offsets)
    pages = stash.pages
    pool = pages.state, *memory, stash.page_rows, pages.pages, pages.host_pages
    h, record = _first(values, first, offsets, experts.by, *pool)
    is_last = not first.requires_grad
    return _second(h, weights, down, offsets, experts.gated, experts.by, is_last, record, *pool)


@torch.library.custom_op("packgraph::stashed_first_product", mutates_args=())
def _first(
    values: Tensor,
    first: Tensor,
    offsets: Tensor,
    by: str,
    state: Tensor,
    buffers: Sequence[Tensor],
    hosts: Sequence[Tensor],
    page_rows: int,
    pages: int,
    host_pages: int,
) -> tuple[Tensor, Tensor]:
    """h, and the record of the pages that values and h are in. buffers: of values, of h; hosts: as
    many or none."""
    h = product(values, first, offsets, True, by)
    return h, keep(state, buffers, hosts, [values, h], offsets, page_rows, pages, host_pages)


_first.register_fake(
    lambda values, first, offsets, by, state, buffers, hosts, page_rows, *_: (
        values.new_empty(values.shape[0], first.shape[1]),
        state.new_empty(record_size(values.shape[0], page_rows)),
    )
)


def _save_first(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    values, first, offsets, ctx.by, state, buffers, hosts, *ctx.sizes = inputs
    ctx.rows, ctx.spent = values.shape[0], False
    ctx.save_for_backward(first, offsets, state, output[1], *buffers, *hosts)


def _differentiate_first(ctx: Any, of_h: Tensor, _: Tensor) -> tuple[Any, ...]:
    _spend(ctx)
    first, offsets, state, record, *memories = ctx.saved_tensors
    needs_values, needs_first, *_ = ctx.needs_input_grad
    of_first = None
    if needs_first:
        of_first = matrices_gradient(
            of_h, _back(0, ctx, state, record, memories, of_h, True), offsets, True, ctx.by
        )
    of_values = rows_gradient(of_h, first, offsets, True, ctx.by) if needs_values else None
    return of_values, of_first, *_nothing(3, memories), *[None] * len(ctx.sizes)


_first.register_autograd(_differentiate_first, setup_context=_save_first)


@torch.library.custom_op("packgraph::stashed_second_product", mutates_args=())
def _second(
    h: Tensor,
    weights: Tensor,
    down: Tensor,
    offsets: Tensor,
    gated: bool,
    by: str,
    is_last: bool,
    record: Tensor,
    state: Tensor,
    buffers: Sequence[Tensor],
    hosts: Sequence[Tensor],
    page_rows: int,
    pages: int,
    host_pages: int,
) -> Tensor:
    """made [R, H]. is_last: nobody takes values after the backward has taken h, so that the pages
    are free."""
    return product(activation(h, weights, offsets, gated), down, offsets, True, by)


_second.register_fake(lambda h, weights, down, *_: h.new_empty(h.shape[0], down.shape[1]))


def _save_second(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, weights, down, offsets, *rest = inputs
    ctx.gated, ctx.by, ctx.is_last, record, state, buffers, hosts, *ctx.sizes = rest
    ctx.rows, ctx.spent = h.shape[0], False
    ctx.save_for_backward(weights, down, offsets, state, record, *buffers, *hosts)


def _differentiate_second(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _spend(ctx)
    weights, down, offsets, state, record, *memories = ctx.saved_tensors
    of_act = rows_gradient(grad, down, offsets, True, ctx.by)
    h = _back(1, ctx, state, record, memories, of_act, ctx.is_last)
    of_h, of_weights, act = activation_backward(of_act, h, weights, offsets, ctx.gated)
    del of_act, h  # which the gradient of matrices need not stand beside
    needs_down = ctx.needs_input_grad[2]
    of_down = matrices_gradient(grad, act, offsets, True, ctx.by) if needs_down else None
    return of_h, of_weights, of_down, *_nothing(6, memories), *[None] * len(ctx.sizes)


_second.register_autograd(_differentiate_second, setup_context=_save_second)


def _spend(ctx: Any) -> None:
    if ctx.spent:
        raise RuntimeError(AGAIN)
    ctx.spent = True


def _back(
    number: int,
    ctx: Any,
    state: Tensor,
    record: Tensor,
    memories: list[Tensor],
    after: Tensor,
    release: bool,
) -> Tensor:
    """values (0) or h (1). release: the pages are not needed any more."""
    buffers, hosts = memories[:2], memories[2:]
    return take(
        state,
        buffers[number : number + 1],
        hosts[number : number + 1],
        record,
        after,
        ctx.rows,
        *ctx.sizes,
        release,
    )[0]


def _nothing(count: int, memories: list[Tensor]) -> list[Any]:
    """No gradients of so many inputs, and of the two lists of memories behind them."""
    return [None] * count + [[None] * 2, [None] * (len(memories) - 2)]
