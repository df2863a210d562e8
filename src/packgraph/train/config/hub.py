"""Models and data of the Hugging Face hub by name: the folder of one commit in the hub's cache.

    ORG/NAME, ORG/NAME@REVISION                        a model: configuration, weights, tokenizer
    ORG/NAME, ORG/NAME:SPLIT, ORG/NAME:CONFIG/SPLIT    a split of a dataset (train), as Parquet that
                                                       the hub makes of it

A run stores the folder, whose name is the commit, so it goes on with what it began with. Files are
read from there as from any folder: safetensors and JSON alone, no pickles and no code. A split is
trained on whole: the hub says which files it has, and all of them must be there.
"""

import contextlib
import functools
import importlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packgraph.train.config.reading import one_problem
from packgraph.train.config.sections import TrainConfig

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w./-]+|@[\w./-]+)?")
_WORDS = ("*.json", "*.jinja", "merges.txt", "vocab.txt")
_MODEL = (*_WORDS, "*.safetensors")
_OTHERS = ("*/*", "consolidated*")  # other formats of the same weights
_PARQUET = "refs/convert/parquet"  # where the hub keeps datasets of all formats as Parquet
_MOST_NAMED = 8  # splits in one message


def local_folders(config: TrainConfig) -> dict[str, str]:
    """Folders for the names of the hub in `config`, by option; downloads what is not there.

    Raises:
        ConfigError: If the hub does not have one, or cannot be reached.
    """
    named = {
        "hf.path": (config.hf.path, _WORDS if config.hf.random else _MODEL),
        "run.init_from": (config.run.init_from, _MODEL),
        "data.tokenizer": (config.data.tokenizer, _WORDS),
    }
    found = {
        key: _downloaded(path, files) for key, (path, files) in named.items() if _is_name(path)
    }
    if config.data.source == "hub":
        if not _is_name(path := config.data.path or ""):
            raise one_problem(f"{path}: data.source = hub reads a dataset by its name, ORG/NAME")
        found |= {"data.source": "parquet", "data.path": _split(path)}
    return found


def repository_of(folder: str) -> tuple[str, str] | None:
    """Name and commit of the model in a folder of the hub's cache, None for other folders."""
    path = Path(os.path.abspath(Path(folder).expanduser()))
    kind, *name = path.parent.parent.name.split("--")  # models--OWNER--NAME/snapshots/COMMIT
    cached = (kind, path.parent.name) == ("models", "snapshots")
    return ("/".join(name), path.name) if cached else None


def _is_name(path: str | None) -> bool:
    """Tells names from paths: of a path the folder, at least, is there, or its ending names a
    file."""
    is_path = not path or Path(path).parent.exists() or path.endswith(".json")
    return not is_path and _NAME.fullmatch(path or "") is not None


@functools.cache
def _split(path: str) -> str:
    """The folder CONFIG/SPLIT with the Parquet files of a dataset."""
    name, _, split = path.partition(":")
    split = split or "train"
    with _asking(name, "dataset", _PARQUET) as hub:
        info = hub.HfApi().repo_info(name, repo_type="dataset", revision=_PARQUET)
    files = [file.rfilename for file in info.siblings or () if file.rfilename.endswith(".parquet")]
    there = sorted({file.rpartition("/")[0] for file in files})
    asked = [one for one in there if f"/{one}".endswith(f"/{split}")]
    if len(asked) != 1:
        known = ", ".join(f"{name}:{one}" for one in (asked or there)[:_MOST_NAMED]) or "none"
        raise one_problem(
            f"{path}: names {len(asked)} whole splits that the hub has as Parquet, must be one; "
            f"there is {known}. Others: `hf download {name} --repo-type dataset`, and name the "
            "files to train on"
        )
    folder = Path(_downloaded(f"{name}@{info.sha}", (f"{asked[0]}/*",), "dataset"))
    if missing := [f for f in files if f.startswith(f"{asked[0]}/") and not (folder / f).exists()]:
        raise one_problem(f"{path}: {missing[0]} could not be downloaded; try again")
    return str(folder / asked[0])


@functools.cache
def _downloaded(name: str, files: Sequence[str], kind: str = "model") -> str:
    name, _, revision = name.partition("@")
    with _asking(name, kind, revision) as hub:
        return str(
            hub.snapshot_download(
                name,
                repo_type=kind,
                revision=revision or None,
                allow_patterns=list(files),
                ignore_patterns=list(_OTHERS) if kind == "model" else None,
            )
        )


@contextlib.contextmanager
def _asking(name: str, kind: str, revision: str) -> Iterator[Any]:
    """Gives the package `huggingface_hub`; what it raises in the block becomes a ConfigError."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        why = "there is no such folder, and names of the hub need the package `huggingface_hub`"
        raise one_problem(f"{name}: {why}: pip install huggingface_hub") from error
    if os.environ.get("LOCAL_RANK", "0") != "0":
        hub.utils.disable_progress_bars()
    try:
        yield hub
    except hub.errors.GatedRepoError as error:
        why = "its owner asks for consent: agree on its page there, and log in by `hf auth login`"
        raise one_problem(f"{name}: {why}") from error
    except hub.errors.RepositoryNotFoundError as error:
        why = f"there is no such folder here, and no such {kind} on the hub, or it is private"
        raise one_problem(f"{name}: {why} (then log in by `hf auth login`)") from error
    except hub.errors.RevisionNotFoundError as error:
        raise one_problem(f"{name}: this {kind} has no revision {revision}") from error
    except (OSError, ValueError) as error:
        why = "there is no such folder here, it is not in the hub's cache, and the hub did not give"
        words = f"hf download {name}" + f" --revision {revision}" * bool(revision)
        words += " --repo-type dataset" * (kind == "dataset")
        raise one_problem(f"{name}: {why} it; where it does, run `{words}`") from error
