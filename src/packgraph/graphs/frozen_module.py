"""A block of time in which nothing about a module changes but values, and what is remembered of
calls within it.

A schedule makes the same few calls over and over. What a call is, is then read off a handful of
facts instead of all that could have changed: microseconds instead of a tenth of a millisecond.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from packgraph.graphs import fallback
from packgraph.graphs.fallback import reason_around
from packgraph.graphs.key import Signature, modes
from packgraph.packing.batch import PackedBatch

PLAIN = (type(None), bool, int, str)  # constants whose value tells them apart


class FrozenModule:
    """Calls that could be replayed in this block, by what tells them apart."""

    def __init__(self, module: torch.nn.Module, device_type: str) -> None:
        self._module, self._device_type = module, device_type
        self._known: dict[Hashable, Signature] = {}

    def recall(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature | None:
        """The signature of a call like one that was replayed in this block; None when it has to be
        looked at.

        What the caller may change around a single call (modes, evaluation, hooks on what autograd
        saves) is no part of the promise of a frozen block.
        """
        if (
            kwargs
            or fallback.bypass_reason() is not None
            or not torch.is_grad_enabled()
            or not self._module.training
            or reason_around() is not None
        ):
            return None
        return self._known.get(self._facts(args))

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Signature) -> None:
        """Note that calls like this one can be replayed."""
        facts = self._facts(args)
        if facts is not None and not kwargs:
            self._known[facts] = call

    def _facts(self, args: tuple[Any, ...]) -> Hashable:
        """All that a call's key depends on; None for calls with other arguments."""
        facts: list[Hashable] = [modes(self._device_type)]
        for arg in args:
            if type(arg) is PackedBatch:
                facts.append((arg.capacity, arg.data.device))
            elif type(arg) is torch.Tensor:
                facts.append((arg.shape, arg.dtype, arg.requires_grad, arg.stride(), arg.device))
            elif type(arg) in PLAIN:
                facts.append((type(arg), arg))
            else:
                return None
        return tuple(facts)


def call_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call, in the order of its pytree."""
    if not kwargs and all(
        type(arg) is torch.Tensor or type(arg) is PackedBatch or type(arg) in PLAIN for arg in args
    ):
        return [
            arg.data if type(arg) is PackedBatch else arg for arg in args if type(arg) not in PLAIN
        ]
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
