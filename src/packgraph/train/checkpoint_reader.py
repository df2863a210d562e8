"""Reading torch.distributed.checkpoint's files without trusting them.

The problem: the format's `.metadata` file is a pickle, and unpickling a foreign file can run any code. The
invariant: only the metadata classes of torch.distributed.checkpoint, torch's dtypes and sizes are admitted; entries
that are not tensors (which would be unpickled too) and paths that leave the checkpoint's folder are refused. Tensor
bytes themselves are read by torch with `weights_only=True`.
"""
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.serialization import _get_layout


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or is damaged, foreign or unfit for this run. The message names the file."""


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that admits torch.distributed.checkpoint's metadata and nothing that can act."""

    METADATA_CLASSES = ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
                        "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING")
    OTHERS = {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _get_layout,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == metadata.__name__ and name in self.METADATA_CLASSES:
            return getattr(metadata, name)
        if (module, name) in self.OTHERS:
            return self.OTHERS[module, name]
        if module == "torch" and name.isidentifier() and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


class SafeReader(FileSystemReader):
    """FileSystemReader whose metadata is read by a restricted unpickler. Raises CheckpointError naming the file."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        path = Path(self.path) / ".metadata"
        found = read_metadata_file(path)
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class PlainWriter(FileSystemWriter):
    """FileSystemWriter that leaves the machine's paths out of the metadata (a pickled Path is also not admitted)."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def read_metadata_file(path: Path) -> metadata.Metadata:
    """The metadata of a checkpoint, checked. Raises CheckpointError."""
    try:
        with path.open("rb") as stream:
            found = _MetadataUnpickler(stream).load()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: refused, not a checkpoint's metadata: {error}") from error
    except (EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError) as error:
        # What pickle documents that damaged bytes may raise besides UnpicklingError.
        raise CheckpointError(f"{path}: damaged or not a checkpoint's metadata ({error})") from error
    _check_entries(found, path)
    return found


def tensor_entries(path: Path) -> dict[str, metadata.TensorStorageMetadata]:
    """Name → dtype and size of all tensors of a checkpoint, from its metadata file. Raises CheckpointError."""
    entries = read_metadata_file(path).state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, metadata.TensorStorageMetadata)}


def _check_entries(found: Any, path: Path) -> None:
    """Refuse metadata of a wrong shape, entries that are no tensors and files outside the folder."""
    checks: list[tuple[Callable[[], bool], str]] = [
        (lambda: isinstance(found, metadata.Metadata), "its top level is no metadata"),
        (lambda: isinstance(found.state_dict_metadata, dict) and isinstance(found.storage_data, dict),
         "its tables are missing"),
        (lambda: all(isinstance(name, str) and isinstance(entry, metadata.TensorStorageMetadata)
                     for name, entry in found.state_dict_metadata.items()), "it holds entries that are no tensors"),
        (lambda: all(isinstance(place, _StorageInfo) and not getattr(place, "transform_descriptors", None)
                     and isinstance(place.relative_path, str) and Path(place.relative_path).name == place.relative_path
                     for place in found.storage_data.values()), "it names files outside its folder"),
    ]
    for holds, reason in checks:
        if not holds():
            raise CheckpointError(f"{path}: refused: {reason}")
