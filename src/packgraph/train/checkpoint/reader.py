"""Reading torch.distributed.checkpoint's files without trusting them.

The problem: the format's `.metadata` file is a pickle, and unpickling a foreign file can run any
code. The invariant: only the metadata classes of torch.distributed.checkpoint, torch's dtypes and
sizes are admitted; entries that are not tensors (which would be unpickled too) and paths that leave
the checkpoint's folder are refused. Tensor bytes themselves are read by torch with
`weights_only=True`. What is not stored would keep the values that the memory had: so the chunks of
a tensor must cover it exactly once, each with bytes that its file has.
"""

import math
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.serialization import _get_layout

from packgraph.train.checkpoint.state_file import CheckpointError

METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
    "BytesStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that admits torch.distributed.checkpoint's metadata and nothing that can act."""

    ADMITTED = {
        **{(metadata.__name__, name): getattr(metadata, name) for name in METADATA_CLASSES},
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _get_layout,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.ADMITTED:
            return self.ADMITTED[module, name]
        found = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


class SafeReader(FileSystemReader):
    """FileSystemReader whose metadata is read by a restricted unpickler. Raises CheckpointError
    naming the file."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        found = read_metadata_file(Path(self.path) / ".metadata")
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class PlainWriter(FileSystemWriter):
    """FileSystemWriter that leaves the machine's paths out of the metadata (a pickled Path is also
    not admitted)."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def read_metadata_file(path: Path) -> metadata.Metadata:
    """The metadata of a checkpoint, checked. Raises CheckpointError."""
    if not path.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{path}: missing; the checkpoint is damaged")
    try:
        with path.open("rb") as stream:
            found = _MetadataUnpickler(stream).load()
        fault = next(_faults(found), None)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: refused, not a checkpoint's metadata: {error}") from error
    except (
        EOFError,
        AttributeError,
        ImportError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        MemoryError,
        RuntimeError,
    ) as error:
        # What pickle documents that damaged bytes may raise besides UnpicklingError, what torch's
        # classes raise, and those without one of their fields or with something else in it.
        raise CheckpointError(
            f"{path}: damaged or not a checkpoint's metadata ({error})"
        ) from error
    if fault:
        raise CheckpointError(f"{path}: refused: {fault}")
    return found


def tensor_entries(path: Path) -> dict[str, metadata.TensorStorageMetadata]:
    """Name → dtype and size of all tensors of a checkpoint, from its metadata file. Raises
    CheckpointError."""
    found = read_metadata_file(path)
    files = [path.with_name(name) for name in files_of(found)]
    check_extents(found, {one.name: one.stat().st_size for one in files if one.is_file()}, path)
    return {
        name: entry
        for name, entry in found.state_dict_metadata.items()
        if isinstance(entry, metadata.TensorStorageMetadata)
    }


def files_of(found: metadata.Metadata) -> list[str]:
    """Names of all files that hold tensors, sorted."""
    return sorted({place.relative_path for place in found.storage_data.values()})


def check_extents(found: metadata.Metadata, sizes: dict[str, int], path: Path) -> None:
    """Refuse metadata that name bytes which their file does not have. sizes: file name → bytes.
    Raises CheckpointError."""
    for index, place in found.storage_data.items():
        if place.relative_path not in sizes:
            raise CheckpointError(
                f"{path.parent / place.relative_path}: missing; the checkpoint is damaged"
            )
        if place.offset + place.length > sizes[place.relative_path]:
            raise CheckpointError(
                f"{path}: refused: {index.fqn} lies beyond the end of {place.relative_path}"
            )


def _faults(found: Any) -> Iterator[str]:
    """Faults of metadata: their form, files outside the folder, entries that are no tensors, and
    tensors that are not stored as a whole."""
    if not isinstance(found, metadata.Metadata):
        yield "its top level is no metadata"
    entries, places = found.state_dict_metadata, found.storage_data
    if not (isinstance(entries, dict) and isinstance(places, dict)):
        yield "its tables are missing"
    if not all(
        isinstance(name, str) and isinstance(entry, metadata.TensorStorageMetadata)
        for name, entry in entries.items()
    ):
        yield "it holds entries that are no tensors"
    if not all(
        isinstance(place, _StorageInfo)
        and not getattr(place, "transform_descriptors", None)
        and isinstance(place.relative_path, str)
        and Path(place.relative_path).name == place.relative_path
        for place in places.values()
    ):
        yield "it names files outside its folder"
    expected: set[tuple[str, tuple[int, ...]]] = set()
    for name, entry in entries.items():
        kind = entry.properties.dtype
        if not (_are_sizes(entry.size) and isinstance(kind, torch.dtype)):
            yield f"{name} has no size and dtype"
        for chunk in entry.chunks:
            if not (
                isinstance(chunk, metadata.ChunkStorageMetadata)
                and _are_sizes(chunk.offsets)
                and _are_sizes(chunk.sizes)
            ):
                yield f"{name} has a chunk without offsets and sizes of at least 0"
            if (place := places.get(metadata.MetadataIndex(name, chunk.offsets))) is None:
                yield f"a chunk of {name} lies in no file"
            elif not (_is_count(place.offset) and _is_count(place.length)):
                yield f"a chunk of {name} lies at no place in its file"
            elif math.prod(chunk.sizes) * kind.itemsize > place.length:
                yield f"a chunk of {name} is larger than the bytes that are stored of it"
            expected.add((name, tuple(chunk.offsets)))
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        if not covers(tuple(entry.size), chunks):
            yield f"the chunks of {name} do not cover it exactly once"
    stored = {(index.fqn, tuple(index.offset or ())) for index in places}
    if not stored <= expected:
        yield f"bytes of {min(stored - expected)[0]} belong to no chunk"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _are_sizes(values: Any) -> bool:
    return isinstance(values, torch.Size) and all(map(_is_count, values))


def covers(shape: Sequence[int], chunks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Tells whether chunks (offsets and sizes) fill a tensor of `shape` without gap or overlap."""
    dims = range(len(shape))
    for offsets, sizes in chunks:
        if not len(offsets) == len(sizes) == len(shape) or any(
            offsets[dim] + sizes[dim] > shape[dim] for dim in dims
        ):
            return False
    if sum(math.prod(sizes) for _, sizes in chunks) != math.prod(shape):
        return False
    filled = [chunk for chunk in chunks if math.prod(chunk[1])]
    if not dims or not filled:
        return True
    # Chunks are compared only with those that have not ended, along the dimension with most
    # different offsets.
    sweep = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in filled}))
    active: list[tuple[Sequence[int], Sequence[int]]] = []
    for offsets, sizes in sorted(filled, key=lambda chunk: chunk[0][sweep]):
        active = [chunk for chunk in active if chunk[0][sweep] + chunk[1][sweep] > offsets[sweep]]
        if any(
            all(
                offsets[dim] < start[dim] + size[dim] and start[dim] < offsets[dim] + sizes[dim]
                for dim in dims
            )
            for start, size in active
        ):
            return False
        active.append((offsets, sizes))
    return True
