"""Hooks of parameters that get no gradient from a backward: autograd calls them with None where eager would not.

A region reaches all its parameters through one node, and autograd visits every one of them, whether it got a gradient
or not. A hook that is called with None fails (`lambda grad: grad * 2`), or counts what has not happened. So hooks of a
parameter that nothing has delivered a gradient to are put aside until autograd has visited it.
"""
import operator
from collections.abc import Sequence
from typing import Any

import torch

_HOOKS = operator.attrgetter("_backward_hooks")


class _Visit:
    """One parameter with hooks in one backward: `task`, autograd's number of it."""

    def __init__(self, parameter: torch.Tensor, node: Any, task: int) -> None:
        self.parameter, self.task = parameter, task
        self._delivered = False
        self._aside: dict[Any, Any] = {}
        self._handle = node.register_hook(self._visited)

    def arrives(self, delivered: bool) -> None:
        """A region is done with the parameter; several regions may lead to it."""
        self._delivered = self._delivered or delivered
        if self._delivered:
            self.end()
        elif not self._aside:
            self._aside = dict(_HOOKS(self.parameter))
            _HOOKS(self.parameter).clear()

    def end(self) -> None:
        """Put the hooks back, before those that were added meanwhile."""
        table, aside = _HOOKS(self.parameter), self._aside
        if aside:
            self._aside, added = {}, dict(table)
            table.clear()
            table.update(aside | added)

    def _visited(self, *_: object) -> None:
        self._handle.remove()
        self.end()
        _VISITS.pop(id(self.parameter), None)


_VISITS: dict[int, _Visit] = {}


def are_expected(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether any of these is about to be visited, so that its hooks may be put aside."""
    return bool(_VISITS) and any(id(parameter) in _VISITS for parameter in parameters)


def expect_visits(nodes: Sequence[tuple[Any, int]], parameters: Sequence[torch.Tensor],
                  gradients: Sequence[torch.Tensor | None]) -> None:
    """Within a backward: put hooks aside of parameters that are about to be visited with no gradient.

    nodes: autograd's accumulators of the parameters. gradients: those that a region delivers.
    """
    if not _VISITS and not any(map(_HOOKS, parameters)):
        return
    task = torch._C._current_graph_task_id()
    for (node, _), parameter, gradient in zip(nodes, parameters, gradients, strict=True):
        visit = _VISITS.get(id(parameter))
        if visit is not None and visit.task != task:  # of a backward that has failed in between
            visit.end()
            visit = None
        if visit is None:
            if not _HOOKS(parameter):
                continue
            visit = _VISITS[id(parameter)] = _Visit(parameter, node, task)
        visit.arrives(gradient is not None)
