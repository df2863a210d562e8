"""`bench integrations`: training steps, losses or log-probabilities of a model of
transformers, by transformers alone and through graphs.

    transformers           its own forward, loss and autograd; documents are kept apart by
                           packgraph's attention, registered by hand, without a mask
    transformers+compile   the same, every layer through torch.compile
    live                   packgraph.graph(packed(model))
    live+compile           the same with compile=True
    own                    packgraph's decoder of the same shape and values, through graphs
    own+compile            the same with compile=True
    eager                  packgraph's decoder as it is

    --work step            forward and backward of microbatches with a number of tokens in all, then
                           fused AdamW
    --work loss            the loss of these microbatches without gradients, as validation beside
                           training: a microbatch was trained before, gradients and the graphs of
                           training are there
    --work logprobs        log-probabilities of all labels without gradients. transformers makes the
                           whole logits of a microbatch; +compile fuses what follows them

All ways get the same documents. Each way is built, timed and freed by itself, since several models
with their optimizers do not fit side by side; every way starts from the same values.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from bench_models import SHAPES, draw_batches, dtype_on
from bench_step import FIRST, KILO, WorkArguments
from torch import Tensor, nn

from packgraph.bench.comparison import Deadline, peak_bytes, start_anew, time_calls
from packgraph.bench.rows import FAILURES, Column, Row, Rows, figures, gibibytes, median, value, why
from packgraph.graphs.graphed import GraphedModule, graph
from packgraph.models.decoder import DecoderModel
from packgraph.models.hf_config import config_from_json, config_to_json
from packgraph.ops.attention.api import (
    AttentionMetadata,
    attention,
    attention_metadata,
    choose_backend,
)
from packgraph.ops.log_probabilities import logprobs
from packgraph.ops.loss import IGNORED
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.train.config.reading import ConfigError, Count, option

ATTENTION = "packgraph_bench"
STEPS_AHEAD = 3  # eager calls, captures and compiling

WAYS = (
    *(f"{name}{end}" for name in ("transformers", "live", "own") for end in ("", "+compile")),
    "eager",
)
WORKS = ("step", "loss", "logprobs")

COLUMNS: list[Column] = [
    ("work", value("work")),
    ("row", value("tokens")),
    ("lora", value("lora")),
    ("attention", value("kernel")),
    ("way", value("way")),
    ("tokens / s", value("tokens_per_second", ",.0f")),
    ("ratio", value("ratio", ".2f")),
    ("step ms", median("step_ms", 1)),
    ("host ms", median("host_ms", 1)),
    ("peak GiB", gibibytes("peak_bytes")),
    ("more in pools", value("pool_growth")),
    ("prepare s", value("prepare_seconds", ".1f")),
    ("replayed", value("replayed")),
    ("loss", value("loss", ".4f")),
]


@dataclass(frozen=True, kw_only=True)
class IntegrationArguments(WorkArguments):
    """Steps, losses or log-probabilities of a model of transformers, by itself and in graphs."""

    usual_tokens: ClassVar[tuple[int, ...]] = (4 * KILO,)

    model: str | None = option(
        None,
        "shape of the model, or a config.json of transformers (default: {own.usual_models[0]} on "
        "CUDA, {own.usual_models[1]} on a CPU)",
        metavar="NAME|FILE",
    )
    ways: tuple[Annotated[str, WAYS], ...] = option(WAYS, FIRST)
    work: Annotated[str, WORKS] = option(
        "step", "what is timed: whole steps of training, or forwards without gradients"
    )
    sigma: float = option(1.0, "of the lognormal distribution of lengths", metavar="F")
    documents: Count = option(64, "at most in one microbatch", metavar="N")
    step_tokens: Count = option(32 * KILO, "tokens of a step", metavar="T")
    steps: Count = option(8, "that are timed, after three others; of forwards, too", metavar="N")
    lora: int = option(
        0, "train adapters of this rank on every linear layer, by peft (default: all)", metavar="R"
    )


Loss = Callable[[PackedBatch, Tensor], Tensor]
Step = Callable[[list[PackedBatch]], Tensor]


@dataclass
class _Way:
    """A model, what makes a loss of it, and log-probabilities. graphed: whose counts are told."""

    model: nn.Module
    loss: Loss
    logprobs: Callable[[PackedBatch], Tensor]
    graphed: GraphedModule | None = None

    def pools(self) -> int:
        """Bytes of the pools of its graphs."""
        return 0 if self.graphed is None else self.graphed.stats.pool_bytes


def bench_integrations(
    options: IntegrationArguments, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
    """Measures everything in `options`; one row per number of tokens and way.

    Raises:
        ConfigError: If the model is unknown, or without transformers.
    """
    if not importlib.util.find_spec("transformers"):
        raise ConfigError(["bench integrations needs transformers: pip install transformers"])
    config = _config_of(options)
    for tokens in options.tokens:
        bench = _Bench(options, config, tokens, device)
        first: float | None = None
        for name in options.ways:
            if deadline.passed():
                row = bench.row(name) | {"reason": deadline.reason}
            else:
                row = bench.measure(name)
            if row["tokens_per_second"] is not None:
                first = first or row["tokens_per_second"]
                row["ratio"] = round(row["tokens_per_second"] / first, 4)
            rows.add(row)
            start_anew(device)


def _config_of(options: IntegrationArguments) -> dict[str, Any]:
    """The config.json of the model."""
    name = f"--model {options.model!r}"
    if str(options.model) in SHAPES:
        content = config_to_json(SHAPES[str(options.model)], torch.bfloat16)
    else:
        file = Path(str(options.model))
        if not file.is_file():
            raise ConfigError([f"{name} is neither a config.json nor one of {', '.join(SHAPES)}"])
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError([f"{name} cannot be read: {error}"]) from error
        if not isinstance(content, dict) or "model_type" not in content:
            raise ConfigError([f"{name} names no model_type"])
    if options.layers is not None:
        content["num_hidden_layers"] = options.layers
        if "layer_types" in content:
            content["layer_types"] = content["layer_types"][: options.layers]
    return content


class _Bench:
    """All ways at one number of tokens."""

    def __init__(
        self,
        options: IntegrationArguments,
        config: dict[str, Any],
        tokens: int,
        device: torch.device,
    ) -> None:
        self.options, self.config, self.tokens, self.device = options, config, tokens, device
        found = self._config()
        size = getattr(found, "head_dim", None) or found.hidden_size // found.num_attention_heads
        self.attention = choose_backend(device, dtype_on(device), size, size).name
        self.capacity = Capacity(tokens, options.documents)
        self.per_step = max(1, options.step_tokens // tokens)
        packs = draw_batches(
            self.capacity,
            self.per_step * (STEPS_AHEAD + options.steps + 1),
            config["vocab_size"],
            **options.drawn,
        )
        self.steps = [
            [pack.to(device) for pack in packs[start : start + self.per_step]]
            for start in range(0, len(packs), self.per_step)
        ]

    def row(self, name: str) -> Row:
        """What a row says of a way before it was measured."""
        return {
            "benchmark": "integrations",
            "work": self.options.work,
            "way": name,
            "model": self.options.model,
            "family": self.config["model_type"],
            "layers": self.config["num_hidden_layers"],
            "dtype": str(dtype_on(self.device)).removeprefix("torch."),
            "tokens": self.tokens,
            "documents": self.options.documents,
            "microbatches": self.per_step,
            "lora": self.options.lora,
            "kernel": self.attention,
            **self.options.drawn,
            "figures": {},
            "tokens_per_second": None,
            "ratio": None,
            "peak_bytes": None,
            "pool_growth": None,
            "prepare_seconds": None,
            "replayed": None,
            "fallbacks": None,
            "loss": None,
            "reason": None,
        }

    def measure(self, name: str) -> Row:
        """Builds a way, times its steps and frees it."""
        row = self.row(name)
        try:
            kind, _, compiled = name.partition("+")
            makers = {"transformers": _transformers, "live": _live, "own": _own, "eager": _eager}
            make = makers[kind]
            way = make(self, compile=bool(compiled))
            row |= self._timed(way)
        except FAILURES as error:
            row["reason"] = why(error)
            return row
        if way.graphed is not None:
            row["replayed"] = way.graphed.stats.replayed
            row["fallbacks"] = dict(way.graphed.stats.fallbacks)
            way.graphed.close()
        return row

    def _training(self, way: _Way) -> Step:
        """Steps of training."""
        trained = [parameter for parameter in way.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=self.device.type == "cuda")

        def step(batches: list[PackedBatch]) -> Tensor:
            counted, total = _labels_of(batches), torch.zeros((), device=self.device)
            for batch in batches:
                loss = way.loss(batch, counted)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad(set_to_none=way.graphed is None)
            return total

        return step

    def _losses(self, way: _Way) -> Step:
        """The loss without gradients, after three microbatches of training."""
        for batch in self.steps[0][:STEPS_AHEAD] * STEPS_AHEAD:
            way.loss(batch, _labels_of([batch])).backward()

        @torch.no_grad()
        def step(batches: list[PackedBatch]) -> Tensor:
            counted = _labels_of(batches)
            return torch.stack([way.loss(batch, counted).clone() for batch in batches]).sum()

        return step

    def _log_probabilities(self, way: _Way) -> Step:
        """The mean of negative log-probabilities."""

        @torch.no_grad()
        def step(batches: list[PackedBatch]) -> Tensor:
            found = torch.stack([way.logprobs(batch).sum() for batch in batches]).sum()
            return -found / _labels_of(batches)

        return step

    def _timed(self, way: _Way) -> Row:
        works = {"step": self._training, "loss": self._losses, "logprobs": self._log_probabilities}
        step, before = works[self.options.work](way), way.pools()
        losses: list[Tensor] = []
        ahead, timed = self.steps[:STEPS_AHEAD], self.steps[STEPS_AHEAD:-1]

        def run(steps: list[list[PackedBatch]], mark: Callable[[], None]) -> None:
            for batches in steps:
                losses.append(step(batches))
                mark()

        laps, _ = time_calls(self.device, lambda mark: run(ahead, mark))
        times, host = time_calls(
            self.device, lambda mark: run(timed, mark), lambda: step(self.steps[-1])
        )
        peak = peak_bytes(self.device, lambda: step(self.steps[-1]))
        real = [sum(batch.num_tokens for batch in batches) for batches in timed]
        rates = figures([1000 * count / lap for count, lap in zip(real, times, strict=True)])
        return {
            "figures": {
                "step_ms": figures(times),
                "host_ms": figures([host / len(timed)]),
                "tokens_per_second": rates,
            },
            "tokens_per_second": rates["median"],
            "peak_bytes": peak,
            "pool_growth": way.pools() - before if self.options.work == "loss" else None,
            "prepare_seconds": round(sum(laps) / 1000, 2),
            "loss": float(losses[0]),
        }

    def _config(self) -> Any:
        """The configuration, as transformers reads it."""
        transformers = importlib.import_module("transformers")
        content = {key: entry for key, entry in self.config.items() if key != "architectures"}
        return transformers.AutoConfig.for_model(**content)

    def theirs(self) -> Any:
        """The model by transformers, the same values for a seed."""
        transformers, config = importlib.import_module("transformers"), self._config()
        torch.manual_seed(self.options.seed)
        with torch.device(self.device):
            model = transformers.AutoModelForCausalLM.from_config(config)
        model = model.to(dtype_on(self.device))
        if self.options.lora:
            peft = importlib.import_module("peft")
            rank = self.options.lora
            adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
            with torch.device(self.device):
                model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
        return model.train()

    def ours(self) -> DecoderModel:
        """packgraph's decoder of the same shape and values."""
        if self.options.lora:
            raise ValueError("packgraph's own models take no adapters")
        made = DecoderModel(
            config_from_json(self.config), device=self.device, dtype=dtype_on(self.device)
        ).train()
        values = {
            key.removeprefix("model."): tensor for key, tensor in self.theirs().state_dict().items()
        }
        own = made.state_dict()
        missing = sorted(own.keys() - values.keys())
        if missing:
            raise ValueError(f"transformers' model has no {', '.join(missing[:3])}")
        made.load_state_dict({key: values[key] for key in own})
        return made


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    packed: AttentionMetadata,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """An implementation of attention for transformers, for a model without windows, soft caps and
    sinks."""
    q, k, v = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    return attention(q, k, v, packed, scale=scaling)[None], None


def _labels_of(batches: list[PackedBatch]) -> Tensor:
    """How many tokens have a label."""
    return torch.stack([(batch.labels != IGNORED).sum() for batch in batches]).sum()


def _of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of labels, of the whole logits [T, V]: float32 [T], 0 without a label."""
    return -nn.functional.cross_entropy(
        logits.float(), labels, reduction="none", ignore_index=IGNORED
    )


def _transformers(bench: _Bench, *, compile: bool) -> _Way:
    model = bench.theirs()
    causal = model.get_base_model() if bench.options.lora else model
    importlib.import_module("transformers").AttentionInterface.register(ATTENTION, _attend)
    causal.set_attn_implementation(ATTENTION)  # no mask function of that name: no mask is made
    if any(hasattr(module, "is_concatenated") for module in causal.modules()):
        causal.set_experts_implementation("grouped_mm")
    if compile:
        for layer in causal.base_model.layers:
            layer.compile()

    of_logits = torch.compile(_of_logits) if compile else _of_logits

    def call(batch: PackedBatch, **further: Any) -> Any:
        return model(
            input_ids=batch.tokens[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            packed=attention_metadata(batch, bench.attention),
            **further,
        )

    def loss(batch: PackedBatch, counted: Tensor) -> Tensor:
        labels = batch.labels[None]
        found: Tensor = call(
            batch, labels=labels, shift_labels=labels, num_items_in_batch=counted
        ).loss
        return found

    return _Way(model, loss, lambda batch: of_logits(call(batch).logits[0], batch.labels))


def _live(bench: _Bench, *, compile: bool) -> _Way:
    packed = importlib.import_module("packgraph.integrations.transformers").packed
    model = packed(bench.theirs())
    return _graphed(bench, model, compile=compile)


def _own(bench: _Bench, *, compile: bool) -> _Way:
    return _graphed(bench, bench.ours(), compile=compile)


def _eager(bench: _Bench, *, compile: bool) -> _Way:
    model = bench.ours()
    return _Way(model, model, lambda batch: _only(logprobs(model, batch)))


def _graphed(bench: _Bench, model: nn.Module, *, compile: bool) -> _Way:
    graphed = graph(model, capacities=[bench.capacity], warmup=1, slots=1, compile=compile)
    return _Way(model, graphed, lambda batch: _only(logprobs(graphed, batch)), graphed)


def _only(found: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Log-probabilities without entropies."""
    assert isinstance(found, Tensor)
    return found
