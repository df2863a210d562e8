"""Runs over pipeline stages: graphs equal eager bitwise, stages equal the whole in rounding,
checkpoints move."""

import dataclasses
import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
from distkit import run_ranks
from torch import nn
from trainkit import CAPACITIES, PacksOfOneCapacity, finished, held_tensors, tiny, trainer

from packgraph.parallel.data import FlatParameters
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import collect
from packgraph.train.checkpoint.reader import read_metadata_file
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest
from packgraph.train.validate import validate

ALONE, PP2, PP2_TP2 = Layout(dp=1), Layout(dp=1, pp=2), Layout(dp=1, pp=2, tp=2)


def config(layout, steps, *, dropout=0.1, chunks=1, layers=2, sequence=True, tied=False, **graph):
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    model = dataclasses.replace(
        made.model,
        tie_embeddings=tied,
        num_layers=max(layers, 2 * chunks),
        dropout=dropout,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=33,
    )
    return dataclasses.replace(
        made,
        model=model,
        parallel=ParallelConfig(
            dp=layout.dp, pp=layout.pp, tp=layout.tp, chunks=chunks, sequence=sequence
        ),
        graph=dataclasses.replace(made.graph, **graph),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20),
    )


def go(mesh, folder, settings, resume=False):
    """Run to the end; at last this rank's tensors, its graph counts, and on rank 0 all tensors
    whole."""
    with finished(Path(folder), settings, mesh=mesh, resume=resume) as run:
        held = held_tensors(run)
        return held, run.executor.totals(), dict(collect(mesh, run.tensors()))


def ranks(layout, *arguments):
    return run_ranks(
        go, (layout.dp or 1) * layout.pp * layout.tp, *arguments, layout=layout, seconds=120.0
    )


@pytest.mark.parametrize(
    ("layout", "options", "granularities"),
    [
        (PP2, {}, ("layer", "chunk", "step")),
        (Layout(dp=2, pp=2), {"tied": True}, ("layer", "chunk")),
        (PP2, {"chunks": 2, "tied": True}, ("layer", "chunk", "step")),
        pytest.param(PP2_TP2, {}, ("layer", "chunk", "step"), marks=pytest.mark.slow),
    ],
    ids=["PP2", "DP2xPP2-tied", "PP2xVPP2-tied", "PP2xTP2"],
)
def test_every_granularity_equals_the_eager_run_bitwise(layout, options, granularities, tmp_path):
    eager = ranks(layout, str(tmp_path / "eager"), config(layout, 20, enabled=False, **options))
    for granularity in granularities:
        settings = config(layout, 20, granularity=granularity, **options)
        graphs = ranks(layout, str(tmp_path / granularity), settings)
        for (expected, *_), (got, totals, _) in zip(eager, graphs, strict=True):
            assert expected.keys() == got.keys()
            assert not [name for name in got if not torch.equal(expected[name], got[name])]
            assert totals["replayed"] > 0 and set(totals["fallbacks"]) <= {
                "warm-up",
                "whole step: too many different call signatures",
            }
        assert_copies_are_equal(graphs, layout)


def assert_copies_are_equal(results, layout):
    """What several stages hold of a parameter and of its optimizer state is the same in every
    bit."""
    by_place = {}
    for rank, (tensors, *_) in enumerate(results):
        place = layout.coordinates(rank)
        for name, value in tensors.items():
            by_place.setdefault((name, place["dp"], place["tp"]), []).append(value)
    for (name, *_), copies in by_place.items():
        assert all(torch.equal(copies[0], other) for other in copies[1:]), name


def test_a_replica_without_a_pack_waits_for_the_others(tmp_path):
    layout = Layout(dp=2, pp=2)
    settings = config(layout, 4)
    settings = dataclasses.replace(
        settings, run=dataclasses.replace(settings.run, tokens_per_step=1)
    )
    for tensors, totals, _ in ranks(layout, str(tmp_path / "run"), settings):
        assert all(value.isfinite().all() for value in tensors.values())
        assert totals["replayed"] in (0, 2)


@pytest.mark.parametrize(
    ("layout", "options"),
    [(PP2, {}), (PP2, {"tied": True}), (PP2_TP2, {"tied": True}), (PP2_TP2, {"sequence": False})],
    ids=["PP2", "PP2-tied", "PP2xTP2-tied", "PP2xTP2-whole-rows"],
)
def test_stages_learn_what_the_whole_model_learns(layout, options, tmp_path):
    stages = ranks(layout, str(tmp_path / "pp"), config(layout, 8, dropout=0.0, **options))
    assert_copies_are_equal(stages, layout)
    assert_close(
        stages, ranks(ALONE, str(tmp_path / "alone"), config(ALONE, 8, dropout=0.0, **options))
    )
    for ours, theirs in zip(
        read_metrics(tmp_path / "pp" / METRICS),
        read_metrics(tmp_path / "alone" / METRICS),
        strict=True,
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-3)


def assert_close(results, alone):
    """Sums over stages and ranks are rounded in another order, and Adam makes much of tiny
    gradients: hence 1e-4."""
    (_, _, found), (_, _, expected) = results[0], alone[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: name + m
        )


def test_a_run_moves_from_chunks_to_one_process_and_back(tmp_path):
    folder = str(tmp_path / "moved")
    ranks(PP2, folder, config(PP2, 3, dropout=0.0, chunks=2, tied=True))
    stored = read_metadata_file(Path(folder) / "checkpoints" / "step-00000003" / ".metadata")
    names = [index.fqn for index in stored.storage_data]
    assert len(names) == len(set(names)) and "optimizer.embed_tokens.weight.exp_avg" in names, (
        "copies are stored once"
    )
    ranks(ALONE, folder, config(ALONE, 6, dropout=0.0, layers=4, tied=True), True)
    moved = ranks(PP2, folder, config(PP2, 9, dropout=0.0, chunks=2, tied=True), True)
    assert_copies_are_equal(moved, PP2)
    assert_close(
        moved,
        ranks(ALONE, str(tmp_path / "alone"), config(ALONE, 9, dropout=0.0, layers=4, tied=True)),
    )


def test_a_resumed_pipeline_is_bitwise_the_one_that_never_stopped(tmp_path):
    straight = ranks(PP2, str(tmp_path / "straight"), config(PP2, 6, chunks=2))
    ranks(PP2, str(tmp_path / "halves"), config(PP2, 3, chunks=2))
    halves = ranks(PP2, str(tmp_path / "halves"), config(PP2, 6, chunks=2), True)
    for (expected, *_), (got, *_) in zip(straight, halves, strict=True):
        assert not [name for name in expected if not torch.equal(expected[name], got[name])]


def fewer_layers(mesh, folder, settings):
    """Ask for a checkpoint of more layers than there are: which rank holds too little is nobody's
    fault."""
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.input_layernorm\.weight is not part of this run"
    ):
        go(mesh, folder, settings, True)


def test_a_checkpoint_of_more_layers_is_refused_on_all_ranks(tmp_path):
    folder = str(tmp_path / "run")
    ranks(ALONE, folder, config(ALONE, 3, layers=3))
    run_ranks(fewer_layers, 2, folder, config(PP2, 6), layout=PP2)


def test_what_cannot_be_a_pipeline_is_said_at_once():
    settings = config(Layout(dp=1, pp=4), 4, chunks=2, layers=4, scope=("head",))
    settings = dataclasses.replace(settings, parallel=ParallelConfig(dp=1, pp=4, chunks=2, tp=2))
    text = "\n".join(validate(settings, "cpu", world=8))
    assert (
        "parallel.pp = 4 x parallel.chunks = 2 needs at least as many layers, model.num_layers is 4"
        in text
    )
    assert "head is on the last one only" in text
    assert not validate(config(Layout(dp=2, pp=2, tp=2), 4), "cpu", world=8)
    alone = dataclasses.replace(settings, parallel=ParallelConfig(dp=1, chunks=2))
    assert "parallel.chunks = 2 needs parallel.pp" in "\n".join(validate(alone, "cpu"))


# ---- gradients of a chunk are reduced while the step goes on


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
            held_tensors(run),
            launched,
            len(flat.spans),
        )
    finally:
        run.close()


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
