"""What two runs of a loop must agree on, and how a run through graphs is judged against one
without."""

import json
import math
import random
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from corpus.entry import DOCUMENTED as TOLERANCES
from corpus.entry import INFINITE, SAVED_UNREAD, leaves
from torch import Tensor

BITWISE, FALLBACK, ERROR, DOCUMENTED = "bitwise", "fallback", "error", "documented"
SILENT, LAST_BITS, UNWARNED, FOREIGN, BROKEN = (
    "SILENT",
    "LAST BITS",
    "UNWARNED",
    "FOREIGN ERROR",
    "BROKEN ENTRY",
)
GOOD = (BITWISE, FALLBACK, ERROR, DOCUMENTED)
ASKED = (
    "warm-up",
    # fallbacks of which nobody needs to be told
    "the first backward, which no warm-up call has shown",
)
ANY_ERROR = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    EOFError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    ReferenceError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
    Warning,
)
LAST_BITS_LIMIT = 1e-4  # of a tensor's largest entry: what another order of sums can make


def together(*acts: Callable[[], Any]) -> None:
    """Run acts in threads of their own, and raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(act: Callable[[], Any]) -> None:
        try:
            act()
        except ANY_ERROR as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class TensorFact(NamedTuple):
    """A tensor as it was, without what it hangs on. stride: of dimensions longer than one."""

    data: Tensor
    stride: tuple[int, ...]
    trains: bool


class Verdict(NamedTuple):
    """How a loop ended. kind: one of the names above. what: the first difference, the error, or the
    fallbacks."""

    kind: str
    what: str = ""

    @property
    def good(self) -> bool:
        return self.kind in GOOD


def note(facts: dict[str, Any], name: str, value: Any) -> None:
    """Put a value, or all in a container, into `facts`."""
    for path, leaf in leaves(value, name):
        facts[path] = _fact(leaf)


def note_grads(facts: dict[str, Any], model: torch.nn.Module, arguments: Any = ()) -> None:
    """Gradients of parameters and of leaves among the arguments, None as None."""
    for name, parameter in model.named_parameters():
        facts[f"gradient of {name}"] = _fact(parameter.grad)
    for path, leaf in leaves(arguments, "argument"):
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf:
            facts[f"gradient of {path}"] = _fact(leaf.grad)


def note_state(facts: dict[str, Any], model: torch.nn.Module, device: str) -> None:
    """Parameters, buffers and random states."""
    for name, parameter in model.named_parameters():
        facts[f"parameter {name}"] = _fact(parameter)
    for name, buffer in model.named_buffers():
        facts[f"buffer {name}"] = _fact(buffer)
    facts["torch's random state"] = (
        torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    )
    facts["Python's random state"] = hash(random.getstate())
    facts["numpy's random state"] = np.random.get_state()[1].tobytes() + bytes(
        [np.random.get_state()[2] % 256]
    )


def _fact(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    plain = value.detach()
    if plain.layout is torch.strided:
        stride = tuple(
            step for step, size in zip(plain.stride(), plain.shape, strict=True) if size > 1
        )
        return TensorFact(plain.resolve_conj().resolve_neg().clone(), stride, value.requires_grad)
    return TensorFact(plain.to_dense().clone(), (), value.requires_grad)


def difference(mine: Any, other: Any) -> tuple[str, float] | None:
    """How two facts differ: in words, and relative to the largest entry (infinite where that says
    nothing)."""
    if isinstance(mine, TensorFact) and isinstance(other, TensorFact):
        return _tensor_difference(mine, other)
    if isinstance(mine, Tensor) and isinstance(other, Tensor):
        return None if torch.equal(mine, other) else ("differs", float("inf"))
    if isinstance(mine, TensorFact) or isinstance(other, TensorFact):
        return f"eager {_kind(mine)}, graphs {_kind(other)}", float("inf")
    same = type(mine) is type(other) and (
        mine is other or bool(np.all(mine == other)) or (mine != mine and other != other)
    )
    return None if same else (f"eager {mine!r:.60}, graphs {other!r:.60}", float("inf"))


def _tensor_difference(mine: TensorFact, other: TensorFact) -> tuple[str, float] | None:
    left, right = mine.data, other.data
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return (
            f"eager {left.dtype} {list(left.shape)}, graphs {right.dtype} {list(right.shape)}",
            float("inf"),
        )
    if mine.trains != other.trains:
        return f"requires_grad is {mine.trains} in eager", float("inf")
    equal = (left == right) | ((left != left) & (right != right))
    if bool(equal.all()):
        return _layout_difference(mine, other)
    finite = torch.isfinite(left).all() and torch.isfinite(right).all()
    if not finite or not (left.is_floating_point() or left.is_complex()):
        return (
            f"{int((~equal).sum())} of {left.numel()} entries, some not finite or whole numbers",
            float("inf"),
        )
    wide = torch.complex128 if left.is_complex() else torch.float64
    error = (left.to(wide) - right.to(wide)).abs().max().item() / max(
        left.to(wide).abs().max().item(), 1e-12
    )
    return f"{int((~equal).sum())} of {left.numel()} entries, by {error:.2g}", error


def _layout_difference(mine: TensorFact, other: TensorFact) -> tuple[str, float] | None:
    """Of equal values. A view with holes may come as a dense tensor: nobody keeps the memory
    between its entries."""
    if mine.stride == other.stride or not mine.data.numel():
        return None
    shape = [size for size in mine.data.shape if size > 1]
    spans = sorted(zip(mine.stride, shape, strict=True))
    dense = all(
        step == math.prod(size for _, size in spans[:number])
        for number, (step, _) in enumerate(spans)
    )
    return (f"strides {mine.stride}, graphs {other.stride}", 1e-12) if dense else None


def _kind(fact: Any) -> str:
    return f"a tensor {list(fact.data.shape)}" if isinstance(fact, TensorFact) else repr(fact)[:60]


class Run(NamedTuple):
    """What a loop left behind. error: what it ended with; told: messages of packgraph's
    warnings."""

    trace: list[dict[str, Any]]
    error: BaseException | None
    told: list[str]
    own_error: bool = False  # whether packgraph raised it itself
    replayed: int = 0
    fallbacks: dict[str, int] = {}


def first_difference(
    mine: list[dict[str, Any]], other: list[dict[str, Any]]
) -> tuple[str, float] | None:
    """The worst of the first step that differs."""
    for step, (left, right) in enumerate(zip(mine, other, strict=False)):
        found = []
        for name in {**left, **right}:
            if name not in left or name not in right:
                found.append(
                    (f"{name} only in {'eager' if name in left else 'graphs'}", float("inf"))
                )
            elif (told := difference(left[name], right[name])) is not None:
                found.append((f"{name}: {told[0]}", told[1]))
        if found:
            worst = max(found, key=lambda entry: entry[1])
            return f"step {step}: {worst[0]}" + (
                f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            ), worst[1]
    return None


def judge(eager: Run, graphs: Run, documented: str = "") -> Verdict:
    """The verdict on a run through graphs, by the run without. documented: why last bits may
    differ, if they may."""
    found = first_difference(eager.trace, graphs.trace)
    if (
        documented == INFINITE
        and found is not None
        and "gradient of z" in found[0]
        and "not finite" in found[0]
    ):
        return Verdict(DOCUMENTED, found[0])
    if found is not None and found[1] > TOLERANCES.get(documented, 0.0):
        return Verdict(SILENT if found[1] > LAST_BITS_LIMIT else LAST_BITS, found[0])
    if eager.error is not None and (graphs.error is None or len(graphs.trace) > len(eager.trace)):
        if documented == SAVED_UNREAD and "modified by an inplace operation" in str(eager.error):
            return Verdict(DOCUMENTED, SAVED_UNREAD)
        return Verdict(
            SILENT,
            f"eager raised {type(eager.error).__name__}: {str(eager.error)[:120]}; graphs did not",
        )
    if graphs.error is not None:
        line = f"{type(graphs.error).__name__}: {graphs.error}"
        if isinstance(graphs.error, RuntimeError) and (
            graphs.own_error or re.search(r"\.py:\d+|where:", line)
        ):
            return Verdict(ERROR, line.splitlines()[0])
        return Verdict(ERROR if type(eager.error) is type(graphs.error) else FOREIGN, line[:300])
    reasons = {reason: count for reason, count in graphs.fallbacks.items() if reason not in ASKED}
    summary = f"{graphs.replayed} replays" + (f", {json.dumps(reasons)}" if reasons else "")
    if not reasons and graphs.replayed:
        return Verdict(
            BITWISE if found is None else DOCUMENTED, summary if found is None else found[0]
        )
    return Verdict(FALLBACK if graphs.told or not reasons else UNWARNED, summary)
