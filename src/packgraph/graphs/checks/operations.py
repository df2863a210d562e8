"""Schema facts, read once, and operands of tensor operations, for those who watch them.

All of this runs for every operation of a capture, several times: hence plain loops, and tests of
exact types before those that call a function.
"""

from collections.abc import Iterable
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from packgraph.torch_internals import HigherOrderOperator, OpOverload, schema_of, storage_id

aten = torch.ops.aten
DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKABLE = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}
_PRODUCTS = {aten.prod.default, aten.prod.dim_int}
# Running averages are written to, in training at least, and no argument is marked so.
_UNDECLARED = {
    operation.default
    for operation in (
        aten.native_batch_norm,
        aten.cudnn_batch_norm,
        aten.miopen_batch_norm,
        aten.batch_norm_update_stats,
        aten.batch_norm_gather_stats,
        aten.batch_norm_gather_stats_with_counts,
    )
}
_RESIZING = {
    aten.resize_.default,
    aten.set_.source_Storage,
    aten.set_.source_Tensor,
    aten.set_.default,
}
_SPARSE = {
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_unsafe",
}
# Namespaces whose operations draw only if they are tagged so.
_KNOWN_NAMESPACES = {"aten", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd"}
PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
PLAIN_VALUES = {
    NoneType,
    bool,
    int,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
}
_LEAVES = {*PLAIN_TENSORS, *PLAIN_VALUES, float, complex, torch.Generator}


class Operation(NamedTuple):
    """Facts about `function`, an operation of torch or compiled code that presents itself as one.

    written: index and name of the arguments that it changes in place by its schema. undeclared: it
    changes running averages, too. is_view: it reads no values, its results are other views of its
    inputs. waits: the host needs a result. draws: random numbers. moves: it may draw from default
    generators, which cannot be told. may_draw: either. maskable: a boolean mask among its indices
    makes it wait. copies: it may copy from one device to another. is_harmless: a graph can hold it,
    whatever it is given, but for sparse tensors.
    """

    function: Any
    name: str
    mutates: bool
    written: tuple[tuple[int, str], ...]
    undeclared: bool
    is_view: bool
    waits: bool
    draws: bool
    moves: bool
    may_draw: bool
    maskable: bool
    resizes: bool
    is_product: bool
    takes_generator: bool
    makes_sparse: bool
    copies: bool
    is_harmless: bool

    def written_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments that a call changes in place."""
        if self.undeclared:
            return self.uncounted_of(args, kwargs)
        if not self.written:
            return []
        values = [
            args[index] if index < len(args) else kwargs.get(name) for index, name in self.written
        ]
        return tensors_of(flat(values))

    def uncounted_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Those that a call changes though the schema does not say so: their versions do not count
        that."""
        if not self.undeclared:
            return []
        names = [argument.name for argument in schema_of(self.function).arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        means = (
            [given.get("running_mean"), given.get("running_var")]
            if given.get("training", True)
            else []
        )
        return [tensor for tensor in means if tensor is not None]


_OPERATIONS: dict[int, Operation] = {}  # by identity: torch hashes operations in Python


def operation_of(function: Any) -> Operation | None:
    """The facts about what a dispatch mode is given; None for a higher-order operator."""
    found = _OPERATIONS.get(id(function))
    if found is None and not isinstance(function, HigherOrderOperator):
        found = _facts(function)
        if isinstance(function, OpOverload):  # compiled code comes and goes
            _OPERATIONS[id(function)] = found
    return found


def _facts(function: Any) -> Operation:
    schema, tags = schema_of(function), function.tags
    overload = isinstance(function, OpOverload)
    writes = [
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in schema.arguments
    ]
    aliases = [
        result.alias_info for result in getattr(schema, "returns", ())
    ]  # compiled code has none
    draws = torch.Tag.nondeterministic_seeded in tags
    moves = not overload or (not draws and function.namespace not in _KNOWN_NAMESPACES)
    name = function.overloadpacket.__name__
    waits = not DATA_DEPENDENT.isdisjoint(tags)
    takes_generator = not overload or "Generator" in str(schema)
    special = overload and function in _MASKABLE | _RESIZING | _PRODUCTS
    return Operation(
        function,
        name,
        schema.is_mutable,
        tuple(
            (index, schema.arguments[index].name)
            for index, is_written in enumerate(writes)
            if is_written
        ),
        overload and function in _UNDECLARED,
        bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases),
        waits=waits,
        draws=draws,
        moves=moves,
        may_draw=draws or moves,
        maskable=overload and function in _MASKABLE,
        resizes=overload and function in _RESIZING,
        is_product=overload and function in _PRODUCTS,
        takes_generator=takes_generator,
        makes_sparse=name in _SPARSE,
        copies=name == "_to_copy",
        is_harmless=not (waits or draws or takes_generator or special or name == "_to_copy"),
    )


def operands_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All that an operation is called with, without the lists."""
    return flat(args) + flat(kwargs.values()) if kwargs else flat(args)


def flat(values: Iterable[Any]) -> list[Any]:
    """The leaves of an operation's arguments or results, in order: `tree_leaves` of torch takes ten
    times as long."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _LEAVES:
            found += (value,)
        elif kind is list or kind is tuple:
            found += flat(value)
        else:
            found += tree_leaves(value)
    return found


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among `values`."""
    return [
        value
        for value in values
        if type(value) in PLAIN_TENSORS
        or (type(value) not in PLAIN_VALUES and isinstance(value, torch.Tensor))
    ]


def storages(values: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The tensors among `values` by storage; without those that have none."""
    return {storage_id(one): one for one in tensors_of(values) if one.layout is torch.strided}
