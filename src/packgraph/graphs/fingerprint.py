"""The facts that graphs bake about a module, checked before every call.

A replay reads the storages it was captured with and runs no Python of the module. So a storage that was replaced, a
parameter that was frozen, a submodule that was exchanged, switched to evaluation or given a hook would be ignored by
a replay. The check walks lists made at capture; it must stay cheap, since it is paid by every microbatch.
"""
from typing import Any

import torch

from packgraph.graphs.parameters import local_tensor

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLACING = "torch.distributed.tensor."


class Fingerprint:
    """Storages, trainable parameters, submodules, training flags and the absence of hooks, as they are now."""

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.named_modules())
        self._flags = [(owner, owner.training) for _, owner in modules]
        hooks = [getattr(owner, kind) for _, owner in modules for kind in HOOKS]
        self._hooks = [(table, len(table)) for table in hooks]
        tables = [owner._modules for _, owner in modules]
        self._children = [(table, name, child) for table in tables for name, child in table.items()]
        self._sizes = [(table, len(table)) for table in tables]
        self._tensors: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, int, bool, str]] = []
        for prefix, owner in modules:
            for table in (owner._parameters, owner._buffers, vars(owner)):
                for name, tensor in table.items():
                    if isinstance(tensor, torch.Tensor):
                        full = f"{prefix}.{name}" if prefix else name
                        local = local_tensor(tensor)
                        fact = (table, name, tensor, local, local.data_ptr(), tensor.requires_grad, full)
                        self._tensors.append(fact)

    def changed(self) -> str | None:
        """What no longer holds, in words, or None. Hooks are not told here: see `hooked`."""
        for table, name, tensor, local, pointer, trains, full in self._tensors:
            if table.get(name) is not tensor or local.data_ptr() != pointer or local_tensor(tensor) is not local:
                return f"the storage of {full!r} was replaced"
            if tensor.requires_grad != trains:
                return f"requires_grad of {full!r} changed"
        for owner, training in self._flags:
            if owner.training is not training:
                return f"the training mode of a {type(owner).__name__} inside the module changed"
        for table, name, child in self._children:
            if table.get(name) is not child:
                return f"the submodule {name!r} was replaced"
        if any(len(table) != size for table, size in self._sizes):
            return "a submodule was added"
        return None

    def hooked(self) -> bool:
        """Whether a submodule has got a hook since."""
        return any(len(table) != size for table, size in self._hooks)


def module_hooks(module: torch.nn.Module) -> str | None:
    """The first submodule with hooks that a replay would skip, in words, or None.

    The hooks of DTensor's parallel styles only place tensors on the mesh: what they launch is captured with the
    module, so they are fine.
    """
    for name, owner in module.named_modules():
        for kind in HOOKS:
            if any(not hook.__module__.startswith(_PLACING) for hook in getattr(owner, kind).values()):
                where = f"submodule {name!r}" if name else "the module"
                return f"{where} ({type(owner).__name__}) has {kind.strip('_').replace('_', ' ')}"
    return None
