"""Losses of multi-token prediction in the metrics of a run: one number for each further token.

The forwards of a step add them up on the device (`models/layers/prediction.py`). They are read with
the other numbers of the step, and begin anew.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from packgraph.models.layers.prediction import LossSums
from packgraph.parallel.mesh import Mesh
from packgraph.train.config.sections import TrainConfig


class FurtherLosses:
    """Those of the chunks of one rank, of which the last pipeline stage alone has any."""

    def __init__(
        self, chunks: Sequence[nn.Module], config: TrainConfig, mesh: Mesh, device: torch.device
    ) -> None:
        depths = config.model.mtp_layers if config.hf.path is None else 0
        self._sums = sums_of(chunks)
        self._none = torch.zeros(depths, device=device)
        # Ranks that split matrices all know the whole loss of their rows.
        self._tells = mesh.place["tp"] == 0

    def take(self) -> Tensor:
        """This rank's share of the losses since the last call, float32 [D] on the device: the sum
        over ranks is the loss of each depth. They begin anew."""
        taken = [sums.take() for sums in self._sums]
        return taken[0] if taken and self._tells else self._none


def sums_of(chunks: Sequence[nn.Module]) -> list[LossSums]:
    """Modules that sum up the losses in these chunks; at most one."""
    return [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, LossSums)
    ]
