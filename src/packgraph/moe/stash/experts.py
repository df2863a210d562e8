"""Experts whose rows wait for the backward in pages: both products and the activation as one operation.

    forward     values -- first product --> h -- activation, second product --> made     values, h -> pages
    backward    pages -> h: of the second product and the activation; pages -> values: of the first; pages are free

The same kernels on the same rows as `experts.Experts` without a stash, so the same bits. One operation with a gradient
of its own, and not saved-tensor hooks around ordinary code (`Stash.saving`), since compiled code calls no hooks.

What a compiler may do with it: forward and backward are traced into one graph, which is then cut in two. That rows are
taken in the backward, and not in the forward to be kept there, is data: a take waits for a gradient (`after`). Rows of
the first product come back when the second one's gradients are there, so that [R, w] tensors follow one another.
"""
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packgraph.moe.activation import activation, activation_backward
from packgraph.moe.experts import Experts
from packgraph.moe.grouped.products import autocast, matrices_gradient, product
from packgraph.moe.stash.ops import keep, take
from packgraph.moe.stash.pages import record_size
from packgraph.moe.stash.saving import Column
from packgraph.moe.stash.stash import Stash

AGAIN = ("backward through stashed experts a second time: their pages went back to the pool after the first "
         "(retain_graph=True has no effect on a stash). Add the losses before backward, or run the forward again")


def columns_of(experts: Experts) -> dict[Column, int]:
    """What these experts keep for their backward: the rows of tokens, and those before the activation."""
    matrices, columns = experts.first_proj, Counter[Column]()
    for width in (matrices.shape[2], matrices.shape[1]):
        columns[matrices.dtype, width] += 1
    return dict(columns)


def stashed_experts(experts: Experts, values: Tensor, weights: Tensor, offsets: Tensor, stash: Stash) -> Tensor:
    """`experts(values, weights, offsets)`, [R, H]; values and h, which its backward needs, are in pages until then.

    values: [R, H]; weights: float32 [R]; offsets: int32 [E]; h: [R, 2I], without a gate [R, I]. Where there is nothing
    to differentiate, and while the stash measures, nothing is stashed. Fit for torch.compile. Raises RuntimeError where
    the stash was allocated for other columns, and in a second backward.
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
    made, _ = _experts(values, weights, first, down, offsets, experts.gated, pages.state, *memory, stash.page_rows,
                       pages.pages, pages.host_pages)
    return made


@torch.library.custom_op("packgraph::stashed_experts", mutates_args=())
def _experts(values: Tensor, weights: Tensor, first: Tensor, down: Tensor, offsets: Tensor, gated: bool, state: Tensor,
             buffers: Sequence[Tensor], hosts: Sequence[Tensor], page_rows: int, pages: int, host_pages: int
             ) -> tuple[Tensor, Tensor]:
    """made [R, H], and the record of the pages. buffers: of values, of h; hosts: as many or none."""
    h = product(values, first, offsets, True)
    record = keep(state, buffers, hosts, [values, h], offsets, page_rows, pages, host_pages)
    return product(activation(h, weights, offsets, gated), down, offsets, True), record


@_experts.register_fake
def _shapes(values: Tensor, weights: Tensor, first: Tensor, down: Tensor, offsets: Tensor, gated: bool, state: Tensor,
            buffers: Sequence[Tensor], hosts: Sequence[Tensor], page_rows: int, pages: int, host_pages: int
            ) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape[0], down.shape[1]), state.new_empty(record_size(values.shape[0], page_rows))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    values, weights, first, down, offsets, ctx.gated, state, buffers, hosts, *ctx.sizes = inputs
    ctx.rows, ctx.spent = values.shape[0], False
    ctx.save_for_backward(weights, first, down, offsets, state, output[1], *buffers, *hosts)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    if ctx.spent:
        raise RuntimeError(AGAIN)
    ctx.spent = True
    weights, first, down, offsets, state, record, *memories = ctx.saved_tensors
    buffers, hosts = memories[:2], memories[2:]

    needs_values = ctx.needs_input_grad[2]

    def back(number: int, after: Tensor, release: bool) -> Tensor:
        """values or h. release: the pages are not needed any more. A result must be used: compilers drop what is not.
        """
        return take(state, buffers[number : number + 1], hosts[number : number + 1], record, after, ctx.rows,
                    *ctx.sizes, release)[0]

    of_act = product(grad, down, offsets, False)
    h = back(1, of_act, not needs_values)
    of_h, of_weights, act = activation_backward(of_act, h, weights, offsets, ctx.gated)
    of_down = matrices_gradient(grad, act, offsets, True) if ctx.needs_input_grad[3] else None
    del of_act, h, act  # that the first product's rows need not stand beside
    of_first = matrices_gradient(of_h, back(0, of_h, True), offsets, True) if needs_values else None
    of_values = product(of_h, first, offsets, False) if ctx.needs_input_grad[0] else None
    return (of_values, of_weights, of_first, of_down, None, None, None, [None] * len(buffers), [None] * len(hosts),
            *[None] * len(ctx.sizes))


_experts.register_autograd(_differentiate, setup_context=_save)
