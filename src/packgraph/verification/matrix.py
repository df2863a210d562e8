"""The default check of `packgraph verify`: a tiny model under every combination that may go wrong
on its own.

Granularity layer and chunk, dropout off and on; the same with latent attention and experts, and a
choice of scopes of these; with a hybrid of Mamba-2 and attention; in each case three capacities,
microbatch counts that change from step to step, and steps whose forwards all run before their
backwards. Over several processes: every layout that they can take and granularity layer and chunk,
with dropout; layouts in which replicas share experts with the model that has some, and layouts in
which ranks share rows: always, and in groups whose size changes with every microbatch.

`SwitchingSteps` are hard on dynamic context parallelism: every microbatch has other groups than the
one before.

    microstep    0   1   2   3     4 ...
    ranks   1   4   2   1     4          per row, on 4 ranks: whatever a graph or a communicator has
                                         left behind meets another size at once

And rows as they rarely come: one document that fills all ranks to the last token, as many documents
of one or two tokens as there are places, rows without any, lengths that no number of ranks divides.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from packgraph.models.config import ExpertConfig, LatentConfig, MambaConfig
from packgraph.models.decoder import DecoderConfig
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.parallel.layout import Layout, Shard, context_sizes
from packgraph.parallel.mesh import make_mesh
from packgraph.train.config.sections import (
    GraphConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from packgraph.train.data.microbatches import Packs
from packgraph.train.parallelisms import PARALLELISMS
from packgraph.train.progress import SILENT, Phases
from packgraph.train.validate import validate
from packgraph.verification.ranks import RanksReport, verify_ranks
from packgraph.verification.verify import VerifyReport, verify

WAVES = (3, 4, 1, 6, 2)  # of the steps, in turn
VOCABULARY = 64
CAPACITIES = (Capacity(32, 4), Capacity(64, 6), Capacity(128, 12))
BUDGETS = (200, 60, 330, 120, 20)
# What of layers is sharded, and over blocks of how many ranks, 0 = all.
SHARDS: tuple[tuple[Shard, int], ...] = (("none", 0), ("parameters", 0), ("parameters", 2))
FEWEST = 5  # steps, of which two are warm-up: enough for all budgets
EXPERTS = 4
# Each ends a region of experts at another stage; granularity layer without a scope captures all of
# them.
EXPERT_SCOPES = (
    ("layer", None),
    ("chunk", None),
    ("layer", ("attn", "moe_router")),
    ("layer", ("attn", "mlp", "moe_router", "moe_preprocess")),
    ("layer", ("moe",)),
)
HYBRID_SCOPES = (
    ("layer", ("mamba",)),
    ("chunk", ("mamba", "attn", "mlp", "moe_router")),
    ("chunk", None),
)


class SwitchingSteps:
    """Endless steps for `world` ranks with `rank_tokens` tokens each; a `StepSource`.

    sizes: of groups, ascending. places: for documents, as a row may have them. The same for the
    same arguments.
    """

    def __init__(
        self,
        world: int,
        rank_tokens: int,
        sizes: Sequence[int],
        places: Sequence[int],
        vocabulary: int,
        seed: int = 1,
    ) -> None:
        self._draw, self._vocabulary, self._places = random.Random(seed), vocabulary, sorted(places)
        switching = itertools.cycle([sizes[0], *reversed(sizes[1:])])
        self._steps = (
            [
                self._row(size * rank_tokens)
                for size in itertools.islice(switching, count)
                for _ in range(world // size)
            ]
            for count in itertools.cycle(WAVES)
        )

    def next_step(self) -> list[PackedBatch]:
        """The packs of a step, microstep by microstep and by first rank."""
        return next(self._steps)

    def _row(self, tokens: int) -> PackedBatch:
        draw, most = self._draw, self._places[-1]
        kind = draw.choices(("some", "one", "tiny", "none"), (3, 1, 1, 1))[0]
        lengths: list[int] = [tokens] if kind == "one" else []
        if kind == "tiny":
            lengths = [2, *(draw.randint(1, 2) for _ in range(min(most, tokens // 2) - 1))]
        room = tokens if kind == "some" else 0
        while room > 1 and len(lengths) < most:
            lengths.append(min(room, 2 + int(draw.paretovariate(0.8) * 4) | 1))
            room -= lengths[-1]
        capacity = Capacity(
            tokens, next(places for places in self._places if places >= len(lengths))
        )
        if not lengths:
            return PackedBatch.empty(capacity)
        return PackedBatch.build(
            [[draw.randrange(self._vocabulary) for _ in range(length)] for length in lengths],
            capacity,
        )


def tiny_config(granularity: str, dropout: float, steps: int) -> TrainConfig:
    """A two-layer model that runs a step in milliseconds."""
    return TrainConfig(
        preset="verify",
        model=DecoderConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            rope_theta=10_000.0,
            tie_embeddings=True,
            dropout=dropout,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        graph=GraphConfig(
            capacities=CAPACITIES, granularity="chunk" if granularity == "chunk" else "layer"
        ),
        run=RunConfig(steps=steps, tokens_per_step=200),
    )


def tiny_experts_config(
    granularity: str, dropout: float, steps: int, scope: tuple[str, ...] | None = None
) -> TrainConfig:
    """The same with latent attention, and experts in all layers but the first, whose routers have
    biases."""
    config = tiny_config(granularity, dropout, steps)
    model = replace(
        config.model,
        num_kv_heads=4,
        head_dim=12,
        qk_norm=False,
        latent=LatentConfig(kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8),
        experts=ExpertConfig(
            count=EXPERTS,
            per_token=2,
            intermediate_size=16,
            shared=1,
            first_dense=1,
            score="sigmoid",
            score_bias=True,
            bias_rate=0.01,
            document_loss=1e-2,
        ),
    )
    return replace(config, model=model, graph=replace(config.graph, scope=scope))


def tiny_hybrid_config(
    granularity: str, dropout: float, steps: int, scope: tuple[str, ...] | None = None
) -> TrainConfig:
    """A hybrid of four layers of one branch each: Mamba-2, attention without positions,
    feed-forward, experts."""
    config = tiny_config(granularity, dropout, steps)
    model = replace(
        config.model,
        num_layers=4,
        pattern="M*-E",
        activation="relu2",
        rotary_share=0.0,
        qk_norm=False,
        mamba=MambaConfig(num_heads=4, head_dim=16, state=16, groups=2, chunk=16),
        experts=ExpertConfig(
            count=EXPERTS, per_token=2, intermediate_size=16, score="sigmoid", score_bias=True
        ),
    )
    return replace(config, model=model, graph=replace(config.graph, scope=scope))


def random_packs(
    seed: int,
    capacities: Sequence[Capacity] = CAPACITIES,
    vocabulary: int = VOCABULARY,
    multiple: int = 1,
) -> Iterator[PackedBatch]:
    """Endless packs of random documents with heavy-tailed lengths, over all capacities. multiple:
    as in `pack`."""
    draw = random.Random(seed)
    longest = max(capacity.tokens for capacity in capacities)
    while True:
        lengths = [
            min(longest, 1 + int(draw.paretovariate(0.8) * 4)) for _ in range(draw.randint(3, 12))
        ]
        documents = [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]
        yield from pack(documents, capacities, multiple=multiple)


def default_matrix(
    device: torch.device, steps: int, progress: Phases = SILENT
) -> Iterator[VerifyReport]:
    """Verify every combination for `steps` steps each (scopes, hybrids: a third); yields reports as
    they are done. progress: told how far it is."""
    few = max(steps // 3, FEWEST)
    cases = [
        (f"granularity {granularity}, dropout {dropout}", tiny_config(granularity, dropout, steps))
        for granularity, dropout in itertools.product(("layer", "chunk"), (0.0, 0.1))
    ]
    for kind, make, scopes in (
        ("experts", tiny_experts_config, EXPERT_SCOPES),
        ("hybrid", tiny_hybrid_config, HYBRID_SCOPES),
    ):
        for granularity, scope in scopes:
            chosen = "all" if scope is None else " ".join(scope)
            title = f"{kind}, granularity {granularity}, {chosen}, dropout 0.1"
            count = steps if kind == "experts" and scope is None else few
            cases.append((title, make(granularity, 0.1, count, scope)))
    for title, config in progress.of("", len(cases), cases, "run"):
        packs = random_packs(seed=1)
        yield verify(title, config, packs, device, budget=budget_of, progress=progress)


def budget_of(step: int) -> int:
    """Real tokens of a step, so that the number of microbatches changes from step to step."""
    return BUDGETS[step % len(BUDGETS)]


def budget_over(replicas: int) -> Callable[[int], int]:
    """Budgets that reach all replicas in some steps, and leave some without a pack in others."""
    return lambda step: budget_of(step) * ((replicas + 1) // 2)


def config_for(layout: Layout, granularity: str, steps: int) -> TrainConfig:
    """The tiny model with as many layers and heads as `layout` (dp filled in) has stages and parts
    of a matrix.

    Ranks of a pipeline hold two chunks each where a chunk is a region. The model has experts where
    replicas share them.
    """
    chunks = 2 if layout.pp > 1 and granularity == "chunk" else 1
    sizes: dict[str, Any] = {axis.name: axis.size for axis in layout.axes}
    # Room enough for whatever is routed.
    parallel = ParallelConfig(chunks=chunks, ep=layout.ep, expert_room=float(layout.ep), **sizes)
    layers = max(2, layout.pp * chunks)
    if layout.ep > 1:
        config = tiny_experts_config(granularity, 0.1, steps)
        return replace(config, model=replace(config.model, num_layers=layers), parallel=parallel)
    config = tiny_config(granularity, 0.1, steps)
    model = replace(
        config.model,
        num_layers=layers,
        num_heads=max(4, layout.tp, layout.cp),
        num_kv_heads=max(2, layout.tp),
    )
    return replace(config, model=model, parallel=parallel)


def layouts_of(world: int) -> list[Layout]:
    """Every way to spread the tiny models over `world` processes; all replicas share the experts,
    or are ranks that share rows instead, where any do."""
    every = [Layout(dp=world)]
    for parallelism in PARALLELISMS:
        every += [found for layout in every for found in parallelism.tried(layout)]
    return [
        layout
        for layout in every
        if not validate(config_for(layout, "layer", 30), "cpu", world=world)
    ]


def dynamic_config(layout: Layout, granularity: str, steps: int) -> TrainConfig:
    """`config_for` of a layout whose ranks share rows, where up to all of them do so, with two
    numbers of places."""
    config = config_for(layout, granularity, steps)
    capacities = tuple(Capacity(CAPACITIES[0].tokens * layout.cp, places) for places in (4, 12))
    return replace(
        config,
        parallel=replace(config.parallel, dynamic_cp=True),
        graph=replace(config.graph, capacities=capacities),
    )


def switching_steps(layout: Layout) -> SwitchingSteps:
    """The steps of such a run."""
    return SwitchingSteps(
        (layout.dp or 1) * layout.cp,
        CAPACITIES[0].tokens,
        context_sizes(layout.cp),
        (4, 12),
        VOCABULARY,
    )


def ranks_matrix(
    device: torch.device,
    steps: int,
    world: int,
    *,
    one_process: bool = True,
    progress: Phases = SILENT,
) -> Iterator[RanksReport]:
    """Verify every layout of `world` connected processes, at granularity layer and chunk;
    collective. progress: told how far it is."""
    cases = list[tuple[str, TrainConfig, Callable[[], Packs], Callable[[int], int] | None]]()
    for layout, granularity, (shard, ranks) in itertools.product(
        layouts_of(world), ("layer", "chunk"), SHARDS
    ):
        config = config_for(layout, granularity, steps)
        if shard != "none":
            parallel = replace(config.parallel, shard=shard, shard_ranks=ranks)
            config = replace(config, parallel=parallel)
            is_one_block = ranks == (layout.dp or 1) * layout.cp
            if is_one_block or validate(config, "cpu", world=world):
                continue
        chunks = f" x {config.parallel.chunks} chunks" if config.parallel.chunks > 1 else ""
        shared = f", ep={layout.ep}" if layout.ep > 1 else ""
        rows = f", cp={layout.cp}" if layout.cp > 1 else ""
        title = (
            f"dp={layout.dp}, pp={layout.pp}{chunks}{rows}, tp={layout.tp}{shared}, granularity "
            f"{granularity}, "
            "dropout 0.1"
            + (f", shard {shard}" if shard != "none" else "")
            + (f" in blocks of {ranks}" if ranks else "")
        )
        cases.append((title, config, partial(random_packs, 1), budget_over(layout.dp or 1)))
        if layout.cp > 1:
            config = dynamic_config(layout, granularity, steps)
            cases.append((f"dynamic {title}", config, partial(switching_steps, layout), None))
    for title, config, packs, budget in progress.of("", len(cases), cases, "run"):
        yield verify_ranks(
            title,
            config,
            packs,
            device,
            make_mesh(config.parallel.layout(), device),
            one_process=one_process,
            budget=budget,
            progress=progress,
        )
