"""The random states of a run as tensors, so that a resumed run draws the numbers an unbroken one would have drawn."""
import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Copies of the generators' states by name (`cpu` and, on CUDA, `cuda`), uint8 on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Put states back that `random_states` gave for the same kind of device."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
