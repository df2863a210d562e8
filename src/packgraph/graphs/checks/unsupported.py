"""Modules and outputs that cannot be captured as they are.

Modules that work through hooks, which a replay would skip, or that hold tensors whose memory torch
does not show. Outputs that share memory with each other, or with what was there before the call:
a replay hands out copies, so a change in place would not reach the other one. Parts of one tensor
that do not overlap (`chunk`, `split`) are fine.
"""

from collections.abc import Container, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from packgraph.graphs.checks.host_sync import LEAVE_OUT
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.parameters import storage_of
from packgraph.graphs.wrapper import HOOKS_OF_ALL, Wrapper, wrapped
from packgraph.torch_internals import HOOKS, ddp_module


class Unsupported(NamedTuple):
    """reason: the fallback's name in stats. what, remedy: for the message."""

    reason: str
    what: str
    remedy: str


def find_unsupported(module: torch.nn.Module) -> Unsupported | None:
    """Returns the reason why `module` cannot be captured at all, or None."""
    wrapper = _data_parallel(module)
    if wrapper is not None:
        return Unsupported(
            f"{wrapper} hooks",
            f"the module is or holds a {wrapper}: it works through hooks, which graphs would skip",
            "graph the plain module and reduce its .grad after the last backward of the step",
        )
    hooks = module_hooks(module)
    if hooks is not None:
        # Those of transformers and its kin, when it is not the one that is known.
        remedy = (
            "call disable_input_require_grads() of the model: checkpoints need no such hook with "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
            if "require_grad" in hooks
            else "remove the hooks, or do their work in forward; hooks on outputs and parameters "
            "are fine"
        )
        return Unsupported(
            "module hooks", f"{hooks}, which would run at capture only, never at a replay", remedy
        )
    nested = next(
        (
            name
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            if tensor.is_nested
        ),
        None,
    )
    if nested is not None:  # torch crashes where its memory is asked for
        return Unsupported(
            "a nested tensor",
            f"{nested!r} is a nested tensor, whose memory cannot be looked at",
            "hold its values and offsets as two tensors, and make it of them in forward",
        )
    return None


def unsupported_error(module: torch.nn.Module) -> CaptureError | None:
    """`find_unsupported` as an error at the user's line."""
    found = find_unsupported(module)
    return None if found is None else CaptureError(found.what, user_line(), found.remedy)


def _data_parallel(module: torch.nn.Module) -> str | None:
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    kinds: tuple[type, ...] = (DataParallel, DistributedDataParallel)
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        kinds = (*kinds, FSDPModule, FullyShardedDataParallel)
    found = (k.__name__ for child in module.modules() for k in kinds if isinstance(child, k))
    # One around the module may be calling it.
    return next(found, None if ddp_module() is None else DistributedDataParallel.__name__)


_PLACING = "torch.distributed.tensor."


def owners(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The module and its submodules by name; a wrapper is seen as what it wraps."""
    return [
        (name, wrapped(owner) if isinstance(owner, Wrapper) else owner)
        for name, owner in module.named_modules()
    ]


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
    for kind, table in zip(HOOKS, HOOKS_OF_ALL, strict=True):
        if table:
            return f"every module has {_words(kind)} (register_module_..._hook)"
    return None


def only_marks(hook: Any) -> bool:
    """Returns whether a hook can do no more than call `requires_grad_` of its arguments.

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


_REMEDY = "return a copy (.clone()) in its place. " + LEAVE_OUT


def refuse_shared_memory(
    leaves: Sequence[Any], made: Container[int], captured: Container[int]
) -> None:
    """Raise CaptureError for outputs whose memory is not theirs alone.

    Args:
        leaves: The outputs of a call that is captured.
        made: Storages that captured code has made.
        captured: Identities of tensors that captured code returns. Others are handed through as
            they are, or made by eager code, which runs at every replay.
    """
    outputs = list(
        {
            id(leaf): leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel()
        }.values()
    )
    by_storage: dict[int, list[torch.Tensor]] = {}
    for output in outputs:
        storage = storage_of(output)
        if storage not in made and id(output) not in captured:
            continue
        if storage not in made:
            raise CaptureError(
                f"an output of shape {tuple(output.shape)} shares its memory with a tensor that "
                "was "
                "there before the call (an input, a parameter, a buffer): a replay returns a copy, "
                "and "
                "changes in place would not be seen through the other",
                user_line(),
                _REMEDY,
            )
        for other in by_storage.setdefault(storage, []):
            if _overlap(output, other):
                raise CaptureError(
                    f"two outputs, of shapes {tuple(other.shape)} and {tuple(output.shape)}, share "
                    "memory: a replay returns copies, and changes in place of one would not be "
                    "seen "
                    "through the other",
                    user_line(),
                    _REMEDY,
                )
        by_storage[storage].append(output)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one storage have an element in common."""
    (start, stop), (first, last) = _extent(one), _extent(other)
    if stop <= first or last <= start:
        return False
    if one.dtype != other.dtype:
        return True
    mask = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    mask.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(mask.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) within the storage."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    last = sum(
        int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()
