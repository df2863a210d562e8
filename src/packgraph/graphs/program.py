"""A module seen as stages cut into runs: what is captured, what stays eager, and how to run either.

A module without stages is one stage called `module`: its arguments are the first state, its result
the last.

Objects among a call's outputs: taken apart for graphs, and made anew at every replay.

Language models of transformers return a cache of keys and values unless told otherwise: an object
of a class of its own, with tensors in it. A graph makes tensors. So such an object becomes a node
of the tree of outputs, which knows how to build an object of the same class with other tensors:

    forward ─▶ {"loss": tensor, "cache": Cache} ─▶ {"loss": tensor, "cache": Opened([tensor,
    tensor])} ─▶ {..., Cache}

Only objects that forward makes are taken apart: the tracer refuses to return others.
"""

import contextlib
import operator
import sys
import types
from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import Enum
from typing import Any, Protocol

import torch
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from packgraph.graphs.errors import CaptureError, forward_line, is_user_file
from packgraph.graphs.fallback import within
from packgraph.graphs.key import CONSTANTS, own_strides, row_major
from packgraph.graphs.stages import (
    CompileUnit,
    Run,
    Stage,
    Staged,
    State,
    compile_units_of,
    cut_runs,
    run_in_order,
)
from packgraph.packing.batch import PackedBatch


class RunHandler(Protocol):
    """Executes the runs of a program in one way: plain, checked, by capture or by replay."""

    def captured(self, index: int, run: Run, state: State) -> State:
        """Executes run number `index`, which graphs hold."""

    def eager(self, index: int, run: Run, state: State) -> State:
        """Executes run number `index`, which stays eager."""


class Program:
    """The runs of one module under one scope and granularity.

    compiler: what compiles the stages of captured runs (graphs/compiled/compiler.py, loaded only
    where it is needed: torch takes long); None runs them as they are.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        scope: Iterable[str] | None,
        granularity: str,
        compiler: Any = None,
        reader: Any = None,
    ) -> None:
        self.module, self.compiler = module, compiler
        self.scope = scope if scope is None or isinstance(scope, str) else tuple(scope)
        self.granularity = granularity
        self._staged: Staged | None = (
            module if isinstance(module, Staged) else None
        )  # asking takes 10 us
        self.staged = self._staged is not None
        stages = (
            list(module.stages())
            if isinstance(module, Staged)
            else [Stage("module", 0, types.MethodType(_call, module))]
        )
        self.stages = stages
        self.runs: tuple[Run, ...] = cut_runs(stages, self.scope, granularity)
        if compiler is not None:
            compiler.adds_products = all(run.captured for run in self.runs)
        self.compiles = compiler is not None
        self._list = CompileUnit(module, (_listed,), "the list of stages")
        self.pieces = {
            run: compile_units_of(stages[run.start : run.stop]) for run in self.runs if run.captured
        }
        self._reader = reader

    def rebuilt(self) -> "Program":
        """The program of the module as it is now: stages are bound to the submodules that were
        there when asked."""
        return Program(self.module, self.scope, self.granularity, self.compiler, self._reader)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
        """The first state."""
        if self._staged is not None:
            return self._staged.begin(*args, **kwargs)
        return {"args": args, "kwargs": kwargs}

    def end(self, state: State) -> Any:
        """The call's outputs; objects among them are `Opened`."""
        return (
            open_objects(self._staged.end(state)) if self._staged is not None else state["outputs"]
        )

    def run(self, run: Run, state: State) -> State:
        """Run the stages of `run` on `state`."""
        if self.compiler is not None and run.captured:
            found = self.compiler.run(self.pieces[run], _as_in_graphs(state))
        elif run.captured and _TRACES.get() is not None:
            found = self._run_read(run, {key: row_major(value) for key, value in state.items()})
        else:
            found = run_in_order(self.stages[run.start : run.stop], state)
        return found if self.staged else {"outputs": open_objects(found["outputs"])}

    @property
    def reader(self) -> Any:
        """Reads pieces (`front.Reader`); loaded when the first is read: torch's tracer takes
        seconds."""
        if self._reader is None:
            from packgraph.graphs.front import Reader

            self._reader = Reader()
        return self._reader

    def _run_read(self, run: Run, state: State) -> State:
        """Runs stages as they are, each piece read before."""
        start = run.start
        for piece in self.pieces[run]:
            self.reader.read(piece, state)
            stop = start + len(piece.methods)
            state, start = run_in_order(self.stages[start:stop], state), stop
        return state

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Reads what is known before a call runs: the list of stages; a module without stages. Each
        trace with its owner; none where code is compiled.

        A module is read on the call's own arguments, and on what a graph has in their place.

        Raises:
            CaptureError: It cannot be read, or it does other things with other tensors in place of
                the arguments.
        """
        if self.compiles:
            return []
        if self.staged:
            return [(self.reader.read(self._list, {}), self.module)]
        state, piece = self.begin(args, kwargs), self.pieces[self.runs[0]][0]
        shown = row_major(hide_lengths(detached_state(state, numbers_of_tensors(args, kwargs))))
        given, found = self.reader.read(piece, state), self.reader.read(piece, shown)
        if not found.does_as(given):
            raise CaptureError(
                "forward sees other arguments in a graph: one of them is a tensor of the module, a "
                "view of another one, or has gaps in memory",
                forward_line(self.module),
                "pass tensors of their own",
            )
        return [(found, self.module)]

    def execute(self, state: State, handler: RunHandler) -> State:
        """Executes all runs in order by `handler`: the last state."""
        for index, run in enumerate(self.runs):
            if run.captured:
                state = handler.captured(index, run, state)
            else:
                state = handler.eager(index, run, state)
        return state

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's call without graphs: captured runs by the code that graphs hold."""
        return close_objects(self.end(self.execute(self.begin(args, kwargs), self)))

    def captured(self, index: int, run: Run, state: State) -> State:
        """See RunHandler; as it is."""
        shown = hide_lengths(state)
        return with_lengths(state, shown, self.run(run, shown))

    def eager(self, index: int, run: Run, state: State) -> State:
        """See RunHandler; as it is."""
        return self.run(run, state)

    def describe(self, run: Run) -> str:
        """The run's stages in words, for messages."""
        first, last = self.stages[run.start], self.stages[run.stop - 1]
        if run.stop - run.start == 1:
            return f"stage {first.name} of layer {first.layer}"
        return f"stages {first.name} of layer {first.layer} to {last.name} of layer {last.layer}"

    def label(self, run: Run) -> str:
        """The run's stages in short, for profiles: `attn 2`, `layer 2`, `embed to head 4`."""
        stages = self.stages[run.start : run.stop]
        if len(stages) > 1 and stages[0].layer == stages[-1].layer:
            return f"layer {stages[0].layer}"
        names = [
            stage.name
            if stage.layer < 0 or stage.name == "module"
            else f"{stage.name} {stage.layer}"
            for stage in (stages[0], stages[-1])
        ]
        return " to ".join(names if len(stages) > 1 else names[:1])


_TRACES: ContextVar[list[tuple[Any, Any]] | None] = ContextVar("packgraph_traces", default=None)


def reading(found: list[tuple[Any, Any]]) -> AbstractContextManager[None]:
    """Within the block captured stages are read before they run. found: gets the traces
    (`guards.Trace`) of what a graph will hold, each with its owner."""
    return within(_TRACES, found)


@contextlib.contextmanager
def reading_calls(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within a block of `reading` these modules are read when they are called, as `Program.run`
    reads stages."""
    reader = Program(torch.nn.Module(), None, "chunk").reader
    hooks: dict[torch.nn.Module, Any] = {}

    def read(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        hooks[module].remove()  # which is no part of it
        piece = CompileUnit(module, (_call,), "module")
        reader.read(piece, {"args": args, "kwargs": kwargs})
        hooks[module] = module.register_forward_pre_hook(read, with_kwargs=True, prepend=True)

    for module in modules:
        hooks[module] = module.register_forward_pre_hook(read, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        for hook in hooks.values():
            hook.remove()
        hooks.clear()  # `read` refers to itself, and would keep the modules


def note_trace(trace: Any, owner: Any) -> None:
    """A graph that is about to be captured holds what was traced."""
    found = _TRACES.get()
    if found is not None:
        found.append((trace, owner))


def _call(module: torch.nn.Module, state: State) -> State:
    return {"outputs": module(*state["args"], **state["kwargs"])}


def _listed(module: Any, state: State) -> State:
    module.stages()
    return state


def _as_in_graphs(state: State) -> State:
    """Returns the state as compiled code gets it, in eager calls as in graphs, since it is for one
    layout of memory. A tensor with gaps, sliced or expanded, is copied row-major (see
    `own_strides`). One without gradient has an object of its own in every place (graphs hold memory
    for each that an eager stage has made, see `detached_state`)."""
    seen, copies = set[int](), dict[int, torch.Tensor]()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        again = id(leaf) in seen and not leaf.requires_grad
        seen.add(id(leaf))
        if not leaf.is_contiguous() and own_strides(leaf) is None and id(leaf) not in copies:
            copies[id(leaf)] = leaf.contiguous()
        found = copies.get(id(leaf), leaf)
        return found.detach() if again else found

    made = {}
    for key, value in state.items():
        shown = tree_map(own, value)
        same = all(map(operator.is_, tree_leaves(shown), tree_leaves(value)))
        made[key] = value if same else shown  # what is as it was stays itself, containers too
    return made


def with_lengths(state: State, shown: State, result: State) -> State:
    """Returns `result` with `hide_lengths` undone: values that captured code has passed through are
    those of `state`."""
    return {
        key: state[key] if key in shown and shown[key] is value else value
        for key, value in result.items()
    }


def hide_lengths(state: State) -> State:
    """The state as captured code may see it: packed batches without their host lengths."""
    return tree_map(
        lambda leaf: leaf.without_lengths() if isinstance(leaf, PackedBatch) else leaf,
        state,
        is_leaf=lambda leaf: isinstance(leaf, PackedBatch),
    )


def detached_state(state: State, single: Container[int] = (), keep: Container[int] = ()) -> State:
    """The state cut from the caller's autograd graph; tensors of `keep` (identities) are left as
    they are.

    A differentiable tensor of `single` that occurs twice stays one, so that its gradients are
    summed in eager's order. Any other becomes two: the next call with this key may well pass two
    different ones.
    """
    cut: dict[int, torch.Tensor] = {}

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in keep:
            return leaf
        if id(leaf) in single:
            return cut.setdefault(id(leaf), cut_off(leaf))
        return cut_off(leaf)

    return tree_map(own, state)


def numbers_of_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int]:
    """Numbers of the call's tensors, by identity: the first, of one that is there twice, which is a
    fact of the call's key."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return {id(tensor): number for number, tensor in reversed([*enumerate(tensors)])}


def cut_off(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, cut from what made it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


_HEAP_TYPE = 1 << 9  # of Python's own flags: a class statement has made it
_FIXED = (*CONSTANTS, Enum, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


class _Closed(Exception):
    """Something in an object cannot be made anew."""


class Opened:
    """An object taken apart. build: how it is made, nested tuples with places in `tensors`."""

    def __init__(self, tensors: list[Any], build: Any) -> None:
        self.tensors, self.build = tensors, build


register_pytree_node(
    Opened,
    lambda opened: (opened.tensors, opened.build),
    lambda tensors, build: Opened(list(tensors), build),
    serialized_type_name=f"{__name__}.Opened",
)


def open_objects(tree: Any) -> Any:
    """The tree, with the objects among its leaves taken apart; those that cannot be are left."""
    return tree_map(_opened, tree)


def close_objects(tree: Any) -> Any:
    """The tree, with the objects that were taken apart."""
    return tree_map(
        lambda leaf: _make(leaf.build, leaf.tensors, []) if isinstance(leaf, Opened) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Opened),
    )


def _opened(leaf: Any) -> Any:
    if isinstance(leaf, (torch.Tensor, *_FIXED)) or not is_simple(leaf):
        return leaf
    tensors: list[torch.Tensor] = []
    try:
        build = _take(leaf, tensors, {})
    except _Closed:
        return leaf
    return Opened(list(tensors), build)


def is_simple(value: Any) -> bool:
    """Returns whether the value is an object whose whole state is in its attributes."""
    kind = type(value)
    return (
        isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, torch.nn.Module)
        and all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__)
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
        and "__del__" not in dir(kind)
        and kind.__new__ is object.__new__
        and is_user_file(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<unknown>")
    )


def _take(value: Any, tensors: list[torch.Tensor], seen: dict[int, int]) -> Any:
    """Returns how to make `value` anew. seen: numbers of the objects met, by identity."""
    if isinstance(value, torch.Tensor):
        number = next((i for i, tensor in enumerate(tensors) if tensor is value), len(tensors))
        if number == len(tensors):
            tensors.append(value)
        return "tensor", number
    if isinstance(value, _FIXED):
        return "value", value
    if type(value) in (list, tuple):
        return (
            "list" if type(value) is list else "tuple",
            tuple(_take(v, tensors, seen) for v in value),
        )
    if type(value) is dict:
        if not all(isinstance(key, CONSTANTS) for key in value):
            raise _Closed
        return "dict", tuple((key, _take(entry, tensors, seen)) for key, entry in value.items())
    if not is_simple(value):
        raise _Closed
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    return (
        "object",
        type(value),
        tuple((name, _take(entry, tensors, seen)) for name, entry in vars(value).items()),
    )


def _make(build: Any, tensors: list[Any], made: list[Any]) -> Any:
    """Follows the instructions `build`. made: the objects so far."""
    kind, what = build[0], build[1]
    if kind == "tensor":
        return tensors[what]
    if kind == "value":
        return what
    if kind == "again":
        return made[what]
    if kind in ("list", "tuple"):
        entries = [_make(entry, tensors, made) for entry in what]
        return entries if kind == "list" else tuple(entries)
    if kind == "dict":
        return {key: _make(entry, tensors, made) for key, entry in what}
    new = object.__new__(what)
    made.append(new)
    vars(new).update((name, _make(entry, tensors, made)) for name, entry in build[2])
    return new
