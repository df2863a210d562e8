"""Settings that others have published figures of, and how packgraph runs the same.

A `Setting` is one run: a model, the documents it trains on, the rows they are packed into, and what
the trainer is told beside its defaults. `theirs` is the figure that others give, as its source has
it. What is not like theirs stands in `differs`. Documents fill a row each, as most such figures
have them, or are of lognormal length. Models have random weights. A setting with `over` is told as
a ratio over the setting of that name, which trains on the same documents.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from packgraph.models.config import DecoderConfig, ExpertConfig
from packgraph.packing.capacity import Capacity
from packgraph.train.config.presets import moonlight, qwen3_0_6b
from packgraph.train.config.sections import ParallelConfig

Unit = Literal["tokens/s and GPU", "times padded"]


@dataclass(frozen=True, kw_only=True)
class Published:
    """A figure of others.

    figure: in `unit`. tflops: TFLOP/s of a GPU that they give with it, by their own count, or as a
    share of 989. chip: number and kind of their GPUs. source: repository and file, or thread. date:
    of the figure, as the source gives it. settings: what it was measured with.
    """

    figure: float
    unit: Unit = "tokens/s and GPU"
    tflops: float | None = None
    chip: str
    source: str
    date: str
    settings: str


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Lengths of the documents of a run.

    mean: tokens of each (sigma 0), or on average. sigma: of the lognormal distribution. longest:
    longer ones are cut there.
    """

    mean: int
    sigma: float = 0.0
    longest: int


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run of the trainer.

    Attributes:
        model: Its shape.
        documents: What it trains on.
        capacities: Rows, as `graph.capacities`.
        microbatches: Of the largest capacity that a step's tokens fill, of one GPU.
        step_tokens: Real tokens of a step of one GPU instead, where rows are padded.
        window: Documents that wait to be packed; as many as a row takes = they are taken as they
            come.
        gpus: Numbers of GPUs that it runs on, each with the layers that are kept of the model; 0 =
            all of them.
        recompute: As `run.recompute`.
        precision: As `model.precision`.
        lora_rank: Of adapters; 0 = all weights are trained.
        shard: As `parallel.shard`, on several GPUs.
        shares_experts: Ranks share the experts (`parallel.ep`), on several GPUs.
        dispatcher: As `parallel.dispatcher`, where they do.
        compile: As `graph.compile`.
        one_graph: A whole step with its update is one graph.
        dtype: As `run.dtype`.
        gradients: As `optimizer.gradients`.
        timed: Steps that count.
        theirs: The figure of others.
        over: Name of the setting that this one is told as a ratio over.
        differs: What is not as in their setting, beside the chip.
    """

    model: DecoderConfig
    documents: Documents
    capacities: tuple[Capacity, ...]
    microbatches: int = 1
    step_tokens: int | None = None
    window: int = 256
    gpus: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({1: 0}))
    recompute: str = "none"
    precision: str = "bf16"
    lora_rank: int = 0
    shard: Literal["none", "gradients", "parameters"] = "none"
    shares_experts: bool = False
    dispatcher: Literal["auto", "symmetric"] = "symmetric"
    compile: bool = True
    one_graph: bool = False
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    gradients: Literal["auto", "float32", "bfloat16"] = "auto"
    timed: int = 8
    theirs: Published | None = None
    over: str | None = None
    differs: str = ""

    @property
    def tokens(self) -> int:
        """Token slots of the largest row."""
        return max(capacity.tokens for capacity in self.capacities)

    def tokens_per_step(self, world: int) -> int:
        """Real tokens of that many GPUs at which a step has enough packs: half a row less than full
        ones have, since rows of several documents are not quite full."""
        if self.step_tokens is not None:
            return world * self.step_tokens
        return world * self.microbatches * self.tokens - self.tokens // 2

    def parallel(self, world: int) -> ParallelConfig:
        """How the run is spread over that many GPUs."""
        if world == 1:
            return ParallelConfig()
        if self.shares_experts:
            return ParallelConfig(ep=world, dispatcher=self.dispatcher)
        return ParallelConfig(shard=self.shard)

    def on(self, world: int) -> "Setting":
        """With the layers that are kept on that many GPUs. Raises KeyError for another number."""
        layers = self.gpus[world] or self.model.num_layers
        return replace(self, model=replace(self.model, num_layers=layers))


QWEN3_0_6B = qwen3_0_6b().model
LLAMA3_8B = DecoderConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
    qk_norm=False,
    max_position_embeddings=8192,
)
QWEN3_30B_A3B = DecoderConfig(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    rope_theta=1_000_000.0,
    experts=ExpertConfig(
        count=128, per_token=8, intermediate_size=768, score="softmax", load_loss=1e-3
    ),
)

PRIME = "PrimeIntellect-ai/prime-rl, benchmarks/results/BENCHMARKS.md"
PRIME_HOW = "SFT of all weights, fake data, 2 microbatches of a row, compile, full recompute, FA3"
AUTOMODEL = "NVIDIA-NeMo/Automodel, docs/performance-summary.mdx"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1"
TITAN_HOW = "C4 in rows of 8,192, 2 a GPU and step, FSDP, selective checkpointing"
TITAN_CHIP = "8 × H100 96 GB HBM2e, 500 W"
HALO = "whitecircle/halo, agent-docs/optimization/padding-free-collator.md"
HALO_HOW = "documents of 1,024 on average, at most 4,096; 2 a GPU, EP 2, recompute, FA2"
UNSLOTH = "unslothai/unsloth, pull request 3672"


def _full(tokens: int) -> Documents:
    return Documents(mean=tokens, longest=tokens)


def _qwen3_rows(tokens: int, figure: float, tflops: float, recompute: str) -> Setting:
    theirs = Published(
        figure=figure,
        tflops=tflops,
        chip="1 × H100 80 GB",
        source=PRIME,
        date="2026-02-07",
        settings=PRIME_HOW,
    )
    return Setting(
        model=QWEN3_0_6B,
        documents=_full(tokens),
        capacities=(Capacity(tokens, 1),),
        microbatches=2,
        recompute=recompute,
        theirs=theirs,
        differs="" if recompute == "full" else "nothing recomputed",
    )


def _llama3_rows(figure: float, how: str, *, compile: bool = True, fp8: bool = False) -> Setting:
    theirs = Published(
        figure=figure, chip=TITAN_CHIP, source=TITAN, date="2024-12-26", settings=how
    )
    return Setting(
        model=LLAMA3_8B,
        documents=_full(8192),
        capacities=(Capacity(8192, 1),),
        microbatches=2,
        gpus=MappingProxyType({2: 0, 8: 0}),
        recompute="full",  # two GPUs hold four times as much of the state each
        precision="fp8_weight_gradients" if fp8 else "bf16",
        shard="parameters",
        compile=compile,
        gradients="bfloat16",  # of two microbatches; with float32 two GPUs of 80 GB are full
        timed=5,
        theirs=theirs,
        differs="two GPUs, so all is recomputed; rows one after another"
        + ("; float8 with a scale for each row" if fp8 else ""),
    )


def _whole_steps(**more: object) -> Setting:
    """Documents of lognormal length, 8 rows of 4,096 a step, at most 16 of them in a row."""
    settings = Setting(
        model=QWEN3_0_6B,
        documents=Documents(mean=1024, sigma=1.0, longest=4096),
        capacities=(Capacity(4096, 16),),
        microbatches=8,
        timed=12,
    )
    return replace(settings, **more)  # type: ignore[arg-type]


INSTRUCTIONS = Documents(mean=200, sigma=0.6, longest=1024)
PADDED_TO = (256, 320, 384, 448, 512, 640, 768, 1024)


def _unsloth(capacities: tuple[Capacity, ...], **more: object) -> Setting:
    """8 of Llama-3-8B's layers with adapters, batches of 8 documents. Not compiled, so that many
    shapes cost little and batches are padded about as far as their longest document."""
    setting = Setting(
        model=LLAMA3_8B,
        documents=INSTRUCTIONS,
        capacities=capacities,
        step_tokens=4 * 8 * INSTRUCTIONS.mean,
        gpus=MappingProxyType({1: 8}),
        lora_rank=16,
        compile=False,
        timed=24,
        differs="lengths of short instructions, theirs are not given",
    )
    return replace(setting, **more)  # type: ignore[arg-type]


def _unsloth_theirs(figure: float) -> Published:
    return Published(
        figure=figure,
        unit="times padded",
        chip="not given",
        source=UNSLOTH,
        date="2025-12-02",
        settings="Llama-3-8B, padding-free batches of 8: 52 s against 96 s",
    )


def _halo(capacities: tuple[Capacity, ...], figure: float | None, **more: object) -> Setting:
    """Batches of 2 documents a GPU, not compiled for the same reason."""
    theirs = None
    if figure is not None:
        theirs = Published(
            figure=figure,
            unit="times padded",
            chip="2 × B300",
            source=HALO,
            date="undated",
            settings=HALO_HOW,
        )
    setting = Setting(
        model=QWEN3_30B_A3B,
        documents=Documents(mean=1024, sigma=0.6, longest=4096),
        capacities=capacities,
        step_tokens=15_000,
        gpus=MappingProxyType({1: 4, 2: 8}),
        shares_experts=True,
        compile=False,
        timed=12,
        theirs=theirs,
        over=None if figure is None else "halo-padded",
        differs="nothing recomputed; lognormal lengths",
    )
    return replace(setting, **more)  # type: ignore[arg-type]


def _experts(model: DecoderConfig, **more: object) -> Setting:
    """Rows of 4,096, ranks share the experts."""
    setting = Setting(
        model=model,
        documents=_full(4096),
        capacities=(Capacity(4096, 1),),
        microbatches=16,
        gpus=MappingProxyType({1: 4, 2: 8, 8: 0}),
        shares_experts=True,
        timed=6,
    )
    return replace(setting, **more)  # type: ignore[arg-type]


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "qwen3-0.6b-8k": _qwen3_rows(8192, 26_010, 166, "none"),
        "qwen3-0.6b-8k-recompute": _qwen3_rows(8192, 26_010, 166, "full"),
        "qwen3-0.6b-16k": _qwen3_rows(16_384, 25_490, 234, "none"),
        "qwen3-0.6b-16k-recompute": _qwen3_rows(16_384, 25_490, 234, "full"),
        "llama3-8b-lora": Setting(
            model=LLAMA3_8B,
            documents=_full(4096),
            capacities=(Capacity(2 * 4096, 2),),
            microbatches=4,
            lora_rank=16,
            timed=5,
            theirs=Published(
                figure=12_473,
                tflops=402,
                chip="1 × H100 80 GB",
                source=AUTOMODEL,
                date="2026-06-12",
                settings="LoRA, mock data, 16 microbatches of 2 rows a step, TransformerEngine",
            ),
            differs="4 microbatches a step",
        ),
        "qwen3-0.6b-steps": _whole_steps(),
        "qwen3-0.6b-steps-one-graph": _whole_steps(one_graph=True),
        "qwen3-0.6b-steps-bf16-sums": _whole_steps(gradients="bfloat16"),
        "qwen3-0.6b-steps-fp8": _whole_steps(precision="fp8"),
        "unsloth-padded": _unsloth(
            tuple(Capacity(8 * longest, 8, longest) for longest in PADDED_TO),
            window=8,
        ),
        "unsloth-padding-free": _unsloth(
            tuple(Capacity(4 * longest, 8) for longest in PADDED_TO),
            window=8,
            theirs=_unsloth_theirs(1.85),
            over="unsloth-padded",
        ),
        "unsloth-packed": _unsloth((Capacity(8192, 64),), over="unsloth-padded"),
        "halo-padded": _halo((Capacity(2 * 4096, 2),), None, window=2),
        "halo-padding-free": _halo(
            tuple(Capacity(tokens, 2) for tokens in (*range(1024, 3073, 512), 4096, 5120, 8192)),
            2.33,
            window=2,
        ),
        "halo-packed": _halo((Capacity(2 * 4096, 32),), 9.22),
        "moonlight": _experts(moonlight().model),
        "qwen3-30b-a3b": _experts(
            QWEN3_30B_A3B,
            theirs=Published(
                figure=12_040,
                tflops=277,
                chip="8 × H100 80 GB",
                source=AUTOMODEL,
                date="2026-06-12",
                settings="mock data, 16 microbatches of 4 rows, EP 8, balanced by force, DeepEP",
            ),
            differs="16 microbatches of a row a step; the router's own choice; no recompute",
        ),
        "llama3.1-8b": _llama3_rows(5762, TITAN_HOW, compile=False),
        "llama3.1-8b-compile": _llama3_rows(6667, f"{TITAN_HOW}, compile"),
        "llama3.1-8b-compile-float32-sums": replace(
            _llama3_rows(6667, f"{TITAN_HOW}, compile"), gradients="float32"
        ),
        "llama3.1-8b-fp8": _llama3_rows(8532, f"{TITAN_HOW}, compile, float8", fp8=True),
    }
)
