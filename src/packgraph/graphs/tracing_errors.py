"""What torch's tracer says of code that it cannot read, as an error at the user's line."""

import os
import re
import traceback

import torch
from torch._dynamo.exc import TorchDynamoException

from packgraph.graphs.checks.host_sync import host_read
from packgraph.graphs.errors import (
    USER_ERRORS,
    CaptureError,
    forward_line,
    is_user_file,
    traced_line,
    user_line,
)
from packgraph.graphs.stages import CompileUnit

# What tracing may raise: torch's own errors, and what its inside meets in unusual objects.
TRACING_ERRORS = (TorchDynamoException, ImportError, *USER_ERRORS)
_TO_DO = (
    "write it so that torch.compile(fullgraph=True) takes it, leave the stage out of the scope, or"
)
TRUST = f"{_TO_DO} say that it is static: packgraph.graph(module, trust=True)"
COMPILE = f"{_TO_DO} compile=False"
MORE = "; TORCH_LOGS=graph_breaks,recompiles says more"


def explained(piece: CompileUnit, error: Exception, to_do: str) -> CaptureError:
    """What torch's tracer has raised, as an error at the user's line. to_do: If nothing better is
    known: `TRUST` or `COMPILE`."""
    inner = getattr(error, "inner_exception", None) or error
    if isinstance(inner, CaptureError):
        return CaptureError(inner.what, inner.where or definition(piece), inner.remedy)
    lines = [line.strip() for line in str(inner).strip().split("\n") if line.strip()]
    said = lines[0] if lines else type(inner).__name__
    why = next((line.partition(": ")[2] for line in lines if line.startswith("Explanation: ")), "")
    stack = "".join(traceback.format_list(getattr(error, "real_stack", None) or []))
    where = traced_line(stack) or definition(piece)
    raised = re.search(r"raised exception (.*)", str(inner))
    if raised is not None:
        return CaptureError(
            f"{raised[1]} is raised while {piece.name} is read",
            where,
            "leave the stage out of the scope, or mend what raises",
        )
    instead = next((text for file, text in _INSTEAD.items() if file in stack), "")
    for words, name in _WAITS.items():
        if any(words in line for line in lines[:3]):
            found = host_read(name, where)
            return CaptureError(found.what, where, instead or found.remedy)
    what = f"PyTorch's tracer cannot read {piece.name}: {said}" + (why and f" ({why})")
    return CaptureError(what, where, instead or to_do + MORE)


# What Dynamo says of code that needs a value on the host, and of what that is a read.
_WAITS = {
    "Data-dependent branching": "__bool__",
    "Tensor.tolist()": "tolist",
    "Data dependent operator": "item",
    "Could not guard on data-dependent": "item",
}


# What to do where code of torch, in these files, looks at numbers.
_INSTEAD = {
    os.path.join("torch", "distributions", ""): "pass validate_args=False to the distribution: its "
    "checks read numbers on the host",
    os.path.join("torch", "nn", "modules", "transformer.py"): "pass is_causal=True or False beside "
    "the mask: torch looks at the mask's numbers otherwise",
}


def definition(piece: CompileUnit) -> str:
    """Where the first of the stages begins."""
    code = getattr(piece.methods[0], "__code__", None)
    if code is not None and is_user_file(code.co_filename):
        return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    owned = isinstance(piece.owner, torch.nn.Module)
    return forward_line(piece.owner) if owned else user_line()
