"""Compiled code as everybody else sees it: one operation without an inside.

A compiler turns the operations of some stages into two functions, a forward and a backward, that
launch kernels of their own. Whoever watches operations (the recorder, the watch of a dry run)
cannot look into them. So compiled code presents itself to the watching dispatch mode as one
operation of torch would: by a schema that says what it changes in place, and a call on tensors.
Without a watcher nothing stands between autograd and the code: a CUDA capture, a replay and an
eager call run it as it is.

    eager, CUDA capture     autograd ──▶ code
    dry run, recorder     autograd ──▶ CompiledCode ──▶ the mode's __torch_dispatch__ ──▶ code, with the mode off
"""  # noqa: E501

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils import _python_dispatch

from packgraph.graphs.checks.host_sync import CodeWatcher, FunctionWatcher


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Within the block host reads are not looked for: torch.compile would take the guard's Python
    for the user's."""
    with contextlib.ExitStack() as stack:
        while isinstance(_get_current_function_mode(), FunctionWatcher):
            stack.enter_context(_pop_mode_temporarily())
        yield


class CompiledCode:
    """A compiled forward or backward. function: takes a list of tensors and numbers, which it
    empties, and returns a list or tuple. mutated: which of them it changes in place. note: is shown
    the inputs of every call.

    Has what watchers ask an operation of torch for: name, namespace, schema and tags.
    """

    namespace = "packgraph_compiled"
    tags: tuple[torch.Tag, ...] = ()

    def __init__(
        self,
        function: Callable[[list[Any]], Sequence[Any]],
        name: str,
        inputs: int,
        mutated: frozenset[int],
        note: Callable[[Sequence[Any]], None] | None = None,
    ) -> None:
        self.function, self.note = function, note
        self._boxed_call = (
            True  # tells AOTAutograd that it may hand over its list, so that inputs are freed early
        )
        self.overloadpacket = SimpleNamespace(__name__=name)
        self._schema = SimpleNamespace(
            is_mutable=bool(mutated),
            arguments=[
                SimpleNamespace(
                    name=f"input {number}", alias_info=_WRITTEN if number in mutated else None
                )
                for number in range(inputs)
            ],
        )

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        """Run it: on one list, as AOTAutograd calls it, or on the list's entries, as watchers
        do."""
        boxed: list[Any] = (
            arguments[0]
            if len(arguments) == 1 and isinstance(arguments[0], list)
            else list(arguments)
        )
        mode = _python_dispatch._get_current_dispatch_mode()
        if isinstance(mode, CodeWatcher):
            with _python_dispatch._pop_mode_temporarily():
                return mode.__torch_dispatch__(self, (), tuple(boxed), {})
        if self.note is not None:
            self.note(boxed)
        with unguarded():
            return self.function(boxed)

    def __repr__(self) -> str:
        return f"{self.namespace}.{self.overloadpacket.__name__}"


_WRITTEN = SimpleNamespace(is_write=True)
