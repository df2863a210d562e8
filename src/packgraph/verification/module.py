"""`packgraph.verify`: training a module of one's own twice, eagerly and through graphs, and
comparing every bit."""

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from packgraph.graphs.fallback import eager
from packgraph.graphs.graphed import GraphedModule, control, graph
from packgraph.verification.compare import Difference, first_difference

Loss = Callable[[Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
REFERENCE = "the eager run of packgraph.verify"


@dataclass(frozen=True)
class Verification:
    """Result of `packgraph.verify`. True where all was equal and something was replayed.

    Attributes:
        steps: Optimizer steps that were compared, the one that differs included.
        tensors: Tensors that were compared.
        replayed: Calls that graphs served; the others ran eagerly on both sides.
        fallbacks: Why calls ran eagerly, with their counts.
        difference: The first tensor that differs, None where all are equal bit by bit.
    """

    steps: int
    tensors: int
    replayed: int
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    difference: Difference | None = None

    def __bool__(self) -> bool:
        return self.difference is None and self.replayed > 0

    def __str__(self) -> str:
        eagerly = ", ".join(f"{reason}: {count}" for reason, count in self.fallbacks.items())
        calls = f"{self.replayed} calls replayed" + (f", run eagerly: {eagerly}" if eagerly else "")
        if self.difference is not None:
            return f"differs from eager at {self.difference} ({calls})"
        if not self.replayed:
            return f"nothing was verified: no call was replayed ({calls})"
        return f"equal bit by bit: {self.tensors} tensors in {self.steps} steps ({calls})"


def verify(
    module: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    **options: Any,
) -> Verification:
    """Trains two copies of a module, eagerly and through graphs, and compares them bit by bit.

    After every step the outputs, the loss, the gradients of parameters and inputs, the parameters,
    the buffers and torch's random states must be equal in every bit. The module itself is not
    changed.

    Args:
        module: The module that is to be graphed; must work with `copy.deepcopy`.
        batches: The arguments of each call, a tuple or a single one, on the module's device. The
            first `warmup` calls run eagerly, so give some more, with all shapes that occur.
        loss: Makes a scalar of the module's output. By default the sum of all floating-point
            outputs, in float32.
        optimizer: Makes an optimizer of parameters, such as
            `lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)`. By default SGD with a
            learning rate of 0.01.
        **options: Options of `packgraph.graph`: `scope`, `granularity`, `capacities`, `compile` and
            others. With `compile=True` the eager copy runs the compiled code, too, and Inductor
            chooses kernels without timing them: a choice by time may differ between two copies.

    Returns:
        What was compared and the first difference; false if there is one or nothing was replayed.

    Raises:
        CaptureError: With `strict=True`, where a call would run eagerly.

    Examples:
        >>> found = packgraph.verify(
        ...     torch.nn.Linear(8, 8), [torch.randn(4, 8) for _ in range(6)]
        ... )
        >>> assert found, found
    """
    if isinstance(module, GraphedModule):
        module = control(module).module
    compiles = bool(options.get("compile", False))
    if compiles:
        options["compile"] = _without_timing(options["compile"])
    plain, graphed = copy.deepcopy(module), graph(copy.deepcopy(module), **options)
    reference = graph(plain, **options) if compiles else plain
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    around = functools.partial(eager, REFERENCE) if compiles else contextlib.nullcontext
    loss, trained = loss or sum_of_outputs, control(graphed).module
    sides = [
        _Side(reference, plain, make, loss, around),
        _Side(graphed, trained, make, loss, contextlib.nullcontext),
    ]
    steps = tensors = 0
    difference: Difference | None = None
    try:
        for steps, batch in enumerate(batches, start=1):
            devices = range(torch.cuda.device_count() * torch.cuda.is_initialized())
            with torch.random.fork_rng(devices):
                expected = sides[0].step(batch)
            found = sides[1].step(batch)
            tensors += len(expected)
            difference = first_difference(steps, expected, found)
            if difference is not None:
                break
        stats = control(graphed).stats
        return Verification(steps, tensors, stats.replayed, Counter(stats.fallbacks), difference)
    finally:
        for made in (graphed, reference) if compiles else (graphed,):
            control(made).close()


def _without_timing(compile: Any) -> Any:
    """The option of `graph`, with kernels chosen by rules: the choice sets the order of sums."""
    if compile is True:
        return {"deterministic": True}
    return {"deterministic": True, **compile} if isinstance(compile, Mapping) else compile


class _Side:
    """One of the two copies and its optimizer."""

    def __init__(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        make: MakeOptimizer,
        loss: Loss,
        around: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._call, self._module, self._loss, self._around = call, module, loss, around
        self._optimizer = make(module.parameters())

    def step(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch; everything that is compared, by name."""
        args = tree_map(_own, batch if isinstance(batch, tuple) else (batch,))
        self._optimizer.zero_grad(set_to_none=True)
        with self._around():
            out = self._call(*args)
        loss = self._loss(out)
        found = {f"output {number}": leaf.detach().clone() for number, leaf in tensors_of(out)}
        found["loss"] = loss.detach().clone()
        if loss.requires_grad:
            loss.backward()
        found |= {
            f"gradient of input {number}": leaf.grad
            for number, leaf in tensors_of(args)
            if leaf.grad is not None
        }
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad.clone()
        self._optimizer.step()
        state = [*self._module.named_parameters(), *self._module.named_buffers()]
        found |= {name: tensor.detach().clone() for name, tensor in state}
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        states = enumerate([torch.get_rng_state(), *cuda])
        return found | {f"random state {number}": state for number, state in states}


def tensors_of(tree: Any) -> list[tuple[int, Tensor]]:
    """Lists the tensors of a pytree with their numbers among its leaves."""
    leaves, _ = tree_flatten(tree)
    return [(number, leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]


def _own(leaf: Any) -> Any:
    """A tensor of a side's own: what one side changes or differentiates is not the other's."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def sum_of_outputs(out: Any) -> Tensor:
    """Returns the sum of all floating-point tensors in `out`: 0-d float32. Raises ValueError where
    there is none."""
    parts = [leaf.float().sum() for _, leaf in tensors_of(out) if leaf.is_floating_point()]
    if not parts:
        raise ValueError("the module returns no floating-point tensor: pass loss=")
    return torch.stack(parts).sum()
