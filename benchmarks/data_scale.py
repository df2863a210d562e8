"""What data cost a rank: planning a step of many ranks, and the wait for data at a given rate.

    python benchmarks/data_scale.py plan --ranks 1024 --folder /tmp/shards
    python benchmarks/data_scale.py wait --ranks 8 --rate 130000 --folder /tmp/shards
    python benchmarks/data_scale.py tokenize --tokenizer tokenizer.json

`plan` times, on one rank, the packing and assignment of whole steps by the index alone. `wait` runs
one rank of so many, which takes a step as often as its rate allows and sleeps in between, as a rank
does whose device computes. `tokenize` times the tokenizer in one process, and a build with as many
as there are cores. FOLDER is filled with made-up documents where it is empty. One JSON line per
row.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from packgraph.packing.capacity import Capacity
from packgraph.packing.document import Document
from packgraph.train.data import (
    DataConfig,
    build_tokenizer,
    open_documents,
    open_microbatches,
)
from packgraph.train.data.shard_build import ShardWriter, build_shards
from packgraph.train.data.shards import MANIFEST, Manifest
from packgraph.train.data.source import BadDocuments
from packgraph.train.feed import StepFeed
from packgraph.train.run_files import write_json
from packgraph.train.step import MicrobatchAssignment, count_loss_tokens, take_step

DOCUMENTS, LONGEST, VOCABULARY = 40_000, 16_384, 264
CPU = torch.device("cpu")


def made_up(folder: Path) -> None:
    """Write shards of documents whose lengths are log-normal, of 1,000 tokens in the mean."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, per_shard = np.random.default_rng(0), 5000
    lengths = np.clip(draw.lognormal(6.2, 1.2, DOCUMENTS), 8, LONGEST).astype(int)
    names = ("bytes", "bytes", "made up", "made up")
    manifest = Manifest(*names, DOCUMENTS, per_shard, "stop", 2)
    for number in range(manifest.count):
        writer = ShardWriter(folder, number, manifest.token_type)
        for row in manifest.rows_of(number):
            writer.add([Document(draw.integers(0, 256, lengths[row]))])
        manifest.shards[number] = writer.finish(BadDocuments())
    write_json(folder / MANIFEST, manifest.to_json())


def stream_of(folder: Path, tokens: int):
    """The stream of packs of so many tokens, or half, over the shards, as a run has it."""
    if not (folder / MANIFEST).exists():
        made_up(folder)
    config = DataConfig(source="shards", path=str(folder), window=256, overlong="split")
    capacities = [Capacity(tokens, 64), Capacity(tokens // 2, 64)]
    return open_microbatches(config, open_documents(config), build_tokenizer(config), capacities)


def plan(asked) -> dict:
    """Milliseconds of one rank for the packing and the assignment of a step."""
    stream = stream_of(asked.folder, asked.tokens)
    sharing = MicrobatchAssignment(asked.ranks, asked.ranks // 2)
    found, packs = {"packing_ms": [], "assignment_ms": [], "documents": []}, []
    for _ in range(asked.steps):
        began = time.thread_time()  # other processes do not count
        packs = take_step(stream.planned, asked.ranks * asked.tokens)
        planned = time.thread_time()
        sharing.share(packs)
        count_loss_tokens(packs)
        stream.state_dict()
        done = time.thread_time()
        found["packing_ms"].append(1e3 * (planned - began))
        found["assignment_ms"].append(1e3 * (done - planned))
        found["documents"].append(sum(pack.num_documents for pack in packs))
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    return {"packs": len(packs), **medians}


def wait(asked) -> dict:
    """Share of the time that a rank waits for its data, when it asks for a step as often as its
    rate allows."""
    sharing = MicrobatchAssignment(asked.ranks, asked.ranks // 2)
    feed = StepFeed(
        stream_of(asked.folder, asked.tokens), asked.ranks * asked.tokens, sharing, CPU, asked.ahead
    )
    waits, steps = [], []
    for _ in range(asked.steps):
        began = time.perf_counter()
        step = feed.take()
        waits.append(time.perf_counter() - began)
        feed.go_on()
        tokens = sum(pack.num_tokens for pack in step.packs)
        seconds = tokens / asked.ranks / asked.rate
        steps.append(seconds)
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
    feed.close()
    # the first step is waited for as a whole
    share = sum(waits[1:]) / sum(steps[1:])
    worst = max(one / step for one, step in zip(waits[1:], steps[1:], strict=True))
    return {
        "step_ms": round(1e3 * statistics.mean(steps), 1),
        "wait_ms": round(1e3 * statistics.mean(waits[1:]), 4),
        "wait_share": round(share, 6),
        "worst_share": round(worst, 6),
    }


def tokenize(asked) -> dict:
    """Tokens a second: of the tokenizer in one process, and of a build by all cores."""
    source = DataConfig(tokenizer=asked.tokenizer, max_documents_loaded=asked.documents)
    documents, tokenizer = open_documents(source), build_tokenizer(source)
    some = [documents[index] for index in range(len(documents))]
    began = time.perf_counter()
    tokens = sum(len(one) for document in some for one in tokenizer.encode(document))
    alone = time.perf_counter() - began
    found = {"tokens": tokens, "tokenizer_per_core": round(tokens / alone)}
    for workers in sorted({1, len(os.sched_getaffinity(0))}):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            build_shards(
                source, Path(folder), workers=workers, rows_per_shard=200, tell=lambda _: None
            )
            found[f"build_{workers}_workers"] = round(tokens / (time.perf_counter() - began))
    stream = open_microbatches(source, documents, tokenizer, [Capacity(2**17, 256)])
    began = time.perf_counter()
    packed = sum(pack.num_tokens for pack in itertools.islice(stream, 4))
    found["packed_on_the_fly"] = round(packed / (time.perf_counter() - began))
    return found


def main() -> None:
    """Print one row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("plan", "wait", "tokenize"))
    parser.add_argument("--folder", type=Path, default=Path("shards-made-up"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=LONGEST, help="of a step, for each rank")
    parser.add_argument("--rate", type=float, default=130_000, help="tokens a second of a rank")
    parser.add_argument("--ahead", type=int, default=2, help="steps made ahead")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--documents", type=int, default=2000)
    asked = parser.parse_args()
    measured = {"plan": plan, "wait": wait, "tokenize": tokenize}[asked.what](asked)
    options = {name: str(value) for name, value in vars(asked).items() if name != "folder"}
    print(json.dumps({**options, "host": platform.processor() or platform.machine(), **measured}))


if __name__ == "__main__":
    main()
