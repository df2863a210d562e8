"""Hooks of modules and of parameters, which a replay would skip or call where eager would not.

A replay skips hooks of modules, so a module that has such hooks is not captured (`module_hooks`).

A segment reaches all its parameters through one node, and autograd visits every one of them,
whether it got a gradient or not. A hook that is called with None fails (`lambda grad: grad * 2`),
or counts what eager does not. So hooks of parameters that get none are kept from being called.
"""

import operator
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from packgraph.graphs.wrapper import Wrapper, wrapped

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLACING = "torch.distributed.tensor."


def owners(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The module and its submodules by name; a wrapper is seen as what it wraps."""
    return [
        (name, wrapped(owner) if isinstance(owner, Wrapper) else owner)
        for name, owner in module.named_modules()
    ]


def global_hooks() -> list[dict[int, Any]]:
    """The tables of the hooks that run for every module of the process."""
    return [getattr(torch_module, f"_global{kind}") for kind in HOOKS]


def module_hooks(module: torch.nn.Module) -> str | None:
    """The first submodule with hooks that a replay would skip, in words, or None.

    Some hooks run tensor operations and nothing else. What they launch is captured with the module,
    so they are fine: those of DTensor's parallel styles, which place tensors on the mesh, and those
    of submodules that mark what they are given as requiring a gradient.
    """
    for name, owner in [*owners(module), *module.named_modules()]:  # a wrapper has hooks of its own
        for kind in HOOKS:
            for hook in getattr(owner, kind).values():
                if not hook.__module__.startswith(_PLACING) and not (name and only_marks(hook)):
                    where = f"submodule {name!r}" if name else "the module"
                    return f"{where} ({type(owner).__name__}) has {_words(kind)}: {_name(hook)}"
    for kind, table in zip(HOOKS, global_hooks(), strict=True):
        if table:
            return f"every module has {_words(kind)} (register_module_..._hook)"
    return None


def only_marks(hook: Any) -> bool:
    """Whether a hook can do no more than call `requires_grad_` of its arguments.

    transformers registers one on the input embedding (`enable_input_require_grads`, which
    `gradient_checkpointing_enable` calls): `output.requires_grad_(True)`. Its code tells: it names
    that method and nothing else, no global and no variable of an outer function.
    """
    if type(hook) is not FunctionType:
        return False
    code = hook.__code__
    return (
        code.co_names == ("requires_grad_",)
        and not code.co_freevars
        and not hook.__defaults__
        and not hook.__kwdefaults__
        and all(isinstance(constant, bool | str | None) for constant in code.co_consts)
    )


def _name(hook: Any) -> str:
    """A hook's function by its full name."""
    hook = getattr(hook, "func", hook)
    kind = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{kind.__module__}.{kind.__qualname__}"


def _words(kind: str) -> str:
    return kind.strip("_").replace("_", " ")


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
                guarded = _Wrapped(hook.hook if isinstance(hook, _Wrapped) else hook, is_wanted)
                self._places.append((table, key, hook, guarded))
                table[key] = guarded
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
        for table, key, before, guarded in self._places:
            if table.get(key) is guarded:  # else its handle has removed it
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
