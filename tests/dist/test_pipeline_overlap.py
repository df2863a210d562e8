"""Under a pipeline the gradients of a chunk are reduced while the step goes on, and nothing changes
by it."""

import dataclasses
import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
from distkit import run_ranks
from torch import nn
from trainkit import CAPACITIES, PacksOfOneCapacity, tiny, trainer

from packgraph.graphs.parameters import local_tensor
from packgraph.parallel.data import FlatParameters
from packgraph.parallel.mesh import Layout
from packgraph.parallel.pieces import Pieces
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.signals import StopRequest

pytestmark = pytest.mark.dist
DP2_PP2 = Layout(dp=2, pp=2)
# many spans, few of which hold both chunks' parameters
SMALL = functools.partial(FlatParameters, span_bytes=4096)


def two_chunks(mesh):
    """Chunk b is done first; only what lies in its spans alone may be on its way before chunk a is
    done."""
    torch.manual_seed(0)
    chunks = {
        name: nn.ParameterList(nn.Parameter(torch.randn(4, 40)) for _ in range(4)) for name in "ab"
    }
    named = [
        (f"{name}{index}", value)
        for name, chunk in chunks.items()
        for index, value in enumerate(chunk)
    ]
    flat = FlatParameters(named, mesh.group("dp"), span_bytes=1700)
    assert [len(span.members) for span in flat.spans] == [2, 2, 2, 2]
    started = []
    for step in range(2):
        flat.zero_gradients()
        started.append([])
        for name in "ba":
            chunk = list(chunks[name])
            # The last parameter of a chunk is left out of its last backward: it got its gradient
            # before.
            chunk[-1].grad += 1.0 + mesh.rank
            output = sum((value * (step + 1)).sum() for value in chunk[:-1])
            flat.overlap(output, chunk)
            started[-1].append(flat.launched)
            output.backward()
            started[-1].append(flat.launched)
        flat.reduce()
        for span in flat.spans:
            for member in span.members:
                first, last = (
                    max(member.place.start, span.own.start),
                    min(member.place.stop, span.own.stop),
                )
                expected = 3.0 if member.name.endswith("3") else 2.0 * (step + 1)
                got = span.own_gradients[first - span.own.start : max(first, last) - span.own.start]
                assert torch.equal(got, torch.full_like(got, expected)), member.name
    return started


def test_spans_leave_when_their_chunk_is_done():
    for started in run_ranks(two_chunks, 2):
        assert started == [[0, 2, 2, 4]] * 2


def train(mesh, folder, settings, how):
    """Tensors at the end, and how many spans were on their way before the end of each step. how:
    overlap or not."""
    with mock.patch("packgraph.train.optimizer.FlatParameters", SMALL):
        run = trainer(Path(folder), settings, PacksOfOneCapacity(), mesh=mesh)
    flat, launched = run.optimizer.flat, []
    reduce, overlap = flat.reduce, flat.overlap

    def noted():
        launched.append(flat.launched)
        reduce()

    flat.reduce = noted
    if how != "overlap":
        flat.overlap = {
            "plain": lambda output, settled=None: None,
            "early": lambda output, settled=None: overlap(output),
        }[how]
    try:
        run.run(StopRequest())
        return (
            {name: _held(value) for name, value in run.tensors().items()},
            launched,
            len(flat.spans),
        )
    finally:
        run.close()


def _held(value):
    if isinstance(value, Pieces):
        return torch.cat([torch.zeros(0), *(piece.detach().flatten() for _, piece in value.pieces)])
    return local_tensor(value.detach()).clone()


def run(tmp_path, how, **graph):
    made = tiny(graph=True, steps=6, checkpoint_every=100)
    settings = dataclasses.replace(
        made,
        parallel=ParallelConfig(dp=2, pp=2, chunks=2),
        model=dataclasses.replace(made.model, num_layers=4),
        graph=dataclasses.replace(made.graph, capacities=CAPACITIES[-1:], **graph),
    )
    name = f"{how} {graph}"
    return run_ranks(train, 4, str(tmp_path / name), settings, how, layout=DP2_PP2, seconds=120.0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Eager steps that reduce all gradients at their end."""
    return run(tmp_path_factory.mktemp("plain"), "plain", enabled=False)


def differing(left, right):
    return [
        name
        for (a, *_), (b, *_) in zip(left, right, strict=True)
        for name in a
        if not torch.equal(a[name], b[name])
    ]


def test_reductions_start_before_the_end_of_a_step_and_change_nothing(plain, tmp_path):
    overlapped = run(tmp_path, "overlap", enabled=False)
    graphs = run(tmp_path, "overlap", granularity="chunk")
    assert not differing(plain, overlapped) and not differing(plain, graphs)
    for _, launched, spans in (*overlapped, *graphs):
        # Also when graphs are replayed, after two steps of warm-up.
        assert spans > 2 and max(launched[2:]) == spans, (
            "the last backward of the step has started the last span"
        )
    assert all(max(launched) == 0 for _, launched, _ in plain)


def test_gradients_reduced_before_all_chunks_are_done_are_wrong_and_the_test_sees_it(
    plain, tmp_path
):
    """Negative control: each chunk's last backward is taken for the last one of the step."""
    assert differing(plain, run(tmp_path, "early", enabled=False))
