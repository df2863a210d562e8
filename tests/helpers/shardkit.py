"""Small sources of documents and their shards."""

import json
import random
from pathlib import Path

from packgraph.train.data import DataConfig
from packgraph.train.data.shard_build import build_shards

WORDS = 32


def write_rows(path: Path, count: int, seed: int = 0, longest: int = 40) -> DataConfig:
    """A file of tokenized rows of every kind: plain, masked, with other labels, of several
    documents, empty."""
    draw = random.Random(seed)
    with path.open("w") as stream:
        for number in range(count):
            ids = [draw.randrange(WORDS) for _ in range(draw.randint(2, longest))]
            row: dict[str, list[int]] = {"input_ids": ids}
            if number % 5 == 1:
                row["loss_mask"] = [draw.randrange(2) for _ in ids]
            if number % 5 == 2:
                row["labels"] = [draw.choice((-100, 3)) for _ in ids]
            if number % 5 == 3:
                row["seq_lengths"] = [len(ids) // 2, len(ids) - len(ids) // 2]
            if number % 11 == 7:
                row["input_ids"], row["seq_lengths"] = [[]], []
                row.pop("labels", None), row.pop("loss_mask", None)
            stream.write(json.dumps(row) + "\n")
    return DataConfig(source="jsonl", path=str(path), window=16, overlong="split")


def shards_of(config: DataConfig, folder: Path, rows_per_shard: int = 7) -> DataConfig:
    """The same documents from shards in `folder`, which are built."""
    build_shards(config, folder, workers=1, rows_per_shard=rows_per_shard)
    changed = {"source": "shards", "path": str(folder)}
    return DataConfig(**{**vars(config), **changed})
