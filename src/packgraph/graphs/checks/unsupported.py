"""Modules that cannot be captured as they are: they work through hooks that a replay would skip, or
hold tensors whose memory torch does not show."""

from typing import NamedTuple

import torch

from packgraph.graphs.hooks import module_hooks


class Unsupported(NamedTuple):
    """reason: the fallback's name in stats. what, remedy: for the message."""

    reason: str
    what: str
    remedy: str


def find_unsupported(module: torch.nn.Module) -> Unsupported | None:
    """Why `module` cannot be captured at all, or None."""
    wrapper = _data_parallel(module)
    if wrapper is not None:
        return Unsupported(
            f"{wrapper} hooks",
            f"the module is or holds a {wrapper}: it works through hooks, which graphs would skip",
            "graph the plain module and reduce its .grad after the last backward of the step",
        )
    hooks = module_hooks(module)
    if hooks is not None:
        remedy = (
            "remove the hooks, or do their work in forward; hooks on outputs and parameters are "
            "fine"
        )
        if (
            "require_grad" in hooks
        ):  # of transformers and its kin, when it is not the one that is known
            remedy = (
                "call disable_input_require_grads() of the model: checkpoints need no such hook "
                "with "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
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


def _data_parallel(module: torch.nn.Module) -> str | None:
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    kinds: tuple[type, ...] = (DataParallel, DistributedDataParallel)
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        kinds = (*kinds, FSDPModule, FullyShardedDataParallel)
    for child in module.modules():
        for kind in kinds:
            if isinstance(child, kind):
                return kind.__name__
    return "DistributedDataParallel" if inside_data_parallel() else None


def inside_data_parallel() -> bool:
    """Whether this call comes from the forward of a DistributedDataParallel around the module."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None
