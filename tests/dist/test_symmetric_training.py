"""Runs with `parallel.dispatcher = symmetric`, over buffers that only gather: room grows on all
ranks and layers."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from dispatchkit import EmulatedBuffers
from distkit import run_ranks
from trainkit import RandomPacks, close, equal, finished, tiny

from packgraph.models.config import ExpertConfig
from packgraph.models.layers.moe import moe_blocks
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import single_process
from packgraph.parallel.pieces import collect
from packgraph.train.build import build_chunks
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.sections import OffloadConfig, ParallelConfig
from packgraph.train.validate import validate

EXPERTS = ExpertConfig(
    count=8, per_token=2, intermediate_size=16, score="sigmoid", score_bias=True, bias_rate=0.01
)
CAPACITIES = (Capacity(16, 4), Capacity(32, 4))
EP2 = Layout(dp=2, ep=2)


class Packs(RandomPacks):
    """The capacities in turn, of equal documents."""

    def __next__(self):
        capacity = CAPACITIES[self.position // 2 % 2]
        self.position += 1
        size = capacity.tokens // 4
        return pack(
            [[(self.position * 7 + 3 * place) % 32 for place in range(size)]] * 3, [capacity]
        )[0]


def config(layout, dispatcher, room=2.0, **graph):
    made = tiny(graph=True, steps=4, checkpoint_every=100)
    return dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, dropout=0.0, experts=EXPERTS),
        graph=dataclasses.replace(made.graph, capacities=CAPACITIES, granularity="chunk", **graph),
        parallel=ParallelConfig(
            dp=layout.dp, ep=layout.ep, dispatcher=dispatcher, expert_room=room
        ),
        run=dataclasses.replace(made.run, tokens_per_step=40),
    )


def go(mesh, folder, settings):
    """All tensors whole on rank 0, steps replayed and made again, and what the layers' dispatchers
    share."""
    with (
        mock.patch.multiple(
            "packgraph.train.features.moe",
            SymmetricBuffers=EmulatedBuffers,
            symmetric_problem=lambda *_: None,
        ),
        finished(Path(folder), settings, Packs(), mesh=mesh) as run,
    ):
        dispatchers = [block.dispatcher for block in moe_blocks(run.model.chunks)]
        buffers = {getattr(dispatcher, "buffers", None) for dispatcher in dispatchers}
        return (
            dict(collect(mesh, run.tensors())),
            run.executor.totals()["replayed"],
            run.repeated,
            [getattr(dispatcher, "factor", None) for dispatcher in dispatchers],
            [made and (made.pairs, made.rows, made.factor) for made in buffers],
        )


def test_room_grows_on_all_ranks_and_the_run_is_that_of_one_process(tmp_path):
    """Dispatchers see the same tokens in the same order, so eager, replays and a room that grows
    differ in no bit."""
    alone, *_ = run_ranks(
        go, 1, str(tmp_path / "alone"), config(Layout(dp=1), "local"), layout=Layout(dp=1)
    )[0]
    roomy, tight = (
        run_ranks(go, 2, str(tmp_path / name), settings, layout=EP2, seconds=120.0)
        for name, settings in (
            ("roomy", config(EP2, "symmetric", enabled=False)),
            ("tight", config(EP2, "symmetric", room=1.0)),
        )
    )
    close(roomy[0][0], alone)
    equal(roomy[0][0], tight[0][0])
    for _, replayed, again, factors, buffers in roomy:
        assert (
            replayed == 0 and again == 0 and set(factors) == {2.0} and buffers == [(64, 128, 2.0)]
        )
    for _, replayed, again, factors, buffers in tight:
        assert replayed > 0 and again > 0 and len(set(factors)) == 1 and factors[0] > 1.0
        assert len(buffers) == 1 and buffers[0][0] == 64 and buffers[0][2] == factors[0], (
            "one for all layers"
        )
    assert tight[0][3:] == tight[1][3:]


def test_it_is_refused_where_there_is_no_such_memory():
    with pytest.raises(
        ConfigError, match=r"with parallel\.ep = 1: symmetric memory is memory of GPUs, not of"
    ):
        build_chunks(config(Layout(dp=1), "symmetric"), torch.device("cpu"), single_process())
    settings = config(EP2, "symmetric")
    (problem,) = validate(settings, "cpu", world=2)
    assert (
        "parallel.dispatcher = symmetric with parallel.ep = 2" in problem
        and "use dispatcher = padded" in problem
    )
    moving = dataclasses.replace(
        config(EP2, "symmetric", compile=True), offload=OffloadConfig(modules=("layer",))
    )
    assert any(
        "a compiled layer saves would move" in problem
        for problem in validate(moving, "cuda", world=2)
    )
    large = dataclasses.replace(
        settings, parallel=dataclasses.replace(settings.parallel, dp=None, ep=16)
    )
    assert any(
        "symmetric memory is for 2 to 8 ranks of one host, not 16" in problem
        for problem in validate(large, "cuda", world=16)
    )


def refused(mesh):
    with pytest.raises(ConfigError, match="not of cpu; use dispatcher = padded"):
        build_chunks(config(EP2, "symmetric"), torch.device("cpu"), mesh)
    with (
        mock.patch("packgraph.train.features.moe.symmetric_problem", return_value=None),
        pytest.raises(
            ConfigError, match="dispatcher = symmetric: symmetric memory is memory of GPUs"
        ),
    ):
        build_chunks(config(EP2, "symmetric"), torch.device("cpu"), mesh)
    hosts = mock.patch("socket.gethostname", return_value=f"host-{mesh.rank}")
    problem = mock.patch("packgraph.moe.peer_read.symmetric_problem", return_value=None)
    with (
        mock.patch("packgraph.train.features.moe.symmetric_problem", return_value=None),
        hosts,
        problem,
        pytest.raises(
            ConfigError, match="ranks of one host, but these are on host-0, host-1; use dispatcher"
        ),
    ):
        build_chunks(config(EP2, "symmetric"), torch.device("cpu"), mesh)
    return True


def test_ranks_of_several_hosts_are_refused_by_name():
    assert run_ranks(refused, 2, layout=EP2) == [True, True]
