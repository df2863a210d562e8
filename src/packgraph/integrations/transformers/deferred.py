"""A model of transformers whose matrices have no memory until it is known which part of them a rank
keeps.

    config.json ─▶ modules, matrices without memory ─▶ packed ─▶ shard ─▶ parts ◂─ *.safetensors

The modules are made as `from_config` makes them, but for `torch.empty`, which gives no memory to
matrices then. So buffers, and what is smaller, are as ever. Values are those of `from_pretrained`
where each stored tensor is a parameter, or an expert of a stack, as it is. What transformers
converts in another way as it loads is refused here.
"""

import importlib
import itertools
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from packgraph.models.hf import FLOATS, named, open_tensors, split_experts, tensor_files
from packgraph.models.values import StoredBox, box_of, fill_stored
from packgraph.parallel.deferred import (
    defer,
    fill_copies,
    set_aside,
    values_of,
)
from packgraph.parallel.pieces import parts_of

# Whose experts are stored as our own models store them; others fuse or name them in another way.
STACKED = frozenset({"qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next"})
# Parts of names of what stays in float32 in models of a dtype.
FLOAT32 = {
    torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
}
LOCAL = {"local_files_only": True, "trust_remote_code": False}


class ConvertedWeightsError(ValueError):
    """Weights that only transformers itself can read, all of them at once."""


def load_deferred(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> Any:
    """Makes the causal language model of a folder, without memory for matrices.

    `packgraph.shard(packed(model))` gives memory to the part that a rank keeps, and reads it from
    the safetensors in the folder; no rank ever holds the whole model. Until then its matrices are
    NaN.

    Args:
        path: A folder with `config.json` and safetensors. No code in it is run.
        dtype: Of the parameters.
        device: Where they will be. None is torch's default device.

    Returns:
        The `PreTrainedModel`, in training mode.

    Raises:
        ValueError: If the weights are damaged, or transformers converts them as it loads: then use
            `from_pretrained`.
        FileNotFoundError: If a file is missing.

    Examples:
        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from packgraph.integrations.transformers import load_deferred
        >>> config = LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     LlamaForCausalLM(config).save_pretrained(folder)
        ...     model = load_deferred(folder)
        >>> model.lm_head.weight.shape, model.lm_head.weight.untyped_storage().nbytes()
        (torch.Size([16, 8]), 2)
    """
    library = importlib.import_module("transformers")
    folder = Path(path).expanduser()
    config = library.AutoConfig.from_pretrained(folder, **LOCAL)
    model = skeleton(library.AutoModelForCausalLM, config, dtype)
    target = torch.get_default_device() if device is None else torch.device(device)
    defer_stored(model, folder, target)
    return model.train()


def skeleton(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model of `config` without memory for matrices, which are on the meta device.

    model_class: that makes it, such as `AutoModelForCausalLM`.
    """
    with torch.random.fork_rng(devices=[]), _MatricesOnMeta():
        return model_class.from_config(config, dtype=dtype)


@torch.no_grad()
def defer_stored(model: Any, folder: Path, device: torch.device) -> None:
    """Move a `skeleton` to `device`; its matrices are filled from the safetensors in `folder`, the
    rest now. Raises ConvertedWeightsError."""
    files = tensor_files(folder)
    if getattr(model.config, "quantization_config", None) is not None:
        raise ConvertedWeightsError("they are quantized")
    _keep_float32(model)
    boxes = _boxes(model, files)
    _check(boxes, files, model)
    values = {name: partial(fill_stored, found, open_tensors) for name, found in boxes.items()}
    _move(model, device, values)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, fill in values.items():
        if values_of(held[name]) is None:
            fill(parts_of(held[name]))


def defer_arbitrary(model: Any, device: torch.device) -> None:
    """Move a `skeleton` to `device`; its matrices are left as they are, to be loaded."""
    _move(model, device, {name: lambda pieces: None for name, _ in model.named_parameters()})


def defer_copies(model: nn.Module, device: torch.device) -> None:
    """Move a model on the host to `device`, but for matrices, whose parts are copied."""
    values = {
        name: partial(fill_copies, p.detach())
        for name, p in model.named_parameters()
        if p.ndim >= 2
    }
    with set_aside(model, values):
        model.to(device)
    defer(model, values, device)


def _move(model: nn.Module, device: torch.device, values: Mapping[str, Any]) -> None:
    matrices = [name for name, p in model.named_parameters() if p.is_meta]
    with set_aside(model, matrices):
        model.to(device)
    defer(model, {name: values[name] for name in matrices}, device)


class _MatricesOnMeta(TorchFunctionMode):
    """Within the block `torch.empty` gives no memory to what has two or more dimensions."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if function is torch.empty:
            shape = given.get("size", args[0] if args and not isinstance(args[0], int) else args)
            if len(shape) >= 2:
                given["device"] = "meta"
        return function(*args, **given)


def _keep_float32(model: Any) -> None:
    """Make float32 what transformers keeps so. Raises ConvertedWeightsError for matrices."""
    kept = [key for entry in FLOAT32.get(model.dtype, ()) for key in getattr(model, entry) or ()]
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if any(key in name for key in kept):
            if value.is_meta:
                raise ConvertedWeightsError(f"{name} stays in float32")
            value.data = value.data.float()
    if any("*" in key for key in kept):
        raise ConvertedWeightsError(f"some weights stay in float32 ({', '.join(kept)})")


def _boxes(model: Any, files: Mapping[str, Path]) -> dict[str, list[StoredBox]]:
    """Locations in the files of each parameter, and of each buffer that is stored, by its first
    name; empty where it has none."""
    stored, first = model.state_dict(keep_vars=True), dict[int, str]()
    found: dict[str, list[StoredBox]] = {}
    for name, value in stored.items():
        known = found.setdefault(first.setdefault(id(value), name), [])
        whole = torch.empty(value.shape, device="meta")
        views = {name: whole}
        if name not in files and model.config.model_type in STACKED:
            views = split_experts(views)
        if views.keys() <= files.keys():
            known += [StoredBox(n, files[n], box_of(v, whole.shape)) for n, v in views.items()]
    return found


def _check(
    boxes: Mapping[str, list[StoredBox]], files: Mapping[str, Path], model: nn.Module
) -> None:
    """Each tensor is stored once, in its shape, and nothing else is."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    read = {box.name for found in boxes.values() for box in found}
    covered = {
        name: sum(math.prod(box.box[1]) for box in found) == held[name].numel()
        for name, found in boxes.items()
    }
    wrong = [name for name, right in covered.items() if not right]
    wrong += sorted(files.keys() - read) + _misshapen(boxes)
    if wrong:
        raise ConvertedWeightsError(f"not stored once, as they are here: {named(wrong)}")


def _misshapen(boxes: Mapping[str, list[StoredBox]]) -> list[str]:
    """Stored tensors that have another shape than their box, or are no floating-point numbers."""
    wrong, every = list[str](), itertools.chain(*boxes.values())
    for file, those in itertools.groupby(sorted(every, key=lambda box: box.file), lambda b: b.file):
        with open_tensors(file) as stored:
            for name, _, (_, sizes) in those:
                part = stored.get_slice(name)
                shape = tuple(part.get_shape())
                fits = sizes == (1,) * (len(sizes) - len(shape)) + shape
                if not fits or part.get_dtype() not in FLOATS:
                    wrong.append(name)
    return wrong
