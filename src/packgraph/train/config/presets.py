"""Presets: complete runs by name. Everything in them can be changed by a config file or an
option."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packgraph.models.config import DecoderConfig, ExpertConfig, LatentConfig, MambaConfig
from packgraph.packing.capacity import Capacity
from packgraph.train.config.reading import ConfigError, ConfigLayer
from packgraph.train.config.sections import (
    SOURCES,
    DataConfig,
    GraphConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)


def qwen3_tiny() -> TrainConfig:
    """A toy of the Qwen3 family on bytes of Python's own library: trains in a minute or two on two
    CPU cores."""
    return TrainConfig(
        preset="qwen3-tiny",
        model=DecoderConfig(
            vocab_size=320,
            hidden_size=128,
            intermediate_size=384,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            rope_theta=10_000.0,
            tie_embeddings=True,
        ),
        data=DataConfig(overlong="split"),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        graph=GraphConfig(capacities=(Capacity(256, 8), Capacity(512, 16), Capacity(1024, 32))),
        run=RunConfig(steps=160, tokens_per_step=2048, checkpoint_every=80),
    )


def qwen3_0_6b() -> TrainConfig:
    """The shape of Qwen3-0.6B in bfloat16, for one GPU; bring your own data and tokenizer.json."""
    return TrainConfig(
        preset="qwen3-0.6b",
        model=DecoderConfig(
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=1_000_000.0,
            tie_embeddings=True,
        ),
        data=DataConfig(overlong="split"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
        graph=GraphConfig(capacities=(Capacity(1024, 32), Capacity(2048, 64), Capacity(4096, 64))),
        run=RunConfig(steps=1000, tokens_per_step=32_768, checkpoint_every=250, dtype="bfloat16"),
    )


def moonlight_tiny() -> TrainConfig:
    """A toy of the DeepSeek-V3 family (latent attention, experts) on bytes of Python's own library,
    for CPU cores."""
    return TrainConfig(
        preset="moonlight-tiny",
        model=DecoderConfig(
            vocab_size=320,
            hidden_size=96,
            intermediate_size=256,
            num_layers=3,
            num_heads=4,
            num_kv_heads=4,
            head_dim=24,
            rope_theta=10_000.0,
            qk_norm=False,
            latent=LatentConfig(kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16),
            experts=ExpertConfig(
                count=8,
                per_token=2,
                intermediate_size=64,
                shared=1,
                first_dense=1,
                score="sigmoid",
                scaling=2.0,
                score_bias=True,
                document_loss=1e-4,
            ),
        ),
        data=DataConfig(overlong="split"),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        graph=GraphConfig(capacities=(Capacity(256, 8), Capacity(512, 16), Capacity(1024, 32))),
        run=RunConfig(steps=160, tokens_per_step=2048, checkpoint_every=80),
    )


def moonlight() -> TrainConfig:
    """The shape of Moonlight-16B-A3B in bfloat16: 27 layers, 64 experts, 6 of them and 2 shared
    ones for each token."""
    return TrainConfig(
        preset="moonlight",
        model=DecoderConfig(
            vocab_size=163_840,
            hidden_size=2048,
            intermediate_size=11_264,
            num_layers=27,
            num_heads=16,
            num_kv_heads=16,
            head_dim=192,
            rope_theta=50_000.0,
            rms_norm_eps=1e-5,
            qk_norm=False,
            max_position_embeddings=8192,
            latent=LatentConfig(kv_rank=512),
            experts=ExpertConfig(
                count=64,
                per_token=6,
                intermediate_size=1408,
                shared=2,
                first_dense=1,
                score="sigmoid",
                scaling=2.446,
                score_bias=True,
                document_loss=1e-3,
            ),
        ),
        data=DataConfig(overlong="split"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
        graph=GraphConfig(capacities=(Capacity(1024, 32), Capacity(2048, 64), Capacity(4096, 64))),
        run=RunConfig(steps=1000, tokens_per_step=32_768, checkpoint_every=250, dtype="bfloat16"),
    )


def hybrid_tiny() -> TrainConfig:
    """A toy of the Nemotron-H family (Mamba-2, attention, feed-forward, experts) on bytes of
    Python's own library."""
    return TrainConfig(
        preset="hybrid-tiny",
        model=DecoderConfig(
            vocab_size=320,
            hidden_size=96,
            intermediate_size=256,
            num_layers=6,
            num_heads=4,
            num_kv_heads=2,
            head_dim=24,
            rms_norm_eps=1e-5,
            qk_norm=False,
            pattern="M-M*ME",
            activation="relu2",
            rotary_share=0.0,
            mamba=MambaConfig(num_heads=8, head_dim=24, state=16, groups=2, chunk=32),
            experts=ExpertConfig(
                count=8,
                per_token=2,
                intermediate_size=64,
                shared=1,
                score="sigmoid",
                scaling=2.0,
                score_bias=True,
                document_loss=1e-4,
            ),
        ),
        data=DataConfig(overlong="split"),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        graph=GraphConfig(capacities=(Capacity(256, 8), Capacity(512, 16), Capacity(1024, 32))),
        run=RunConfig(steps=160, tokens_per_step=2048, checkpoint_every=80),
    )


def hybrid_1_6b() -> TrainConfig:
    """A hybrid of 1.6B parameters in bfloat16, 0.6B of them for each token: 8 layers of Mamba-2, 8
    of 32 experts, 2 of attention, as in Nemotron 3; bring your own data and tokenizer.json."""
    return TrainConfig(
        preset="hybrid-1.6b",
        model=DecoderConfig(
            vocab_size=131_072,
            hidden_size=2048,
            intermediate_size=8448,
            num_layers=18,
            num_heads=16,
            num_kv_heads=4,
            head_dim=128,
            rms_norm_eps=1e-5,
            qk_norm=False,
            max_position_embeddings=8192,
            pattern="MEME*MEMEME*MEMEME",
            activation="relu2",
            rotary_share=0.0,
            mamba=MambaConfig(num_heads=64, head_dim=64, state=128, groups=8),
            experts=ExpertConfig(
                count=32,
                per_token=4,
                intermediate_size=768,
                shared=1,
                score="sigmoid",
                scaling=2.5,
                score_bias=True,
                document_loss=1e-3,
            ),
        ),
        data=DataConfig(overlong="split"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
        graph=GraphConfig(capacities=(Capacity(1024, 32), Capacity(2048, 64), Capacity(4096, 64))),
        run=RunConfig(steps=1000, tokens_per_step=32_768, checkpoint_every=250, dtype="bfloat16"),
    )


LIVE = "hf"  # preset of runs of a model of transformers; written hf:PATH


def hf() -> TrainConfig:
    """A model of transformers in the folder PATH, as it is: `packgraph train hf:PATH`."""
    return TrainConfig(
        preset=LIVE,
        model=DecoderConfig(  # sizes are those of PATH/config.json
            vocab_size=320,
            hidden_size=128,
            intermediate_size=384,
            num_layers=4,
            num_heads=4,
            num_kv_heads=4,
            head_dim=32,
        ),
        data=DataConfig(overlong="split"),
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=10),
        graph=GraphConfig(capacities=(Capacity(1024, 32), Capacity(2048, 64), Capacity(4096, 64))),
        run=RunConfig(steps=100, tokens_per_step=16_384, dtype="bfloat16"),
    )


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "qwen3-tiny": qwen3_tiny,
    "qwen3-0.6b": qwen3_0_6b,
    "moonlight-tiny": moonlight_tiny,
    "moonlight": moonlight,
    "hybrid-tiny": hybrid_tiny,
    "hybrid-1.6b": hybrid_1_6b,
}


def recipes() -> dict[str, Path]:
    """The files of whole runs that come with packgraph, by name."""
    return {file.stem: file for file in sorted(Path(__file__).parents[2].glob("recipes/*"))}


def of_path(name: str) -> tuple[str, ConfigLayer | None]:
    """The preset that `name` stands for, and the values in it: hf:PATH is `hf` with a path."""
    kind, colon, path = name.partition(":")
    if kind != LIVE or not colon:
        return name, None
    return LIVE, ConfigLayer(name, {"hf": {"path": path}})


def data_layer(name: str, layers: Sequence[ConfigLayer]) -> list[ConfigLayer]:
    """The source of data that the ending of data.path says, where no layer names one. Raises
    ConfigError for a run of hf:PATH that has no data."""

    given: dict[str, Any] = {}
    for layer in layers:  # a file may be nested deeply, so no more of it is looked at
        for section in ("data", "hf"):
            nested = layer.values.get(section)
            inner = nested.items() if isinstance(nested, Mapping) else ()
            given |= {f"{section}.{key}": value for key, value in inner if value is not None}
        given |= {key: value for key, value in layer.values.items() if value is not None}
    path = given.get("data.path")
    if "data.source" in given:
        return []
    if name == LIVE and path is None and "hf.path" in given:
        raise ConfigError(
            ["hf:PATH needs data to train on: name a file by --data.path, such as chats.jsonl"]
        )
    ending = (SOURCES.get(suffix.lower()) for suffix in reversed(Path(str(path)).suffixes))
    source = next(filter(None, ending), None) if path is not None else None
    return [ConfigLayer("data.path", {"data": {"source": source}})] if source else []


def preset(name: str) -> TrainConfig:
    """The preset called `name`. Raises ConfigError naming all, and the one that was probably
    meant."""
    if name == LIVE:
        return hf()
    if name in PRESETS:
        return PRESETS[name]()
    known = [*PRESETS, *recipes()]
    near = difflib.get_close_matches(name, known, n=1)
    meant = f", did you mean {near[0]}?" if near else "."
    raise ConfigError(
        [f"unknown preset {name!r}{meant} Known: {', '.join(PRESETS)}, recipes "
         f"(`packgraph recipes`), and {LIVE}:PATH"]
    )  # fmt: skip
