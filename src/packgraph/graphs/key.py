"""The key of a call: everything that Python branches on or that a launch bakes.

Tensors count by shape, dtype, memory layout and whether they need a gradient; their values are data
and never part of the key. Constants among the arguments (numbers, strings, capacities, optional
arguments left out) count by value.
"""

import contextlib
import enum
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

from packgraph.graphs import fallback
from packgraph.graphs.fallback import OVER_BUDGET as OVER_BUDGET
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.torch_internals import (
    ATTENTION,
    KERNEL_SETTINGS,
    attention_order,
    attention_reduces,
    cudnn_enabled,
    function_modes,
    set_attention_order,
    set_cudnn_enabled,
)

CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    Capacity,
)
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor})


class _Structure:
    """A hashable tree structure (torch's own is not hashable when it holds dicts)."""

    def __init__(self, spec: TreeSpec) -> None:
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Structure)
            and self.spec == other.spec
            and _alike(self.spec, other.spec)
        )

    def __hash__(self) -> int:
        return hash((self.spec.num_leaves, self.spec.num_nodes))


def _alike(one: TreeSpec, other: TreeSpec) -> bool:
    """Returns whether keys of dicts are of the same types in two specs that are equal: 1, 1.0 and
    True are equal in Python."""
    if (
        isinstance(one.type, type)
        and issubclass(one.type, dict)
        and list(map(type, _keys(one.context))) != list(map(type, _keys(other.context)))
    ):
        return False
    return all(map(_alike, one.children(), other.children()))


def _keys(context: Any) -> Any:
    """The keys of a dict, of whose spec `context` is: of a defaultdict they come after its
    factory."""
    return context[1] if context and isinstance(context[-1], list) else context


class Signature(NamedTuple):
    """key: hashable identity of a call's variant. size: of its bucket, by which variants of a slot
    are compared: whether gradients are on, since forwards alone need less, and the bytes of its
    tensor arguments."""

    key: tuple[Any, ...]
    size: tuple[bool, int]


# Settings that choose between kernels, or that code may ask for. They are read before every call.
_MODES: tuple[Callable[[], Any], ...] = (
    torch.is_grad_enabled,
    partial(torch.is_autocast_enabled, "cpu"),
    partial(torch.get_autocast_dtype, "cpu"),
    partial(torch.is_autocast_enabled, "cuda"),
    partial(torch.get_autocast_dtype, "cuda"),
    torch.is_autocast_cache_enabled,
    torch.get_default_dtype,
    cudnn_enabled,
    *(is_enabled for is_enabled, _ in ATTENTION.values()),
    attention_reduces,
)


def kernel_settings(device_type: str) -> tuple[Any, ...]:
    """Global settings by which kernels of forwards and backwards compute otherwise."""
    return tuple(map(operator.call, KERNEL_SETTINGS[device_type]))


def call_key(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, training: bool = True
) -> tuple[Any, ...] | None:
    """The key of a call, or None when an argument cannot be part of one.

    Only tensors on `device` and plain constants can: the contents of any other object could change
    unseen. training: whether the module is in training mode.
    """
    facts: list[Any] = []
    single = len(args) + len(kwargs) == 1
    for arg in (*args, *kwargs.values()) if kwargs else args:
        fact = _fact(arg, device)
        if fact is None:
            return None
        facts.append(fact)
        single = single and (type(arg) is PackedBatch or type(arg) in TENSORS)
    return (
        training,
        () if single else _repeats(args, kwargs),
        len(args),
        tuple(kwargs),
        tuple(facts),
        tuple(map(operator.call, KERNEL_SETTINGS[device.type])),
        tuple(map(operator.call, _MODES)),
        tuple(attention_order()),
        str(torch.get_default_device()) if function_modes() else None,
    )


def _repeats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Numbers equal for tensors of a call that are the same object; empty if none is there
    twice."""
    numbers = [id(t) for t in call_tensors(args, kwargs)]
    return () if len({*numbers}) == len(numbers) else tuple(map(numbers.index, numbers))


def _fact(arg: Any, device: torch.device) -> tuple[Any, ...] | None:
    """Returns the part of a key that stands for an argument; None when it cannot be part of one."""
    kind = type(arg)
    if kind is PackedBatch:
        fact = _fact(arg.data, device)
        return None if fact is None else (PackedBatch, arg.capacity, fact)
    if kind in TENSORS:
        if arg.device != device or arg.layout != torch.strided:
            return None
        if arg.__dict__ and _attributes(arg):
            return None
        strides = None if arg.is_contiguous() else own_strides(arg)
        # A graph has copies: code that asks what made its arguments is read on the arguments.
        origin = arg.requires_grad and (True, arg.is_leaf)
        return (arg.shape, arg.dtype, origin, strides, arg.is_conj(), arg.is_neg())
    if isinstance(arg, CONSTANTS):
        return kind, _value(arg)
    leaves, spec = tree_flatten(arg)
    if len(leaves) == 1 and leaves[0] is arg:  # no container
        return None
    facts = tuple(_fact(leaf, device) for leaf in leaves)
    return None if None in facts else (_Structure(spec), facts)


def signature(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, training: bool = True
) -> Signature | None:
    """The key of a call with the size of its bucket, or None when an argument cannot be part of a
    key. training: whether the module is in training mode."""
    key = call_key(args, kwargs, device, training)
    if key is None:
        return None
    return Signature(key, call_size(args, kwargs))


def call_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, int]:
    """The size of the bucket of a call made now, see `Signature`."""
    tensors = call_tensors(args, kwargs)
    return torch.is_grad_enabled(), sum(one.numel() * one.element_size() for one in tensors)


Pattern = tuple["Layout | None", ...]  # for each output of a segment, None = it gets no gradient


def pattern_of(gradients: Sequence[torch.Tensor | None]) -> Pattern:
    """The pattern of the gradients that a segment's outputs got, by which its backward is looked
    up: the layout of each."""
    return tuple(
        [
            None if gradient is None else () if gradient.is_contiguous() else layout_of(gradient)
            for gradient in gradients
        ]
    )


def _value(leaf: Any) -> Any:
    """A constant's value, without numbers that are equal and not the same (0.0 and -0.0)."""
    if isinstance(leaf, complex):
        return leaf.real.hex(), leaf.imag.hex()
    return leaf.hex() if isinstance(leaf, float) else leaf


def unfit(leaf: Any, device: torch.device) -> str | None:
    """Returns the reason why this leaf of a call's arguments cannot be part of a key, or None."""
    if not isinstance(leaf, torch.Tensor):
        return None if isinstance(leaf, CONSTANTS) else f"an object of type {type(leaf).__name__}"
    if type(leaf) not in TENSORS:
        return f"a {type(leaf).__name__}, a tensor that may do more than hold numbers"
    if leaf.layout != torch.strided:
        return f"a tensor of layout {leaf.layout}"
    if _attributes(leaf):
        return (
            f"a tensor with the attribute {_attributes(leaf)[0]!r}, which a graph's copy would not "
            "have"
        )
    return (
        f"a tensor on {leaf.device}, and the module is on {device}"
        if leaf.device != device
        else None
    )


def _attributes(leaf: torch.Tensor) -> list[str]:
    """The names of what Python code has set on a tensor, which captured code could read."""
    if type(leaf) is not torch.Tensor or not leaf.__dict__:
        return []
    return [name for name in leaf.__dict__ if not name.startswith("_dynamo_")]


_PLAIN = (type(None), bool, int, str)


def call_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call, in the order of its pytree."""
    if not kwargs and all(
        type(arg) is torch.Tensor or type(arg) is PackedBatch or type(arg) in _PLAIN for arg in args
    ):
        return [
            arg.data if type(arg) is PackedBatch else arg for arg in args if type(arg) not in _PLAIN
        ]
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def packed_batches(args: Any) -> list[PackedBatch]:
    """The packed batches among a call's arguments."""
    is_batch = lambda leaf: isinstance(leaf, PackedBatch)  # noqa: E731
    return [leaf for leaf in tree_leaves(args, is_leaf=is_batch) if is_batch(leaf)]


def undeclared(
    args: tuple[Any, ...], kwargs: dict[str, Any], capacities: Sequence[Capacity]
) -> str | None:
    """Returns the reason why this call lies outside the declared capacities, or None. Without
    declared capacities every shape may be."""
    if not capacities:
        return None
    batches = packed_batches((args, kwargs))
    for batch in batches:
        if batch.capacity not in capacities:
            dropped = capacities.dropped if isinstance(capacities, CapturedCapacities) else {}
            if batch.capacity in dropped:
                return dropped[batch.capacity]
            most = max(capacity.documents for capacity in [*capacities, *dropped])
            return fallback.DOCUMENTS if batch.capacity.documents > most else fallback.UNDECLARED
    if batches:
        return None
    first = next(
        (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None
    )
    tokens = {capacity.tokens for capacity in capacities}
    if first is None or first.dim() == 0 or not set(first.shape[:2]) & tokens:
        return fallback.UNKNOWN_SHAPE
    return None


class CapturedCapacities(tuple[Capacity, ...]):
    """The capacities that graphs are captured for. dropped: those that were declared as well, with
    the reason.

    True even when none is kept: an empty tuple of capacities would mean that every shape may be
    captured.
    """

    dropped: dict[Capacity, str]

    def __new__(
        cls, kept: Iterable[Capacity], dropped: Mapping[Capacity, str]
    ) -> "CapturedCapacities":
        made = super().__new__(cls, sorted(kept))
        made.dropped = dict(dropped)
        return made

    def __bool__(self) -> bool:
        return bool(len(self) or self.dropped)


Layout = tuple[int, ...]  # strides of a tensor, () for row-major


def contiguous_strides(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`."""
    sizes = [max(1, size) for size in reversed(shape)]
    return (
        tuple(reversed(list(itertools.accumulate([1, *sizes[:-1]], lambda a, b: a * b))))
        if shape
        else ()
    )


def own_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides a static copy of `tensor` must have, or None for row-major.

    Transposed and channels-last tensors keep their layout, since kernels choose by it; expanded and
    sliced tensors are copied row-major.
    """
    return (
        None
        if tensor.is_contiguous() or not _is_dense(tensor.stride(), tensor.shape)
        else tuple(tensor.stride())
    )


def row_major(tree: Any) -> Any:
    """A tree with dense copies of tensors with gaps, sliced or expanded, as graphs have them;
    itself if there are none."""

    copies: dict[int, torch.Tensor] = {}

    def dense(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.is_contiguous():
            return leaf
        if own_strides(leaf) is not None:
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().contiguous().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    made = tree_map(dense, tree)
    return made if copies else tree


def layout_of(gradient: torch.Tensor) -> Layout:
    """The layout in which a static copy of `gradient` is read: its own, expanded dimensions
    included; row-major for tensors with gaps."""
    if gradient.is_contiguous():
        return ()
    return tuple(gradient.stride()) if _is_dense(gradient.stride(), _unexpanded(gradient)) else ()


def with_bits(tensor: torch.Tensor, conjugate: bool, negative: bool) -> torch.Tensor:
    """The same memory with the conjugate and negative bits of lazy views (`torch.conj`, `.imag` of
    it)."""
    if conjugate:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if negative else tensor


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target`, which may be expanded: every element of its memory is written
    once."""
    shape = _unexpanded(target)
    if shape == tuple(target.shape):
        target.copy_(source)
    else:
        source = source[tuple(slice(0, size) for size in shape)]
        target.as_strided(shape, target.stride()).copy_(source)


def _unexpanded(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of what lies in memory: expanded dimensions count once."""
    if 0 not in tensor.stride():
        return tensor.shape
    return tuple(
        1 if stride == 0 else size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _is_dense(strides: tuple[int, ...], shape: torch.Size | tuple[int, ...]) -> bool:
    """Returns whether a tensor fills its memory without gaps and overlaps, in whatever order of
    dimensions."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class CallModes(NamedTuple):
    """Modes of a call.

    Attributes:
        device_type: Of the module.
        autocast: Whether autocast is on for it, its dtype, and whether casts are cached.
        dtype: The default dtype.
        device: The default device, if the user has set one for this thread.
        attention: Which kernels `scaled_dot_product_attention` may choose, and in which order.
        cudnn: Whether cuDNN is used.
    """

    device_type: str
    autocast: tuple[bool, torch.dtype, bool]
    dtype: torch.dtype
    device: torch.device | None
    attention: tuple[tuple[bool, ...], tuple[int, ...]]
    cudnn: bool

    @classmethod
    def now(cls, device_type: str) -> "CallModes":
        """The modes of this thread."""
        found = [is_enabled() for is_enabled, _ in ATTENTION.values()]
        return cls(
            device_type,
            (
                torch.is_autocast_enabled(device_type),
                torch.get_autocast_dtype(device_type),
                torch.is_autocast_cache_enabled(),
            ),
            torch.get_default_dtype(),
            torch.get_default_device() if function_modes() else None,
            (tuple(found), tuple(attention_order())),
            cudnn_enabled(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block these are the modes. Default dtype and choice of kernels are those of
        the whole process, as where users set them."""
        before = CallModes.now(self.device_type)
        enabled, dtype, cache = self.autocast
        self.put_in_place_of(before)
        try:
            with (
                torch.autocast(self.device_type, dtype=dtype, enabled=enabled, cache_enabled=cache),
                torch.device(self.device or "cpu")
                if self.device != before.device
                else contextlib.nullcontext(),
            ):
                yield
        finally:
            before.put_in_place_of(self)

    def put_in_place_of(self, now: "CallModes") -> None:
        """Set what differs from the modes that there are now."""
        if self.dtype != now.dtype:
            torch.set_default_dtype(self.dtype)
        if self.attention != now.attention:
            for (_, enable), enabled in zip(ATTENTION.values(), self.attention[0], strict=True):
                enable(enabled)
            set_attention_order(list(self.attention[1]))
        if self.cudnn != now.cudnn:
            set_cudnn_enabled(self.cudnn)


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """Within the block there is no autocast, which guards of tensors would see: backwards, and
    calls in another mode, ask them, too."""
    on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)
