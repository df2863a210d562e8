"""Refusal of operations of a traced graph that a capture cannot hold, while it is compiled.

The watch of a dry run cannot look into compiled code, so the same rules are read off the traced
operations: nothing whose result or shape is needed on the host, no copies between devices, nothing
computed on another device (a replay would not compute it again), no writes that happen outside of
the code.
"""

from collections.abc import Sequence
from typing import Any

import torch

from packgraph.graphs.checks.host_sync import LEAVE_OUT, way_out
from packgraph.graphs.checks.operations import DATA_DEPENDENT
from packgraph.graphs.errors import CaptureError, traced_line


def written_inputs(graph: torch.fx.GraphModule) -> frozenset[int]:
    """The inputs of an AOTAutograd graph that it writes to: their new values are copied in at its
    end.

    Raises CaptureError for changes that AOTAutograd makes after the code has run.
    """
    context = torch._guards.TracingContext.try_get()
    facts = context.fw_metadata if context is not None else None
    if facts is not None and facts.mutated_inp_runtime_indices:
        raise CaptureError(
            "a tensor from outside is changed in place in a way that compiled code cannot hold "
            "(its "
            "shape, or while it needs a gradient)",
            "",
            f"write to a new tensor. {LEAVE_OUT}",
        )
    places = {node: number for number, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    written = [
        node.args[0]
        for node in graph.graph.nodes
        if node.op == "call_function"
        and node.args
        and getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    ]
    return frozenset(
        places[node] for node in written if isinstance(node, torch.fx.Node) and node in places
    )


def refuse_unsafe_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Raise CaptureError, at the user's line if torch knows it, for the first operation that a
    graph cannot hold.

    inputs: (fake) tensors and numbers that the graph was traced with.
    """
    devices = {value.device.type for value in inputs if isinstance(value, torch.Tensor)}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if DATA_DEPENDENT & set(getattr(node.target, "tags", ())) and not _is_indexing(node):
            raise CaptureError(
                f"{name} waits for the device inside a compiled stage: its result is needed on the "
                "host",
                _line(node),
                way_out(name),
            )
        elsewhere = _device(node)
        if elsewhere is not None and devices and elsewhere not in devices:
            raise CaptureError(
                f"{name} makes a tensor on the {elsewhere} inside a compiled stage on "
                f"{' and '.join(sorted(devices))}: a graph would freeze it",
                _line(node),
                "make the tensor on the device, or outside of the stage",
            )


def _is_indexing(node: torch.fx.Node) -> bool:
    """Returns whether the shape of the result is known after all: indexing by numbers is tagged
    like indexing by a mask."""
    return isinstance(node.meta.get("val"), torch.Tensor) and all(
        isinstance(n, int) for n in node.meta["val"].shape
    )


def _device(node: torch.fx.Node) -> str | None:
    value = node.meta.get("val")
    return (
        value.device.type
        if isinstance(value, torch.Tensor) and value.device.type != "meta"
        else None
    )


def _line(node: torch.fx.Node) -> str:
    return traced_line(node.stack_trace)
