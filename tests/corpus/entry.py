"""What an entry of the corpus is: a module, its inputs, and what happens to it between calls.

A family is a file that calls `add` for each of its entries. Whatever an entry changes outside its
module (globals, class attributes) its `make` sets back, since every loop makes its module anew,
once for eager and once for graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, ROWS, WORDS = 4, 3, 11


INPUT_TWICE = (
    "autograd adds the two gradients of an input in another order, where some uses are outside the "
    "module"
)
WEIGHT_TWICE = (
    "a weight that is used inside and outside gets its gradients in another order when they "
    "accumulate"
)
AUTOCAST_CALLS = (
    "autocast calls in one backward do not share the casts of weights, so sums are rounded "
    "elsewhere"
)
ALIGNMENT = (
    "arguments are copied row-major into aligned memory, and kernels choose by layout and alignment"
)
GRADIENT_LAYOUT = (
    "gradients that autograd.grad returns for parameters have the memory layout of the parameter"
)
LOSS_IN_A_THREAD = (
    "a loss of another thread is summed by other sequence numbers, even without graphs"
)
INFINITE = "an infinite gradient of a complex parameter becomes NaN where it is added to a buffer"
SAVED_UNREAD = (
    "eager raises for tensors that autograd has saved, even if their values are not needed"
)
DOCUMENTED = {
    INPUT_TWICE: 1e-4,
    WEIGHT_TWICE: 1e-4,
    AUTOCAST_CALLS: 2e-2,
    ALIGNMENT: 1e-4,
    GRADIENT_LAYOUT: 1e-4,
    LOSS_IN_A_THREAD: 1e-4,
    INFINITE: 0.0,
    SAVED_UNREAD: 0.0,
}  # each with the share that it may make


class Draw:
    """Makes the inputs of one call from a generator of its own, so that the module alone moves the
    global one."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.device = device

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
        """Normal numbers, [ROWS, WIDTH] without a shape."""
        made = torch.randn(shape or (ROWS, WIDTH), generator=self._generator)
        return made.to(self.device, dtype).requires_grad_(grad)

    def ids(self, *shape: int, words: int = WORDS) -> Tensor:
        """Integers below `words`, int64."""
        return torch.randint(0, words, shape or (ROWS,), generator=self._generator).to(self.device)


class Keywords(dict[str, Any]):
    """Keyword arguments of a call, the last of its arguments."""


@dataclass(frozen=True)
class Entry:
    """One hostile module.

    make: the module, fresh, with all that it reads. inputs: of (draw, step), the call's arguments;
    Keywords may be the last. mutate: applied to the model after some calls. loss: of the model's
    outputs. call: of (model, arguments), instead of the plain call. backward: of (model, loss,
    outputs, arguments, step), instead of `loss.backward()`. prepare: applied to the model before
    its first call. observe: of the model, further values that must agree after each step. drive: of
    (model, draw, done), a loop of the entry's own instead of the three; it calls done after every
    step with what else must agree. documented: why last bits may differ, one of DOCUMENTED.
    """

    name: str
    group: str
    make: Callable[[], nn.Module]
    inputs: Callable[[Draw, int], tuple[Any, ...]]
    mutate: Callable[[Any], Any] | None = None
    loss: Callable[[Any], Tensor] | None = None
    call: Callable[[Any, tuple[Any, ...]], Any] | None = None
    backward: Callable[..., Any] | None = None
    prepare: Callable[[Any], Any] | None = None
    observe: Callable[[Any], Any] | None = None
    drive: Callable[..., Any] | None = None
    documented: str = ""
    loops: Sequence[str] = ("plain", "accumulate", "rough")


ENTRIES: dict[str, Entry] = {}


def one(draw: Draw, step: int) -> tuple[Any, ...]:
    """One matrix that needs no gradient."""
    return (draw.rows(),)


def one_grad(draw: Draw, step: int) -> tuple[Any, ...]:
    """One matrix that gets a gradient."""
    return (draw.rows(grad=True),)


def words(draw: Draw, step: int) -> tuple[Any, ...]:
    """Token ids, [2, 5]."""
    return (draw.ids(2, 5),)


def add(
    group: str,
    name: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[Draw, int], tuple[Any, ...]] = one,
    **options: Any,
) -> None:
    """Put an entry into the corpus. Raises ValueError when there is one of that name."""
    key = f"{group}: {name}"
    if options.get("documented", INPUT_TWICE) not in DOCUMENTED:
        raise ValueError(f"{key!r}: only what stands in DOCUMENTED may differ in its last bits")
    if key in ENTRIES:
        raise ValueError(f"there are two entries called {key!r}")
    ENTRIES[key] = Entry(key, group, make, inputs, **options)


class Own(nn.Module):
    """A linear layer, further parts, and a forward given from outside as a function of module and
    arguments."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of outputs in any container, in order; one that occurs twice comes twice."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Tensors and other values of outputs in any container, with the way to each."""
    if isinstance(value, dict):
        return [found for key, part in value.items() for found in leaves(part, f"{name}[{key!r}]")]
    if isinstance(value, (list, tuple)):
        return [
            found
            for number, part in enumerate(value)
            for found in leaves(part, f"{name}[{number}]")
        ]
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return [found for part in names for found in leaves(getattr(value, part), f"{name}.{part}")]
    if not isinstance(value, Tensor) and hasattr(value, "__dict__") and not callable(value):
        return [
            found for key, part in vars(value).items() for found in leaves(part, f"{name}.{key}")
        ]
    return [(name, value)]


def trained(value: Any) -> list[Tensor]:
    """The outputs that a loss can be made of."""
    return [leaf for leaf in tensors_in(value) if leaf.requires_grad]


def scalar(tensors: Sequence[Tensor]) -> Tensor:
    """A loss of tensors in which every entry counts differently. float32 or wider, []."""
    total: Any = 0.0
    for number, tensor in enumerate(tensors):
        parts = [tensor.real, tensor.imag] if tensor.is_complex() else [tensor]
        for part in parts:
            wide = part if part.dtype == torch.float64 else part.float()
            weights = (
                torch.arange(1, wide.numel() + 1, device=wide.device, dtype=wide.dtype)
                .cos()
                .reshape(wide.shape)
            )
            total = total + (wide * weights).sum() * (1 + number) + 0.1 * wide.square().sum()
    return total


def loss_of(entry: Entry, outputs: Any) -> Tensor:
    """The loss of a call: the entry's own, or one of all outputs."""
    return scalar(trained(outputs)) if entry.loss is None else entry.loss(outputs)
