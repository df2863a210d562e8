"""Amount of optimizer state that stays on the device with `--optimizer.offload`.

    device   | weights, gradients, activations: `predicted_peak` | state that stays | spare |
    host                                                           the rest of the state

Some of the memory is spare (`predicted_peak.SHARE`). `--optimizer.resident` says a size instead.
Ranks may come to different amounts: neither bits nor checkpoints depend on them.
"""

from dataclasses import replace

import torch

from packgraph.graphs.parameters import local_tensor
from packgraph.models.decoder import ModelChunks
from packgraph.parallel.mesh import Mesh
from packgraph.train.config.sections import TrainConfig
from packgraph.train.predicted_peak import SHARE, predicted_peak


def left_for_state(memory: int, peak: int) -> int:
    """Bytes for state, of so many that a run may take, beside its peak without any."""
    return max(0, round(SHARE * memory) - peak)


def resident_bytes(config: TrainConfig, memory: int | None, world: int = 1, rank: int = 0) -> int:
    """Bytes of the optimizer's state that may stay on the device.

    Args:
        config: A run whose capacities are known.
        memory: Bytes of a CUDA device that the run may take, None = there is no limit to keep to.
        world: Number of processes.
        rank: This one's.
    """
    options = config.optimizer
    if not options.offload:
        return 0
    if (chosen := options.resident_bytes()) is not None:
        return chosen
    if memory is None:
        return 0
    return left_for_state(memory, predicted_peak(config, "cuda", world, rank))


def resident_on(model: ModelChunks, config: TrainConfig, mesh: Mesh) -> int:
    """The same for a model that is on its device."""
    weights = [local_tensor(parameter) for parameter in model.parameters()]
    memory = None
    if weights and weights[0].is_cuda:
        storages = [weight.untyped_storage() for weight in weights]
        held = {storage.data_ptr(): storage.nbytes() for storage in storages}
        memory = memory_of_run(weights[0].device, sum(held.values()))
    return resident_bytes(config, memory, mesh.world, mesh.rank)


def memory_of_run(device: torch.device, held: int) -> int:
    """Bytes of a CUDA device for a run that holds `held` of them by now: these, and what neither
    this process nor another one uses, within this process's limit."""
    free, total = torch.cuda.mem_get_info(device)
    limit = round(total * torch.cuda.get_per_process_memory_fraction(device))
    most = min(free + torch.cuda.memory_reserved(device), limit)
    return most - torch.cuda.memory_allocated(device) + held


def without_host_state(config: TrainConfig) -> TrainConfig:
    """The same run with all of the optimizer's state on the device."""
    return replace(config, optimizer=replace(config.optimizer, offload=False))


def planned_state(
    config: TrainConfig, whole: int, peak: int, memory: int | None
) -> tuple[int, int]:
    """Bytes of a planned run's optimizer state: on the device beside those in `peak`, and on the
    host.

    Args:
        config: The run.
        whole: Bytes of all of its state on a rank.
        peak: Bytes of the device without what stays by itself (`auto`).
        memory: Bytes of a device, None = not known.
    """
    options = config.optimizer
    if not options.offload:
        return 0, 0
    if (chosen := options.resident_bytes()) is not None:
        return 0, max(0, whole - chosen)
    stays = 0 if memory is None else min(whole, left_for_state(memory, peak))
    return stays, whole - stays
