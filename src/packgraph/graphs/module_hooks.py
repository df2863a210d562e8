"""Hooks on modules, and the submodules that may have them."""

from types import FunctionType
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

    Some hooks run tensor operations and nothing else. What they launch is captured with the module,
    so they are fine: those of DTensor's parallel styles, which place tensors on the mesh, and those
    of submodules that mark what they are given as requiring a gradient.
    """
    for name, owner in [*owners(module), *module.named_modules()]:  # a wrapper has hooks of its own
        for kind in HOOKS:
            for hook in getattr(owner, kind).values():
                if not hook.__module__.startswith(_PLACING) and not (name and only_marks(hook)):
                    where = f"submodule {name!r}" if name else "the module"
                    return f"{where} ({type(owner).__name__}) has {_words(kind)}: {_name(hook)}"
    for kind, table in zip(HOOKS, global_hooks(), strict=True):
        if table:
            return f"every module has {_words(kind)} (register_module_..._hook)"
    return None


def only_marks(hook: Any) -> bool:
    """Whether a hook can do no more than call `requires_grad_` of its arguments.

    transformers registers one on the input embedding (`enable_input_require_grads`, which
    `gradient_checkpointing_enable` calls): `output.requires_grad_(True)`. Its code tells: it names
    that method and nothing else, no global and no variable of an outer function.
    """
    if type(hook) is not FunctionType:
        return False
    code = hook.__code__
    return (
        code.co_names == ("requires_grad_",)
        and not code.co_freevars
        and not hook.__defaults__
        and not hook.__kwdefaults__
        and all(isinstance(constant, bool | str | None) for constant in code.co_consts)
    )


def _name(hook: Any) -> str:
    """A hook's function by its full name."""
    hook = getattr(hook, "func", hook)
    kind = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{kind.__module__}.{kind.__qualname__}"


def _words(kind: str) -> str:
    return kind.strip("_").replace("_", " ")
