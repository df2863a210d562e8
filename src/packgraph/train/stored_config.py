"""The configuration of a run that is to go on: config.json, or what its checkpoints say.

config.json is written at every start, with a checksum, and every checkpoint holds the configuration
that it was saved under. A config.json that is empty, damaged or edited does not decide what a
resumed run trains: the newest checkpoint that says so does. (A damaged file and an edited one look
alike; values are changed by options.)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packgraph.train.checkpoint import checkpoints_by_step
from packgraph.train.checkpoint_reader import CheckpointError
from packgraph.train.checkpoint_state import STATE, read_state
from packgraph.train.config import ConfigError, ConfigLayer, load_file
from packgraph.train.run_files import CHECKSUM, parse_json, read_json

CHECKPOINTS = "checkpoints"
CONFIG = "config.json"


class StoredConfig(NamedTuple):
    """Values of a run. note: what is to be said if they are not those of config.json."""

    layer: ConfigLayer
    note: str | None = None


def stored_config(folder: Path) -> StoredConfig:
    """The configuration of the run in `folder`.

    Raises:
        ConfigError: If config.json cannot be read or is damaged, and no checkpoint holds the
            configuration.
    """
    path = folder / CONFIG
    values = read_json(path)
    if values and _has_checksum(path):
        return StoredConfig(ConfigLayer(str(path), values))
    for checkpoint in checkpoints_by_step(folder / CHECKPOINTS):
        try:
            stored = read_state(checkpoint).state.get("config")
        except CheckpointError:
            continue
        if isinstance(stored, Mapping):
            return StoredConfig(
                ConfigLayer(str(checkpoint / STATE), stored),
                (
                    f"{path} is missing, damaged or was edited: the configuration is that of "
                    f"{checkpoint}, and is written "
                    "anew; values are changed by options"
                ),
            )
    # Of a run before configurations had checksums, or one that nothing can be said of.
    layer = load_file(path)
    if not values and layer.values:
        raise ConfigError(
            [
                f"{path}: damaged or edited: its checksum differs, and no checkpoint holds the "
                f"configuration. If you have edited it, remove its line {CHECKSUM!r}"
            ]
        )
    return StoredConfig(layer)


def config_layer(path: Path, resume: bool) -> ConfigLayer:
    """The values of a config file; for a run to go on, those that `stored_config` finds for its
    config.json.

    Raises:
        ConfigError: If it cannot be read.
    """
    if resume and path.name == CONFIG and (path.parent / CHECKPOINTS).is_dir():
        return stored_config(path.parent).layer
    return load_file(path)


def _has_checksum(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        content: Any = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and CHECKSUM in content
