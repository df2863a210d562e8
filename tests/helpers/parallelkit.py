"""A small decoder trained on any layout, returning what two runs must agree on."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.parallel.layout import Shard
from packgraph.parallel.mesh import Mesh, single_process
from packgraph.parallel.pieces import Pieces, parts_of
from packgraph.parallel.sharded_layers import ShardedLayers, layers_of
from packgraph.parallel.tensor import dropout_seed, parallelize
from packgraph.train.config.sections import GraphConfig, OptimizerConfig
from packgraph.train.feed import count_loss_tokens, shares
from packgraph.train.optimizer import Optimizer
from packgraph.train.strategies import MicrobatchExecutor, accumulate

CPU = torch.device("cpu")
CAPACITIES = (Capacity(16, 2), Capacity(32, 4), Capacity(64, 8))
COUNTS = (
    3,
    4,
    1,
    6,
    2,
    5,
)  # microbatches of the steps: fewer than replicas, uneven, more than ever before


def tiny_config(**changes: Any) -> DecoderConfig:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "tie_embeddings": True,
    }
    return DecoderConfig(**(sizes | changes))


def steps_of_packs(
    steps: int, vocabulary: int = 32, capacities: Sequence[Capacity] = CAPACITIES
) -> Iterator[list[PackedBatch]]:
    longest = max(capacity.tokens for capacity in capacities) // 3
    for step in range(steps):
        draw = random.Random(step)
        rows = [
            [
                [draw.randrange(vocabulary) for _ in range(draw.randint(2, longest))]
                for _ in range(draw.randint(1, 3))
            ]
            for _ in range(COUNTS[step % len(COUNTS)])
        ]
        yield [pack(documents, list(capacities))[0] for documents in rows]


def held(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank has of each, by name, of those in pieces also by place."""
    return {
        f"{name} {corner}" if isinstance(tensor, Pieces) else name: part
        for name, tensor in tensors.items()
        for corner, part in (parts_of(tensor) if isinstance(tensor, Pieces) else [((), tensor)])
    }


def whole(tensor: Tensor) -> Tensor:
    """The values of all ranks together, as a plain tensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Run:
    """One rank's model, optimizer and executor."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        graphs: bool,
        granularity: str = "layer",
        sequence: bool = False,
        seed: int = 0,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        capacities: Sequence[Capacity] = CAPACITIES,
        shard: Shard = "none",
        **model: Any,
    ) -> None:
        torch.manual_seed(dropout_seed(seed, mesh, sequence=sequence))
        self.mesh, self.device = mesh, device
        self.model = DecoderModel(tiny_config(**model), device=device, dtype=dtype).train()
        if mesh.size("tp") > 1:
            parallelize(self.model, mesh["tp"], sequence=sequence)
        layers = layers_of(self.model) if shard != "none" else None
        self.optimizer = Optimizer(
            self.model.named_parameters(), OptimizerConfig(clip_norm=0.5), mesh, layers, shard
        )
        self.together = 1
        if layers is not None:
            ShardedLayers(self.optimizer.flat).put_into(self.model)
            self.together = mesh.size("dp")
        # Not strict: microbatches that are in flight together have one slot, so that some of them
        # run eagerly.
        options = GraphConfig(enabled=graphs, capacities=tuple(capacities), granularity=granularity)
        self.executor = MicrobatchExecutor(self.model, options, device)
        self.overlapped = 0

    def step(
        self,
        number: int,
        packs: list[PackedBatch],
        *,
        overlap: bool = True,
        set_to_none: bool = False,
    ) -> dict[str, Tensor]:
        """One optimizer step on this replica's share; loss, norm, gradients and parameters of this
        rank."""
        self.executor.before_step(number)
        if set_to_none:
            for parameter in self.model.parameters():
                parameter.grad = None
        else:
            self.optimizer.zero_grad()
        share = shares(packs, self.mesh.size("dp"), self.together)[self.mesh.place["dp"]]
        loss = accumulate(
            self.executor.loss,
            share,
            self.device,
            in_flight=number % 3 == 2,
            loss_tokens=count_loss_tokens(packs),
            before_last=self.optimizer.flat.overlap if overlap else None,
        )
        self.overlapped += self.optimizer.flat.launched
        norm = self.optimizer.step(0.02)
        facts = {"loss": loss, "norm": norm}
        facts |= {
            f"gradient {name}": value.clone()
            for name, value in held(self.optimizer.gradients()).items()
        }
        gathered = self.optimizer.flat.gathered()
        facts |= {
            f"parameter {name}": whole(value)
            for name, value in (dict(self.model.named_parameters()) | held(gathered)).items()
            if name not in gathered
        }
        return facts | {"random": torch.get_rng_state()}


def train(
    mesh: Mesh | None,
    *,
    steps: int = 10,
    overlap: bool = True,
    set_to_none: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train `steps` steps. Returns trace (facts of each step), replayed and fallbacks."""
    run = Run(mesh or single_process(), **options)
    trace = [
        run.step(number, packs, overlap=overlap, set_to_none=set_to_none)
        for number, packs in enumerate(steps_of_packs(steps))
    ]
    totals = run.executor.totals()
    run.executor.close()
    return {
        "trace": trace,
        "replayed": totals["replayed"],
        "overlapped": run.overlapped,
        "spans": len(run.optimizer.flat.spans),
    }


def assert_same_within_rounding(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Norms and parameters of all ranks are those of one process.

    Sums over ranks are rounded in another order. Adam divides a gradient by its own size, so where
    a gradient is hardly more than rounding, parameters move apart by parts of the learning rate
    (0.02): hence the absolute tolerance.
    """
    for result in results:
        for step, (ours, theirs) in enumerate(zip(result["trace"], alone["trace"], strict=True)):
            for name in theirs:
                if name == "norm" or name.startswith("parameter"):
                    torch.testing.assert_close(
                        ours[name],
                        theirs[name],
                        rtol=1e-4,
                        atol=5e-5,
                        msg=lambda text, place=f"step {step}, {name}: ": place + text,
                    )


def train_both(mesh: Mesh, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same training eagerly and through graphs."""
    return train(mesh, graphs=False, **options), train(mesh, graphs=True, **options)
