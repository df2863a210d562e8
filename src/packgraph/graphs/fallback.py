"""Running eagerly instead of replaying: asked for by the user, or forced by a fact; always counted
with its reason.

Every reason stands in one table, `REASONS`, with what to do about it. What the user did not ask for
is said once (graphs/notices.py), or is an error in strict mode.

Some reasons lie around a call, whatever module it is of (`reason_around`). A replay launches the
module's operations as one. Whoever wants to see each of them (a mode, a tracer, anomaly detection,
hooks of saved tensors, a transformation) sees nothing then, and the result may lack what that adds
to tensors. They are looked at before every call, so each check is one call into C.
"""

import contextlib
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from packgraph.graphs.memory.budget import shown
from packgraph.torch_internals import (
    cached_parametrizations,
    dispatch_modes,
    function_modes,
    saved_tensor_hooks,
    tangent_level,
    tracing_state,
    transform,
)

_BYPASS: ContextVar[str | None] = ContextVar("packgraph_eager_reason", default=None)


@dataclass(frozen=True)
class Reason:
    """Reason for which a call runs eagerly.

    text: its name in `Stats.fallbacks`. remedy: what to do about it. asked: whether the user asked
    for it.
    """

    text: str
    remedy: str
    asked: bool = False


REASONS: dict[str, Reason] = {}


def _reason(text: str, remedy: str, *, asked: bool = False) -> str:
    REASONS[text] = Reason(text, remedy, asked)
    return text


# Asked for: by an option, a mode or a call of the user's.
WARM_UP = _reason(
    "warm-up", "nothing: the first calls run eagerly, as many as graph(warmup=...) says", asked=True
)
INFERENCE = _reason(
    "inference mode",
    "use torch.no_grad instead: in inference mode only whole modules replay, and only with "
    "gradients off",
    asked=True,
)
FIRST_BACKWARD = _reason(
    "the first backward, which no warm-up call has shown",
    "nothing: with warmup=0 the first "
    "backward shows which outputs get gradients, and is captured at the next call",
    asked=True,
)
CLOSED = _reason(
    "closed", "wrap the module again with packgraph.graph: close() has freed its graphs", asked=True
)
INSIDE = _reason(
    "inside the capture of another module",
    "nothing: the other module's graphs hold this module's work",
    asked=True,
)
OVER_BUDGET = _reason(
    "over the memory budget",
    "give graphs more memory (graph.memory_budget), or fewer slots or capacities",
    asked=True,
)

# Not asked for: what the call is given.
UNDECLARED = _reason(
    "capacity not declared",
    "add this capacity to graph(capacities=...), or pack into one that is "
    "declared; capacities=None captures every shape that comes",
)
DOCUMENTS = _reason(
    "more documents than any capacity",
    "declare a capacity for more documents, or pack fewer into a microbatch",
)
UNKNOWN_SHAPE = _reason(
    "unknown shape",
    "pad the call's first tensor to the tokens of a declared capacity, or leave "
    "out graph(capacities=...) to capture every shape that comes",
)
NO_KEY = _reason(
    "an argument cannot be part of a key",
    "pass tensors on the module's device, packed batches, numbers, "
    "strings, None, and lists, tuples or dicts of these; keep other objects as attributes of the "
    "module",
)
TOO_MANY_KEYS = _reason(
    "too many different call signatures",
    "pad inputs to a few shapes, and pass numbers that "
    "change as 0-d tensors: every new shape and every new number is captured by itself",
)

# Not asked for: the loop around the call.
UNDER_AUTOCAST = _reason(
    "the backward runs under autocast",
    "leave the torch.autocast block before loss.backward(): "
    "such a backward runs eagerly, after its forward was run again",
)
AGAIN = _reason(
    "a second backward through one call (retain_graph=True)",
    "add the losses and call backward once: "
    "the second one runs eagerly, after its forward was run again",
)
SPARSE = _reason(
    "an output got a sparse gradient",
    "use dense gradients (nn.Embedding(sparse=False)): such a backward runs eagerly, after its "
    "forward was run again",
)
NO_SLOT = _reason(
    "no free slot",
    "run the backward of earlier calls first or drop their outputs, or let "
    "graph(slots=...) be as many calls as wait for their backward at a time; slots=None follows "
    "the loop",
)
BUSY = _reason(
    "another thread is inside the module, which is to be captured",
    "let one thread call the module until "
    "its graphs are captured, or keep calls short: a capture waits for other threads for some "
    "seconds",
)
SAVED_TENSOR_HOOKS = _reason(
    "saved-tensor hooks are active (checkpoint or offload around the module)",
    "put the checkpoint inside the module, or leave it out: graphs keep activations in memory "
    "of their own; packgraph.eager(...) around the call says that this is meant",
)
ANOMALY = _reason(
    "anomaly detection is on",
    "turn off torch.autograd.detect_anomaly once the line is found: it "
    "watches the module's operations, of which a replay launches none by itself",
)
TANGENTS = _reason(
    "forward-mode differentiation is active",
    "leave torch.autograd.forward_ad.dual_level before the call: graphs carry no tangents",
)
TRANSFORMED = _reason(
    "inside a transformation of torch.func",
    "transform the plain module: a replay knows nothing of vmap, grad or jvp around it",
)
TRACED = _reason(
    "the call is traced (torch.compile, torch.export or torch.jit)",
    "trace the plain module; for "
    "compiled code inside of graphs use packgraph.graph(module, compile=True)",
)
MODES = _reason(
    "a torch function or dispatch mode is active",
    "leave the mode before the call: it sees the module's "
    "operations, and a replay has none; count FLOPs or profile operations under "
    "packgraph.eager(...)",
)
CACHED = _reason(
    "parametrizations are cached (torch.nn.utils.parametrize.cached)",
    "leave the block before the call, "
    "or put it inside the module: what a graph computes cannot be shared with other calls",
)

# Not asked for: the module, and its captures.
NOT_LEAVES = _reason(
    "parameters are not leaf parameters",
    "call the module itself, not by torch.func.functional_call "
    "or with a parametrization that computes its weights: graphs add to the .grad of leaf "
    "parameters",
)
PATCHED = _reason(
    "its forward was replaced, so stages no longer say what it does",
    "replace the forward before "
    "packgraph.graph, of a class without stages, or change what the stages do",
)
TWICE = _reason(
    "gradients of the module are differentiated themselves (create_graph=True)",
    "nothing: a captured "
    "backward has no graph of its own; run only calls whose gradients are differentiated under "
    "packgraph.eager(...) to keep graphs for the others",
)
SEEN_INSIDE = _reason(
    "a hook or retain_grad on an output that other outputs were computed from",
    "put it on a tensor "
    "that nothing else is computed from, or run such calls under packgraph.eager(...): from a "
    "replay "
    "such an output gets only the gradients of your own code",
)
NEW_PATTERN = _reason(
    "another set of outputs got gradients than any captured backward starts from",
    "use the same "
    "outputs in the loss during warm-up; this backward ran eagerly, after its forward was run "
    "again, "
    "and is captured at the next call of this shape",
)
OTHER_STATE = _reason(
    "an eager stage made another state than at capture (one region)",
    "let the eager stage return "
    "tensors of the same shapes, dtypes and requires_grad at every call, and the same numbers",
)
NO_MEMORY = _reason(
    "no memory for its graphs, for the time being",
    "free memory, or declare fewer or smaller "
    "capacities or fewer slots: the capture is tried again later, a few times",
)
OTHER_RANK = _reason(
    "another rank runs this step eagerly",
    "see the warnings of the other ranks: a step of a pipeline is one graph on all of them or on "
    "none",
)
APART = _reason(
    "other ranks do not capture in this call",
    "change the module on all ranks before the same call, or put back what was changed: ranks that "
    "exchange data in a module capture it together or not at all",
)
CAPTURE_FAILED = _reason(
    "capture failed",
    "see the first error of this call's capture: it names the line and what to do there",
)
_OTHER = Reason("", "see packgraph.control(graphed).stats.fallbacks")


def reason_of(text: str) -> Reason:
    """The entry of the table, or one that was not asked for. What `eager` gives around the caller
    is asked for."""
    if text == bypass_reason():
        return Reason(text, "leave packgraph.eager before the call", asked=True)
    return REASONS.get(text, _OTHER)


@contextlib.contextmanager
def within(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Gives a context variable a value for the block: what a block says to the code that it
    runs."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def eager(reason: str) -> Iterator[None]:
    """Runs graphed modules eagerly inside this block; each call is counted under `reason` in their
    stats.

    Args:
        reason: Why, in a few words.

    Raises:
        ValueError: If `reason` is empty.

    Examples:
        >>> graphed = packgraph.graph(torch.nn.Linear(8, 8))
        >>> with packgraph.eager("comparison"):
        ...     graphed(torch.ones(2, 8)).sum().backward()
        >>> graphed.stats.fallbacks["comparison"]
        1
    """
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError(
            "packgraph.eager needs a reason to count, for example packgraph.eager('debugging')"
        )
    with within(_BYPASS, reason):
        yield


def bypass_reason() -> str | None:
    """The reason of the innermost `eager` block around the caller, or None."""
    return _BYPASS.get()


@dataclass
class Stats:
    """Counts of a graphed module; `print` shows them as a short table.

    Attributes:
        captured: Captured segments, of all slots and keys.
        replayed: Calls served by graphs.
        fallbacks: Calls served eagerly, by reason.
        lines: The first line of the user's code that met each reason which nobody asked for.
        recaptures: Captured keys that were dropped, by reason: a larger bucket took their slot, a
            parameter's storage was replaced, and so on.
        capture_seconds: Time spent capturing.
        compared: Replays that were compared bit by bit with a call of the module itself.
        trusted: Whether the module is taken for static, as `graph(trust=True)` says.
        pool_bytes: Memory that the pools of all slots hold now.
        compiled: Pieces of code that torch.compile made, each a forward and its backward.
        recompiles: Of those, the ones made for stages that had code already, by reason: other
            inputs (another bucket) or other constants.
        compile_seconds: Time spent generating code.
        choices: How each bucket runs since graphs were timed against eager execution
            (`train/autotune.py`), with the figures; empty if they were not timed.

    Examples:
        >>> graphed = packgraph.graph(torch.nn.Linear(8, 8), warmup=1)
        >>> for _ in range(3):
        ...     graphed(torch.ones(2, 8)).sum().backward()
        >>> graphed.stats.replayed, dict(graphed.stats.fallbacks)
        (2, {'warm-up': 1})
        >>> print(graphed.stats)  # doctest: +ELLIPSIS
        captured      1  segments in ... s
        replayed      2  calls
        eager         1  warm-up
        pools ...
    """

    captured: int = 0
    replayed: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    lines: dict[str, str] = field(default_factory=dict)
    recaptures: Counter[str] = field(default_factory=Counter)
    capture_seconds: float = 0.0
    compared: int = 0
    trusted: bool = False
    compiled: int = 0
    recompiles: Counter[str] = field(default_factory=Counter)
    compile_seconds: float = 0.0
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)
    _pool_bytes: Callable[[], int] = field(default=int, repr=False)
    _notice: Callable[[str, Callable[[], str]], None] = field(
        default=lambda reason, detail: None, repr=False
    )

    def fell_back(self, reason: str, detail: Callable[[], str] = str) -> None:
        """Count a call, or a region of one, that runs eagerly; the user is told if that was not
        asked for.

        detail: what it is about this time, in words. Raises CaptureError in strict mode, and counts
        nothing then.
        """
        self._notice(reason, detail)
        self.fallbacks[reason] += 1

    def dropped(self, reason: str, count: int) -> None:
        """Count so many variants that are captured again at their next use."""
        if count:
            self.recaptures[reason] += count

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pools of all slots hold now."""
        return self._pool_bytes()

    def __str__(self) -> str:
        captured = f"segments in {self.capture_seconds:.1f} s" + (
            f"; compiled {self.compiled} pieces of code in {self.compile_seconds:.1f} s"
            if self.compiled
            else ""
        )
        counts = (self.fallbacks, self.recaptures, self.recompiles)
        rows = [
            ("captured", self.captured, captured),
            ("replayed", self.replayed, "calls"),
            *(
                ("" if number else name, count, reason)
                for name, reasons in zip(("eager", "recaptured", "recompiled"), counts)
                for number, (reason, count) in enumerate(reasons.items())
            ),
        ]
        width, lines = max(len(f"{count:>4}") for _, count, _ in rows), list[str]()
        for name, count, text in rows:
            begin = f"{name:10} {count:{width}}  "
            lines += textwrap.wrap(
                text, 80, initial_indent=begin, subsequent_indent=" " * len(begin)
            )
            if text in self.lines:
                lines.append(" " * len(begin) + self.lines[text].removeprefix(os.getcwd() + os.sep))
        return "\n".join([*lines, f"pools {shown(self.pool_bytes):>{5 + width}}"])


READING = False  # whether a module is read for a capture: graphed ones in it count nothing


def is_traced() -> bool:
    """Returns whether torch.compile, torch.export or torch.jit reads the caller's code instead of
    running it."""
    return torch.compiler.is_compiling() or tracing_state() is not None


def reason_around() -> str | None:
    """Returns why an untraced call made here must run eagerly, or None."""
    if torch.is_inference_mode_enabled():
        return INFERENCE
    if transform() is not None:
        return TRANSFORMED
    if tangent_level() >= 0:
        return TANGENTS
    if saved_tensor_hooks() is not None:
        return SAVED_TENSOR_HOOKS
    if torch.is_anomaly_enabled():
        return ANOMALY
    functions = _get_current_function_mode_stack() if function_modes() else ()
    # What torch.set_default_device says captured code has obeyed.
    if dispatch_modes() or (
        functions and not all(isinstance(mode, DeviceContext) for mode in functions)
    ):
        return MODES
    if cached_parametrizations():
        return CACHED
    return None
