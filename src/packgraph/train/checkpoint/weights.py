"""Weights into and out of a run, in Hugging Face's layout.

    config.json, safetensors ─▶ shape and first weights of a run ─▶ training
                             ─▶ checkpoint ─▶ config.json, safetensors

The invariant: the weights decide the shape of the model; an option that contradicts them is refused
by name.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.models.hf import (
    CONFIG,
    WeightsError,
    fill_pretrained,
    pretrained_config,
    read_json,
    save_pretrained,
)
from packgraph.models.hf_config import config_from_json, shape_values
from packgraph.train.checkpoint.reader import CheckpointError
from packgraph.train.checkpoint.writer import latest_checkpoint, load_state, load_tensors
from packgraph.train.config.presets import preset
from packgraph.train.config.reading import ConfigError, ConfigLayer, read_config
from packgraph.train.config.sections import TrainConfig
from packgraph.train.config.values import path_problem, shown
from packgraph.train.run_files import writing
from packgraph.train.run_folder import CHECKPOINTS, stored_config
from packgraph.train.run_folder import CONFIG as RUN_CONFIG

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def shape_layer(path: str) -> ConfigLayer:
    """The shape of the model in the folder `path` as values of a configuration. Raises
    WeightsError."""
    file = Path(path).expanduser() / CONFIG
    with _one_error():
        try:
            found = config_from_json(read_json(file))
        except WeightsError:
            raise
        except ValueError as error:
            raise WeightsError(f"{file}: {error}") from error
    values: dict[str, Any] = {}
    for field, value in shape_values(found).items():
        *sections, name = field.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return ConfigLayer(str(file), {"model": values})


def load_weights(models: Sequence[DecoderModel], path: str) -> None:
    """Copy the weights in the folder `path` into `models`: a whole decoder, or pipeline stages with
    their parts of it.

    Raises WeightsError naming every value in which the shapes differ, and what `fill_pretrained`
    refuses.
    """
    folder = Path(path).expanduser()
    with _one_error():
        found, _ = pretrained_config(folder)
        differing = _differences(found, models[0].config)
        if differing:
            raise WeightsError(
                f"{path}: these weights are of another shape than the run: {'; '.join(differing)}"
            )
        fill_pretrained(models, folder)


def export(run: Path, folder: Path) -> Path:
    """Write the weights of the newest checkpoint of the run in the folder `run` as a Hugging Face
    checkpoint.

    A tokenizer.json that the run was trained with is copied. Returns the checkpoint's folder.
    Raises ConfigError, CheckpointError, WeightsError and RunFileError.
    """
    problems = [
        f"{shown(str(path))} cannot be the path of a folder: {problem}"
        for path in (run, folder)
        if (problem := path_problem(str(path))) is not None
    ]
    if problems:
        raise ConfigError(problems)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            [f"{folder}: this is no folder; the weights cannot go there, name a new one"]
        )
    config = _config_of(run)
    checkpoint = latest_checkpoint(run / CHECKPOINTS)
    if checkpoint is None:
        raise CheckpointError(f"{run / CHECKPOINTS}: there is no checkpoint to export")
    load_state(checkpoint)
    model = DecoderModel(config.model, device="cpu", dtype=getattr(torch, config.run.dtype))
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    load_tensors(checkpoint, tensors, optional=("optimizer.", "random."))
    with writing(folder, "Make room there or choose another folder"):
        try:
            save_pretrained(model, folder)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        except (FileExistsError, ValueError) as error:
            raise WeightsError(str(error)) from error
        tokenizer = Path(config.data.tokenizer).expanduser()
        source = tokenizer if tokenizer.is_dir() else tokenizer.parent
        if tokenizer.exists():
            for name in TOKENIZER_FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)
    return checkpoint


def _config_of(run: Path) -> TrainConfig:
    layer = stored_config(run).layer
    name = layer.values.get("preset")
    if not isinstance(name, str):
        raise ConfigError([f"{run / RUN_CONFIG}: says no preset; is this the folder of a run?"])
    return read_config(preset(name), [layer])


def _differences(found: DecoderConfig, wanted: DecoderConfig) -> list[str]:
    here = shape_values(wanted)
    return [
        f"model.{name} is {value!r} there, {here[name]!r} here"
        for name, value in shape_values(found).items()
        if value != here[name]
    ]


@contextmanager
def _one_error() -> Iterator[None]:
    """Files that are missing are told as WeightsError too."""
    try:
        yield
    except FileNotFoundError as error:
        raise WeightsError(str(error)) from error
