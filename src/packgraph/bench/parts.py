"""What of a decoder is run: all of it, from tokens to loss, or its layers alone, from hidden states
to hidden states.

    model     batch ─▶ embedding ─▶ layers ─▶ norm, head, loss        backward from the loss
    layers    batch, hidden [T, H] ─▶ layers ─▶ hidden [T, H]         backward from a gradient that
                                                                      comes in, [T, H]

Layers alone are what the middle of a pipeline runs, and what figures of other libraries are of: a
head of 152k words costs as much as ten small layers and hides what happens in them.
"""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from packgraph.bench.models import FreshModel, draw_parameters
from packgraph.models.config import DecoderConfig
from packgraph.models.layers.decoder import DecoderLayer
from packgraph.models.stack import DecoderStack
from packgraph.packing.batch import PackedBatch

PARTS = ("model", "layers")


def build_part(
    part: str, config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> DecoderStack:
    """The part of a decoder of this shape, with fresh values."""
    if part == "model":
        return FreshModel(config, device=device, dtype=dtype)
    with torch.device("meta"):
        layers = {number: DecoderLayer(config, number) for number in range(config.num_layers)}
        model = DecoderStack(config, layers, first=False, last=False)
    model.to(dtype).to_empty(device=device)
    draw_parameters(model, seed=0)
    return model


def twin(model: DecoderStack, attention: str) -> DecoderStack:
    """Another module over the same values and gradients, with another attention backend (a name, or
    auto).

    Its parameters are objects of their own: torch keeps an accumulator of gradients with every
    parameter, bound to the stream that it was made on, and a capture that keeps one alive would
    move the gradients of all others there. Gradients must be there already, and stay the same
    tensors.
    """
    replaced: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise ValueError(
                f"{name} has no gradient that a twin could share: call zero_gradients first"
            )
        other = torch.nn.Parameter(parameter.data)
        other.grad = parameter.grad
        replaced[id(parameter)] = other
    config = dataclasses.replace(model.config, attention_backend=attention)
    return copy.deepcopy(model, replaced | {id(model.config): config})


class TimedPart:
    """Forward and backward of a part for microbatches of at most `tokens` places, at least `real`
    of them used.

    What comes in from other parts of the model is drawn once; its gradient is zero from row `real`
    on, so that it is zero in all padding, whatever the shape that a way runs its documents in.
    """

    def __init__(self, model: DecoderStack, tokens: int, real: int, seed: int = 0) -> None:
        self.model: torch.nn.Module = model
        self.config, self.real = model.config, real
        self.hidden: Tensor | None = None
        self.gradient: Tensor | None = None
        if not model.first:
            like = next(model.parameters())
            generator = torch.Generator(like.device).manual_seed(seed)
            shape = tokens, model.config.hidden_size
            self.hidden, self.gradient = (
                torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
                for _ in range(2)
            )
            self.gradient[real:] = 0.0

    def by(self, model: torch.nn.Module) -> "TimedPart":
        """The same work with the same inputs, done by another form of the model."""
        other = copy.copy(self)
        other.model = model
        return other

    def arguments(self, batch: PackedBatch) -> tuple[Any, ...]:
        """The model's arguments for one microbatch. Hidden states are a new leaf each time."""
        if self.hidden is None:
            return (batch,)
        return batch, None, self.hidden[: batch.capacity.tokens].detach().requires_grad_()

    def incoming(self, batch: PackedBatch) -> Tensor | None:
        """The gradient of the output for one microbatch; None: the output is a loss."""
        return None if self.gradient is None else self.gradient[: batch.capacity.tokens]

    def score(self, out: Tensor) -> float:
        """What tells outputs apart: a loss itself, of hidden states the root mean square of rows
        with a document."""
        out = out.detach()
        return float(out if out.dim() == 0 else out[: self.real].float().square().mean().sqrt())
