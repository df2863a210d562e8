"""Choices that arguments of `packgraph.graph` make: the backend that serves a module, the compiler
of its stages, and the copy streams that copy beside eager work."""

from collections.abc import Mapping
from typing import Any

import torch

from packgraph.graphs.backend import Backend
from packgraph.graphs.copy_streams import CopyStreams
from packgraph.graphs.cuda.backend import CudaBackend
from packgraph.graphs.cuda.copy_streams import CudaCopyStreams, streams_beside
from packgraph.graphs.fallback import Stats
from packgraph.graphs.recorder.backend import RecorderBackend
from packgraph.graphs.recorder.copy_streams import EmulatedCopyStreams


def choose_backend(name: str, device: torch.device, generators: list[torch.Generator]) -> Backend:
    """The backend called `name`; `auto` takes CUDA graphs for CUDA modules and the recorder for CPU
    modules.

    generators: random generators that the module holds besides the default ones.
    Raises ValueError for an unknown name or a backend that cannot serve `device`.
    """
    if name == "auto":
        name = "cuda" if device.type == "cuda" else "recorder"
    if name == "cuda":
        if device.type != "cuda":
            raise ValueError(
                f"backend='cuda' needs a module on a CUDA device; its parameters are on {device}. "
                "Move the module first, or use backend='recorder' on the CPU"
            )
        return CudaBackend(device, generators)
    if name == "recorder":
        if device.type != "cpu":
            raise ValueError(
                f"backend='recorder' captures CPU modules; the parameters are on {device}. "
                "Use backend='cuda' or 'auto'"
            )
        return RecorderBackend(generators)
    raise ValueError(f"unknown backend {name!r}: use 'auto', 'cuda' or 'recorder'")


def make_copy_streams(device: torch.device) -> CopyStreams:
    """Copy streams for eager work where there are no graphs."""
    if device.type == "cuda":
        out, back = streams_beside(torch.cuda.current_stream(device), 2)
        return CudaCopyStreams(device, out, back)
    return EmulatedCopyStreams(set())


def choose_compiler(compile: bool | str | Mapping[str, Any], stats: Stats) -> Any:
    """Chooses what compiles stages: True is torch's `inductor`, a mapping holds options for it,
    False is no compiler.

    stats: gets the counts. Raises ValueError for an unknown compiler or option.
    """
    if compile is False:
        return None
    from packgraph.graphs.compiled.compiler import (
        Compiler,
    )  # loads torch's compiler, which takes seconds

    name = compile if isinstance(compile, str) else "inductor"
    return Compiler(name, stats, compile if isinstance(compile, Mapping) else {})
