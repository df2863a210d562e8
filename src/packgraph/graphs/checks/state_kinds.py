"""What a graph bakes of each kind of Python value that a module can reach, and how a change of it
is noticed.

`WATCHED` is the table that the checks use and that the page on what a graph assumes is made from.
The first row that fits the type of a value decides. What no row knows is an object with attributes.
"""

import collections
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import queue
import random
import re
import struct
import sys
import types
import uuid
import weakref
from collections.abc import AsyncIterator, Coroutine, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
Mark = tuple[int, str]  # an attribute: id of what has it, name
PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
DEPTH = 8  # objects within objects whose attributes are watched
LARGEST_BYTES = 2**20  # of an array that is compared before every call
# What torch.compile notes on tensors for itself.
OF_TORCH = frozenset(
    {
        "_dynamo_static_input_type",
        "_dynamo_dynamic_indices",
        "_dynamo_weak_dynamic_indices",
        "_dynamo_unbacked_indices",
        "_dynamo_static_indices",
        "_is_param",
    }
)
MOST_CONTAINERS = 20_000


class Treatment(enum.Enum):
    """How values of a kind are watched."""

    TENSOR = "identity and storage"
    MODULE = "everything a registered submodule is watched for"
    VALUE = "type and value"
    BYTES = "identity and contents"
    CONTENTS = "every entry"
    ATTRIBUTES = "identity and every attribute"
    FUNCTION = "identity, code, defaults, closure and the globals it names"
    CLASS = "identity and attributes"
    NAMESPACE = "the names that the module's code reads"
    REFERENT = "what it refers to"
    IDENTITY = "identity"
    REFUSED = "not watched: the module runs eagerly"


class KindRule(NamedTuple):
    """kinds: types, or dotted names of them (`numpy.ndarray`, all of a package with
    `logging.*`)."""

    what: str
    kinds: tuple[type | str, ...]
    treatment: Treatment
    reason: str


VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_SCALARS = (
    *PLAIN,
    enum.Enum,
    slice,
    range,
    types.EllipsisType,
    types.NotImplementedType,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    uuid.UUID,
    pathlib.PurePath,
    re.Pattern,
)

WATCHED: tuple[KindRule, ...] = (
    KindRule(
        "tensors, parameters and buffers",
        (torch.Tensor,),
        Treatment.TENSOR,
        "a graph reads the storage it was captured with: another tensor, storage, shape, stride, "
        "dtype or requires_grad, a first or last hook and Python attributes are noticed; values "
        "are read at every replay",
    ),
    KindRule(
        "modules, also in lists, objects and closures",
        (torch.nn.Module,),
        Treatment.MODULE,
        "training flags, submodules, parameters, buffers, hooks and attributes are baked",
    ),
    KindRule(
        "torch generators",
        (torch.Generator,),
        Treatment.IDENTITY,
        "replays advance them as eager calls do",
    ),
    KindRule(
        "random generators of Python and numpy",
        (
            random.Random,
            "numpy.random.Generator",
            "numpy.random.RandomState",
            "numpy.random.BitGenerator",
        ),
        Treatment.REFUSED,
        "a replay would neither see nor advance its hidden state",
    ),
    # A proxy has __next__, whatever it refers to: before iterators.
    KindRule(
        "weak references and context variables",
        (
            weakref.ReferenceType,
            weakref.ProxyType,
            weakref.CallableProxyType,
            contextvars.ContextVar,
        ),
        Treatment.REFERENT,
        "forward reads what they refer to now",
    ),
    KindRule(
        "iterators, generators and files",
        (Iterator, AsyncIterator, Coroutine, io.IOBase),
        Treatment.REFUSED,
        "a replay would not advance it",
    ),
    KindRule(
        "queues and connections",
        (
            queue.Queue,
            queue.SimpleQueue,
            "asyncio.Queue",
            "multiprocessing.queues.Queue",
            "multiprocessing.queues.SimpleQueue",
            "multiprocessing.connection._ConnectionBase",
        ),
        Treatment.REFUSED,
        "a replay would not take from it",
    ),
    KindRule(
        "events of processes",
        ("multiprocessing.synchronize.Event",),
        Treatment.REFERENT,
        "whether they are set is baked",
    ),
    KindRule(
        "other state shared by processes, and pointers",
        (
            "multiprocessing.synchronize.Semaphore",
            "multiprocessing.synchronize.Condition",
            "multiprocessing.synchronize.Barrier",
            "multiprocessing.managers.BaseProxy",
            "_ctypes._Pointer",
        ),
        Treatment.REFUSED,
        "what is behind it cannot be compared before a replay",
    ),
    KindRule(
        "numpy scalars",
        ("numpy.generic",),
        Treatment.VALUE,
        "they are baked as constants, bit by bit",
    ),
    KindRule(
        "numbers, strings and other plain values",
        _SCALARS,
        Treatment.VALUE,
        "they are baked as constants: 1, True and 1.0 are three values, and so are 0.0 and -0.0; "
        "NaN equals itself",
    ),
    KindRule(
        "arrays and byte buffers",
        (
            "numpy.ndarray",
            "array.array",
            bytearray,
            memoryview,
            "_ctypes._SimpleCData",
            "_ctypes.Structure",
            "_ctypes.Array",
        ),
        Treatment.BYTES,
        "their contents are baked; beyond 1 MiB they are refused unless numpy has them read-only",
    ),
    KindRule(
        "lists, tuples, sets, deques, dictionaries and views of them",
        (
            list,
            tuple,
            set,
            frozenset,
            collections.deque,
            dict,
            types.MappingProxyType,
            *VIEWS,
        ),
        Treatment.CONTENTS,
        "what they hold is baked, of whatever length, in the order they give it",
    ),
    KindRule(
        "functions, methods, partial calls and contexts made of functions",
        (
            types.FunctionType,
            types.MethodType,
            types.BuiltinMethodType,
            types.MethodWrapperType,
            functools.partial,
            functools.partialmethod,
            staticmethod,
            classmethod,
            property,
            functools.cached_property,
            functools._lru_cache_wrapper,
            "contextlib._GeneratorContextManagerBase",
        ),
        Treatment.FUNCTION,
        "their operations are baked, with every constant that their code reads, by a name in a "
        "string, "
        "too (`globals()`, `eval`, `sys.modules`); where your code computes the name, with all "
        "that "
        "begins like it in the Python module; `exec` and `eval` of a computed string: all globals; "
        "where it "
        "computes the Python module's name as well, the module runs eagerly",
    ),
    KindRule(
        "classes",
        (type,),
        Treatment.CLASS,
        "methods and class attributes are baked; not of library classes",
    ),
    KindRule(
        "Python modules",
        (types.ModuleType,),
        Treatment.NAMESPACE,
        "the functions and constants that the code names are baked; of torch, what its own layers "
        "call",
    ),
    KindRule(
        "state of a thread",
        ("_thread._local",),
        Treatment.ATTRIBUTES,
        "its attributes in the thread that calls are baked",
    ),
    KindRule(
        "loggers",
        ("logging.Logger",),
        Treatment.REFERENT,
        "whether they are disabled and their effective level are baked, not what they write",
    ),
    KindRule(
        "operators, contexts and data sets made of users' objects",
        (
            "torch._library.custom_ops.CustomOpDef",
            "torch.utils.data.dataset.*",
            "contextlib.nullcontext",
        ),
        Treatment.ATTRIBUTES,
        "attributes are baked, and the functions and constants among them",
    ),
    KindRule(
        "internals of torch, numpy, packgraph and of the interpreter",
        (
            "torch._*",
            "torch.distributed.*",
            "torch.cuda.*",
            "torch.fx.*",
            "torch.jit.*",
            "torch.utils.*",
            "numpy.*",
            "packgraph.*",
            "logging.*",
            "threading.Thread",
            "concurrent.*",
            "asyncio.*",
            "contextlib.*",
            "_thread.*",
            types.CodeType,
            types.CellType,
            types.FrameType,
        ),
        Treatment.IDENTITY,
        "they keep caches of their own",
    ),
    KindRule(
        "other objects",
        (object,),
        Treatment.ATTRIBUTES,
        f"attributes and slots are baked, to {DEPTH} objects deep; below that, and of objects "
        "without "
        "attributes, "
        "identity is watched",
    ),
)


def _resolved(name: str) -> type | None:
    """The type of a dotted name if its package is loaded; no value can have it otherwise."""
    package, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(package), attribute, None)
    return found if isinstance(found, type) else None


def _fits(kind: type, wanted: type | str) -> bool:
    if not isinstance(wanted, str):
        return issubclass(kind, wanted)
    if wanted.endswith("*"):
        return f"{kind.__module__}.{kind.__qualname__}".startswith(wanted[:-1])
    found = _resolved(wanted)
    return found is not None and issubclass(kind, found)


_ROW_OF: "weakref.WeakKeyDictionary[type, KindRule]" = weakref.WeakKeyDictionary()


def row_of(value: Any) -> KindRule:
    """The row of the table that says how `value` is watched."""
    kind = type(value)
    row = _ROW_OF.get(kind)
    if row is None:
        row = _ROW_OF[kind] = next(
            row for row in WATCHED if any(_fits(kind, wanted) for wanted in row.kinds)
        )
    return row


def global_generators() -> tuple[Any, ...]:
    """The hidden generators behind `random.random` and `numpy.random.rand`: captures see draws
    from them."""
    numpy = sys.modules.get("numpy.random")
    draws = [random.random, *(() if numpy is None else (numpy.rand,))]
    return tuple(getattr(draw, "__self__", None) for draw in draws)


def value_key(value: Any) -> Hashable | None:
    """What tells plain values apart, bit by bit; None for a value that is not plain."""
    kind = type(value)
    if kind in (int, bool, str, bytes, type(None)):
        return kind, value
    if isinstance(value, tuple | frozenset):
        keys = [value_key(entry) for entry in value]
        return None if None in keys else (kind, *keys)
    if row_of(value).treatment is not Treatment.VALUE:
        return None
    if isinstance(value, enum.Enum):
        return kind, id(value)
    if hasattr(value, "tobytes"):
        return kind, str(value.dtype), value.tobytes()
    if isinstance(value, float):
        return kind, struct.pack("d", value)
    if isinstance(value, complex):
        return kind, struct.pack("dd", value.real, value.imag)
    if isinstance(value, slice | range):
        return kind, value_key(value.start), value_key(value.stop), value_key(value.step)
    return kind, repr(value), value


def same_value(one: Any, other: Any) -> bool:
    """Whether two plain values are of the same type and the same bits."""
    if type(one) is not type(other):
        return False
    key = value_key(one)
    return key is not None and key == value_key(other)


def contents(buffer: Any) -> tuple[Any, ...] | None:
    """Form and bytes of an array or a byte buffer.

    Of one that is large and cannot be written to, the form alone; None if it is too large to be
    compared before every call.
    """
    form = tuple(getattr(buffer, name, None) for name in ("dtype", "shape", "strides", "typecode"))
    nbytes = getattr(buffer, "nbytes", None)
    if nbytes is None:
        nbytes = memoryview(buffer).nbytes
    if nbytes > LARGEST_BYTES:
        return (form,) if _read_only(buffer) else None
    if hasattr(buffer, "mask"):  # of numpy: its own bytes are those of `filled`
        attributes = repr(vars(buffer))
        return form, attributes, buffer.data.tobytes(), buffer.mask.tobytes()
    return form, buffer.tobytes() if hasattr(buffer, "tobytes") else bytes(buffer)


def _read_only(array: Any) -> bool:
    while array is not None and hasattr(array, "flags"):
        if array.flags.writeable:
            return False
        array = array.base
    return array is None or isinstance(array, bytes)


class _Assumed:
    """Objects that users have declared constant, by id. Weak where that is possible."""

    def __init__(self) -> None:
        self.version = 0
        self._held: dict[int, Any] = {}

    def add(self, value: Any) -> None:
        """Declare `value` constant."""
        held, key = self._held, id(value)
        try:
            held[key] = weakref.ref(value, lambda _: held.pop(key, None))
        except TypeError:
            held[key] = lambda: value
        self.version += 1

    def __contains__(self, value: Any) -> bool:
        held = self._held.get(id(value))
        return held is not None and held() is value


ASSUMED = _Assumed()


def assume_constant(value: T) -> T:
    """Declares that what captured code reads of an object never changes, so that graphs need not
    watch it.

    The inside of the object is then neither watched nor refused: a random generator, an iterator or
    a large array may stay an attribute of a module, and a trainer that changes in every step does
    not lead to new captures. Replays go on with what forward read at the capture. An attribute that
    gets another object is still noticed.

    Args:
        value: What to leave unwatched: an object, a container, an array, a function or a module
            with all it holds. It is not kept alive, unless it cannot be referred to weakly (lists,
            dictionaries, numpy generators).

    Returns:
        The same object.

    Raises:
        TypeError: `value` is a plain value such as a number, which has no identity of its own.

    Example:
        >>> import random
        >>> module = torch.nn.Linear(8, 8)
        >>> module.draws = packgraph.assume_constant(random.Random(0))
        >>> graphed = packgraph.graph(module, warmup=0, strict=True)
        >>> graphed(torch.ones(2, 8)).sum().backward()
        >>> graphed.stats.replayed
        1
    """
    if row_of(value).treatment is Treatment.VALUE:
        raise TypeError(
            f"assume_constant({value!r}): a {type(value).__name__} is known by its value, not as "
            "an object; pass the object that holds it"
        )
    ASSUMED.add(value)
    return value
