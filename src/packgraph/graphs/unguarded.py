"""Readings that Dynamo has no guard for: either it gets one here, or they are refused.

    a key, attribute or name that is not there     a guard that it is not
    a module that is called                        a guard that nobody has compiled it
    an array of numpy                              refused: it is made a tensor, and not compared
    what users have compiled                       refused: Dynamo reads through it
    what an argument was computed from             refused: a graph has a copy of it
    a size that depends on numbers                 refused: torch reads them on the host
    what a cache of functools has kept             compared, or refused: Dynamo calls anew

No table of names is kept here: what else the tracer takes for fixed, it takes for fixed everywhere.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import numpy
import torch
import torch._dynamo.variables.dicts as dicts
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import UserFunctionVariable, WrapperUserFunctionVariable
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.misc import PythonModuleVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from packgraph.graphs.errors import CaptureError, traced_line

_COMPILED = "_torchdynamo_inline"  # how Dynamo gets at what is inside of a compiled function
_ARRAY = "___from_numpy("  # how Dynamo gets at an array

_OWN_NAMES = getattr(dicts, "DunderDictVariable", None)  # an object's __dict__

Method = Callable[..., Any]


def refuse_value(name: str, value: Any) -> None:
    """Raises CaptureError for a value that was read. name: Of its source."""
    if isinstance(value, torch.nn.Module):
        compiled = isinstance(value, OptimizedModule) or value._compiled_call_impl is not None
    else:
        compiled = value is torch.compile or _COMPILED in name
    if compiled:
        raise _compiled()
    if _ARRAY in name or isinstance(value, numpy.ndarray):
        raise CaptureError(
            f"forward reads an array of numpy ({name.replace(_ARRAY, '').rstrip(')')}), whose "
            "numbers a graph would keep",
            "",
            "make it a tensor: a buffer of the module",
        )


def refuse_compiled_method(method: Any, code: Sequence[CodeType]) -> None:
    """Raises CaptureError for a method that users have compiled. code: That was traced."""
    inside = getattr(getattr(method, "__func__", method), _COMPILED, None)
    if getattr(inside, "__code__", None) in code:
        raise _compiled()


def _compiled() -> CaptureError:
    return CaptureError(
        "forward calls a function or module that you have compiled, which a trace would read "
        "through",
        "",
        "compile the whole module: packgraph.graph(module, compile=True)",
    )


def refuse_operations(graph: torch.fx.GraphModule) -> None:
    """Raises CaptureError for an operation that was traced and that no graph can hold."""
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        if name in _NO_OPERATION:
            what, remedy = _NO_OPERATION[name]
            raise CaptureError(what, traced_line(node.stack_trace), remedy)


_DATA = (
    "a tensor is given other memory (an assignment to Tensor.data): a replay would not do it",
    "write in place under torch.no_grad(): tensor.copy_(...)",
)
_NO_OPERATION = {
    "_assert_scalar": (  # how Dynamo keeps what it supposes of sizes that it does not know
        "the size of a tensor depends on numbers of another one, which are read on the host",
        "make tensors of fixed sizes",
    ),
    "set_": _DATA,
    "shallow_copy_data_": _DATA,  # torch 2.14
}


def let_go_of_tensors(output: Any) -> None:
    """Clears the weak references of a trace to what it has read: torch.utils.swap_tensors takes no
    tensor that has any. output: Dynamo's OutputGraph."""
    output.tracing_context.tensor_to_context.clear()
    modes = {output.tracing_context.fake_mode, getattr(output, "_old_fake_mode", None)}
    for mode in modes - {None}:
        seen = mode.fake_tensor_converter.meta_converter.describer
        seen.lookup_tensor.clear()
        seen.lookup_storage.clear()


Substitute = Callable[[Any], Any]


def around(function: Callable[..., Any]) -> Substitute:
    """Returns what makes of a method of Dynamo's one that calls `function` with that method first,
    and then what it is called with."""
    return lambda method: lambda *args, **kwargs: function(method, *args, **kwargs)


@around
def _of_keys(method: Method, table: Any, asking: Any, key: Any) -> Any:
    if key not in table:
        table.install_dict_contains_guard(asking, [key])
    return method(table, asking, key)


@around
def _of_attributes(method: Method, found: Any, asking: Any, name: str) -> Any:
    """An object may have none of the name, or `__getattr__` has answered, which would not if the
    object itself had it."""
    if found.source is not None and not _has(getattr(found, "value", None), name):
        _guard_name(found.source, name)
    try:
        return method(found, asking, name)
    except ObservedAttributeError:
        _guard_absence(found.source, name)
        raise


@around
def _of_tensors(method: Method, found: Any, asking: Any, name: str) -> Any:
    if name in ("is_leaf", "grad_fn"):
        raise CaptureError(
            f"forward asks for Tensor.{name}: a graph has copies of its arguments, which "
            "nothing was computed from",
            "",
            "ask outside of the call, and pass the answer as an argument",
        )
    return method(found, asking, name)


@around
def _of_methods(method: Method, found: Any, asking: Any, name: str, *args: Any) -> Any:
    if name in ("__delattr__", "register_hook", "retain_grad"):
        raise CaptureError(
            f"forward calls Tensor.{name}, which a replay would not do",
            "",
            "do it outside of forward, or write a torch.autograd.Function",
        )
    return method(found, asking, name, *args)


def _has(value: Any, name: str) -> bool:
    """Returns whether an object, its class or a module's tables have a name, or it has no names at
    all."""
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict) or name in own or not type(value).__dictoffset__:
        return True
    if any(name in vars(kind) for kind in type(value).__mro__):
        return True
    tables = (own.get(table, ()) for table in ("_parameters", "_buffers", "_modules"))
    return isinstance(value, torch.nn.Module) and any(name in table for table in tables)


def guard_own_name(attribute: Any, name: Any) -> None:
    """Guards a name that is asked for in an object's `__dict__`, where it is not there."""
    source, table = attribute.obj.source, getattr(attribute.obj.value, "__dict__", None)
    if attribute.name == "__dict__" and source is not None and table is not None:
        key = name.as_python_constant() if name.is_python_constant() else None
        if key is not None and key not in table:
            _guard_name(source, key)


KEPT = list[tuple[Any, tuple[Any, ...], dict[str, Any]]]()  # what the trace under way has called


@around
def _of_caches(method: Method, function: Any, asking: Any, args: Any, kwargs: Any) -> Any:
    """Calls of functions with a cache: Dynamo reads through it, and a graph has what is in it."""
    found, kept = method(function, asking, args, kwargs), function.wrapper_obj
    room = (getattr(kept, "__module__", None) or "").split(".")[0]
    if not hasattr(kept, "cache_info") or room in ("torch", __name__.split(".")[0]):
        return found
    known = all(each.is_python_constant() for each in (*args, *kwargs.values()))
    if isinstance(found, _CHANGING) or (isinstance(found, TensorVariable) and not known):
        raise CaptureError(
            f"forward takes a container, an object or a tensor from the cache of "
            f"{kept.__name__} (functools.lru_cache), which the tracer would not see change",
            "",
            "keep it on the module: a tensor as a buffer",
        )
    if known:
        named = {name: each.as_python_constant() for name, each in kwargs.items()}
        KEPT.append((kept, tuple(each.as_python_constant() for each in args), named))
    return found


@around
def _of_own_names(_: Method, table: Any, asking: Any, args: Sequence[Any]) -> None:
    """Of names that are asked for in an object's `__dict__`, in newer versions of torch."""
    for arg in args if table.source is not None else ():
        if arg.is_python_constant() and not table.contains(arg.as_python_constant()):
            _guard_name(table.source.base, arg.as_python_constant())


@around
def _of_all_names(_: Method, table: Any) -> None:
    if table.source is not None:
        install_guard(table.source.make_guard(GuardBuilder.DICT_KEYS_MATCH))


def _guard_name(source: Any, name: str) -> None:
    absent = functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
    install_guard(source.make_guard(absent))


@around
def _of_names(method: Method, found: Any, asking: Any, name: str) -> Any:
    answer = method(found, asking, name)
    if answer.is_python_constant() and not answer.as_python_constant():
        _guard_absence(found.source, name)
    return answer


@around
def _of_calls(method: Method, module: Any, *args: Any) -> Any:
    refuse_value("", module.value)
    if module.source is not None:
        own = AttrSource(module.source, "_compiled_call_impl")
        install_guard(own.make_guard(GuardBuilder.CONSTANT_MATCH))
    return method(module, *args)


def _guard_absence(source: Any, name: str) -> None:
    if source is None:
        return
    if "attr" in inspect.signature(GuardBuilder.HASATTR).parameters:
        install_guard(source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name)))
    else:  # torch 2.11
        install_guard(AttrSource(source, name).make_guard(GuardBuilder.HASATTR))


# Dynamo's methods that look something up, and what makes another one of each, with a guard. A
# version of torch has one of two names for that of attributes.
ABSENCES: dict[tuple[Any, str], Substitute] = {
    (UserDefinedObjectVariable, "tp_getattro_impl"): _of_attributes,
    (ConstDictVariable, "getitem_const_raise_exception_if_absent"): _of_keys,
    (UserDefinedObjectVariable, "var_getattr"): _of_attributes,
    (PythonModuleVariable, "call_obj_hasattr"): _of_names,
    (UserFunctionVariable, "call_obj_hasattr"): _of_names,
    (UnspecializedNNModuleVariable, "call_function"): _of_calls,
    (WrapperUserFunctionVariable, "call_function"): _of_caches,
    (_OWN_NAMES, "install_dict_contains_guard"): _of_own_names,
    (_OWN_NAMES, "install_dict_keys_match_guard"): _of_all_names,
}
_CHANGING = (ConstDictVariable, ListVariable, UserDefinedObjectVariable)
# The same of tensors, for code that is compiled, too; one of two names for that of attributes.
OF_TENSORS: dict[tuple[Any, str], Substitute] = {
    (TensorVariable, "tp_getattro_impl"): _of_tensors,
    (TensorVariable, "var_getattr"): _of_tensors,
    (TensorVariable, "call_method"): _of_methods,
}
