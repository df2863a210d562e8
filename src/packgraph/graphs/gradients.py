"""Gradient buffers: the static memory that captured backwards add parameter gradients to.

A backward graph adds to fixed addresses, while `.grad` belongs to the user, who may set it to None,
replace it, or keep the tensor. So every replay begins by comparing `.grad` with the buffer:

    `.grad` is                            before the replay                      after the replay
    the buffer                            nothing                                nothing
    None                                  the buffer, zeroed, becomes `.grad`    nothing
    another tensor nobody else holds      copied in; the buffer becomes `.grad`  nothing
    another tensor somebody else holds    copied in                              copied out to that tensor
    any but the buffer, and somebody      the buffer's content is set aside      copied out; the content is put back
    else holds the buffer

Somebody else is found by reference counts: of the Python object that was `.grad`, and of the
storage behind it (views, aliases, saved tensors).

The gradient of a DTensor may have other placements than its parameter: that of a replicated
parameter is each rank's share of a sum (`Partial`) where ranks have seen other tokens. A buffer has
those of eager gradients, and copies are of local tensors: torch copies a share of a sum by way of
the whole sum, which takes a collective and gives every rank another share.

Gradients of parameters that several threads train.

Alone, a module's gradient buffers are the `.grad` of its parameters, and backward graphs add to
them in place. Autograd adds to `.grad` too, for calls that run eagerly, and knows nothing of
graphs. With several threads both happen at once. Autograd's own adding is safe between threads. So
in shared modules `.grad` is no buffer: gradients of a replay are taken by themselves
(`SeparateGradients`), and autograd adds them to `.grad`.

    thread 1   F, B adds to the buffer, which is `.grad`            F, B  let go, replay apart, autograd adds to `.grad`
    thread 2                              first call: launches.shared    F, B  let go, replay apart, autograd adds

`.grad` moves at the first backward after that, not at the call before: a thread may change `.grad`
while another one runs a forward. Every backward sees to it for its own buffers, so none replays on
memory that is `.grad`, whoever put it there; and whoever replays on what is `.grad` has begun
before `launches.shared` is set, which waits.

Adding gradients to their buffers a few dozen at a time while a backward is captured.

Autograd adds every parameter's gradient as soon as it is there: one small kernel each, eleven a
layer in a decoder. The sums are the same bit by bit if a few gradients wait for each other and one
multi-tensor kernel adds all of them.

    autograd     g1 + , g2 + , g3 + , ...              here     g1, g2, g3 ... -> one kernel for all

The invariant: gradients that wait hold at most WAITING_BYTES, so what a backward needs at most
hardly grows. Code that reads gradients within a backward has them added first
(`add_waiting_gradients`).

A dry run needs no gradients of parameters, only what they are like. `torch.autograd.grad` would
hold those of all layers until the backward ends, and where layers are sharded there is no memory
for as much: each is replaced as it arrives (`without_content`).
"""  # noqa: E501

import contextlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement

from packgraph.graphs.parameters import gradient_dtype, has_hooks, local_tensor, storage_of
from packgraph.graphs.slots import Launches
from packgraph.torch_internals import (
    add_each,
    backward_task,
    below_modes,
    negate_each,
    storage_uses,
    zero_each,
)

_SHOWN, _ADDRESS = operator.attrgetter("shown"), operator.attrgetter("_address")
_GRADIENT = operator.attrgetter("grad")


def _counts_of_a_gradient() -> tuple[int, int, int]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    grad = parameter.grad
    uses = int(storage_uses(storage_of(grad)))
    return sys.getrefcount(grad), uses, sys.getrefcount(grad.untyped_storage())


# References to the object, uses of the storage and references to the storage's object of a gradient
# that only its parameter holds, as counted by a function with one local variable for it. Versions
# of torch and Python differ in it.
# No Python function may stand between: a call of one holds its arguments once more while any thread
# runs code of torch.compile, which replaces the interpreter's evaluation of frames.
_REFERENCES, _USES, _STORAGE_REFERENCES = _counts_of_a_gradient()


def _is_storage_held(tensor: torch.Tensor) -> bool:
    return sys.getrefcount(local_tensor(tensor).untyped_storage()) > _STORAGE_REFERENCES


class GradientBuffer:
    """The gradient buffer of one parameter.

    Attributes:
        parameter: The parameter, which the graphs' memory belongs to.
        tensor: What graphs write to, an alias that never leaves this object and graphs.
        shown: What becomes `.grad`: a tensor of the same memory.
    """

    __slots__ = ("_address", "_storage", "parameter", "shown", "tensor")

    def __init__(self, parameter: torch.nn.Parameter, shown: torch.Tensor) -> None:
        self.parameter, self.shown = parameter, shown
        self.tensor = shown.data  # users may see the versions of what is shown
        self._storage = storage_of(shown)
        self._address = self.tensor.data_ptr()

    def is_attached(self, grad: torch.Tensor | None) -> bool:
        """Returns whether `grad`, the parameter's, is this buffer."""
        if (
            self.shown.data_ptr() != self._address
        ):  # its `.data` was replaced: it is the user's from here on
            self.shown = self.tensor.detach()
        return grad is self.shown

    def is_grad(self) -> bool:
        """Returns whether the parameter's `.grad` is this memory."""
        grad = self.parameter.grad
        return grad is not None and (grad is self.shown or storage_of(grad) == self._storage)

    def is_held(self) -> bool:
        """Returns whether somebody else holds the buffer. Meaningful while it is not the
        parameter's `.grad`."""
        # The attribute and the argument are two references; `tensor` is one use of the storage
        # more.
        return (
            sys.getrefcount(self.shown) > 2
            or storage_uses(self._storage) > _USES + 1
            or _is_storage_held(self.tensor)
        )


class _Aside(NamedTuple):
    """A buffer that is not `.grad` for one replay. grad: the user's gradient, None = there was
    none. content: of the buffer, to be put back; None = nobody needs it."""

    buffer: GradientBuffer
    grad: torch.Tensor | None
    content: torch.Tensor | None


class GradientBuffers:
    """The gradient buffers of a module's parameters, one each, for the life of the graphs.

    launches: of the module; None = only one thread trains. homes: memory that somebody wants
    gradients to lie in, by identity of the parameter.
    """

    def __init__(
        self, launches: Launches | None = None, homes: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        self.made: dict[int, GradientBuffer] = {}  # by identity of the parameter
        self._launches, self._homes = launches, homes or {}

    def present(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Returns the tensor that gradients of `parameter` are added to now: its buffer, or what
        that will be made of; None if that is new memory."""
        if id(parameter) in self.made:
            return self.made[id(parameter)].shown
        shared = self._launches is not None and self._launches.shared
        return None if shared else self._homes.get(id(parameter), parameter.grad)

    @torch.no_grad()
    def buffer(
        self, parameter: torch.nn.Parameter, placements: Sequence[Placement] | None = None
    ) -> GradientBuffer:
        """The buffer of `parameter`: its home, its present `.grad`, or zeros, which become its
        `.grad` at the first backward. Where several threads train, no `.grad` is a buffer (see
        `let_go`).
        placements: of eager gradients, if they are DTensors."""
        if id(parameter) not in self.made:
            shown = self.present(parameter)
            if shown is None:
                zeros = torch.zeros_like(local_tensor(parameter), dtype=gradient_dtype(parameter))
                shown = with_local(parameter, zeros, placements)
            self.made[id(parameter)] = GradientBuffer(parameter, shown)
        return self.made[id(parameter)]


@torch.no_grad()
def attach(buffers: Sequence[GradientBuffer]) -> list[_Aside]:
    """Prepare buffers for a backward graph that adds to them; what to hand to `settle` after its
    replay."""
    if (attached := Attached(buffers)).holds():
        attached.count_writes()
        return []
    cleared: list[torch.Tensor] = []
    aside: list[_Aside] = []
    addresses = dict(zip(map(_ADDRESS, buffers), buffers, strict=True))
    for buffer in buffers:
        grad = buffer.parameter.grad
        if buffer.is_attached(grad):
            torch.autograd.graph.increment_version(buffer.shown)
            continue
        if gradient_dtype(buffer.parameter) != buffer.tensor.dtype:
            raise RuntimeError(
                f"grad_dtype of a parameter of shape {list(buffer.parameter.shape)} changed after "
                f"graphs were captured that add {buffer.tensor.dtype} to its gradient: set it "
                "before packgraph.graph"
            )
        held = buffer.is_held() and not (grad is not None and _same_memory(grad, buffer.tensor))
        other = grad if grad is None else addresses.get(local_tensor(grad).data_ptr())
        is_other = other is not None and other is not buffer
        if grad is not None and is_other and grad.numel():
            raise RuntimeError(
                "one tensor is the gradient of two parameters, to which graphs add by themselves: "
                "give each a gradient of its own, or run such calls under packgraph.eager(...)"
            )
        if held or (
            grad is not None
            and (
                sys.getrefcount(grad) > _REFERENCES
                or storage_uses(storage_of(grad)) > _USES
                or _is_storage_held(grad)
                or not _placed_alike(grad, buffer.tensor)
            )
        ):
            content = cloned(buffer.tensor) if held else None
            aside.append(_Aside(buffer, grad, content))
        else:
            if grad is None:
                # Another tensor of the same memory: users may have marked the old one, hooked it or
                # kept weak references to it, and autograd has counted writes to it.
                buffer.shown = buffer.tensor.data
            buffer.parameter.grad = buffer.shown
        if grad is None:
            cleared.append(local_tensor(buffer.tensor))
        elif not _same_memory(grad, buffer.tensor):
            _copy(grad, buffer.tensor)
        grad = None
    if cleared:
        # To -0.0 everything adds without a change of any bit: 0.0 would lose the sign of a zero.
        zero_each(cleared)
        negate_each(cleared)
    return aside


class Attached:
    """Test of whether every `.grad` is its buffer. It runs before every replay, so it costs one
    pass in C for each fact. It holds no gradient, since references to gradients are counted."""

    def __init__(self, buffers: Sequence[GradientBuffer]) -> None:
        self._buffers = buffers
        self._parameters = [buffer.parameter for buffer in buffers]
        self._addresses = list(map(_ADDRESS, buffers))

    def holds(self) -> bool:
        """Returns whether all gradients are their buffers now."""
        found = list(map(_GRADIENT, self._parameters))
        return (
            all(map(operator.is_, found, map(_SHOWN, self._buffers)))
            and list(map(torch.Tensor.data_ptr, found)) == self._addresses
        )

    def count_writes(self) -> None:
        """Tells autograd that a replay adds to them, as it counts eager additions."""
        torch.autograd.graph.increment_version(list(map(_SHOWN, self._buffers)))


@torch.no_grad()
def settle(aside: Sequence[_Aside]) -> None:
    """Hands the sums, after the replay, to gradients that are not in the buffers."""
    for buffer, grad, content in aside:
        if grad is None:
            buffer.parameter.grad = cloned(buffer.tensor)
        else:
            _copy(buffer.tensor, grad)
        if content is not None:
            _copy(content, buffer.tensor)


class SeparateGradients:
    """One replay whose gradients are wanted by themselves, not added to `.grad`.

    Buffers hold -0.0 meanwhile, to which everything adds without a change of any bit.
    """

    @torch.no_grad()
    def __init__(self, buffers: Sequence[GradientBuffer]) -> None:
        self._buffers = buffers
        self._contents = [local_tensor(buffer.tensor).clone() for buffer in buffers]
        for buffer in buffers:
            local_tensor(buffer.tensor).zero_().neg_()

    @torch.no_grad()
    def take(self) -> list[torch.Tensor]:
        """The gradients of the replay; buffers have their contents again."""
        taken = [cloned(buffer.tensor) for buffer in self._buffers]
        for buffer, content in zip(self._buffers, self._contents, strict=True):
            local_tensor(buffer.tensor).copy_(content)
        return taken


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = local_tensor(one), local_tensor(other)
    return (
        one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
        and one.shape == other.shape
    )


def cloned(gradient: torch.Tensor) -> torch.Tensor:
    """A copy with the same placements."""
    return with_local(gradient, local_tensor(gradient).clone())


def with_local(
    like: torch.Tensor, local: torch.Tensor, placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """`local` as a tensor of the form of `like`. placements: if other than those of `like`, a
    DTensor."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements if placements is None else placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if _placed_alike(source, target):
        local_tensor(target).copy_(local_tensor(source))
    else:
        target.copy_(source)


def _placed_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two gradients have the same placements."""
    if not isinstance(one, DTensor) or not isinstance(other, DTensor):
        return isinstance(one, DTensor) == isinstance(other, DTensor)
    return one.device_mesh == other.device_mesh and one.placements == other.placements


@torch.no_grad()
def let_go(buffers: Iterable[GradientBuffer], launches: Launches) -> None:
    """Make every `.grad` that is a buffer a tensor of its own, while other threads may add to it.

    To be called when `launches.shared` is set, and without the launches: autograd may hold the lock
    of a parameter in a thread that waits for them.
    """
    due = [buffer for buffer in buffers if buffer.is_grad()]
    devices = {buffer.tensor.device for buffer in due if buffer.tensor.device.type == "cuda"}
    for device in devices:  # autograd adds on a stream of its own choice
        torch.cuda.synchronize(device)
    for buffer in due:
        if buffer.parameter.requires_grad and not has_hooks(buffer.parameter):
            _add_nothing(buffer)
            continue
        with launches:  # autograd adds nothing, or a hook would see a gradient that is none
            if buffer.is_grad():
                buffer.parameter.grad = cloned(buffer.tensor)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _add_nothing(buffer: GradientBuffer) -> None:
    """Have autograd replace `.grad` by the sum of it and -0.0, which changes no number.

    The node of a parameter adds out of place where gradients may be differentiated again, and holds
    its lock, as in every backward of every thread, until the sum has become `.grad`. (Hooks run
    without that lock.)
    """
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(buffer.parameter).node
        nothing = torch.zeros_like(local_tensor(buffer.tensor)).neg_()
        node(with_local(buffer.tensor, nothing))  # type: ignore[operator]


WAITING_BYTES = 64 * 2**20
_ADDING: dict[int, Callable[[], None]] = {}  # by autograd's number of the running backward


def add_waiting_gradients() -> None:
    """Adds what waits to be added, within a backward: by a node of it or at its end."""
    add = _ADDING.get(backward_task())
    if add is not None:
        add()


@contextlib.contextmanager
def adding_together(aliases: Sequence[torch.Tensor], most: int = WAITING_BYTES) -> Iterator[None]:
    """Takes the gradients of `aliases` (leaf parameters with `.grad`) over from autograd in the
    block, a backward. What waits is added when it ends, or lost where it fails. most: bytes of
    gradients that wait before they are added."""
    waiting, tasks = list[tuple[torch.Tensor, torch.Tensor]](), set[int]()

    def add() -> None:
        with torch.no_grad():
            if waiting:
                add_each(*map(list, zip(*waiting, strict=True)))
        waiting.clear()

    def take(alias: torch.Tensor, gradients: tuple[torch.Tensor | None, ...]) -> Any:
        (gradient,) = gradients
        buffer = alias.grad
        if gradient is None or buffer is None or type(gradient) is not torch.Tensor:
            return None
        tasks.add(backward_task())
        _ADDING[backward_task()] = add
        waiting.append((local_tensor(buffer), gradient))
        if sum(each.nbytes for _, each in waiting) >= most:
            add()
        return (None,)  # nothing is left for autograd to add

    with contextlib.ExitStack() as at_end:
        for alias in aliases:
            node = torch.autograd.graph.get_gradient_edge(alias).node
            at_end.callback(node.register_prehook(partial(take, alias)).remove)
        try:
            yield
            add()
        finally:
            for task in tasks:
                del _ADDING[task]


@contextlib.contextmanager
def without_content(aliases: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within the block backwards leave one number in place of each gradient of `aliases`: of the
    same shape, dtype, device and placements, without memory of that size."""
    hooks = [alias.register_hook(without_memory) for alias in aliases if alias.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def without_memory(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A hook: one number in place of a gradient. None where the gradient stays: it is sparse, or of
    a type that has no memory of its own."""
    if gradient is None or gradient.layout is not torch.strided:
        return None
    local = local_tensor(gradient)
    if type(local) is not torch.Tensor:
        return None
    with below_modes(), torch.no_grad():
        one = local.new_empty(()).expand(local.shape)
    return with_local(gradient, one)
