"""AdamW that never makes the host wait.

The learning rate is a device tensor (a captured or queued kernel reads its newest value), clipping stays on the
device, weight decay touches only parameters with two or more dimensions. Under bfloat16 weights the optimizer keeps
float32 masters: an update smaller than half a bfloat16 step would otherwise be lost. The invariant: after
`zero_grad` every parameter has a gradient buffer of its own that stays where it is, so captured graphs may add to it.
"""
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from packgraph.train.options import OptimizerConfig


class Optimizer:
    """Fused AdamW (Loshchilov and Hutter 2019) over named parameters that live on one device."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self._named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        self._clip_norm = config.clip_norm
        self._weights = [parameter for _, parameter in self._named]
        device = self._weights[0].device
        self.learning_rate = torch.tensor(config.learning_rate, dtype=torch.float32, device=device)
        self._masters = [_master(weight) for weight in self._weights]
        matrices = [master for master in self._masters if master.ndim >= 2]
        vectors = [master for master in self._masters if master.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay},
                  {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=self.learning_rate, betas=config.betas,
            eps=config.eps, fused=True, capturable=device.type == "cuda")
        for master in self._masters:
            # Made here and not at the first step: a resumed run needs the places to load into.
            self._adam.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master),
            }
        self.zero_grad()

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Zero all gradients in place; a gradient that is None gets a buffer."""
        for weight in self._weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        torch._foreach_zero_(list(self.gradients().values()))

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        """Clip and update once. Returns the global gradient norm before clipping, float32 [] on the device."""
        self.learning_rate.fill_(learning_rate)
        with_master = [(weight, master) for weight, master in zip(self._weights, self._masters) if master is not weight]
        if with_master:
            torch._foreach_copy_([_gradient(master) for _, master in with_master],
                                 [_gradient(weight) for weight, _ in with_master])
        norm = torch.nn.utils.get_total_norm([_gradient(master) for master in self._masters])
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._masters, self._clip_norm, norm)
        self._adam.step()
        if with_master:
            torch._foreach_copy_([weight for weight, _ in with_master], [master for _, master in with_master])
        return norm.float()

    def state_tensors(self) -> dict[str, Tensor]:
        """The live state by flat name: `NAME.step`, `.exp_avg`, `.exp_avg_sq` and, under bfloat16, `.master`."""
        tensors: dict[str, Tensor] = {}
        for (name, weight), master in zip(self._named, self._masters):
            tensors.update({f"{name}.{key}": value for key, value in self._adam.state[master].items()})
            if master is not weight:
                tensors[f"{name}.master"] = master.detach()
        return tensors

    def gradients(self) -> dict[str, Tensor]:
        """The live gradient buffers by parameter name."""
        return {name: weight.grad for name, weight in self._named if weight.grad is not None}


def _gradient(tensor: Tensor) -> Tensor:
    """The gradient buffer, which exists after `zero_grad`."""
    assert tensor.grad is not None
    return tensor.grad


def _master(weight: nn.Parameter) -> Tensor:
    """The weight itself, or a float32 copy with a gradient buffer where its type is narrower."""
    if weight.dtype == torch.float32:
        return weight
    master = weight.detach().float().requires_grad_()
    master.grad = torch.zeros_like(master)
    return master
