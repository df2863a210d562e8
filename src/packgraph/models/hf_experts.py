"""Experts in checkpoints: on disk every expert has matrices of its own, in a model those of a layer
are one tensor.

    experts.gate_up_proj [E, 2I, H]     expert e: rows 0 .. I   experts.e.gate_proj.weight [I, H]
                                                  rows I .. 2I  experts.e.up_proj.weight   [I, H]
    experts.up_proj      [E, I, H]      expert e:               experts.e.up_proj.weight   [I, H]   without a gate
    experts.down_proj    [E, H, I]      expert e:               experts.e.down_proj.weight [H, I]

Nothing is copied: a stored tensor is a view of its place in the whole one, so that filling the
views fills the model, and writing them writes it, without a second set of experts in memory.
"""  # noqa: E501

import re
from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

_WHOLE = re.compile(r"(?P<prefix>(.*\.)?experts)\.(?P<part>gate_up_proj|up_proj|down_proj)")


def split_experts(
    tensors: Mapping[str, Tensor], first: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Tensor]:
    """`tensors` with those of all experts of a layer replaced by views, one for each expert and
    matrix; order is kept.

    first: which expert a tensor begins with, where that is not expert 0.
    Raises ValueError for such a tensor of another shape than above.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _WHOLE.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        merged = match["part"] == "gate_up_proj"
        if tensor.dim() != 3 or (merged and tensor.shape[1] % 2):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; experts are [E, 2I, H], "
                "[E, I, H] or [E, H, I]"
            )
        for expert, matrix in enumerate(tensor.unbind(0), start=first.get(name, 0)):
            parts = (
                dict(zip(("gate_proj", "up_proj"), matrix.chunk(2)))
                if merged
                else {match["part"]: matrix}
            )
            found |= {
                f"{match['prefix']}.{expert}.{part}.weight": view for part, view in parts.items()
            }
    return found
