"""One microbatch on its way through one chunk: what it owns from its forward to the end of its last
send."""

from typing import Any

import torch

from packgraph.graphs.replay_handle import ReplayHandle
from packgraph.parallel.pipeline.links import Transfer


class InFlight:
    """A microbatch in a chunk. Replayed flights use the slot's static memory, eager ones memory of
    their own.

    hidden: activations received from the stage before. out: what the chunk made. gradient: received
        gradient of `out`.
    input_gradient: gradient of `hidden`, to be sent. direct: the claim, if it is replayed without
        autograd.
    """

    def __init__(self, claim: ReplayHandle | None, lease: Any, direct: bool = False) -> None:
        self.claim, self.lease = claim, lease
        self.direct = claim if claim is not None and direct and claim.is_direct else None
        self.hidden: torch.Tensor | None = None
        self.out: torch.Tensor | None = None
        self.gradient: torch.Tensor | None = None
        self.input_gradient: torch.Tensor | None = None
        self.receiving: dict[str, Transfer] = {}
        self._sending: list[tuple[Transfer, torch.Tensor]] = []

    def activation_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Where to receive activations of `like`'s shape: the slot's own input memory when a graph
        reads it there."""
        buffer = self.claim.buffer("hidden") if self.claim is not None else None
        self.hidden = (
            torch.empty(like.shape, dtype=like.dtype, device=like.device)
            if buffer is None
            else buffer
        )
        return self.hidden

    def gradient_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Where to receive the gradient of `out`."""
        buffer = self.claim.gradient_buffer() if self.claim is not None else None
        self.gradient = (
            torch.empty(like.shape, dtype=like.dtype, device=like.device)
            if buffer is None
            else buffer
        )
        return self.gradient

    def sent(self, transfer: Transfer, tensor: torch.Tensor) -> None:
        """Keep `tensor` until `transfer` is done."""
        self._sending.append((transfer, tensor))

    def delivered(self) -> bool:
        """Whether all sends are done."""
        return all(transfer.is_completed() for transfer, _ in self._sending)

    def finish(self) -> None:
        """Wait for the sends (on CUDA: make the stream wait) and give the slot back."""
        for transfer, _ in self._sending:
            transfer.wait()
        self._sending = []
        if self.lease is not None:
            self.lease.release()
        self.out = self.gradient = self.input_gradient = self.hidden = None


class Arrival(torch.autograd.Function):
    """Starts a chunk's autograd graph at received activations, and catches the gradient that goes
    back."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, flight: InFlight, received: torch.Tensor
    ) -> torch.Tensor:
        ctx.flight = flight
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.flight.input_gradient = gradient
        return None, None, None
