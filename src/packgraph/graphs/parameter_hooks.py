"""Hooks of parameters that get no gradient from a backward: autograd calls them where eager would
not.

A region reaches all its parameters through one node, and autograd visits every one of them, whether
it got a gradient or not. A hook that is called with None fails (`lambda grad: grad * 2`), or counts
what has not happened. So until autograd has visited such a parameter its hooks are wrapped, each in
its own place, where handles find them: a gradient that comes after all, from another region or from
eager code, is passed on. Likewise for hooks that run after accumulation, as optimizers in the
backward do.
"""

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

_HOOKS = operator.attrgetter("_backward_hooks")
_LATE_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")
_Hook = Callable[[Any], Any]


class _Wrapped:
    """A hook that is called if `is_wanted` says so of its argument."""

    def __init__(self, hook: _Hook, is_wanted: Callable[[Any], bool]) -> None:
        self.hook, self._is_wanted = hook, is_wanted

    def __call__(self, value: Any) -> Any:
        return self.hook(value) if self._is_wanted(value) else None


class _Seen(threading.local):
    """What the thread that visits a parameter has found."""

    is_absent = False


class _Visit:
    """One parameter with hooks in one backward: `task`, autograd's number of it. Held by the node
    alone.

    A backward that fails leaves its wrappers behind. They call what torch would call, and the next
    visit replaces them.
    """

    def __init__(self, parameter: torch.Tensor, node: Any, task: int) -> None:
        self._task, self._seen = task, _Seen()
        self._places = list[tuple[dict[Any, _Hook], Any, _Hook, _Hook]]()
        for table, is_wanted in (
            (_HOOKS(parameter), _is_gradient),
            (_LATE_HOOKS(parameter), self._has_come),
        ):
            for key, hook in list((table or {}).items()):
                wrapped = _Wrapped(hook.hook if isinstance(hook, _Wrapped) else hook, is_wanted)
                self._places.append((table, key, hook, wrapped))
                table[key] = wrapped
        self._handles = [node.register_prehook(self._begins), node.register_hook(self._ends)]

    def _has_come(self, parameter: torch.Tensor) -> bool:
        return not self._seen.is_absent

    def _begins(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self._seen.is_absent = gradients[0] is None

    def _ends(self, *_: object) -> None:
        self._seen.is_absent = False
        if (
            torch._C._current_graph_task_id() != self._task
        ):  # a backward within this one, or in another thread
            return
        for handle in self._handles:
            handle.remove()
        for table, key, before, wrapped in self._places:
            if table.get(key) is wrapped:  # else its handle has removed it
                table[key] = before


def _is_gradient(gradient: torch.Tensor | None) -> bool:
    return gradient is not None


def expect_visits(
    nodes: Sequence[tuple[Any, int]],
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Within a backward: let no hook be called of parameters that a region delivers no gradient to.

    nodes: autograd's accumulators of the parameters. gradients: those that a region delivers.
    """
    if not any(map(_HOOKS, parameters)) and not any(map(_LATE_HOOKS, parameters)):
        return
    task = torch._C._current_graph_task_id()
    for (node, _), parameter, gradient in zip(nodes, parameters, gradients, strict=True):
        if (
            gradient is None
            and (_HOOKS(parameter) or _LATE_HOOKS(parameter))
            and torch._C._will_engine_execute_node(node)
        ):
            _Visit(parameter, node, task)
