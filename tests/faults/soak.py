"""A long run: python tests/faults/soak.py [--steps 10000] [--replays 100000], also `make soak`.

Trains with checkpoints and offloading, then replays with evaluation in between, on the CPU backend,
and prints memory, open files and threads as they go. The exit code is 1 if any of them grows.
"""

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2] / "src")]
from trainkit import RandomPacks, tiny, trainer  # noqa: E402

from packgraph.graphs.graphed import graph  # noqa: E402
from packgraph.models.config import DecoderConfig  # noqa: E402
from packgraph.models.decoder import DecoderModel  # noqa: E402
from packgraph.train.config.sections import OffloadConfig  # noqa: E402
from packgraph.train.signals import StopRequest  # noqa: E402

MOST_GROWTH = 8 * 2**20  # bytes between the middle and the end: the allocator's pieces come and go


class Watch:
    """What a process holds, noted at times."""

    def __init__(self, what: str) -> None:
        self.what, self.began, self.rows = what, time.monotonic(), list[tuple[int, int, int, int]]()

    def note(self, done: int) -> None:
        """Note it after `done` of something, and print it."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        row = (
            done,
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
        )
        self.rows.append(row)
        print(
            f"{self.what} {done:>8,}  {row[1] / 2**20:8.1f} MiB  {row[2]} files  {row[3]} threads  "
            f"{time.monotonic() - self.began:6.0f} s",
            flush=True,
        )

    def is_flat(self) -> bool:
        """Whether the second half has grown in nothing."""
        middle, last = self.rows[len(self.rows) // 2], self.rows[-1]
        return last[1] - middle[1] <= MOST_GROWTH and last[2] <= middle[2] and last[3] <= middle[3]


def train(steps: int) -> bool:
    """Train with graphs, offloading and a checkpoint every 50 steps."""
    watch, every = Watch("steps"), max(1, steps // 20)
    with tempfile.TemporaryDirectory() as folder:
        made = replace(
            tiny(graph=True, steps=steps, checkpoint_every=50),
            offload=OffloadConfig(
                modules=("moe_act", "mlp_act", "attn_norm"), min_bytes=1, margin=0
            ),
        )
        run = trainer(Path(folder) / "run", made, RandomPacks())
        one_step = run._one_step

        def stepped() -> bool:
            if run.step % every == 0 and run.step:
                watch.note(run.step)
            return one_step()

        run._one_step = stepped  # type: ignore[method-assign]
        summary = run.run(StopRequest())
        watch.note(run.step)
        print({name: summary.get(name) for name in ("captured", "replayed", "fallbacks")})
        run.close()
    return watch.is_flat()


def replay(replays: int) -> bool:
    """Replay forward and backward, evaluated in between, shapes and outputs changing."""
    watch, every = Watch("replays"), max(1, replays // 20)
    model = DecoderModel(
        DecoderConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
        )
    )
    graphed, packs, optimizer = (
        graph(model, warmup=1),
        RandomPacks(),
        torch.optim.AdamW(model.parameters(), 1e-4),
    )
    noted = 0
    while graphed.stats.replayed < replays:
        graphed(next(packs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if packs.position % 100 == 0:
            model.eval()
            with torch.no_grad():
                graphed(next(packs))
            model.train()
        if graphed.stats.replayed // every > noted:
            noted += 1
            watch.note(graphed.stats.replayed)
    print(graphed.stats)
    return watch.is_flat()


def main() -> int:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--replays", type=int, default=100_000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    flat = [train(asked.steps), replay(asked.replays)]
    print("flat" if all(flat) else "grows")
    return int(not all(flat))


if __name__ == "__main__":
    sys.exit(main())
