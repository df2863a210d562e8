"""Throughput of a run: tokens a second, model FLOPs utilization (MFU) and the time that is left.

MFU is the share of a device's peak that the model's own operations reach: the products of forward
and backward for real tokens, without padding and recomputation (`branches.forward_operations`).
Everything is made of what the host knows: nothing here waits for the device.
"""

import re
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from packgraph.models.branches import forward_operations, head_weights, token_weights
from packgraph.train.config.sections import TrainConfig
from packgraph.train.data.microbatches import StepPack
from packgraph.train.features.live import live_shape

# TFLOP/s of dense bfloat16 products with sums in float32, by NVIDIA's data sheets (their figures
# with sparsity halved), of devices by their whole name. Other builds of a chip are slower.
PEAKS = {
    r"NVIDIA A100[- ](SXM4-|PCIE-)?\d+GB( PCIe)?": 312,  # A100 Tensor Core GPU Datasheet
    r"NVIDIA H100 80GB HBM3": 989,  # H100 Tensor Core GPU Datasheet, SXM
    r"NVIDIA H100 PCIe": 756,
    r"NVIDIA H200": 989,  # H200 Tensor Core GPU Datasheet, SXM
    r"NVIDIA L40S": 362,  # L40S Datasheet
    r"NVIDIA GeForce RTX 4090": 165,  # Ada GPU Architecture whitepaper, appendix A
    r"NVIDIA B200": 2250,  # Blackwell Architecture Technical Brief, HGX B200
}
WINDOW = 100  # steps that the time that is left is estimated by


def peak_flops(device: torch.device) -> float | None:
    """Operations a second of dense bfloat16 products at the peak of `device`; None of one that is
    not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for known, peak in PEAKS.items() if re.fullmatch(known, name)), None)


def training_operations(config: TrainConfig) -> tuple[int, int] | None:
    """Operations of forward and backward for a real token, and for a pair of tokens of a document.

    Weights under adapters have no gradients. None for a model of transformers with experts: how
    many of them a token is routed to has no common name there.
    """
    model, weights = config.model, token_weights(config.model) + head_weights(config.model)
    of_token, of_pair = (3 * forward_operations(model, *one) for one in ((1, 0), (0, 1)))
    if config.hf.path is not None:
        found = live_shape(config.hf.path).token_weights
        if found is None:
            return None
        of_token += 6 * (found - weights)
        weights = found
    return of_token - (2 * weights if config.lora.enabled else 0), of_pair


class Throughput:
    """Figures of the steps of a run for its rows."""

    def __init__(self, config: TrainConfig, device: torch.device, world: int) -> None:
        """world: processes, each with a device like this one."""
        self._steps, self._device = config.run.steps, device
        peak = peak_flops(device)
        self._operations = None if peak is None else training_operations(config)
        self._peak = (peak or 0.0) * world
        self._ends = deque[tuple[int, float]](maxlen=WINDOW)  # of steps, by their numbers

    def figures(
        self, step: int, packs: Sequence[StepPack], seconds: float, *, starting: bool
    ) -> dict[str, Any]:
        """Entries of the row of a step that was launched just now.

        Args:
            step: Its number.
            packs: Of all replicas.
            seconds: Since the launch of the step before.
            starting: Whether it took longer than others will, as a step that captures does.
        """
        tokens, seconds = sum(pack.num_tokens for pack in packs), max(seconds, 1e-9)
        found: dict[str, Any] = {"tokens_per_second": tokens / seconds}
        if self._operations is not None:
            of_token, of_pair = self._operations
            operations = of_token * tokens + of_pair * sum(pack.num_pairs for pack in packs)
            found["mfu"] = operations / seconds / self._peak
        if self._device.type == "cuda":
            found["peak_memory"] = torch.cuda.max_memory_allocated(self._device)
        if starting or (self._ends and self._ends[-1][0] >= step):  # the run has gone back
            self._ends.clear()
        self._ends.append((step, time.perf_counter()))
        (first, began), (last, now) = self._ends[0], self._ends[-1]
        if last > first:
            found["eta_seconds"] = (now - began) / (last - first) * (self._steps - step)
        return found
