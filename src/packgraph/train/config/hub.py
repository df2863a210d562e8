"""Models and data of the Hugging Face hub by name: the folder of one commit in the hub's cache.

    ORG/NAME, ORG/NAME@REVISION    a model: configuration, weights, tokenizer
    ORG/NAME, ORG/NAME:SPLIT       a split of a dataset (train), as Parquet that the hub makes of it

A run stores the folder, whose name is the commit, so it goes on with what it began with. Files are
read from there as from any folder: safetensors and JSON alone, no pickles and no code.
"""

import functools
import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packgraph.train.config.reading import ConfigError
from packgraph.train.config.sections import TrainConfig

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+|@[\w./-]+)?")
_MODEL = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt")
_OTHERS = ("*/*", "consolidated*")  # other formats of the same weights
_PARQUET = "refs/convert/parquet"  # where the hub keeps datasets of all formats as Parquet


def local_folders(config: TrainConfig) -> dict[str, str]:
    """Folders for the names of the hub in `config`, by option; downloads what is not there.

    Raises:
        ConfigError: If the hub does not have one, or cannot be reached.
    """
    named = {
        "hf.path": config.hf.path,
        "run.init_from": config.run.init_from,
        "data.tokenizer": config.data.tokenizer,
    }
    found = {key: _downloaded(path) for key, path in named.items() if path and _is_name(path)}
    if config.data.source == "hub":
        if not _is_name(path := config.data.path or ""):
            raise ConfigError([f"{path}: data.source = hub reads a dataset by its name, ORG/NAME"])
        found |= {"data.source": "parquet", "data.path": _split(path)}
    return found


def repository_of(folder: str) -> tuple[str, str] | None:
    """Name and commit of the model in a folder of the hub's cache, None for other folders."""
    path = Path(os.path.abspath(Path(folder).expanduser()))
    if path.parent.name != "snapshots":  # models--OWNER--NAME/snapshots/COMMIT
        return None
    return path.parents[1].name.partition("--")[2].replace("--", "/"), path.name


def _is_name(path: str) -> bool:
    """Tells names from paths: of a path the folder, at least, is there, or its ending names a
    file."""
    is_path = Path(path).parent.exists() or path.endswith(".json")
    return _NAME.fullmatch(path) is not None and not is_path


def _split(path: str) -> str:
    """The folder CONFIGURATION/SPLIT with the Parquet files of a dataset."""
    name, _, split = path.partition(":")
    split = split or "train"
    folder = Path(_downloaded(f"{name}@{_PARQUET}", "dataset", (f"*/{split}/*.parquet",)))
    found = sorted(folder.glob(f"*/{split}/"))
    if len(found) != 1:
        there = f"{len(found)} configurations have" if found else "no configuration has"
        raise ConfigError(
            [
                f"{path}: {there} a whole split {split} as Parquet on the hub; get the files by "
                f"`hf download {name} --repo-type dataset`, and name those to train on"
            ]
        )
    return str(found[0])


@functools.cache
def _downloaded(name: str, kind: str = "model", files: Sequence[str] = _MODEL) -> str:
    name, _, revision = name.partition("@")
    words = f"hf download {name}" + f" --revision {revision}" * bool(revision)
    words += " --repo-type dataset" * (kind == "dataset")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        why = "there is no such folder, and names of the hub need the package `huggingface_hub`"
        raise ConfigError([f"{name}: {why}: pip install huggingface_hub"]) from error
    if os.environ.get("LOCAL_RANK", "0") != "0":
        hub.utils.disable_progress_bars()
    try:
        return str(
            hub.snapshot_download(
                name,
                repo_type=kind,
                revision=revision or None,
                allow_patterns=list(files),
                ignore_patterns=list(_OTHERS) if kind == "model" else None,
            )
        )
    except hub.errors.GatedRepoError as error:
        why = "its owner asks for consent: agree on its page there, and log in by `hf auth login`"
        raise ConfigError([f"{name}: {why}"]) from error
    except hub.errors.RepositoryNotFoundError as error:
        why = f"there is no such folder here, and no such {kind} on the hub, or it is private"
        raise ConfigError([f"{name}: {why} (then log in by `hf auth login`)"]) from error
    except hub.errors.RevisionNotFoundError as error:
        raise ConfigError([f"{name}: this {kind} has no revision {revision}"]) from error
    except (OSError, ValueError) as error:
        why = "there is no such folder here, it is not in the hub's cache, and the hub did not give"
        raise ConfigError([f"{name}: {why} it; where it does, run `{words}`"]) from error
