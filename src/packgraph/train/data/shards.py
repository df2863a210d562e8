"""Shards: documents that were tokenized once, memory-mapped for training.

    FOLDER/manifest.json         what the shards were made from; size and SHA-256 of every file
           00000.tokens          token ids, uint16 or uint32, one document after another
           00000.targets         what may be predicted, for documents with labels or masks
           00000.documents.npy   one RECORD for each document: offset, length, loss tokens, CRC-32
           00000.rows.npy        int64 [rows + 1]: first document of each document of the source

A document of the source may be several documents for packing, or none; its number is kept (a row),
so the order of an epoch, and with it every pack, is that of the source itself.

Lengths of all documents come from the index. Tokens are read for documents that are loaded, and
for those with labels of their own that are cut into pieces. The invariants: what is loaded has the
checksum that it was written with, and a folder is opened only if it is complete, its files have the
sizes and its index has the checksums of the manifest.
"""

import hashlib
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packgraph.models.foreign import in_one_line, naming
from packgraph.packing.document import IGNORED, Document, Ids
from packgraph.train.config.reading import convert, resolved_types
from packgraph.train.data.files import FileStamp, OpenedFiles
from packgraph.train.data.order import SourcePart
from packgraph.train.data.source import BadDocuments, DataError, SourceDocument, TokenizerName
from packgraph.train.run_files import digest_of, read_json

FORMAT = 1
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError)  # of fields that are not there
MANIFEST = "manifest.json"
# What a document may predict: all of its tokens, those of a mask of bits, or int32 labels.
ALL, MASK, LABELS = 0, 1, 2
RECORD = np.dtype(
    [
        ("offset", "<i8"),  # of the first token
        ("targets", "<i8"),  # byte of the first target
        ("length", "<u4"),
        ("loss_tokens", "<u4"),
        ("checksum", "<u4"),  # CRC-32 of tokens, then targets
        ("kind", "u1"),
    ]
)
INDEX = ("documents.npy", "rows.npy")


@dataclass(frozen=True)
class ShardFile:
    """A file of a shard: its size in bytes and SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class ShardFacts:
    """Facts of the manifest about a shard. rows: documents of the source, of which `bad` were left
    out. files: by name."""

    number: int
    rows: int
    documents: int
    tokens: int
    loss_tokens: int
    largest_id: int
    bad: int
    first_bad: Sequence[str]
    files: Mapping[str, ShardFile]

    @staticmethod
    def read(content: Mapping[str, Any]) -> "ShardFacts":
        """From JSON. Raises one of UNREADABLE for anything else."""
        files = {
            name: ShardFile(**_typed(ShardFile, one)) for name, one in content["files"].items()
        }
        found = ShardFacts(**{**_typed(ShardFacts, content), "files": files})
        names = {f"{found.number:05}.{name}" for name in (*INDEX, "tokens")}
        counts = [found.bad, found.tokens, found.loss_tokens, *(one.size for one in files.values())]
        told = isinstance(found.first_bad, list) and bool(found.first_bad) == bool(found.bad)
        known = names <= files.keys() <= {*names, f"{found.number:05}.targets"}
        if not (known and told and min(counts) >= 0):
            raise ValueError(f"its shard {found.number} has other files or counts than a shard")
        return found


@dataclass(frozen=True)
class Manifest:
    """Origin of a folder of shards, and its shards so far.

    Attributes:
        tokenizer: Fingerprint of the tokenizer.
        tokenizer_name: Path of the tokenizer, or `bytes`.
        source: Fingerprint of the source.
        source_name: Kind and path of the source.
        rows: Documents of the source.
        rows_per_shard: Documents of the source in every shard but the last.
        on_bad: As `data.on_bad`.
        token_bytes: 2 or 4.
        shards: By number, those that are written.
    """

    tokenizer: str
    tokenizer_name: str
    source: str
    source_name: str
    rows: int
    rows_per_shard: int
    on_bad: str
    token_bytes: int
    shards: dict[int, ShardFacts] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Shards of the whole folder."""
        return -(-self.rows // self.rows_per_shard)

    def rows_of(self, number: int) -> range:
        """The documents of the source that shard `number` holds."""
        first = number * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, self.rows))

    def to_json(self) -> dict[str, Any]:
        """JSON-able, shards in their order."""
        shards = [asdict(self.shards[number]) for number in sorted(self.shards)]
        return {"format": FORMAT, **asdict(self), "shards": shards}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises DataError naming the file that is missing, damaged or of
    another format."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{path}: not there, so {folder} holds no shards; see packgraph data build")
    content = read_json(path, checked=True)
    if not content:
        raise DataError(f"{path}: damaged; build the shards again")
    if content.pop("format", None) != FORMAT:
        raise DataError(f"{path}: written by another version of packgraph; build the shards again")
    try:
        shards = [ShardFacts.read(one) for one in content.pop("shards")]
        numbered = {shard.number: shard for shard in shards}
        manifest = Manifest(**_typed(Manifest, content), shards=numbered)
        wrong = min(manifest.rows, manifest.rows_per_shard) < 1 or manifest.token_bytes not in (
            2,
            4,
        )
        if wrong or any(one.rows != len(manifest.rows_of(one.number)) for one in shards):
            raise ValueError("its counts are not those of its shards")
    except UNREADABLE as error:
        raise DataError(
            f"{path}: not what is written here: {in_one_line(error)}; build the shards again"
        ) from error
    return manifest


def _typed(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass out of JSON, numbers and texts checked."""
    types = resolved_types(kind)
    return {
        name: convert(value, types[name], from_text=False) if types[name] in (int, str) else value
        for name, value in content.items()
    }


def check_file(path: Path, expected: ShardFile, *, content: bool = True) -> None:
    """Raise DataError naming `path` unless it has the size that was written, and the content."""
    found = path.stat().st_size if path.is_file() else -1
    if found != expected.size:
        what = "it is gone" if found < 0 else f"it has {found:,} bytes, not {expected.size:,}"
        raise damaged(path, what)
    if content and digest_of(path) != expected.sha256:
        raise damaged(path, "its SHA-256 is not that of the manifest")


def damaged(path: Path, what: str) -> DataError:
    """The error for a file that is not what was written."""
    return DataError(
        f"{path}: damaged: {what}; packgraph data build writes damaged shards again, or restore it"
    )


def encode_targets(document: Document) -> tuple[int, bytes]:
    """Encodes what a document may predict as its kind and the bytes of the file of targets."""
    targets = document.targets
    if targets is None:
        return ALL, b""
    mask = targets != IGNORED
    if np.array_equal(targets[mask], document.tokens[mask]):
        return MASK, np.packbits(mask).tobytes()
    return LABELS, targets.astype("<i4").tobytes()


def decode_targets(kind: int, content: bytes, tokens: Ids) -> Ids | None:
    """The targets of a document with these tokens, from what `encode_targets` made."""
    if kind == ALL:
        return None
    if kind == LABELS:
        return np.frombuffer(content, "<i4").astype(np.int64)
    mask = np.unpackbits(np.frombuffer(content, np.uint8), count=len(tokens)).astype(bool)
    return np.where(mask, tokens, IGNORED)


def targets_size(kind: int, length: int) -> int:
    """Bytes of a document in the file of targets."""
    return {ALL: 0, MASK: -(-length // 8), LABELS: 4 * length}[kind]


class Shard:
    """A shard that is opened: its index is checked, its tokens are mapped into memory.

    Attributes:
        records: RECORD [documents].
        rows: int64 [rows + 1].
        kinds: Of the records.
        stamps: All files, for `check_all`.
    """

    def __init__(self, folder: Path, facts: ShardFacts, token_type: np.dtype[Any]) -> None:
        """Raises DataError naming a file that is damaged."""
        self.stamps: list[tuple[Path, FileStamp]] = []
        for name, expected in facts.files.items():
            check_file(folder / name, expected, content=name.endswith(".npy"))
            self.stamps.append((folder / name, FileStamp.of((folder / name).stat())))
        prefix = folder / f"{facts.number:05}"
        records, rows = (prefix.with_suffix(f".{name}") for name in INDEX)
        self.records: NDArray[Any] = _index(records, RECORD, facts.documents)
        self.rows: NDArray[np.int64] = _index(rows, np.dtype(np.int64), facts.rows + 1)
        lengths = self.records["length"].astype(np.int64)
        is_whole = (
            self.rows[0] == 0 and self.rows[-1] == len(self.records),
            bool((np.diff(self.rows) >= 0).all()),
            np.array_equal(self.records["offset"], np.cumsum(lengths) - lengths),
            int(lengths.sum()) == facts.tokens,
            int(self.records["loss_tokens"].sum(dtype=np.int64)) == facts.loss_tokens,
            bool((self.records["kind"] <= LABELS).all()),
        )
        if not all(is_whole):  # rows hold all documents, and documents all tokens, once
            raise damaged(rows, "it and the index of documents are not those of one shard")
        self._lengths, self._loss_tokens = self.records["length"], self.records["loss_tokens"]
        self.kinds = self.records["kind"]
        self.path = prefix.with_suffix(".tokens")
        self._tokens = _mapped(self.path, token_type)
        targets = prefix.with_suffix(".targets")
        self._targets = _mapped(targets, np.dtype(np.uint8)) if targets.name in facts.files else b""

    def __len__(self) -> int:
        return len(self.rows) - 1

    def row(self, number: int) -> "tuple[StoredDocument, ...]":
        """The documents of row `number`, whose tokens are not read. Raises DataError if the index
        is not what was opened."""
        first, stop = self.rows.item(number), self.rows.item(number + 1)
        if not 0 <= first <= stop <= len(self.records):
            raise damaged(self.path.with_suffix(".rows.npy"), "it was written to")
        lengths, loss_tokens = self._lengths, self._loss_tokens
        return tuple(
            StoredDocument(self, place, 0, lengths.item(place), loss_tokens.item(place))
            for place in range(first, stop)
        )

    def lengths_of_rows(self) -> NDArray[np.uint32]:
        """Tokens and loss tokens of each row that is one document, else 0: [2, rows]."""
        first, found = self.rows[:-1], np.zeros((2, len(self)), np.uint32)
        is_one = (np.diff(self.rows) == 1) & (first >= 0) & (first < len(self.records))
        records = self.records[first[is_one]]
        found[:, is_one] = records["length"], records["loss_tokens"]
        return found

    def read(self, number: int) -> Document:
        """Document `number`, from the disk. Raises DataError if it is not what was written."""
        record = self.records[number]
        offset, length, kind = int(record["offset"]), int(record["length"]), int(record["kind"])
        stored = self._tokens[offset : offset + length]
        start = int(record["targets"])
        targets = bytes(self._targets[start : start + targets_size(kind, length)])
        if zlib.crc32(targets, zlib.crc32(stored.tobytes())) != record["checksum"]:
            raise damaged(self.path, f"document {number} is not what was written")
        tokens = stored.astype(np.int64)
        document = Document(tokens, decode_targets(kind, targets, tokens))
        if document.loss_tokens != record["loss_tokens"]:
            raise damaged(self.path, f"document {number} has another number of labels")
        return document


def _index(path: Path, kind: np.dtype[Any], length: int) -> NDArray[Any]:
    with naming(path, "not an index of a shard", DataError, "build the shards again"):
        # A plain view of the map: one of class memmap takes ten times as long for a number.
        found = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    if found.dtype != kind or found.shape != (length,):
        raise damaged(path, "it is no index of this shard")
    return found


def _mapped(path: Path, kind: np.dtype[Any]) -> NDArray[Any]:
    """A file as an array; what is empty cannot be mapped."""
    if not path.stat().st_size:
        return np.empty(0, kind)
    return np.memmap(path, kind, mode="r")


@dataclass(eq=False, slots=True)
class StoredDocument:
    """The tokens from `start` to `stop` of document `number` of a shard, read by `load`.

    loss_tokens: how many of them are to be predicted.
    """

    shard: Shard
    number: int
    start: int
    stop: int
    loss_tokens: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def predicts(self) -> bool:
        """See `Document.predicts`."""
        return self.loss_tokens > 0

    def part(self, start: int, stop: int) -> "StoredDocument":
        """See `Document.part`; reads targets where the document has its own."""
        start, stop = self.start + start, self.start + stop
        part = StoredDocument(self.shard, self.number, start, stop, stop - start - 1)
        if self.shard.kinds.item(self.number) != ALL:  # it has targets of its own
            part.loss_tokens = part.load().loss_tokens
        return part

    def load(self) -> Document:
        """Its tokens. Raises DataError if they are not what was written."""
        return self.shard.read(self.number).part(self.start, self.stop)


class ShardSource(OpenedFiles):
    """The documents of folders of shards, one folder after another, as `DocumentSource` and
    `StoredSource`; a mixture of them is a `WeightedSource`, too.

    Attributes:
        made: The tokenizer of all folders; None where it is not one.
        parts: Documents and weight of each folder of a mixture.
        tokens: Of all documents; None with a limit.
    """

    parts: Sequence[SourcePart]

    def __init__(
        self, folders: Sequence[str], weights: Sequence[float] = (), limit: int | None = None
    ) -> None:
        """weights: of the folders of a mixture. limit: documents to use, of a single folder.

        Raises DataError for a folder that is not whole or is damaged.
        """
        super().__init__()
        # Each shard with its folder, the first document of that, and the tokenizer.
        self._shards: list[tuple[Shard, str, int, TokenizerName]] = []
        self._starts: list[int] = []  # first document of each shard
        self._total = 0
        fingerprints, parts = list[str](), list[SourcePart]()
        tokens = 0
        for path, weight in zip(folders, weights or [1.0], strict=True):
            folder, first = Path(path).expanduser(), self._total
            manifest = read_manifest(folder)
            if len(manifest.shards) < manifest.count:
                raise DataError(
                    f"{folder}: {len(manifest.shards)} of {manifest.count} shards are written; run "
                    "packgraph data build again, which goes on"
                )
            made = TokenizerName(manifest.tokenizer, manifest.tokenizer_name)
            for number, facts in sorted(manifest.shards.items()):
                shard = Shard(folder, facts, np.dtype(f"<u{manifest.token_bytes}"))
                self._shards.append((shard, path, first, made))
                tokens += facts.tokens
                self._stamped += shard.stamps
                self._starts.append(first + manifest.rows_of(number).start)
                self.bad += BadDocuments(facts.bad, list(facts.first_bad))
                self.largest_id = max(self.largest_id, (facts.largest_id, path))
            documents = manifest.rows if limit is None else min(limit, manifest.rows)
            self._total += documents
            parts.append(SourcePart(documents, weight))
            shards = (manifest.shards[number] for number in range(manifest.count))
            names = [one.sha256 for facts in shards for one in facts.files.values()]
            fingerprints.append(_digest([str(documents), *names]))
        self.tokens = tokens if limit is None else None
        if weights:
            self.parts = parts
        self._fingerprint = (
            _digest([*fingerprints, *map(str, parts)]) if weights else fingerprints[0]
        )
        tokenizers = {made for *_, made in self._shards}
        self.made = tokenizers.pop() if len(tokenizers) == 1 else None
        # In memory, 8 bytes a document: those of a shuffled order are in any shard.
        self._lengths = np.concatenate([one.lengths_of_rows() for one, *_ in self._shards], 1)

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: int) -> SourceDocument:
        place = bisect_right(self._starts, index) - 1
        shard, path, first, made = self._shards[place]
        where, row = f"{path}, document {index - first}", index - self._starts[place]
        return SourceDocument(where, stored=shard.row(row), made=made)

    def lengths(self, indexes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `StoredSource.lengths`."""
        tokens, loss_tokens = self._lengths[:, indexes].astype(np.int64)
        return tokens, loss_tokens


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
