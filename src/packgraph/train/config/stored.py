"""The configuration that a run has stored: of its config.json, or its newest whole checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packgraph.train.checkpoint.state_file import (
    STATE,
    CheckpointError,
    checkpoints_by_step,
    read_state,
)
from packgraph.train.config.reading import ConfigError, ConfigLayer, load_file
from packgraph.train.run_files import CHECKPOINTS, CHECKSUM, CONFIG, METRICS, SUMMARY, read_json


def stored_config(folder: Path) -> tuple[ConfigLayer, str | None]:
    """The configuration of the run in `folder`, and what is to be said if it is not that of
    config.json.

    Raises:
        ConfigError: If config.json cannot be read or is damaged, and no checkpoint holds the
            configuration.
    """
    path = folder / CONFIG
    if values := read_json(path, checked=True):
        return ConfigLayer(str(path), values), None
    for checkpoint in checkpoints_by_step(folder / CHECKPOINTS):
        try:
            _, state, _ = read_state(checkpoint)
        except CheckpointError:
            continue
        if isinstance(stored := state.get("config"), Mapping):
            return ConfigLayer(str(checkpoint / STATE), stored), (
                f"{path} is missing, damaged or was edited: the configuration is that of "
                f"{checkpoint}, and is written anew; values are changed by options"
            )
    # Of a run before configurations had checksums, or one that nothing can be said of.
    layer = load_file(path)
    if layer.values and not read_json(path):
        raise ConfigError(
            [
                f"{path}: damaged or edited: its checksum differs, and no checkpoint holds the "
                f"configuration. If you have edited it, remove its line {CHECKSUM!r}"
            ]
        )
    return layer, None


def config_layer(path: Path, resume: bool) -> ConfigLayer:
    """The values of a config file; for a run to go on, those that `stored_config` finds for its
    config.json.

    Raises:
        ConfigError: If it cannot be read.
    """
    if resume and path.name == CONFIG and (path.parent / CHECKPOINTS).is_dir():
        return stored_config(path.parent)[0]
    return load_file(path)


def run_of(config: Path) -> dict[str, Any]:
    """The values that say which run a config file belongs to; none for a file that is no run's
    config.json."""
    folder = config.parent if config.parent.name not in ("", "..") else config.resolve().parent
    if config.name != CONFIG or not any(
        (folder / name).exists() for name in (CHECKPOINTS, METRICS, SUMMARY)
    ):
        return {}
    return {"run": {"name": folder.name, "folder": str(folder.parent)}}
