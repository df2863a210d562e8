"""Reading and writing checkpoints in Hugging Face's layout: config.json and safetensors.

Nothing in the folder is executed: JSON and safetensors are the only formats read, pickled weights
are refused. What does not describe exactly this model is refused too, with the file and the tensor
named; nothing is left at its random start silently.

Files are written under temporary names and renamed when whole, config.json last: a folder with a
config.json holds a whole checkpoint.

On disk every expert has matrices of its own, in a model those of a layer are one tensor:

    experts.gate_up_proj [E, 2I, H]     expert e: rows 0 .. I   experts.e.gate_proj.weight [I, H]
                                                  rows I .. 2I  experts.e.up_proj.weight   [I, H]
    experts.up_proj      [E, I, H]      expert e:               experts.e.up_proj.weight   [I, H]   without a gate
    experts.down_proj    [E, H, I]      expert e:               experts.e.down_proj.weight [H, I]

Nothing is copied: a stored tensor is a view of its place in the whole one, so that filling the
views fills the model, and writing them writes it, without a second set of experts in memory.

Layers of multi-token prediction follow the last layer, as `model.layers.61` of DeepSeek-V3 does.
There they have embedding and head once more (`embed_tokens`, `shared_head.head`), which are written
and must be equal when read. They are no part of what predicts the next token, so a model may do
without those of a checkpoint, or have them fresh where it has none; either is told.
"""  # noqa: E501

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from packgraph.graphs.errors import warn
from packgraph.models.config import DecoderConfig
from packgraph.models.decoder import DecoderModel
from packgraph.models.foreign import naming, read_object
from packgraph.models.hf_config import config_from_json, config_to_json, stored_dtype
from packgraph.models.hf_families import DEEPSEEK_V3, Family, cut, family_of
from packgraph.models.values import StoredBox, box_of, fill_stored
from packgraph.parallel.deferred import set_values, values_of, whole_shape
from packgraph.parallel.pieces import part_of

_LAYER = re.compile(r"(.*\.)?layers\.(?P<index>\d+)\..*")
_WHOLE = re.compile(r"(?P<prefix>(.*\.)?experts)\.(?P<part>gate_up_proj|up_proj|down_proj)")
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
EMBEDDING, HEAD, SHARED_HEAD = "embed_tokens.weight", "lm_head.weight", "shared_head.head.weight"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names them
LONGEST_NAME = 255  # characters of a file's name
ROWS = 4096  # of two tensors that are compared at a time
MAX_NAMED = 5  # tensors named in one error message


def split_experts(
    tensors: Mapping[str, Tensor], first: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Tensor]:
    """`tensors` with those of all experts of a layer replaced by views, one for each expert and
    matrix; order is kept.

    first: which expert a tensor begins with, where that is not expert 0.
    Raises ValueError for such a tensor of another shape than above.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (match := _WHOLE.fullmatch(name)) is None:
            found[name] = tensor
            continue
        merged = match["part"] == "gate_up_proj"
        if tensor.dim() != 3 or (merged and tensor.shape[1] % 2):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; experts are [E, 2I, H], "
                "[E, I, H] or [E, H, I]"
            )
        for expert, matrix in enumerate(tensor.unbind(0), start=first.get(name, 0)):
            parts = (
                dict(zip(("gate_proj", "up_proj"), matrix.chunk(2)))
                if merged
                else {match["part"]: matrix}
            )
            found |= {
                f"{match['prefix']}.{expert}.{part}.weight": view for part, view in parts.items()
            }
    return found


class WeightsError(ValueError):
    """Weights that are damaged, of another architecture, or do not fit their config."""


def load_pretrained(
    path: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> tuple[DecoderModel, DecoderConfig]:
    """Load the checkpoint folder of an architecture that models/hf_families.py lists.

    dtype: of the parameters; None takes the one named in config.json, else float32. Returns the
    model in training mode and its config. Raises FileNotFoundError when config.json or the weights
    are missing, WeightsError when the folder holds something else than one whole checkpoint of such
    a model. Experts are copied one by one into their places: none is in memory twice but the one on
    its way.
    """
    folder = Path(path)
    config, stored = pretrained_config(folder)
    model = DecoderModel(config, device=device, dtype=stored if dtype is None else dtype)
    fill_pretrained([model], folder)
    return model, config


def pretrained_config(path: str | Path) -> tuple[DecoderConfig, torch.dtype]:
    """The config of the checkpoint folder `path` and the dtype that it names, else float32. Errors
    as in `load_pretrained`."""
    file = Path(path) / CONFIG
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist; a checkpoint folder holds {CONFIG} and {WEIGHTS}."
        )
    description = read_object(file, WeightsError)
    try:
        config, dtype = config_from_json(description), stored_dtype(description)
    except ValueError as error:
        raise WeightsError(f"{file}: {error}") from error
    if config.mtp_layers and not _further_layers(tensor_files(file.parent), config):
        # transformers hands the key on and writes no such layers: no part of the model is missing.
        config = replace(config, mtp_layers=0)
    return config, dtype


@torch.no_grad()
def fill_pretrained(models: Sequence[DecoderModel], path: str | Path) -> None:
    """Copy the weights of the checkpoint folder `path` into `models`, a whole decoder of that
    config or pipeline stages of it, with all experts or some, on any device and in any dtype.

    One stored tensor is in memory at a time. Deferred parameters are filled later, where their part
    is known. A checkpoint must be whole, whatever part of it is here. Errors as in
    `load_pretrained`.
    """
    folder = Path(path)
    files = tensor_files(folder)
    config = models[0].config
    family = family_of(config)
    prefix = next(
        (prefix for prefix in family.prefixes if any(name.startswith(prefix) for name in files)),
        None,
    )
    whole = stored_tensors(DecoderModel(config, device="meta"), prefix)
    copies = _prediction_copies(config, family, prefix)
    if config.tie_embeddings:
        copies[HEAD] = family.tensor_name(EMBEDDING, prefix)
    further = _further_layers(files, config)
    if family is DEEPSEEK_V3 and config.mtp_layers == 0 and further:
        warn(f"{folder} has layers of multi-token prediction, which this model leaves out")
        files = {name: file for name, file in files.items() if name not in further}
    fresh = set[str]() if further else _further_layers(whole, config)
    if fresh:
        warn(f"{folder} has no layers of multi-token prediction: those of this model stay fresh")
    if missing := [name for name in whole if name not in files and name not in fresh]:
        raise WeightsError(f"{folder} lacks {named(missing)}, which its {CONFIG} asks for.")
    if unexpected := [
        f"{name} in {file.name}"
        for name, file in files.items()
        if name not in whole and name not in copies
    ]:
        raise WeightsError(
            f"{folder} holds {named(unexpected)}, which its {CONFIG} has no place for."
        )
    deferred = {name for model in models for name in _defer(model, files, prefix)}
    targets = [stored_tensors(model, prefix) for model in models]
    targets = [{n: held for n, held in each.items() if n not in deferred} for each in targets]
    for file in sorted(set(files.values())):
        names = [name for name, where in files.items() if where == file]
        with open_tensors(file) as stored:
            if absent := sorted(set(names) - set(stored.keys())):
                raise WeightsError(f"{file} lacks {named(absent)}, which {INDEX} puts there.")
            for name in names:
                held = [tensors[name] for tensors in targets if name in tensors]
                _copy(stored, held, whole[copies.get(name, name)], name, file)
    _check_copies(files, copies)


def save_pretrained(
    model: DecoderModel,
    path: str | Path,
    *,
    max_shard_bytes: int | None = None,
    token_ids: Mapping[str, int | list[int]] | None = None,
) -> None:
    """Write `model` as a checkpoint that transformers loads, in the architecture that its config
    has there.

    Args:
        model: Knows no tokenizer, so no special tokens.
        path: A folder, which is made when missing.
        max_shard_bytes: Bound of one weight file, None for a single file.
        token_ids: `bos_token_id`, `eos_token_id` and `pad_token_id` of its tokenizer, for
            config.json. One that is missing is null there: transformers would take the
            architecture's default, and end a text where nobody meant it to.

    Raises:
        FileExistsError: When the folder already holds a checkpoint.
        ValueError: When transformers has no such model, or a token id has another name.
    """
    special = {**dict.fromkeys(SPECIAL), **(token_ids or {})}
    if unknown := sorted(special.keys() - set(SPECIAL)):
        raise ValueError(f"token_ids: unknown {', '.join(unknown)}; use {', '.join(SPECIAL)}")
    description = config_to_json(model.config, next(model.parameters()).dtype) | special
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if present := sorted(
        file.name for file in folder.iterdir() if file.name in (CONFIG, WEIGHTS, INDEX)
    ):
        raise FileExistsError(
            f"{folder} already holds a checkpoint ({', '.join(present)}); save to a new folder."
        )
    tensors = _written_tensors(model, folder)
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        _write_tensors(folder / WEIGHTS, shards[0])
    else:
        weight_map = {}
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_tensors(folder / file, shard)
            weight_map.update(dict.fromkeys(shard, file))
        total = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / CONFIG, description)


def _written_tensors(model: DecoderModel, folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint of `model`, on the host."""
    config, family = model.config, family_of(model.config)
    found = {name: tensor.cpu().contiguous() for name, tensor in stored_tensors(model).items()}
    if family is DEEPSEEK_V3:
        copies = _prediction_copies(config, family, None)
        return found | {name: found[original].clone() for name, original in copies.items()}
    if further := _further_layers(found, config):
        warn(
            f"{folder} is without {len(further)} tensors of multi-token prediction, of which "
            f"{family.architecture} knows nothing"
        )
    return {name: tensor for name, tensor in found.items() if name not in further}


def _further_layers(names: Iterable[str], config: DecoderConfig) -> set[str]:
    """Those of `names` that are of layers behind the last one of the decoder."""
    matches = [match for name in names if (match := _LAYER.fullmatch(name))]
    return {match[0] for match in matches if int(match["index"]) >= config.num_layers}


def _prediction_copies(config: DecoderConfig, family: Family, prefix: str | None) -> dict[str, str]:
    """Tensors of embedding and head in layers of multi-token prediction, by their names, and which
    they are."""
    embedding = family.tensor_name(EMBEDDING, prefix)
    copies = {EMBEDDING: embedding, SHARED_HEAD: embedding if config.tie_embeddings else HEAD}
    return {
        family.tensor_name(f"layers.{index}.{name}", prefix): original
        for index in range(config.num_layers, config.depth)
        for name, original in copies.items()
    }


def tensor_files(folder: Path) -> dict[str, Path]:
    """File of each stored tensor, by the tensor's name. Raises FileNotFoundError and
    WeightsError."""
    if (folder / WEIGHTS).is_file():
        with open_tensors(folder / WEIGHTS) as stored:
            return dict.fromkeys(stored.keys(), folder / WEIGHTS)
    if (folder / INDEX).is_file():
        index = folder / INDEX
        weight_map = read_object(index, WeightsError).get("weight_map")
        if not isinstance(weight_map, dict):
            raise WeightsError(f"{index} has no weight_map.")
        for name, file in weight_map.items():
            is_name = isinstance(file, str) and Path(file).name == file
            if not is_name or not file.endswith(".safetensors") or len(file) > LONGEST_NAME:
                raise WeightsError(
                    f"{index} puts {name} into {cut(file)}, no safetensors file of this folder."
                )
            if not (folder / file).is_file():
                raise WeightsError(f"{index} puts {name} into {file}, which does not exist.")
        return {name: folder / file for name, file in weight_map.items()}
    if pickled := sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES):
        raise WeightsError(
            f"{folder / pickled[0]} is a pickle, which can run code when loaded, and is refused. "
            f"Convert the checkpoint to {WEIGHTS} first."
        )
    raise FileNotFoundError(f"{folder} holds neither {WEIGHTS} nor {INDEX}.")


def _defer(model: DecoderModel, files: Mapping[str, Path], prefix: str | None) -> set[str]:
    """Say of deferred parameters that they are filled from `files`; the stored names of all that
    are deferred."""
    family, names = family_of(model.config), set[str]()
    for name, parameter in model.named_parameters():
        if values_of(parameter) is None:
            continue
        whole = torch.empty(whole_shape(parameter), device="meta")
        views = split_experts({family.tensor_name(name, prefix): whole})
        names |= views.keys()
        if views.keys() <= files.keys():  # else a layer that stays fresh
            boxes = [
                StoredBox(stored, files[stored], box_of(view, whole.shape))
                for stored, view in views.items()
            ]
            set_values(parameter, partial(fill_stored, boxes, open_tensors))
    return names


def _check_copies(files: Mapping[str, Path], copies: Mapping[str, str]) -> None:
    """Refuse tensors that are stored twice and differ; some rows are in memory at a time."""
    for name, original in copies.items():
        if name not in files:
            continue
        with open_tensors(files[name]) as first, open_tensors(files[original]) as second:
            slices = first.get_slice(name), second.get_slice(original)
            starts = range(0, slices[0].get_shape()[0], ROWS)
            equal = all(torch.equal(*(each[at : at + ROWS] for each in slices)) for at in starts)
        if not equal:
            why = (
                f"{CONFIG} ties the two. Set tie_word_embeddings to false there, or drop the "
                "tensor."
                if name == HEAD
                else "multi-token prediction shares it here. Drop the tensor."
            )
            raise WeightsError(f"{files[name]}: {name} differs from {original}, but {why}")


def _copy(stored: Any, targets: Sequence[Tensor], asked: Tensor, name: str, file: Path) -> None:
    """One tensor of an open file into all that it is for, which may be none here; `asked` has the
    shape that fits."""
    part = stored.get_slice(name)
    if part.get_shape() != list(asked.shape):
        raise WeightsError(
            f"{file}: {name} has shape {part.get_shape()}, {CONFIG} asks for {list(asked.shape)}."
        )
    if part.get_dtype() not in FLOATS:
        raise WeightsError(
            f"{file}: {name} is {part.get_dtype()}; only floating-point weights are supported."
        )
    if targets:
        tensor = stored.get_tensor(name)
        for target in targets:
            target.copy_(tensor)


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """The open file of safetensors. Raises WeightsError."""
    with (
        naming(file, "is damaged or no safetensors file", WeightsError),
        safe_open(file, framework="pt", device="cpu") as stored,
    ):
        yield stored


def stored_tensors(model: DecoderModel, prefix: str | None = None) -> dict[str, Tensor]:
    """The live tensors of `model` as a checkpoint names them; prefix: what names begin with there,
    None as they are written here."""
    family = family_of(model.config)
    parts = [(name, part_of(parameter)) for name, parameter in model.named_parameters()]
    first = {
        family.tensor_name(name, prefix): part.offsets[0]
        for name, part in parts
        if part is not None
    }
    return split_experts(
        {family.tensor_name(name, prefix): tensor for name, tensor in model.state_dict().items()},
        first,
    )


def named(names: list[str]) -> str:
    """Some of these names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _shards(tensors: Mapping[str, Tensor], max_bytes: int | None) -> list[dict[str, Tensor]]:
    """Split in order, each part at most `max_bytes` unless a single tensor is larger."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and max_bytes is not None and used + tensor.nbytes > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    return shards


def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    with _renamed_when_whole(file) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    with _renamed_when_whole(file) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _renamed_when_whole(file: Path) -> Iterator[Path]:
    """A temporary name beside `file`; its content becomes `file` when the block ends without an
    error."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(
                written.fileno()
            )  # else a crash after the rename could leave an empty file of that name
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
