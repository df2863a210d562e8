"""Tests over several processes: start them, wait, and end all of them when one fails.

Processes are forked (fast: nothing is imported again) and joined by gloo through a file store.
Where there is CUDA they are started afresh and do not see it: a driver that the parent has touched
fails in a forked child. Whatever a rank returns comes back as bytes; a rank that raises ends the
others, and its traceback becomes the test's error.
"""

import datetime
import gc
import importlib.util
import inspect
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import Mesh, make_mesh

CPU = torch.device("cpu")


class RankFailed(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_ranks(
    function: Any, world: int, *arguments: Any, layout: Layout | None = None, seconds: float = 180.0
) -> list[Any]:
    """`function(mesh, *arguments)` on `world` gloo processes; what they return, by rank. Raises
    RankFailed.

    function: at the top of its file. Returned tensors must be plain tensors. seconds: all ranks are
    ended when they take longer.
    """
    gc.collect()  # a process group that dies in a forked child would wait for threads of its parent
    afresh = torch.cuda.is_available()
    context: Any = multiprocessing.get_context("spawn" if afresh else "fork")
    work = (inspect.getfile(function), function.__name__) if afresh else function
    with tempfile.TemporaryDirectory() as folder:
        links: dict[Any, int] = {}
        workers = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            store = str(Path(folder) / "store")
            worker = context.Process(
                target=_work,
                args=(theirs, work, arguments, rank, world, store, layout),
                daemon=True,
            )
            with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""} if afresh else {}):
                worker.start()
            theirs.close()
            links[ours] = rank
            workers.append(worker)
        try:
            return _collect(links, world, time.monotonic() + seconds)
        finally:
            for worker in workers:
                worker.join(0.5)
                if worker.is_alive():
                    worker.kill()
                    worker.join()


def _collect(links: dict[Any, int], world: int, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    waiting = dict(links)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for link in ready:
            rank = waiting.pop(link)
            try:
                good, content = link.recv()  # type: ignore[union-attr]
            except EOFError:
                good, content = False, "it died without a word"
            if good:
                results[rank] = torch.load(io.BytesIO(content), weights_only=False)
                continue
            failures.append(f"rank {rank} failed:\n{content}")
            # A moment for the others: the first to speak may only have lost its connection to the
            # one that failed.
            deadline = min(deadline, time.monotonic() + 1.0)
    if failures:
        raise RankFailed("\n".join(failures))
    if waiting:
        raise RankFailed(f"ranks {sorted(waiting.values())} did not finish in time")
    return [results[rank] for rank in range(world)]


def _work(
    link: Connection,
    function: Any,
    arguments: tuple[Any, ...],
    rank: int,
    world: int,
    store: str,
    layout: Layout | None,
) -> None:
    done = False
    try:
        torch.set_num_threads(1)
        if isinstance(function, tuple):
            function = _load(*function)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=30),
        )
        mesh: Mesh = make_mesh(layout or Layout(), CPU)
        content = io.BytesIO()
        torch.save(function(mesh, *arguments), content)
        link.send((True, content.getvalue()))
        dist.barrier()
        dist.destroy_process_group()
        done = True
    finally:
        if not done:
            link.send((False, traceback.format_exc()))


def _load(file: str, name: str) -> Any:
    """A function of a test file, which is no importable module."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
