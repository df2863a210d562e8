"""The random states of a run as tensors, so that a resumed run draws the numbers an unbroken one
would have drawn.

Ranks whose activations are copies share a stream of random numbers, all others have their own. A
checkpoint names the state of every stream; a run that goes on at another layout, with other
streams, cannot continue them and seeds anew.
"""

from collections.abc import Mapping

import torch

from packgraph.parallel.mesh import Mesh


def stream_name(place: Mapping[str, int], *, sequence: bool) -> str:
    """Name of the stream that the rank at `place` (`Layout.coordinates`) draws from; `random` for
    the first rank.

    sequence: tensor parallel ranks have rows of their own.
    """
    numbers = {axis: number for axis, number in place.items() if axis != "tp" or sequence}
    return "random" + "".join(f".{axis}{number}" for axis, number in numbers.items() if number)


def all_streams(mesh: Mesh, *, sequence: bool) -> list[str]:
    """The names of all streams of a layout, sorted."""
    return sorted(
        {
            stream_name(mesh.layout.coordinates(rank), sequence=sequence)
            for rank in range(mesh.world)
        }
    )


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Copies of the generators' states by name (`cpu` and, on CUDA, `cuda`), uint8 on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put states back that `random_states` gave for the same kind of device."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
