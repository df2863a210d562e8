"""Offloading under pipelines and tensor parallelism: bitwise the run that keeps everything, with
late copies."""

import contextlib
import dataclasses
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from distkit import run_ranks
from offloadtraces import make_trace
from peerkit import peers_on_cpus
from torch import nn
from trainkit import held_tensors, tiny, trainer

import packgraph
from packgraph.graphs.stages import Stage
from packgraph.offloading import api, group
from packgraph.offloading.api import OffloadedLayer
from packgraph.offloading.group import GroupMemory
from packgraph.parallel.layout import Layout
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.sections import LoraConfig, OffloadConfig, ParallelConfig
from packgraph.train.features.offload import TRIAL, Planner, TrainerOffloading, report_offloading
from packgraph.train.signals import StopRequest
from packgraph.train.validate import validate

DENSE = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_act")


def config(layout, chunks, **graph):
    made = tiny(graph=True, steps=4, checkpoint_every=100)
    return dataclasses.replace(
        made,
        model=dataclasses.replace(
            made.model, num_layers=2 * chunks, num_heads=4, num_kv_heads=2, vocab_size=33
        ),
        parallel=ParallelConfig(dp=layout.dp, pp=layout.pp, tp=layout.tp, chunks=chunks),
        graph=dataclasses.replace(made.graph, **graph),
    )


def go(mesh, folder, settings):
    """For every config: this rank's tensors at the end, and what moved: groups and bytes of every
    chunk."""
    results = []
    for number, setting in enumerate(settings):
        run = trainer(Path(folder) / str(number), setting, mesh=mesh)
        for chunk in range(setting.parallel.chunks if setting.graph.enabled else 0):
            run.executor.copy_streams(chunk).queues.late.update(("out", "back"))
        if run.executor.prepare is not None:
            run.executor.prepare.when_planned = partial(
                report_offloading, mesh=mesh, folder=run.folder, note=str
            )
        run.run(StopRequest())
        held = held_tensors(run)
        runtimes = run.executor.prepare.runtimes if run.executor.prepare is not None else []
        results.append(
            (held, [(runtime.trace.bytes, sum(runtime.plan.moves)) for runtime in runtimes])
        )
        run.close()
    return results


@pytest.mark.parametrize(
    ("layout", "chunks", "granularities"),
    [
        (Layout(dp=1, pp=2), 1, ("chunk", "step")),
        (Layout(dp=1, pp=2), 2, ("chunk",)),
        (Layout(dp=1, tp=2), 1, ("chunk",)),
    ],
    ids=["PP2", "PP2xVPP2", "TP2"],
)
def test_offloading_is_bitwise_keeping(layout, chunks, granularities, tmp_path):
    kept = config(layout, chunks, enabled=False)
    moving = [
        dataclasses.replace(
            config(layout, chunks, granularity=granularity),
            offload=OffloadConfig(modules=DENSE, min_bytes=1, margin=0, fraction=fraction),
        )
        for granularity, fraction in zip(granularities, (1.0, 0.5), strict=False)
    ]
    if len(granularities) > 1:
        later_less = dataclasses.replace(moving[0].offload, delta_bytes_per_pp_rank=2**40)
        moving.append(dataclasses.replace(kept, offload=later_less))
    results = run_ranks(
        go, layout.pp * layout.tp, str(tmp_path), [kept, *moving], layout=layout, seconds=120.0
    )
    for rank, ((expected, _), *others) in enumerate(results):
        for setting, (found, moved) in zip(moving, others, strict=True):
            assert expected.keys() == found.keys()
            assert not [name for name in found if not torch.equal(expected[name], found[name])]
            assert len(moved) == chunks and all(nbytes > 0 for nbytes, _ in moved)
            stays = rank > 0 and setting.offload.delta_bytes_per_pp_rank > 0
            assert all((groups == 0) == stays for _, groups in moved)
    told = (tmp_path / "1" / "offload" / "table.txt").read_text().splitlines()
    names = [
        f"rank {rank}" + (f" chunk {chunk}" if chunks > 1 else "")
        for rank in (0, 1)
        for chunk in range(chunks)
    ]
    assert [line.split("  ")[0] for line in told[1:-1]] == names, "rank 0 knows the plans of all"
    assert len(list((tmp_path / "1" / "offload").glob("*.svg"))) == len(names)


def sharded(shard, **graph):
    made = config(Layout(dp=2), 2, **graph)
    parallel = dataclasses.replace(made.parallel, chunks=1, shard=shard)
    return dataclasses.replace(made, parallel=parallel)


@pytest.mark.parametrize(
    ("shard", "granularity"),
    [
        ("gradients", "chunk"),
        ("parameters", "chunk"),
        ("parameters", "layer"),
        ("parameters", "step"),  # with the update
    ],
)
def test_offloading_beside_sharded_layers_is_bitwise_keeping(shard, granularity, tmp_path):
    """Matrices lie in memory that layers share: what is saved of them must not move."""
    modules = DENSE[1:] if granularity == "layer" else DENSE  # a slot owns a layer's input
    graph = {"granularity": granularity, "optimizer": granularity == "step"}
    moving = [
        dataclasses.replace(
            sharded(shard, **graph),
            offload=OffloadConfig(modules=modules, min_bytes=1, margin=0, fraction=fraction),
        )
        for fraction in (1.0, 0.5)
    ]
    settings = [sharded(shard, enabled=False), *moving]
    assert not [text for each in settings for text in validate(each, "cpu", world=2)]
    for (expected, _), *others in run_ranks(
        go, 2, str(tmp_path), settings, layout=Layout(dp=2), seconds=180.0
    ):
        for found, moved in others:
            assert expected.keys() == found.keys()
            assert not [name for name in found if not torch.equal(expected[name], found[name])]
            assert all(nbytes > 0 and groups > 0 for nbytes, groups in moved)


class Transposed(nn.Module):
    """A layer whose backward needs a view of its matrix."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.3)
        self.offload = packgraph.offload_block

    def run(self, state):
        with self.offload("product"):
            return {**state, "x": (state["x"] @ self.weight.t()).tanh()}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Transposed() for _ in range(4))

    def begin(self, x):
        return {"x": x}

    def stages(self):
        return [Stage("layer", number, layer.run) for number, layer in enumerate(self.layers)]

    def end(self, state):
        return state["x"]


def with_views(mesh, moves, knows, eager):
    """Losses and norms of six steps, and the replays. knows: offloading is told what is a
    parameter's memory."""
    module = Layers()
    shards = packgraph.shard(module)
    graphed = packgraph.graph(module, warmup=1)
    optimizer = torch.optim.SGD(shards.parameters(), lr=0.05)
    data, found = torch.Generator().manual_seed(mesh.rank), []
    with contextlib.ExitStack() as stack:
        if moves:
            graphed.capture_backend.copy_streams.queues.late.update(("out", "back"))
            offloading = packgraph.offload(graphed, modules=["product"], min_bytes=1)
        if not knows:
            stack.enter_context(mock.patch.object(OffloadedLayer, "stays", return_value=[]))
        if eager:
            stack.enter_context(packgraph.eager("comparison"))
        for _ in range(6):
            loss = graphed(torch.randn(8, 16, generator=data)).square().sum()
            loss.backward()
            found += [loss.detach().clone(), shards.step(optimizer, clip_norm=1.0).clone()]
            if moves:
                offloading.end_step()
    return torch.stack(found), graphed.stats.replayed


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.core)])
def test_views_of_sharded_matrices_never_move(eager):
    """A gather for another layer overwrites them before a late copy is made, so a copy would bring
    back that layer's. Nothing else finds it: offloading that does not know them has other bits."""
    (kept, _), _ = run_ranks(with_views, 2, False, True, True)
    for knows in (True, False):
        (found, replays), _ = run_ranks(with_views, 2, True, knows, eager)
        assert torch.equal(found, kept) == knows
        assert replays == (0 if eager else 5)


class _OfNobody(OffloadedLayer):
    """A layer of which nothing is known to stay."""

    def stays(self, part):
        return []


def frozen_and_moved(mesh, folder, settings):
    """As `go`, with copies of peers, of a run that keeps everything and one that moves; then of
    that one without other rules than parameters' addresses, and without these, too."""
    every = []
    for number, layer in enumerate((None, OffloadedLayer, _OfNobody)):
        place = Path(folder) / str(number)
        place.mkdir(exist_ok=True)
        with contextlib.ExitStack() as changed:
            made = changed.enter_context(peers_on_cpus())
            if layer is not None:
                changed.enter_context(mock.patch.object(api, "OffloadedLayer", layer))
                changed.enter_context(mock.patch.object(group, "COVERED", 0.0))
                changed.enter_context(mock.patch.object(GroupMemory, "is_held", return_value=False))
            every += go(mesh, str(place), settings if layer is None else settings[1:])
            assert made
    return every


def test_frozen_weights_in_shared_memory_do_not_move(tmp_path):
    """They are no leaves that need gradients, so their addresses tell them from activations. Where
    nothing does they move, while other layers are gathered over them (control)."""
    pytest.importorskip("peft")
    kept, moving = (
        dataclasses.replace(
            sharded("parameters", enabled=enabled, granularity="chunk"),
            lora=LoraConfig(rank=1),
            offload=OffloadConfig(modules=DENSE if enabled else (), min_bytes=1, margin=0),
        )
        for enabled in (False, True)
    )
    assert not validate(moving, "cpu", world=2)
    for (expected, _), (found, moved), (addressed, as_many), (wrong, more) in run_ranks(
        frozen_and_moved, 2, str(tmp_path), [kept, moving], layout=Layout(dp=2), seconds=180.0
    ):
        for same in (found, addressed):
            assert not [name for name in same if not torch.equal(expected[name], same[name])]
        assert 0 < moved[0][0] <= as_many[0][0] < more[0][0]
        assert [name for name in wrong if not torch.equal(expected[name], wrong[name])]


class Unplannable:
    """A runtime whose plan cannot be made on the last rank."""

    def __init__(self, wrong):
        self.trace, self.policy, self.plan, self.wrong = object(), None, None, wrong

    def end_step(self):
        pass

    def forget_replays(self):
        pass

    def settle(self):
        if self.wrong:
            raise ConfigError(["offload.budget = 1KiB: nothing fits"])


def chosen(mesh, folder, limits, layout, shard):
    """For every limit: this rank's tensors at the end, the recomputation of its layers, and how
    many groups move."""
    results = []
    for number, limit in enumerate(limits):
        made = config(layout, 1, granularity="chunk", memory_budget=limit)
        made = dataclasses.replace(made, parallel=dataclasses.replace(made.parallel, shard=shard))
        made = dataclasses.replace(
            made,
            model=dataclasses.replace(made.model, num_layers=4),
            run=dataclasses.replace(made.run, recompute="none" if limit is None else "auto"),
            offload=OffloadConfig(
                modules=() if limit is None else ("core_attn", "mlp_act", "layer_input"),
                min_bytes=1,
                margin=0,
            ),
        )
        run = trainer(Path(folder) / str(number), made, mesh=mesh)
        run.run(StopRequest())
        held = held_tensors(run)
        kinds = {stage.recompute for chunk in run.model.chunks for stage in chunk.stages()}
        runtimes = [] if limit is None else run.executor.prepare.runtimes
        moved = sum(sum(one.plan.moves) for one in runtimes if one.plan is not None)
        results.append((held, kinds, moved))
        run.close()
    return results


@pytest.mark.parametrize(
    ("layout", "shard"), [(Layout(dp=1, pp=2), "none"), (Layout(dp=2), "parameters")], ids=str
)
def test_ranks_choose_the_same_recomputation_beside_offloading(layout, shard, tmp_path):
    limits = [None, "1GiB", "20KiB"]
    results = run_ranks(
        chosen, 2, str(tmp_path), limits, layout, shard, layout=layout, seconds=180.0
    )
    for (kept, _, _), (ours, none, moved), (theirs, full, inputs) in results:
        assert none == {""} and moved > 0 and full == {"", "full"} and inputs > 0
        assert all(torch.equal(ours[name], kept[name]) for name in kept)
        assert all(torch.equal(theirs[name], kept[name]) for name in kept)


def plan_once(mesh):
    """The problems that a rank hears of, and whether it went on."""
    told, planner = [], Planner(OffloadConfig(modules=("core_attn",)), 0, 1)
    offloading = TrainerOffloading(
        [Unplannable(mesh.rank == mesh.world - 1)],
        [planner],
        2,
        torch.device("cpu"),
        mesh.everyone(),
    )
    offloading.when_planned = told.append
    offloading(1)
    try:
        offloading(2)
    except ConfigError as error:
        return error.problems, told
    return (), told


def test_what_cannot_be_planned_on_one_rank_ends_the_run_on_all():
    assert run_ranks(plan_once, 2) == [(("offload.budget = 1KiB: nothing fits",), [])] * 2


class Replayed(Unplannable):
    """A runtime whose graphs are known on the first rank only."""

    def __init__(self, trace, wrong=False):
        super().__init__(False)
        self.found, self.second = trace, wrong

    def replayed(self, speed):
        return None if self.found is None else (self.found, speed)

    def follow(self, trace, plan):
        if self.second:
            raise ConfigError(["offload.lost = 0.1: not by graphs"])


def plan_twice(mesh, wrong):
    """(whether graphs are captured anew, whether that is final, by what was planned), at the
    trial's end."""
    trace = make_trace([4, 4], [1.0, 1.0]) if mesh.rank == 0 else None
    planner = Planner(OffloadConfig(modules=("core_attn",), lost=0.1), 0, 1)
    offloading = TrainerOffloading(
        [Replayed(trace, wrong)], [planner], 2, torch.device("cpu"), mesh.everyone()
    )
    assert not offloading.is_final and offloading.trial_steps == TRIAL
    assert not offloading(2) and not offloading(3) and not offloading.is_final
    try:
        return (
            offloading(2 + TRIAL),
            offloading(3 + TRIAL),
            offloading.is_final,
            offloading.planned_by,
        )
    except ConfigError as error:
        return error.problems


def test_all_ranks_capture_anew_where_one_has_planned_by_its_graphs():
    assert run_ranks(plan_twice, 2, False) == [(True, False, True, "graphs")] * 2
    assert run_ranks(plan_twice, 2, True) == [("offload.lost = 0.1: not by graphs",)] * 2
