"""Errors that name the user's line.

A message says what happened, where in the user's code, and what to do. The user's line is the
innermost frame that lies neither in torch nor in the capture machinery; packgraph's own models and
ops count as user code.
"""

import os
import re
import sys
import traceback
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

# Nothing here imports torch: commands answer mistakes without it.
_TORCH = str(Path(getattr(find_spec("torch"), "origin", None) or "torch/").parent) + os.sep
_MODULE = os.path.join(_TORCH, "nn", "modules", "module.py")
PACKAGE = Path(__file__).parent.parent
_MACHINERY = tuple(str(PACKAGE / room) + os.sep for room in ("graphs", "packing"))
_STDLIB = str(Path(traceback.__file__).parent) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ([^,\n]+)')
_GRAPH = "<eval_with_key>"  # what torch calls the code of a graph
_TYPED_IN = ("<stdin>", "<ipython", "<input>", "<string>", "<console>")


# What capturing user code may raise: torch reports illegal operations as RuntimeError, and code
# that meets a tensor where it expected a number raises one of the others. Anything else is not ours
# to interpret.
USER_ERRORS = (RuntimeError, TypeError, ValueError, AssertionError, LookupError, AttributeError)


class PackgraphWarning(UserWarning):
    """Category of all warnings of this library: a fallback to eager execution that was not asked
    for, a failed capture, a recapture. Each is issued once, at the user's line.

    Examples:
        >>> import warnings
        >>> warnings.filterwarnings("error", category=packgraph.PackgraphWarning)
        >>> warnings.filterwarnings("default", category=packgraph.PackgraphWarning)
    """


class CaptureError(RuntimeError):
    """Raised when a call or a part of it cannot be captured.

    Attributes:
        what: The operation or fact that stands against it.
        where: `file.py:LINE in function` of the user's code.
        remedy: What to do.

    Examples:
        >>> class Reads(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) * float(x.sum())
        >>> graphed = packgraph.graph(Reads(4, 4), warmup=0, strict=True)
        >>> try:
        ...     graphed(torch.ones(2, 4))
        ... except packgraph.CaptureError as error:
        ...     print(error.what.partition(":")[0])
        reading a number out of a tensor (Tensor.item()) waits for the device
    """

    def __init__(self, what: str, where: str, remedy: str) -> None:
        super().__init__(f"{what}\n  where: {where}\n  to do: {remedy}")
        self.what, self.where, self.remedy = what, where, remedy


def described(given: Any) -> str:
    """Describes what was given in place of a module, and says what to give instead."""
    if isinstance(given, type):
        return f"the class {given.__name__}: pass an instance of it, {given.__name__}(...)"
    kind = "a function" if callable(given) else f"an object of type {type(given).__name__}"
    return (
        f"{kind} ({given!r:.80}): pass the module whose calls are to be captured, with this work "
        "in its forward"
    )


def is_user_file(name: str) -> bool:
    if name.startswith("<"):
        return name.startswith(_TYPED_IN)
    if name.startswith((_TORCH, *_MACHINERY)):
        return False
    return not (name.startswith(_STDLIB) and "site-packages" not in name)


class SourceLine(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def user_place(frame: FrameType | None = None) -> SourceLine | None:
    """The innermost user frame of the running call stack."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        traced = _traced_place(frame)
        if traced is not None:
            return traced
        if is_user_file(frame.f_code.co_filename):
            return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _traced_place(frame: FrameType) -> SourceLine | None:
    """The user's line of an operation of a traced graph, whose code torch has written."""
    graph = frame.f_locals.get("self") if frame.f_code.co_filename.startswith(_GRAPH) else None
    lines = getattr(graph, "_lineno_map", None)  # of a torch.fx.GraphModule
    if graph is None or lines is None:
        return None
    number = lines.get(frame.f_lineno - (graph._prologue_start or 0))
    nodes = list(graph.graph.nodes)
    stack = nodes[number].stack_trace if number is not None and number < len(nodes) else None
    return _place_in(stack)


def _place_in(stack: str | None) -> SourceLine | None:
    """The innermost user frame of a stack that torch has kept as text."""
    for name, line, function in reversed(_FRAME.findall(stack or "")):
        if is_user_file(name):
            return SourceLine(name, int(line), function)
    return None


def user_line(frame: FrameType | None = None) -> str:
    """`file.py:LINE in function` of the innermost user frame of the running call stack."""
    return str(user_place(frame or sys._getframe(1)) or "the autograd engine")


def forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames that an error has passed through hold: tensors, and contexts that
    are left half-way, a checkpoint's hooks of saved tensors among them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def warn(message: str, place: SourceLine | None = None) -> None:
    """Warn at the user's line. Whoever warns sees to it that it is once: Python would take two
    modules for one."""
    place = place or user_place()
    if place is None:
        warnings.warn(message, PackgraphWarning, stacklevel=3)
    else:
        warnings.warn_explicit(message, PackgraphWarning, place.file, place.line)


def raised_line(trace: TracebackType | None) -> str:
    """`file.py:LINE in function` of the innermost user frame that an exception passed through."""
    return traced_line("".join(traceback.format_tb(trace))) or user_line()


def traced_line(stack: str | None) -> str:
    """`file.py:LINE in function` of the innermost user frame of a stack that torch has kept as
    text; empty if none."""
    return str(_place_in(stack) or "")


def forward_line(module: "nn.Module") -> str:
    """`file.py:LINE in forward` of the module's class."""
    code = getattr(module.forward, "__code__", None)
    if code is None or code.co_filename == _MODULE:
        return user_line()
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
