"""Hooks of parameters that get no gradient from a backward: autograd calls them with None where eager would not.

A region reaches all its parameters through one node, and autograd visits every one of them, whether it got a gradient
or not. A hook that is called with None fails (`lambda grad: grad * 2`), or counts what has not happened. So until
autograd has visited such a parameter one hook stands for its own, which calls them if a gradient comes after all: from
another region, or from eager code. Likewise for hooks that run after accumulation, as optimizers in the backward do.
"""
import operator
from collections.abc import Sequence
from typing import Any

import torch

_HOOKS = operator.attrgetter("_backward_hooks")
_LATE_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")
_KEY = "packgraph"  # torch counts its own


class _Visit:
    """One parameter with hooks in one backward: `task`, autograd's number of it."""

    def __init__(self, parameter: torch.Tensor, node: Any, task: int) -> None:
        self.parameter, self.task = parameter, task
        self._aside, self._late_aside = dict(_HOOKS(parameter) or {}), dict(_LATE_HOOKS(parameter) or {})
        if self._aside:
            _HOOKS(parameter).clear()
            _HOOKS(parameter)[_KEY] = self._arrives
        if self._late_aside:
            _LATE_HOOKS(parameter).clear()
            _LATE_HOOKS(parameter)[_KEY] = self._accumulated
        self._before = parameter.grad, None if parameter.grad is None else parameter.grad._version
        self._handle = node.register_hook(self._visited)

    def _arrives(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        hooks = list(self._aside.values())
        self.end()  # before they run: they may remove themselves
        for hook in hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def _accumulated(self, parameter: torch.Tensor) -> None:
        hooks, (gradient, version) = list(self._late_aside.values()), self._before
        self.end()
        now = parameter.grad
        if now is not gradient or (now is not None and now._version != version):
            for hook in hooks:
                hook(parameter)

    def end(self) -> None:
        """Put the hooks back, before those that were added meanwhile."""
        for table, aside in ((_HOOKS(self.parameter), self._aside), (_LATE_HOOKS(self.parameter), self._late_aside)):
            if aside and table.pop(_KEY, None) is not None:
                added = dict(table)
                table.clear()
                table.update(aside | added)

    def _visited(self, *_: object) -> None:
        self._handle.remove()
        self.end()
        _VISITS.pop(id(self.parameter), None)


_VISITS: dict[int, _Visit] = {}


def expect_visits(nodes: Sequence[tuple[Any, int]], parameters: Sequence[torch.Tensor],
                  gradients: Sequence[torch.Tensor | None]) -> None:
    """Within a backward: let no hook be called with None of parameters that a region delivers no gradient to.

    nodes: autograd's accumulators of the parameters. gradients: those that a region delivers.
    """
    if not any(map(_HOOKS, parameters)) and not any(map(_LATE_HOOKS, parameters)):
        return
    task = torch._C._current_graph_task_id()
    for (node, _), parameter, gradient in zip(nodes, parameters, gradients, strict=True):
        visit = _VISITS.get(id(parameter))
        if visit is not None and visit.task != task:  # of a backward that has failed in between
            visit.end()
            visit = None
        if visit is None and gradient is None and (_HOOKS(parameter) or _LATE_HOOKS(parameter)):
            _VISITS[id(parameter)] = _Visit(parameter, node, task)
