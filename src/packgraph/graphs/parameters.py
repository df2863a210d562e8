"""Parameters under capture: aliases, gradient buffers, and the facts a graph has baked about the module.

While a region is captured the module's parameters are replaced by fresh aliases of the same storages. Their autograd
accumulators are then new, so they belong to the capture stream; hooks and `.grad` of the real parameters are not
touched; and gradients are accumulated as they are produced, so no second copy of them is ever needed.
"""
import contextlib
from collections.abc import Iterator, Sequence

import torch

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Aliases:
    """The aliases that stand for a module's parameters during one build."""

    def __init__(self) -> None:
        self.parameter_of: dict[int, torch.nn.Parameter] = {}
        self.alias_of: dict[int, torch.nn.Parameter] = {}

    def alias(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """The alias of `parameter`; tied parameters share one."""
        if id(parameter) not in self.alias_of:
            made = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            self.alias_of[id(parameter)] = made
            self.parameter_of[id(made)] = parameter
        return self.alias_of[id(parameter)]


@contextlib.contextmanager
def aliased_parameters(module: torch.nn.Module) -> Iterator[Aliases]:
    """Put aliases in place of all parameters of `module` for the block."""
    aliases = Aliases()
    replaced = []
    try:
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    replaced.append((owner, name, parameter))
                    owner._parameters[name] = aliases.alias(parameter)
        yield aliases
    finally:
        for owner, name, parameter in replaced:
            owner._parameters[name] = parameter


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether something outside wants to see this parameter's gradient when it arrives."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


class GradientBuffers:
    """The gradient storages that backward graphs accumulate into: one per parameter, for the life of the graphs."""

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[torch.nn.Parameter, torch.Tensor]] = {}

    def buffer(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The buffer of `parameter`: its present `.grad`, or zeros that become its `.grad` at the first backward."""
        if id(parameter) not in self._buffers:
            grad = parameter.grad
            made = grad if grad is not None else torch.zeros_like(parameter, memory_format=torch.preserve_format)
            self._buffers[id(parameter)] = (parameter, made.detach() if grad is None else made)
        return self._buffers[id(parameter)][1]

    @staticmethod
    @torch.no_grad()
    def attach(owned: Sequence[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Make each buffer its parameter's `.grad` before a backward graph adds to it.

        A gradient set to None gets its buffer back, zeroed; a gradient made elsewhere (by an eager microbatch or by
        the user) is copied into the buffer, so that nothing accumulated so far is lost.
        """
        cleared = []
        for parameter, buffer in owned:
            grad = parameter.grad
            if grad is buffer:
                continue
            if grad is None:
                cleared.append(buffer)
            elif grad.data_ptr() != buffer.data_ptr():
                buffer.copy_(grad)
            parameter.grad = buffer
        if cleared:
            torch._foreach_zero_(cleared)


class Fingerprint:
    """What graphs bake about a module: storages, which parameters train, training flags, the absence of hooks."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.modules = list(module.named_modules())
        self.flags = [(m, m.training) for _, m in self.modules]
        self.tensors: list[tuple[dict, str, str, torch.Tensor, int, bool]] = []
        for prefix, owner in self.modules:
            for table in (owner._parameters, owner._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        full = f"{prefix}.{name}" if prefix else name
                        fact = (table, name, full, tensor, tensor.data_ptr(), tensor.requires_grad)
                        self.tensors.append(fact)

    def changed(self) -> str | None:
        """What no longer holds, in words, or None."""
        for table, name, full, tensor, pointer, trains in self.tensors:
            now = table.get(name)
            if now is not tensor or now.data_ptr() != pointer:
                return f"the storage of {full!r} was replaced"
            if now.requires_grad != trains:
                return f"requires_grad of {full!r} changed"
        for module, training in self.flags:
            if module.training != training:
                return f"training mode of a {type(module).__name__} inside the module changed"
        return None


def module_hooks(module: torch.nn.Module) -> str | None:
    """The first submodule with hooks that a replay would skip, in words, or None."""
    for name, owner in module.named_modules():
        for kind in _HOOKS:
            if getattr(owner, kind, None):
                where = f"submodule {name!r}" if name else "the module"
                return f"{where} ({type(owner).__name__}) has {kind.strip('_').replace('_', ' ')}"
    return None


def module_generators(module: torch.nn.Module) -> list[torch.Generator]:
    """The random generators that the module or its submodules hold as attributes, each once."""
    found = {id(v): v for m in module.modules() for v in vars(m).values() if isinstance(v, torch.Generator)}
    return list(found.values())
