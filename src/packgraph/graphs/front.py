"""The front end: PyTorch's own tracer reads what a stage does, and its guards tell when that holds.

    stages    embed | attn mlp | attn mlp | ... | head
    pieces    [---]   [------]   [------]         [--]
    traces      A         B          B              C

Dynamo executes the bytecode of a piece (the stages of one layer, or a whole module) symbolically.
What comes out is a graph of the tensor operations, bytecode that calls it, and a guard for every
object that was read on the way. Like layers share a trace: their module is an argument of it.
What Dynamo cannot read is an error with its own words, at the user's line: there is no guessing.

A trace is pure: code that changes Python state, hooks a gradient or draws numbers of Python's
`random` is refused, since a replay runs no Python.
"""

import contextlib
import gc
import importlib
import logging
import os
import random
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch._dynamo.convert_frame as convert_frame
import torch._dynamo.variables.builder as builder
import torch._dynamo.variables.torch as torch_variables
import torch._meta_registrations as meta
import torch._subclasses.meta_utils as meta_utils
from torch._dynamo.eval_frame import set_enable_dynamic
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.guards import _get_closure_vars as _closure_vars
from torch._dynamo.hooks import Hooks
from torch._dynamo.source import AttrSource, TempLocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import CompileContext, compile_context
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from packgraph.graphs import fallback
from packgraph.graphs.checks.host_sync import all_is_compiled, without_watchers
from packgraph.graphs.errors import (
    PACKAGE,
    CaptureError,
    traced_line,
)
from packgraph.graphs.guards import AROUND, OF_OWNER, Classes, Trace, in_words, name_of
from packgraph.graphs.key import CONSTANTS, neutral
from packgraph.graphs.program import is_simple, note_trace
from packgraph.graphs.stages import CompileUnit, State
from packgraph.graphs.tracing_errors import TRACING_ERRORS, TRUST, explained
from packgraph.graphs.unguarded import (
    ABSENCES,
    KEPT,
    OF_TENSORS,
    Substitute,
    around,
    guard_own_name,
    let_go_of_tensors,
    refuse_operations,
)
from packgraph.packing.batch import PackedBatch

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


_READING = {
    "skip_nnmodule_hook_guards": False,
    "skip_fwd_side_effects_in_bwd_under_checkpoint": True,
    "allow_rnn": True,
    "trace_autograd_ops": True,
    "skip_no_tensor_aliasing_guards_on_parameters": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "skip_guards_on_constant_func_defaults": False,
    "assume_dunder_attributes_remain_unchanged": False,
    "use_recursive_dict_tags_for_guards": False,
}


# Whether who traces takes function modes off the stack; torch 2.11 does so by itself.
_TAKES_MODES = torch.__version__ >= "2.12"
_PACKAGE, _DYNAMO = f"{PACKAGE}{os.sep}", os.path.dirname(convert_frame.__file__)
# Code with a branch for tracers that reads the same: Dynamo cannot follow the other one.
_TOLD = (
    os.path.join("transformers", "utils", "output_capturing.py"),  # sets a context variable
)
_DISTRIBUTED = os.path.join(os.path.dirname(torch.__file__), "distributed")  # asks C++ of groups


def trace(function: FunctionType, arguments: dict[str, Any], backend: Backend | None) -> Trace:
    """Traces a call.

    Args:
        function: Takes `arguments` by name, all of them positional, too.
        arguments: Of the call; tensors among them are looked at, not computed with.
        backend: Makes the code that computes the graph; None only reads.

    Raises:
        CaptureError: Dynamo cannot trace it, or it does what a replay would not do.
    """
    made: list[Any] = [None, None, "", []]
    KEPT.clear()

    def receive(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _refuse_effects(InstructionTranslator.current_tx().output)
        refuse_operations(graph)
        places = graph.graph.find_nodes(op="placeholder")
        sources = [name_of(node.meta["grapharg"].source) for node in places]
        outside = [source for source in sources if "L['state']" not in source]
        if backend is None:
            _refuse_hanging(sources, arguments["state"])
        run = backend and backend(graph, inputs)
        made[:] = graph.meta["backend_id"], run, graph.code, outside
        return run or _not_run  # which Dynamo keeps for good

    code, names, closure = function.__code__, function.__globals__, function.__closure__ or ()
    cells = {name: cell.cell_contents for name, cell in zip(code.co_freevars, closure, strict=True)}
    with (
        convert_frame.compile_lock,
        warnings.catch_warnings(),
        get_metrics_context(),
        dynamo_timed("fullgraph_capture"),
        set_enable_dynamic(False),
        torch._dynamo.config.patch({"ignore_logger_methods": _log_calls(), **_READING}),
        _substituted(_FOR_ALL) if backend else _answering_as_eager_code(),
        _leaving_generators(),
        torch_function_mode_stack_state_mgr if _TAKES_MODES else contextlib.nullcontext(),
        compile_context(CompileContext(convert_frame.get_compile_id({}))),
    ):
        warnings.filterwarnings("ignore", module=r"torch\._dynamo\.")  # ours name the user's line
        found = convert_frame.compile_frame(
            code,
            names,
            arguments | cells,
            vars(importlib.import_module("builtins")),
            closure,  # type: ignore[arg-type]
            compiler_fn=receive,
            one_graph=True,
            restart_reasons=set(),
        )
        output: Any = found.tracer_output.output_graph
        if output.random_calls:
            raise CaptureError(
                "forward draws random numbers of Python, which a replay would not draw again",
                "",
                "draw them with torch, on the module's device",
            )
        with contextlib.ExitStack() as with_modes:
            if _TAKES_MODES:
                with_modes.enter_context(torch_function_mode_stack_state_mgr.temp_restore_stack())
            ends = with_modes.enter_context(_noting_ends())
            classes = Classes(output.traced_code)
            of_state = found.build_guards(code, hooks=Hooks(guard_filter_fn=classes.note))
            with neutral():
                of_owner = _again(found).build_guards(code, hooks=OF_OWNER)
                guards = of_state, of_owner, _again(found).build_guards(code, hooks=AROUND)
    for built in guards:
        names_of_guards = built.guard_manager.closure_vars or {}
        for name, value in list(names_of_guards.items()):
            if isinstance(value, torch.nn.Module | torch.Tensor):
                del names_of_guards[name]  # torch 2.11 needed it to build them
    identity, run, code_of_graph, sources = made
    if run is not None:
        names[identity] = run
    else:
        let_go_of_tensors(output)
    made_function = FunctionType(found.bytecode, names, closure=closure)
    owner = arguments["owner"]
    sources = [*sources, *(name for name in classes.baked if name not in sources)]
    result = Trace(function, made_function, code_of_graph, guards, classes, sources, owner)
    result.kept = tuple(KEPT)
    weakref.finalize(result, _forget, ends)
    if run is not None:
        weakref.finalize(result, names.pop, identity, None)
    return result


@contextlib.contextmanager
def _noting_ends() -> Iterator[list[Any]]:
    """Notes the callbacks by which guards learn in the block that an object is gone. Those on what
    lives as long as the process would keep the trace with it."""
    made = list[Any]()

    def finalize(*args: Any) -> None:
        made.append(weakref.finalize(*args))

    shown = SimpleNamespace(**vars(weakref) | {"finalize": finalize})
    with _substituted(
        {
            (torch._dynamo.guards, "weakref"): lambda _: shown,
            # For a log, behind a flush of the processor's caches: 20 ms for each set of guards.
            (torch._dynamo.guards, "profile_guard_manager"): lambda _: lambda *_: 0.0,
        }
    ):
        yield made


def _not_run(*inputs: Any) -> tuple[()]:
    raise RuntimeError("a trace that is only read was run")


def _forget(ends: Sequence[Any]) -> None:
    for end in ends:
        end.detach()


class _Answers(dict[Any, Any]):
    """Answers for code that asks whether it is traced. Ours, `_TOLD` and torch's of groups, which
    have blocks that Dynamo cannot read and need not, are told the truth; all other code what a
    plain call would tell."""

    def __getitem__(self, asked: Any) -> Any:
        asking = sys._getframe(1).f_locals["tx"]
        files = [asks.f_code.co_filename for asks in (asking, asking.parent) if asks is not None]
        told = any(
            file.startswith((_PACKAGE, _DISTRIBUTED)) or file.endswith(_TOLD) for file in files
        )
        answer = super().__getitem__(asked)
        return answer if told or not answer else False


@around
def _looking_at_results(returns: Any, translator: Any, instruction: Any) -> None:
    """Results are looked at, so that they have guards, and left out of code that nobody runs."""
    if instruction.opname == "RETURN_VALUE":
        _look_at(translator.output, translator.stack[-1], set())
        if fallback.READING:
            translator.pop()
            translator.push(ConstantVariable.create(None))
    returns(translator, instruction)


# By owner and name: how a function of Dynamo's becomes another one.
_Substitutes = dict[tuple[Any, str], Substitute]
_FOR_ALL: _Substitutes = {
    (builder, "safe_grad"): lambda _: lambda tensor: None,  # no business of a forward
    (meta_utils, "safe_grad"): lambda _: lambda tensor: None,
    (InstructionTranslator, "_return"): _looking_at_results,
} | OF_TENSORS


@contextlib.contextmanager
def _substituted(substitutes: _Substitutes) -> Iterator[None]:
    """Within the block other functions are in the place of Dynamo's."""
    with contextlib.ExitStack() as at_end:
        for (home, name), substitute in substitutes.items():
            if hasattr(home, name):
                at_end.callback(setattr, home, name, getattr(home, name))
                setattr(home, name, substitute(getattr(home, name)))
        yield


def _look_at(output: Any, value: Any, seen: set[int]) -> None:
    """Has Dynamo look at all of a result.

    Raises:
        CaptureError: A list, dict or object is returned that was there before: a replay would
            return another one.
    """
    if isinstance(value, LazyVariableTracker):
        value = value.realize()
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, list | tuple | set | deque):
        for each in value:
            _look_at(output, each, seen)
    elif isinstance(value, dict):
        for pair in value.items():
            _look_at(output, pair, seen)
    elif isinstance(value, VariableTracker) and not isinstance(value, TensorVariable):
        made = value.source is None or isinstance(value.source, TempLocalSource)
        of_caller = not made and "L['state']" in name_of(value.source)
        copied = isinstance(value, ConstDictVariable | ListVariable) or (
            isinstance(value, UserDefinedObjectVariable) and is_simple(value.value)
        )
        if not made and not of_caller and copied:  # by a replay
            raise CaptureError(
                f"forward returns {in_words(name_of(value.source))}, which was there before: a "
                "replay would return another one",
                "",
                "return a copy of it, or read it on the module",
            )
        parts = [part for name, part in vars(value).items() if name not in value._nonvar_fields]
        changed = output.side_effects.store_attr_mutations.get(value)
        _look_at(output, [parts, changed or ()] if made else parts, seen)


@around
def _asking_attributes(method: Any, attribute: Any, asking: Any, name: str, *args: Any) -> Any:
    """Methods of attributes; among them of `__module__` of torch's classes, which Dynamo does not
    know (PEFT asks that of parameters)."""
    if args and args[0]:
        guard_own_name(attribute, args[0][0])
    owner = getattr(attribute.obj, "value", None)
    if attribute.name == "__module__" and isinstance(owner, type):
        return ConstantVariable.create(owner.__module__).call_method(asking, name, *args)
    return method(attribute, asking, name, *args)


@around
def _of_any_dtype(grouped: Any, mat_a: Any, mat_b: Any, *args: Any, **options: Any) -> Any:
    """The form of a grouped product, of which torch knows that of bfloat16 alone."""
    if mat_a.dtype not in (torch.float32, torch.float16) or mat_a.dtype != mat_b.dtype:
        return grouped(mat_a, mat_b, *args, **options)
    return grouped(mat_a.bfloat16(), mat_b.bfloat16(), *args, **options).to(mat_a.dtype)


# Backends answer no, too, while they capture.
_CAPTURING = torch.cuda.is_current_stream_capturing, torch.xpu.is_current_stream_capturing


@contextlib.contextmanager
def _answering_as_eager_code() -> Iterator[None]:
    answers = _Answers(torch_variables.tracing_state_functions() | dict.fromkeys(_CAPTURING, False))
    handlers = torch_variables.TorchInGraphFunctionVariable._get_handlers()
    rules = get_torch_obj_rule_map()
    before = {asked: rules[asked] for asked in _CAPTURING if asked in rules}
    handlers |= dict.fromkeys(_CAPTURING, handlers[torch.compiler.is_compiling])
    rules |= dict.fromkeys(_CAPTURING, torch_variables.TorchInGraphFunctionVariable)
    substitutes: _Substitutes = {
        (torch_variables, "tracing_state_functions"): lambda _: lambda: answers,
        (meta, "_meta_grouped_mm_common"): _of_any_dtype,
        (GetAttrVariable, "call_method"): _asking_attributes,
    }
    fallback.READING = True
    try:
        with _substituted(_FOR_ALL | substitutes | ABSENCES):
            yield
    finally:
        fallback.READING = False
        for asked in _CAPTURING:
            del handlers[asked], rules[asked]
        rules |= before


@contextlib.contextmanager
def _leaving_generators() -> Iterator[None]:
    """Within the block Dynamo does not put the states of random generators back, and with them the
    numbers that other threads draw meanwhile: it draws none itself."""

    @around
    def leaving(put_back: Any, *args: Any, **kwargs: Any) -> None:
        if not sys._getframe(2).f_code.co_filename.startswith(_DYNAMO):
            put_back(*args, **kwargs)

    places = (torch.random, "set_rng_state"), (torch.cuda, "set_rng_state"), (random, "setstate")
    with _substituted(dict.fromkeys(places, leaving)):
        yield


def _again(found: Any) -> Any:
    """What was traced, as it was before guards were built of it."""
    for guard in found.tracer_output.output_graph.guards:
        guard.obj_weakref = guard.guarded_class_weakref = guard.guard_types = guard.code_list = None
    return found


def _log_calls() -> set[Any]:
    """Methods of loggers that say something, which the first calls have said; libraries add some
    when they are imported."""
    return {
        method
        for name, method in vars(logging.Logger).items()
        if name.removesuffix("_once")
        in ("debug", "info", "warning", "warn", "error", "critical", "log", "warning_advice")
    }


def _refuse_hanging(sources: Sequence[str], state: Any) -> None:
    """Raises CaptureError for a tensor that is no part of the call's arguments but hangs on one."""
    known = {id(leaf) for leaf in tree_leaves(state)}
    for source in sources:
        if "L['state']" in source and id(eval(source, {"L": {"state": state}})) not in known:
            raise CaptureError(
                f"forward reads {in_words(source)}, which a graph would not read",
                "",
                "pass the tensor to forward as an argument",
            )


def _refuse_effects(output: Any) -> None:
    """Raises CaptureError where the traced code changes Python state, or hooks gradients."""
    effects = output.side_effects
    changed = [
        variable
        for variable in effects.id_to_variable.values()
        if effects.is_modified(variable)
        and variable.source is not None
        and not isinstance(variable.source, TempLocalSource)  # made by the traced code
        and not _is_put_back(output, variable)
    ]
    for variable in changed:
        name = in_words(name_of(variable.source))
        stacks = getattr(effects, "mutation_user_stacks", {}).get(variable, [])
        raise CaptureError(
            f"forward changes a {variable.python_type_name()} that was there before ({name}): a "
            "replay would not change it",
            traced_line("".join(stacks[-1].format())) if stacks else "",
            "return the value, or set it outside of forward",
        )
    if effects.tensor_hooks:
        raise CaptureError(
            "forward registers a hook on a tensor, which a replay would not call",
            "",
            "register the hook outside of forward",
        )


def _is_put_back(output: Any, variable: Any) -> bool:
    """Returns whether what the traced code sets has in the end the value that it had; a guard sees
    to it that it has it before the next call, too."""
    items = vars(variable).get("items")
    if isinstance(items, dict | list) and not items:
        scope = {"L": output.local_scope, "G": output.global_scope, **_closure_vars()}
        install_guard(variable.source.make_guard(GuardBuilder.SEQUENCE_LENGTH))
        return not eval(name_of(variable.source), scope)  # it was cleared, and had been empty
    before = getattr(vars(variable).get("value"), "__dict__", {})
    now = output.side_effects.store_attr_mutations.get(variable) or {}
    for name, value in now.items():
        if not value.is_python_constant() or name not in before:
            return False
        constant = value.as_python_constant()
        if type(before[name]) is not type(constant) or before[name] != constant:
            return False
    for name in now:  # it may have been set without having been read
        install_guard(AttrSource(variable.source, name).make_guard(GuardBuilder.CONSTANT_MATCH))
    return bool(now)


Code = Callable[[Any, State], State]


@contextlib.contextmanager
def _without_remains() -> Iterator[None]:
    """Frees what tracing in the block leaves in cycles: it refers to the module."""
    collecting, variables = gc.isenabled(), _closure_vars()
    before = dict(variables)  # where torch 2.11 leaves modules
    gc.disable()  # all that is made stays young
    try:
        yield
    finally:
        variables.clear()
        variables.update(before)
        gc.collect(0)
        if collecting:
            gc.enable()


class TracedCode:
    """A function of (owner, state) as all its traces: called, it runs the one that fits, or traces
    once more.

    function: What is traced. backend: See `trace`. may_trace: Asked before another trace is made.
    """

    def __init__(
        self, function: Any, backend: Backend | None, may_trace: Callable[[], bool]
    ) -> None:
        self.function, self.backend, self.may_trace = function, backend, may_trace
        self.traces: list[Trace] = []

    def __call__(self, owner: Any, state: Any) -> Any:
        found = self.find(owner, state)
        note_trace(found, owner)
        return found.run(owner, state)

    def find(self, owner: Any, state: Any) -> Trace:
        """The trace of a call, made now if there is none."""
        with without_watchers(), _disable_current_modes():  # which would see what the tracer does
            return self._find(owner, state)

    def _find(self, owner: Any, state: Any) -> Trace:
        for known in self.traces:
            if known.fits(owner, state):
                return known
        if not self.may_trace():
            raise CaptureError(
                "code that was traced before does not fit inside the capture of it"
                + "".join(f"\n    {t.difference(owner, state)}" for t in self.traces[-1:]),
                "",
                "something that the tracer takes for a constant differs from call to call",
            )
        with _without_remains():
            made = trace(self.function, {"owner": owner, "state": state}, self.backend)
        if not made.fits(owner, state):
            raise CaptureError(
                "what forward reads changes while it is traced: " + made.difference(owner, state),
                "",
                "read it outside of forward",
            )
        self.traces.append(made)
        return made


class Reader:
    """What the pieces of a module read: traces, which like pieces share. The pieces themselves run
    as they are."""

    def __init__(self) -> None:
        self._codes = dict[Hashable, TracedCode]()

    def read(self, piece: CompileUnit, state: State) -> Trace | None:
        """Notes the trace of a piece for the graph that is about to hold it.

        Raises:
            CaptureError: The tracer cannot read it, or it does what a replay would not do.
        """
        if piece.opaque:
            return None
        kind = type(piece.owner), piece.methods, getattr(piece.owner, "training", None)
        key = (*kind, shapes_of(state))
        if key not in self._codes:
            self._codes[key] = TracedCode(_read_only(piece), None, lambda: not all_is_compiled())
        try:
            found = self._codes[key].find(piece.owner, state)
        except TRACING_ERRORS as error:
            raise explained(piece, error, TRUST) from error
        note_trace(found, piece.owner)
        return found


def chain(piece: CompileUnit) -> Code:
    """The piece's stages as one function, with a code object of its own: torch keeps what it
    compiled with that."""
    methods, owned = piece.methods, piece.owner is not None

    def run(owner: Any, state: State) -> State:
        for method in methods:
            state = method(owner, state) if owned else method(state)
        return state

    code = run.__code__.replace(co_name=f"stages_{len(methods)}")
    return FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)


def _read_only(piece: CompileUnit) -> Code:
    """The piece's stages as one function that is only read: `_looking_at_results` takes what it
    returns."""
    run = chain(piece)

    def read(owner: Any, state: State) -> State:
        return run(owner, state)

    return read


def shapes_of(state: State) -> Hashable:
    """What of a state code is compiled for: the form of every tensor, and constants; and whether
    gradients are on."""
    return torch.is_grad_enabled(), tuple(
        (key, tuple(map(_shape, tree_leaves(value, is_leaf=lambda x: isinstance(x, PackedBatch)))))
        for key, value in state.items()
    )


def _shape(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, PackedBatch):
        return leaf.capacity
    return type(leaf), repr(leaf) if isinstance(leaf, CONSTANTS) else None
