"""All-to-alls that autograd knows: what goes to a rank on the way there comes back from it on the
way back.

    rank 0   [to 0 | to 1]  ->  [from 0 | from 1]        forward of dispatch, backward of combine
    rank 1   [to 0 | to 1]  ->  [from 0 | from 1]        forward of combine, backward of dispatch

All tensors of an exchange go in one autograd node and in the order in which they are given, so that
ranks cannot disagree about the order of their collectives in the backward. Only data moves; nothing
is added up.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Splits = Sequence[int] | None


def exchange(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    send: Splits = None,
    receive: Splits = None,
) -> tuple[Tensor, ...]:
    """Rows of each tensor [rows, ...] to the ranks of `group`, in rank order; what they sent, in
    rank order.

    send, receive: rows per rank, None = equal parts (static). Collective over `group`; None = this
    process alone, which keeps its rows. Differentiable: the backward is the exchange in the other
    direction.
    """
    if group is None:
        return tuple(tensors)
    made: tuple[Tensor, ...] = _Exchange.apply(group, send, receive, *tensors)
    return made


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, send: Splits, receive: Splits, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return tuple(_all_to_all(tensor, group, send, receive) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = (_all_to_all(grad, ctx.group, ctx.receive, ctx.send) for grad in grads)
        return None, None, None, *back


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup, send: Splits, receive: Splits) -> Tensor:
    rows = tensor.shape[0] if receive is None else sum(receive)
    out = tensor.new_empty((rows, *tensor.shape[1:]))
    dist.all_to_all_single(out, tensor.contiguous(), _listed(receive), _listed(send), group=group)
    return out


def _listed(splits: Splits) -> list[int] | None:
    return None if splits is None else list(splits)
