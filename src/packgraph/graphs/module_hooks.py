"""Hooks on modules, and the submodules that may have them."""

from typing import Any

import torch
from torch.nn.modules import module as torch_module

from packgraph.graphs.wrapper import Wrapper, wrapped

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLACING = "torch.distributed.tensor."


def owners(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The module and its submodules by name; a wrapper is seen as what it wraps."""
    return [
        (name, wrapped(owner) if isinstance(owner, Wrapper) else owner)
        for name, owner in module.named_modules()
    ]


def global_hooks() -> list[dict[int, Any]]:
    """The tables of the hooks that run for every module of the process."""
    return [getattr(torch_module, f"_global{kind}") for kind in HOOKS]


def module_hooks(module: torch.nn.Module) -> str | None:
    """The first submodule with hooks that a replay would skip, in words, or None.

    The hooks of DTensor's parallel styles only place tensors on the mesh: what they launch is
    captured with the module, so they are fine.
    """
    for name, owner in [*owners(module), *module.named_modules()]:  # a wrapper has hooks of its own
        for kind in HOOKS:
            if any(
                not hook.__module__.startswith(_PLACING) for hook in getattr(owner, kind).values()
            ):
                where = f"submodule {name!r}" if name else "the module"
                return f"{where} ({type(owner).__name__}) has {_words(kind)}"
    for kind, table in zip(HOOKS, global_hooks(), strict=True):
        if table:
            return f"every module has {_words(kind)} (register_module_..._hook)"
    return None


def _words(kind: str) -> str:
    return kind.strip("_").replace("_", " ")
