"""Decoders through captured graphs, held against the same decoder without them."""

from collections.abc import Collection, Sequence

import torch

from packgraph.graphs.graphed import control, graph
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity


def assert_graphs_are_eager(
    config: DecoderConfig,
    batches: Sequence[PackedBatch],
    capacities: Sequence[Capacity],
    granularity: str,
    scope: Collection[str] | None,
) -> None:
    """Losses and gradients of `batches` have the same bits in graphs of two capacities, where all
    but the first of each are replays."""
    eager, captured = DecoderModel(config, seed=1), DecoderModel(config, seed=1)
    graphed = graph(
        captured,
        capacities=capacities,
        backend="recorder",
        granularity=granularity,
        scope=scope,
        strict=True,
    )
    losses = []
    for model in (eager, graphed):
        torch.manual_seed(3)
        for batch in batches:
            loss = model(batch, torch.tensor(20))
            loss.backward()
            losses.append(loss.detach().clone())
    assert losses[: len(batches)] == losses[len(batches) :]
    assert control(graphed).stats.replayed == len(batches) - len(capacities)
    for ours, theirs in zip(captured.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    graphed.close()
