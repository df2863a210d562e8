"""What data cost a rank: planning a step of many ranks, and the wait for data at a given rate.

    python benchmarks/data_scale.py plan --ranks 1024 --folder /tmp/shards
    python benchmarks/data_scale.py wait --ranks 8 --rate 130000 --folder /tmp/shards
    python benchmarks/data_scale.py tokenize --tokenizer tokenizer.json
    python benchmarks/data_scale.py text --workers 2 --tokenizer tokenizer.json --rate 1000000

`plan` times, on one rank, the packing and assignment of whole steps by the index alone. `wait` runs
one rank of so many, which takes a step as often as its rate allows and sleeps in between, as a rank
does whose device computes. `text` does so from text, which `--workers` processes tokenize, and
before that takes steps as fast as they come. `tokenize` times the tokenizer, packing from text and
from shards, and builds by one core and all. FOLDER is filled with made-up documents where it is
empty. One JSON line per row.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from packgraph.packing.capacity import Capacity
from packgraph.packing.document import Document
from packgraph.train.data import (
    DataConfig,
    Microbatches,
    build_tokenizer,
    open_documents,
)
from packgraph.train.data.shard_build import build_shards, encoded, write_shard
from packgraph.train.data.shards import MANIFEST, Manifest
from packgraph.train.feed import MicrobatchAssignment, StepFeed, count_loss_tokens
from packgraph.train.run_files import write_json

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
        made = (
            encoded([Document(draw.integers(0, 256, lengths[row]))], manifest.token_bytes)
            for row in manifest.rows_of(number)
        )
        manifest.shards[number] = write_shard(folder, number, made)
    write_json(folder / MANIFEST, manifest.to_json())


def stream_of(folder: Path, tokens: int):
    """The stream of packs of so many tokens, or half, over the shards, as a run has it."""
    if not (folder / MANIFEST).exists():
        made_up(folder)
    config = DataConfig(source="shards", path=str(folder), window=256, overlong="split")
    capacities = [Capacity(tokens, 64), Capacity(tokens // 2, 64)]
    return Microbatches(config, open_documents(config), build_tokenizer(config), capacities)


def plan(asked) -> dict:
    """Milliseconds of one rank for the packing and the assignment of a step."""
    stream = stream_of(asked.folder, asked.tokens)
    sharing = MicrobatchAssignment(asked.ranks, asked.ranks // 2)
    found, packs = {"packing_ms": [], "assignment_ms": [], "documents": []}, []
    for _ in range(asked.steps):
        began = time.thread_time()  # other processes do not count
        packs = stream.plan_step(asked.ranks * asked.tokens)
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
    feed = feed_of(stream_of(asked.folder, asked.tokens), asked)
    found = waited(feed, asked, asked.rate)
    feed.close()
    return found


def feed_of(stream, asked) -> StepFeed:
    """The steps of one rank."""
    sharing = MicrobatchAssignment(asked.ranks, asked.ranks // 2)
    return StepFeed(stream, asked.ranks * asked.tokens, sharing, CPU, asked.ahead)


def waited(feed: StepFeed, asked, rate: float) -> dict:
    """What `wait` measures, of a feed; as fast as steps come where `rate` is infinite."""
    waits, steps, tokens = [], [], []
    for _ in range(asked.steps):
        began = time.perf_counter()
        step = feed.take()
        waits.append(time.perf_counter() - began)
        feed.go_on()
        tokens.append(sum(pack.num_tokens for pack in step.packs))
        steps.append(tokens[-1] / asked.ranks / rate)
        time.sleep(max(0.0, began + steps[-1] - time.perf_counter()))
    # the first step is waited for as a whole
    found = {"first_wait_s": round(waits[0], 2)}
    found["tokens_a_second"] = round(sum(tokens[1:]) / sum(map(max, waits[1:], steps[1:])))
    if steps[-1]:
        worst = max(one / step for one, step in zip(waits[1:], steps[1:], strict=True))
        found |= {
            "step_ms": round(1e3 * statistics.mean(steps), 1),
            "wait_ms": round(1e3 * statistics.mean(waits[1:]), 4),
            "wait_share": round(sum(waits[1:]) / sum(steps[1:]), 6),
            "worst_share": round(worst, 6),
        }
    return found


def text(asked) -> dict:
    """Tokens a second of one rank whose workers tokenize the steps of all, and its waits."""
    config = DataConfig(
        max_documents_loaded=asked.documents,
        tokenizer=asked.tokenizer,
        overlong="split",
        workers=asked.workers,
    )
    capacities = [Capacity(asked.tokens, 64), Capacity(asked.tokens // 2, 64)]
    stream = Microbatches(config, open_documents(config), build_tokenizer(config), capacities)
    feed = feed_of(stream, asked)
    fastest, begun = waited(feed, asked, math.inf), cpu_seconds()
    at_rate, done = waited(feed, asked, asked.rate), cpu_seconds()
    feed.close()
    tokens = asked.steps * asked.ranks * asked.tokens
    own, theirs = (after - before for before, after in zip(begun, done, strict=True))
    return {
        "fastest_tokens_a_second": fastest["tokens_a_second"],
        "tokens_a_cpu_second_here": round(tokens / own),
        "tokens_a_cpu_second_of_workers": round(tokens / theirs) if theirs else None,
        **at_rate,
        "first_wait_s": fastest["first_wait_s"],
    }


def cpu_seconds() -> tuple[float, float]:
    """Of this process, and of its workers so far; other processes do not count."""
    found = 0.0
    for worker in multiprocessing.active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return time.process_time(), found


def tokenize(asked) -> dict:
    """Tokens a second: of the tokenizer alone, of one rank that packs from text and from shards,
    and of builds, by what a longer source takes more time."""
    library = open_documents(DataConfig(max_documents_loaded=asked.documents))
    tokenizer = build_tokenizer(DataConfig(tokenizer=asked.tokenizer))
    some = [library[index] for index in range(len(library))]
    began = time.thread_time()
    tokens = sum(len(one) for document in some for one in tokenizer.encode(document))
    found = {"tokens": tokens, "tokenizer_a_core": round(tokens / (time.thread_time() - began))}
    with tempfile.TemporaryDirectory() as folder:
        root, sources = Path(folder), []
        for copies in (1, 1 + asked.copies):
            path = root / f"{copies}.jsonl"
            lines = [json.dumps({"text": document.text}) + "\n" for document in some]
            path.write_text("".join(lines * copies))
            sources.append(
                DataConfig(source="jsonl", path=str(path), tokenizer=asked.tokenizer, window=64)
            )
        for workers in sorted({1, len(os.sched_getaffinity(0))}):
            seconds, cpu = [], []
            for number, source in enumerate(sources):
                began, used = time.perf_counter(), time.process_time()
                target = root / f"shards-{workers}-{number}"
                build_shards(source, target, workers=workers, rows_per_shard=500)
                seconds.append(time.perf_counter() - began)
                cpu.append(time.process_time() - used)
            if workers == 1:  # its worker is a thread
                found["build_a_core"] = round(asked.copies * tokens / (cpu[1] - cpu[0]))
            rate = asked.copies * tokens / (seconds[1] - seconds[0])
            found[f"build_{workers}_workers"] = round(rate)
            found[f"start_{workers}_workers_s"] = round(seconds[0] - tokens / rate, 2)
        shards = replace(sources[0], source="shards", path=str(root / "shards-1-0"))
        found["packed_from_text"] = packed_rate(sources[0])
        found["packed_from_shards"] = packed_rate(shards)
    return found


def packed_rate(config: DataConfig) -> int:
    """Tokens a second of one thread that plans and reads packs."""
    stream = Microbatches(
        replace(config, overlong="split"),
        open_documents(config),
        build_tokenizer(config),
        [Capacity(8192, 64)],
    )
    next(stream)
    began = time.thread_time()
    packed = sum(pack.num_tokens for pack in itertools.islice(stream, 60))
    return round(packed / (time.thread_time() - began))


def main() -> None:
    """Print one row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("plan", "wait", "text", "tokenize"))
    parser.add_argument("--folder", type=Path, default=Path("shards-made-up"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=LONGEST, help="of a step, for each rank")
    parser.add_argument("--rate", type=float, default=130_000, help="tokens a second of a rank")
    parser.add_argument("--ahead", type=int, default=2, help="steps made ahead")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--workers", type=int, default=0, help="processes that tokenize texts")
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--copies", type=int, default=4, help="that make the longer source")
    asked = parser.parse_args()
    kinds = {"plan": plan, "wait": wait, "text": text, "tokenize": tokenize}
    measured = kinds[asked.what](asked)
    options = {name: str(value) for name, value in vars(asked).items() if name != "folder"}
    print(json.dumps({**options, "host": platform.processor() or platform.machine(), **measured}))


if __name__ == "__main__":
    main()
