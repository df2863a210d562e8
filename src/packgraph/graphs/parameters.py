"""Parameters under capture.

While a region is captured the module's parameters are replaced by fresh aliases of the same
storages. Their autograd accumulators are then new, so they belong to the capture stream; hooks and
`.grad` of the real parameters are not touched; and gradients are accumulated as they are produced
(`gradients.py`), so no second copy of them is ever needed.

A DTensor has no memory of its own: what is baked, compared or zeroed is its local tensor.
"""

import contextlib
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils.hooks import RemovableHandle

from packgraph.graphs.backend import Static, Window
from packgraph.torch_internals import backward_task, hooks_of, parameters_of, storage_id, will_run

_COMMON = {
    bool,
    int,
    float,
    str,
    NoneType,
    torch.Tensor,
    torch.nn.Parameter,
}  # torch asks for a Generator in Python
_TRAINED = operator.attrgetter("requires_grad")
_LATE_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind `tensor` on this rank: of a DTensor its local part, otherwise the tensor
    itself."""
    # Not `to_local()`, which waits, keeps autograd's view and may return another object.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory: the same for all its views."""
    return int(storage_id(local_tensor(tensor)))


_SHARDED, _STANDS_FOR = "packgraph_sharded", "packgraph_stands_for"
_GATHERED = "packgraph_gathered"


def mark_sharded(parameter: torch.nn.Parameter, *, is_gathered: bool) -> None:
    """Say that the memory of `parameter`'s gradient has its content only while the layer runs, and
    is that of others in between. is_gathered: so is its own."""
    setattr(parameter, _SHARDED, True)
    setattr(parameter, _GATHERED, is_gathered)


def is_sharded(parameter: torch.Tensor) -> bool:
    """Returns whether `parameter` was marked by `mark_sharded`."""
    return getattr(parameter, _SHARDED, False)


def is_gathered(parameter: torch.Tensor) -> bool:
    """Returns whether `mark_sharded` was told that others use the memory of `parameter`, too."""
    return getattr(parameter, _GATHERED, False)


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of `.grad` of a leaf: `torch.Tensor.grad_dtype`, where that is not free."""
    return parameter.grad_dtype or parameter.dtype


@torch.no_grad()
def set_gradient_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Let `.grad` of a leaf have this dtype; one that is there is converted."""
    if gradient_dtype(parameter) == dtype:
        return
    grad, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    parameter.grad = None if grad is None else grad.to(dtype)


def unaliased(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter that `parameter` stands for where it is an alias, else itself."""
    return cast(torch.Tensor, getattr(parameter, _STANDS_FOR, parameter))


class Aliases:
    """The aliases that stand for a module's parameters during one build.

    memory: by storage, where each parameter begins and ends. numbers: of aliases, in the order of
    the parameters.
    """

    def __init__(self) -> None:
        self.memory: dict[int, list[tuple[int, int, torch.nn.Parameter]]] = {}
        self.parameter_of: dict[int, torch.nn.Parameter] = {}
        self.alias_of: dict[int, torch.nn.Parameter] = {}
        self.numbers: dict[int, int] = {}
        self.use = _Use(threading.get_ident())

    def alias(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """The alias of `parameter`; tied parameters share one."""
        if id(parameter) not in self.alias_of:
            made = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            made.grad_dtype = parameter.grad_dtype
            setattr(made, _STANDS_FOR, parameter)
            if made.requires_grad:
                made.register_hook(self.use.check)
            self.numbers[id(made)] = len(self.alias_of)
            self.alias_of[id(parameter)] = made
            self.parameter_of[id(made)] = parameter
            local = local_tensor(parameter)
            start = local.data_ptr()
            self.memory.setdefault(storage_of(local), []).append(
                (start, start + max(1, local.numel() * local.element_size()), parameter)
            )
        return self.alias_of[id(parameter)]


class _Use:
    """Tells gradients of a build from those of another thread, which has called the module itself
    meanwhile and has found aliases. (On CUDA backwards of all threads run in one, so there a
    build's end alone tells.)"""

    def __init__(self, thread: int | None) -> None:
        self.thread = thread

    def check(self, gradient: torch.Tensor | None) -> None:
        """The hook of an alias. None: there is no gradient to lose."""
        if gradient is None:
            return
        if self.thread is None or (
            gradient.device.type == "cpu" and threading.get_ident() != self.thread
        ):
            raise RuntimeError(
                "a module was called in one thread while another thread captured graphs of it: the "
                "gradient of its parameters is lost. Call what packgraph.graph returned, which "
                "waits, "
                "not the module inside, or begin threads when graphs are captured"
            )


@contextlib.contextmanager
def aliased_parameters(module: torch.nn.Module) -> Iterator[Aliases]:
    """Put aliases in place of all parameters of `module` for the block."""
    aliases = Aliases()
    replaced = []
    try:
        for owner in module.modules():
            for name, parameter in parameters_of(owner).items():
                if parameter is not None:
                    replaced.append((owner, name, parameter))
                    parameters_of(owner)[name] = aliases.alias(parameter)
        yield aliases
    finally:
        aliases.use.thread = None  # no gradient may come to an alias from here on
        for owner, name, parameter in replaced:
            parameters_of(owner)[name] = parameter


def are_leaves(module: torch.nn.Module) -> bool:
    """Returns whether the tables of parameters hold parameters: `torch.func.functional_call` puts
    other tensors there, whose gradients belong elsewhere."""
    found = (
        p for owner in module.modules() for p in parameters_of(owner).values() if p is not None
    )
    return all(isinstance(p, torch.nn.Parameter) and p.is_leaf for p in found)


def has_hooks(parameter: torch.Tensor) -> bool:
    """Returns whether something outside wants to see this parameter's gradient when it arrives."""
    hooks = hooks_of(parameter) or {}
    if any(not isinstance(getattr(hook, "__self__", None), _Use) for hook in hooks.values()):
        return True
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


@contextlib.contextmanager
def without_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within the block the hooks of `parameters` do not fire."""
    found = [table(parameter) for parameter in parameters for table in (hooks_of, _LATE_HOOKS)]
    tables = [(table, dict(table)) for table in found if table]
    for table, _ in tables:
        table.clear()
    try:
        yield
    finally:
        for table, entries in tables:
            table.update(entries)
        if tables:  # whoever has seen them without hooks looks again
            RemovableHandle(OrderedDict())


# Counts hooks that this process has registered, on whatever; None where torch does not count them.
_hooks_made: Callable[[], int | None] = partial(getattr, RemovableHandle, "next_id", None)


def _hooks_are_counted() -> bool:
    counts = [_hooks_made()]
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        getattr(torch.zeros(1, requires_grad=True), register)(lambda _: None)
        counts.append(_hooks_made())
    return None not in counts and len(set(counts)) == len(counts)


COUNT_HOOKS = _hooks_are_counted()


class HookedParameters:
    """Parameters, and whether any of them has hooks: they are looked at again when this process has
    registered a hook, on whatever, since they were found without."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self._made: int | None = None

    def have_none(self) -> bool:
        """Returns whether no parameter has hooks of any kind."""
        made = _hooks_made()
        if COUNT_HOOKS and made == self._made:
            return True
        if any(map(hooks_of, self.parameters)) or any(map(_LATE_HOOKS, self.parameters)):
            return False
        self._made = made
        return True

    def are_quiet(self) -> bool:
        """Returns whether no parameter has hooks of any kind, and none is frozen."""
        return self.have_none() and all(map(_TRAINED, self.parameters))


@dataclass(frozen=True)
class DistributedStatic:
    """A DTensor in a pool, in the form of `Static`: the memory of its local tensor, and how it lies
    on the mesh."""

    local: Static
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def tensor(self) -> torch.Tensor:
        return DTensor.from_local(
            self.local.tensor,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


def static_gradient(window: Window, gradient: torch.Tensor) -> Static:
    """A handle on a parameter's gradient for replays."""
    local = window.static(local_tensor(gradient))
    if not isinstance(gradient, DTensor):
        return local
    return DistributedStatic(
        local, gradient.device_mesh, gradient.placements, gradient.shape, gradient.stride()
    )


def module_generators(module: torch.nn.Module) -> list[torch.Generator]:
    """The random generators that the module or its submodules hold, as attributes or in containers,
    each once."""
    found: dict[int, torch.Generator] = {}
    for owner in module.modules():
        _look(found, vars(owner), ())
    return list(found.values())


def _look(found: dict[int, torch.Generator], value: Any, above: tuple[int, ...]) -> None:
    if isinstance(value, list | tuple | dict):
        if value and id(value) not in above:
            for entry in value.values() if isinstance(value, dict) else value:
                if type(entry) not in _COMMON:
                    _look(found, entry, (*above, id(value)))
    elif isinstance(value, torch.Generator):
        found[id(value)] = value


_Hook = Callable[[Any], Any]


class _Wrapped:
    """A hook that is called if `is_wanted` says so of its argument."""

    def __init__(self, hook: _Hook, is_wanted: Callable[[Any], bool]) -> None:
        self.hook, self._is_wanted = hook, is_wanted

    def __call__(self, value: Any) -> Any:
        return self.hook(value) if self._is_wanted(value) else None


class _Seen(threading.local):
    """Flag of the thread that visits a parameter: its gradient is absent."""

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
            (hooks_of(parameter), lambda gradient: gradient is not None),
            (_LATE_HOOKS(parameter), lambda _: not self._seen.is_absent),
        ):
            for key, hook in list((table or {}).items()):
                guarded = _Wrapped(hook.hook if isinstance(hook, _Wrapped) else hook, is_wanted)
                self._places.append((table, key, hook, guarded))
                table[key] = guarded
        self._handles = [node.register_prehook(self._begins), node.register_hook(self._ends)]

    def _begins(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self._seen.is_absent = gradients[0] is None

    def _ends(self, *_: object) -> None:
        self._seen.is_absent = False
        if backward_task() != self._task:  # a backward within this one, or in another thread
            return
        for handle in self._handles:
            handle.remove()
        for table, key, before, guarded in self._places:
            if table.get(key) is guarded:  # else its handle has removed it
                table[key] = before


def expect_visits(
    nodes: Sequence[tuple[Any, int]],
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Lets no hook be called, in a backward, of parameters that a region delivers no gradient to.

    nodes: autograd's accumulators of the parameters. gradients: those that a region delivers.
    """
    if not any(map(hooks_of, parameters)) and not any(map(_LATE_HOOKS, parameters)):
        return
    task = backward_task()
    for (node, _), parameter, gradient in zip(nodes, parameters, gradients, strict=True):
        if gradient is None and (hooks_of(parameter) or _LATE_HOOKS(parameter)) and will_run(node):
            _Visit(parameter, node, task)


class ParameterEdge:
    """The parameters of a region as one node of the user's autograd graph, made once and used by
    every call.

    Autograd thereby reaches the parameters from a call's outputs, as it must for
    `backward(inputs=...)`, `autograd.grad` and hooks. Their gradients come here only when somebody
    asks for them: what flows through the node otherwise is None, since the graph has added to
    `.grad` itself.

    Attributes:
        anchor: A leaf that needs a gradient: whether autograd goes there tells `loss.backward()`
            from a call that asks for the gradients of some tensors only.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.anchor = torch.empty(0, requires_grad=True)
        self._delivered: dict[int, _Delivery] = {}
        self._node: Any = None  # of the anchor
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """A tensor that depends on all the parameters."""
        if self._tensor is None:
            # Not at capture: the nodes of parameters belong to the stream on which they are made.
            self._tensor = (
                _AllParameters.apply(
                    self._delivered, HookedParameters(self.parameters), *self.parameters
                )
                if self.parameters
                else self.anchor
            )
        return self._tensor

    def is_wanted(self) -> bool:
        """Returns whether the running backward goes to any of the parameters."""
        return bool(self.parameters) and will_run(self.tensor.grad_fn)

    def deliver(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Hand gradients of the parameters to autograd; returns what the node has to be given."""
        before = self._delivered.get(task := backward_task())
        found = list(gradients)
        if before is not None:
            found = [_sum(*two) for two in zip(before.take(), found, strict=True)]
        self._delivered[task] = _Delivery(found)
        return torch.empty_like(self.tensor)

    def delivers(self) -> bool:
        """Returns whether gradients of the running backward are on their way to autograd."""
        return backward_task() in self._delivered

    def is_whole(self) -> bool:
        """Returns whether the running backward is that of `loss.backward()`."""
        if self._node is None:
            self._node = torch.autograd.graph.get_gradient_edge(self.anchor).node
        return will_run(self._node)


class _Delivery:
    """Gradients on their way to autograd, and the stream on which they are made.

    Autograd takes them to be made on the stream of the thread that calls `backward`, which may be
    another one.
    """

    def __init__(self, gradients: list[torch.Tensor | None]) -> None:
        self._gradients = gradients
        self._device = next(
            (g.device for g in gradients if g is not None and g.device.type == "cuda"), None
        )
        self._stream = None if self._device is None else torch.cuda.current_stream(self._device)

    def take(self) -> list[torch.Tensor | None]:
        """The gradients, for the current stream."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            if current != self._stream:
                current.wait_stream(self._stream)
                for gradient in self._gradients:
                    if gradient is not None:
                        local_tensor(gradient).record_stream(current)
        return self._gradients


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


class _AllParameters(torch.autograd.Function):
    """The node of a `ParameterEdge`."""

    @staticmethod
    def forward(
        ctx: Any,
        delivered: dict[int, _Delivery],
        parameters: HookedParameters,
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.delivered, ctx.parameters = delivered, parameters
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, signal: torch.Tensor | None) -> Any:
        parameters = ctx.parameters.parameters
        gradients: Sequence[torch.Tensor | None] = [None] * len(parameters)
        if signal is not None:
            gradients = ctx.delivered.pop(backward_task()).take()
        if not ctx.parameters.have_none():
            expect_visits(ctx.next_functions, parameters, gradients)
        return (None, None, *gradients)
