"""Ranks of one machine that read each other's memory on CPUs: files that all of them map."""

import contextlib
import itertools
import tempfile
import time
import uuid
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from packgraph.parallel import data


class FilePeers:
    """`Peers` of gloo ranks.

    without: what does not happen, of `main` (barriers around parameters), `complete` (the first of
    a reduction) and `taken` (its last). late: of a rank, the barrier behind which it sleeps 20 ms,
    so that another one that does not wait for it is too early.
    """

    def __init__(self, group, without="", late=None):
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._without, self._late = group, without, late or {}
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=dist.get_global_rank(group, 0), group=group)
        self._folder, self._maps, self._beside = Path(tempfile.gettempdir()), [], None
        self._name = f"peers-{name[0]}"

    def allocate(self, size, dtype):
        def path(rank):
            return self._folder / f"{self._name}-{len(self._maps)}-{rank}"

        def mapped(rank):
            return torch.from_file(str(path(rank)), shared=True, size=size, dtype=dtype)

        mine = mapped(self.rank).zero_()
        dist.barrier(self._group)
        every = [mine if rank == self.rank else mapped(rank) for rank in range(self.ranks)]
        dist.barrier(self._group)  # all have mapped them, so the files may go
        path(self.rank).unlink()
        self._maps.append(every)
        return mine

    def of_rank(self, rank, mine):
        for every in self._maps:
            whole = every[self.rank]
            start = (mine.data_ptr() - whole.data_ptr()) // mine.element_size()
            if mine.dtype == whole.dtype and 0 <= start <= whole.numel() - mine.numel():
                return every[rank][start:][: mine.numel()].view(mine.shape)
        raise AssertionError("not in memory that peers read")

    def barrier(self):
        what = "main" if self._beside is None else next(self._beside)
        if what != self._without:
            dist.all_reduce(torch.zeros(1), group=self._group)
        if self._late.get(self.rank) == what:
            time.sleep(0.02)

    @contextlib.contextmanager
    def beside(self):
        self._beside = itertools.cycle(["complete", "taken"])
        yield _Done()
        self._beside = None


class _Done:
    def wait(self):
        """Copies of CPUs are done when they are made."""


@contextlib.contextmanager
def peers_on_cpus(**options):
    """Sharded layers that are made within the block are exchanged through files; gives what was
    made."""
    made = []

    def find(group, device):
        if group is None:
            return None
        made.append(FilePeers(group, **options))
        return made[-1]

    with mock.patch.object(data, "find_peers", find):
        yield made
