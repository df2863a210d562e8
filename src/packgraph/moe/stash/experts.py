"""Experts whose rows wait for the backward in pages: two operations, with the first product and
with the rest.

    forward     values -- first product --> h      values, h -> pages      h -- activation, second product --> made
    backward    pages -> h: of the second product and the activation       pages -> values: of the first; pages are free

The same kernels on the same rows as `experts.Experts` without a stash, so the same bits. Operations
with gradients of their own, and not saved-tensor hooks around ordinary code (`Stash.saving`), since
compiled code calls no hooks. Two of them, since the gradients of both kinds of matrices would stand
beside each other else. So pages are free when both backwards have run: a backward that is asked for
what follows the first product alone (`torch.autograd.grad` of down_proj, say) leaves them taken
until the next reset.

What a compiler may do with it: forward and backward are traced into one graph, which is then cut in
two. That rows are taken in the backward, and not in the forward to be kept there, is data: a take
waits for a gradient (`after`). Rows of the first product come back when the second one's gradients
are there, so that [R, w] tensors follow one another.
"""  # noqa: E501

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packgraph.moe.experts import Experts, activation, activation_backward
from packgraph.moe.stash.pages import keep, record_size, take
from packgraph.moe.stash.stash import Column, Stash
from packgraph.ops.linear import autocast, matrices_gradient, product, rows_gradient

AGAIN = (
    "backward through stashed experts a second time: their pages went back to the pool after the "
    "first "
    "(retain_graph=True has no effect on a stash). Add the losses before backward, or run the "
    "forward again"
)


def columns_of(experts: Experts) -> dict[Column, int]:
    """Counts the columns that these experts keep for their backward: the rows of tokens, and those
    before the activation."""
    matrices, columns = experts.first_proj, Counter[Column]()
    for width in (matrices.shape[2], matrices.shape[1]):
        columns[matrices.dtype, width] += 1
    return dict(columns)


def stashed_experts(
    experts: Experts, values: Tensor, weights: Tensor, offsets: Tensor, stash: Stash
) -> Tensor:
    """`experts(values, weights, offsets)`, [R, H]; values and h, which its backward needs, are in
    pages until then.

    values: [R, H]; weights: float32 [R]; offsets: int32 [E]; h: [R, 2I], without a gate [R, I].
    Where there is nothing to differentiate, and while the stash measures, nothing is stashed. Fit
    for torch.compile. Raises RuntimeError where the stash was allocated for other columns, and in a
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


@_first.register_fake
def _first_shapes(
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
    return values.new_empty(values.shape[0], first.shape[1]), state.new_empty(
        record_size(values.shape[0], page_rows)
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


@_second.register_fake
def _second_shape(
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
    return h.new_empty(h.shape[0], down.shape[1])


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
    """values (0) or h (1). release: the pages are not needed any more. A result must be used:
    compilers drop what is not."""
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
