"""Weights into a run, in Hugging Face's layout.

    config.json, safetensors ─▶ shape and first weights of a run ─▶ training

The invariant: the weights decide the shape of the model; an option that contradicts them is refused
by name. Layers of multi-token prediction alone may be more or fewer: they stay fresh, or are left
out, and that is told.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.models.hf import (
    CONFIG,
    WeightsError,
    fill_pretrained,
    pretrained_config,
)
from packgraph.models.hf_config import shape_values
from packgraph.train.config.reading import ConfigLayer


def shape_layer(path: str) -> ConfigLayer:
    """The shape of the model in the folder `path` as values of a configuration, and its tokenizer
    if there is one. Raises WeightsError."""
    file = Path(path).expanduser() / CONFIG
    with _one_error():
        found, _ = pretrained_config(file.parent)
    values: dict[str, Any] = {}
    for field, value in shape_values(found).items():
        *sections, name = field.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    has_tokenizer = os.path.lexists(file.with_name("tokenizer.json"))  # a broken link, too
    data = {"data": {"tokenizer": path}} if has_tokenizer else {}
    return ConfigLayer(str(file), {"model": values, **data})


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


def _differences(found: DecoderConfig, wanted: DecoderConfig) -> list[str]:
    here = shape_values(wanted)
    return [
        f"model.{name} is {value!r} there, {here[name]!r} here"
        for name, value in shape_values(found).items()
        if value != here[name] and name != "mtp_layers"
    ]


@contextmanager
def _one_error() -> Iterator[None]:
    """Files that are missing are told as WeightsError too."""
    try:
        yield
    except FileNotFoundError as error:
        raise WeightsError(str(error)) from error
