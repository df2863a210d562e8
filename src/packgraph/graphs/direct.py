"""Replaying a variant without autograd, for a schedule that knows itself when a microbatch's
backward runs.

A call that users write goes through autograd, region by region: their loss may hang on anything. A
schedule calls a chunk forward and later backward, and hands over hidden states and their gradient
itself. If every stage is captured and the gradients go from region to region by baked pointers,
nothing is left for Python to do in between:

    forward    copy the inputs in, launch F1 F2 ... Fn
    backward   copy the gradient in, launch Bn ... B2 B1

The invariant: `direct_replay` returns None unless these launches compute all that autograd would
make of the call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from packgraph.graphs.backend import Graph, Static
from packgraph.graphs.gradients import GradientBuffer, SeparateGradients, attach, settle
from packgraph.graphs.shared_gradients import let_go
from packgraph.graphs.slots import SlotLease

if TYPE_CHECKING:
    from packgraph.graphs.region import Region

Ends = Sequence[tuple[int, int] | None]


@dataclass
class Direct:
    """The launches of one variant.

    copies: which of the call's tensors go into which memory of the slot, and its address. out: the
    call's only output. incoming: where its gradient belongs. gradients: by number of the call's
    tensor, where the backward leaves its gradient.
    """

    forwards: list[Graph]
    backwards: list[Graph]
    copies: list[tuple[int, torch.Tensor, int]]
    out: Static
    incoming: Static
    gradients: dict[int, Static]
    owned: list[GradientBuffer]
    attached: object = field(default=None)

    def forward(self, tensors: Sequence[torch.Tensor], lease: SlotLease) -> torch.Tensor:
        """Launch all forwards on the call's tensors; returns the output, static memory of the
        slot."""
        lease.pending.add(0)
        with lease.slots.launches:
            for number, buffer, address in self.copies:
                if tensors[number].data_ptr() != address:
                    buffer.copy_(tensors[number].detach())
            for graph in self.forwards:
                graph.replay()
        return self.out.tensor

    def backward(self, gradient: torch.Tensor | None, lease: SlotLease, frozen: object) -> None:
        """Launch all backwards. gradient: of the output, None = one.

        frozen: the block in which nobody replaces `.grad`, or None; gradients are looked at once
        per block.
        """
        with lease.slots.launches as launches:
            if not launches.shared:
                known = frozen is not None and self.attached is frozen
                aside = [] if known else attach(self.owned)
                self._launch_backward(gradient, lease)
                settle(aside)
                self.attached = None if aside else frozen
                return
        let_go(self.owned, launches)
        with launches:
            separate = SeparateGradients(self.owned)
            self._launch_backward(gradient, lease)
            found = separate.take()
        torch.autograd.backward([buffer.parameter for buffer in self.owned], found)

    def _launch_backward(self, gradient: torch.Tensor | None, lease: SlotLease) -> None:
        lease.start_backward(0)
        target = self.incoming.tensor
        if gradient is None:
            target.fill_(1)
        elif gradient.data_ptr() != target.data_ptr():
            target.copy_(gradient)
        for graph in self.backwards:
            graph.replay()
        lease.finish_backward(0)


def direct_replay(
    regions: "dict[int, Region]", runs: int, ends: Ends, tensors: Sequence[int | None]
) -> Direct | None:
    """How to replay a variant directly, or None when something has to go through eager code or
    autograd.

    runs: how many runs the program has. tensors: for each static input of the slot the number of
    the call's tensor that it takes in, None for one that the call does not have.
    """
    if (
        len(regions) != runs
        or len(ends) != 1
        or ends[0] is None
        or any(number is None for number in tensors)
    ):
        return None
    if any(
        region.returned or region.summed or len(region.backwards) > 1 for region in regions.values()
    ):
        return None
    producer, output = ends[0]
    last, incoming = regions[producer].outputs[output], regions[producer].incoming(output)
    backwards = [
        region.backward
        for _, region in sorted(regions.items(), reverse=True)
        if region.backward is not None
    ]
    if incoming is None or not backwards:
        return None
    copies: list[tuple[int, torch.Tensor, int]] = []
    gradients: dict[int, Static] = {}
    for region in regions.values():
        for place, entry in enumerate(region.inputs):
            if entry.token[0] != "slot":
                continue
            number = tensors[entry.token[1]]
            assert number is not None
            if entry.buffer is not None:
                copies.append((number, entry.buffer, entry.buffer.data_ptr()))
            gradient = region.backward.gradients[place] if region.backward is not None else None
            if gradient is not None:
                if number in gradients or not entry.lend:
                    return None
                gradients[number] = gradient
    return Direct(
        [region.forward for region in regions.values()],
        [backward.graph for backward in backwards],
        copies,
        last.static,
        incoming,
        gradients,
        [buffer for backward in backwards for buffer in backward.owned],
    )
