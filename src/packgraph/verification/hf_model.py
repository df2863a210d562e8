"""`packgraph verify --hf-config FILE`: graphs against eager training for any config.json of
transformers, with random weights."""

import functools
import importlib
import importlib.util
import random
from pathlib import Path
from typing import Any

import torch

from packgraph.models.foreign import naming, read_object
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.train.config.reading import ConfigError, one_problem
from packgraph.train.features.live import CORRECT, packed_or_refused
from packgraph.verification.module import Verification, verify

STEPS = 6
TOKENS = 256


def verify_hf_config(
    file: str | Path,
    device: torch.device,
    *,
    steps: int | None = None,
    layers: int | None = None,
    tokens: int = TOKENS,
    seed: int = 0,
) -> Verification:
    """Trains a model of transformers with random weights eagerly and through graphs, and compares
    every bit.

    Args:
        file: A config.json of a model with a language-model head.
        device: bfloat16 on CUDA, float32 on a CPU.
        steps: Optimizer steps, 6 by default.
        layers: Another number of layers, for configs of models that do not fit.
        tokens: Tokens of a microbatch.
        seed: Of weights and documents.

    Returns:
        What was compared; false at the first difference.

    Raises:
        ConfigError: The file or the model cannot be used, with the reason.
    """
    if not importlib.util.find_spec("transformers"):
        raise ConfigError(["--hf-config needs transformers: pip install packgraph[transformers]"])
    content = read_hf_config(Path(file), layers)
    transformers = importlib.import_module("transformers")
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    what = "transformers cannot make a model of it"
    with naming(file, what, one_problem, CORRECT), torch.device(device):
        config = transformers.AutoConfig.for_model(**content)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    module = packed_or_refused(model.train(), str(file))
    capacity = Capacity(tokens, max(2, tokens // 16))
    batches = [
        batch.to(device)
        for batch in _batches(config.vocab_size, capacity, steps or STEPS, random.Random(seed))
    ]
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    return verify(module, batches, optimizer=optimizer, capacities=[capacity], warmup=1)


def read_hf_config(file: Path, layers: int | None = None) -> dict[str, Any]:
    """The entries of a config.json, for `AutoConfig.for_model`.

    Raises:
        ConfigError: It cannot be read, is no JSON object, or names no `model_type`.
    """
    file = file / "config.json" if file.is_dir() else file
    content = read_object(file, one_problem)
    if not isinstance(content.get("model_type"), str):
        raise ConfigError([f"{file} is no config.json of transformers: it names no model_type"])
    if layers is not None:
        content["num_hidden_layers"] = layers
        if isinstance(content.get("layer_types"), list):
            content["layer_types"] = content["layer_types"][:layers]
    return content


def _batches(
    vocabulary: int, capacity: Capacity, count: int, draw: random.Random
) -> list[PackedBatch]:
    """Microbatches of documents of random lengths, each with another amount of padding."""
    batches = []
    for _ in range(count):
        documents, room = list[list[int]](), capacity.tokens - draw.randrange(capacity.tokens // 4)
        while room > 1 and len(documents) < capacity.documents:
            length = min(room, 1 + draw.randrange(capacity.tokens // 2))
            documents.append([draw.randrange(vocabulary) for _ in range(length)])
            room -= length
        batches.append(PackedBatch.build(documents, capacity))
    return batches
