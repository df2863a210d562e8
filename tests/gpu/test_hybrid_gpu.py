"""Hybrids of Mamba-2, attention and experts on CUDA: eager against graphs, a soak, isolation,
rounding, no syncs."""

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch
from model_batches import gradients, random_documents

from packgraph.models.config import DecoderConfig, ExpertConfig, MambaConfig
from packgraph.models.decoder import DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.train.config.sections import TrainConfig
from packgraph.verification.matrix import tiny_config
from packgraph.verification.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CAPACITIES = (Capacity(128, 8), Capacity(320, 16))
CHUNK = 64
LENGTHS = (1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1)
MODEL = DecoderConfig(
    vocab_size=300,
    hidden_size=128,
    intermediate_size=256,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    qk_norm=False,
    tie_embeddings=True,
    initializer_range=0.05,
    pattern="M-*ME",
    activation="relu2",
    rotary_share=0.5,
    mamba=MambaConfig(num_heads=8, head_dim=32, state=64, groups=2, chunk=CHUNK),
    experts=ExpertConfig(
        count=4,
        per_token=2,
        intermediate_size=64,
        shared=1,
        score="sigmoid",
        score_bias=True,
        document_loss=1e-3,
    ),
)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def packs(seed: int) -> Iterator[PackedBatch]:
    """Endless packs of both capacities: lengths around the chunk and below the convolution, and one
    long document."""
    draw = random.Random(seed)
    while True:
        capacity = draw.choice(CAPACITIES)
        lengths = [draw.choice((*LENGTHS, draw.randint(2, 100))) for _ in range(draw.randint(1, 7))]
        if draw.random() < 0.2:
            lengths = (
                [draw.randint(3 * CHUNK, capacity.tokens)]
                if capacity.tokens > 3 * CHUNK
                else [capacity.tokens]
            )
        while sum(lengths) > capacity.tokens:
            lengths.pop()
        yield pack(
            [[draw.randrange(300) for _ in range(length)] for length in lengths], [capacity]
        )[0]


def config(granularity: str, steps: int, scope: tuple[str, ...] | None = None) -> TrainConfig:
    base = tiny_config("layer", 0.1, steps)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(MODEL, dropout=0.1),
        graph=dataclasses.replace(
            base.graph, capacities=CAPACITIES, granularity=granularity, scope=scope, autotune=False
        ),
        run=dataclasses.replace(base.run, dtype="bfloat16", tokens_per_step=400),
    )


def budget(step: int) -> int:
    """Real tokens of a step, so that the number of microbatches changes."""
    return (400, 100, 700, 250)[step % 4]


@pytest.mark.parametrize(
    ("granularity", "scope", "steps"),
    [
        ("layer", None, 8),
        ("layer", ("mamba",), 6),
        ("chunk", ("mamba", "attn", "mlp", "moe_router"), 6),
        ("step", None, 8),
        ("chunk", None, 100),
    ],
    ids=str,
)
def test_graphs_equal_eager_bitwise(
    granularity: str, scope: tuple[str, ...] | None, steps: int
) -> None:
    """Loss, gradients, parameters, biases and random states of every step; a hundred steps of new
    lengths at last."""
    report = verify(
        "hybrid",
        config(granularity, steps, scope),
        packs(seed=steps),
        device(),
        budget=budget if granularity != "step" else None,
    )
    assert report.good, report.differences
    assert report.replayed > 0 and "capture failed" not in report.fallbacks


def batch_of(documents: list[list[int]]) -> PackedBatch:
    return PackedBatch.build(documents, Capacity(320, 16)).to(device())


def test_a_changed_document_leaves_the_bits_of_others() -> None:
    """Logits of all other rows; one document lies in chunks with others before and after it."""
    model = DecoderModel(MODEL, device=device(), dtype=torch.bfloat16).eval()
    documents = random_documents([40, 3, 90, 70, 30], 300, seed=1)
    changed = [list(document) for document in documents]
    changed[2] = random_documents([90], 300, seed=2)[0]
    before, after = (model.logits(batch_of(each)) for each in (documents, changed))
    rows = torch.arange(233, device=before.device)
    others = (rows < 43) | (rows >= 133)
    assert torch.equal(before[:233][others], after[:233][others])
    assert not torch.equal(before[43:133], after[43:133])


def test_bfloat16_is_close_to_the_operations_in_float32_on_the_cpu() -> None:
    """Without experts, whose choices tip over by rounding. Kernels and plain operations share only
    their definition."""
    shape = dataclasses.replace(MODEL, pattern="M-*M-", experts=ExpertConfig())
    documents = random_documents([60, 2, 130, 64], 300, seed=3)
    model = DecoderModel(shape, seed=5)
    exact = gradients(model, PackedBatch.build(documents, Capacity(320, 16)))
    low = gradients(
        DecoderModel(shape, seed=5, device=device(), dtype=torch.bfloat16), batch_of(documents)
    )
    for name, wanted in exact.items():  # a few hundred roundings of 2 ** -9 each, random in sign
        assert (low[name].float().cpu() - wanted).norm() <= 0.08 * wanted.norm(), name


def test_a_step_never_waits_for_the_device() -> None:
    model = DecoderModel(MODEL, device=device(), dtype=torch.bfloat16)
    documents = random_documents([60, 100, 30], 300, seed=1)
    gradients(
        model, batch_of(documents)
    )  # kernels are compiled and libraries set themselves up here
    batch, tokens = batch_of(documents[::-1]), torch.tensor(187, device=device())
    torch.cuda.set_sync_debug_mode("error")
    model(batch, tokens).backward()
