"""The layout of processes, and the launcher of these tests."""

import time

import pytest
import torch
import torch.distributed as dist
from distkit import RankFailed, run_ranks
from hypothesis import given
from hypothesis import strategies as st

from packgraph.cli import main
from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import make_mesh, single_process
from packgraph.parallel.ranks import ADDRESS, NUMBERS, Launch, processes


def test_dp_follows_from_the_other_axes():
    assert Layout(tp=2, pp=2).resolved(8) == Layout(dp=2, pp=2, cp=1, tp=2)


@pytest.mark.parametrize(
    ("layout", "world", "words"),
    [
        (Layout(tp=3), 4, "tp 3 = 3 processes do not divide the 4"),
        (Layout(dp=2, tp=2), 2, "needs 4 processes, but 2"),
        (Layout(dp=0, tp=-1), 2, "dp = 0 must be at least 1; tp = -1 must be at least 1"),
        (Layout(tp=2, ep=3), 8, "ep 3 does not divide dp 4"),
        (Layout(ep=0), 2, "ep = 0 must be at least 1"),
        (Layout(dp=3, ep=2), 2, "dp 3 x .* needs 3 processes, but 2 .*; ep 2 does not divide dp 3"),
    ],
)
def test_impossible_layouts_are_refused_with_all_reasons(layout, world, words):
    with pytest.raises(ValueError, match=words):
        layout.resolved(world)


def test_tp_is_innermost():
    layout = Layout(dp=2, pp=2, cp=1, tp=2)
    assert layout.coordinates(0) == dict.fromkeys(("dp", "pp", "cp", "tp"), 0)
    assert layout.coordinates(1) == {"dp": 0, "pp": 0, "cp": 0, "tp": 1}
    assert layout.coordinates(2) == {"dp": 0, "pp": 1, "cp": 0, "tp": 0}
    assert layout.coordinates(4) == {"dp": 1, "pp": 0, "cp": 0, "tp": 0}


def test_experts_are_shared_by_consecutive_replicas():
    groups = Layout(dp=4, tp=2, ep=2).expert_ranks()
    assert groups["ep"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["edp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]


@given(*[st.integers(1, 3)] * 5)
def test_groups_of_experts_divide_the_ranks(edp, ep, pp, cp, tp):
    layout = Layout(dp=edp * ep, pp=pp, cp=cp, tp=tp, ep=ep)
    world = edp * ep * pp * cp * tp
    assert not layout.problems(world)
    places = [layout.coordinates(rank) for rank in range(world)]
    for axis, size in (("ep", ep), ("edp", edp)):
        groups = layout.expert_ranks()[axis]
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert all(len(group) == size for group in groups)
        step = 1 if axis == "ep" else ep
        for group in groups:
            first = places[group[0]]
            expected = [first | {"dp": first["dp"] + step * number} for number in range(size)]
            assert [places[rank] for rank in group] == expected


def test_a_single_process_has_no_groups():
    mesh = make_mesh(Layout(), torch.device("cpu"))
    assert mesh == single_process() and mesh.world == 1
    assert all(mesh.group(axis) is None for axis in ("dp", "pp", "cp", "tp", "ep", "edp"))
    assert mesh.size("ep") == mesh.size("edp") == 1
    with pytest.raises(RuntimeError, match="one process only"):
        mesh["tp"]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"RANK": "x"}, "RANK='x' is no number"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK='-1' is no number"),
        ({"RANK": "1"}, "RANK=1 is none of WORLD_SIZE=1 processes"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 is none of WORLD_SIZE=0 processes"),
        ({"WORLD_SIZE": "2"}, "but RANK, MASTER_ADDR, MASTER_PORT are not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a"}, "but MASTER_PORT is not set"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "b"},
            "MASTER_PORT='b' is no number",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "99999"},
            "MASTER_PORT='99999' is no number of a port",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "", "MASTER_PORT": "29511"},
            "but MASTER_ADDR is not set",
        ),
        ({"WORLD_SIZE": "9" * 5000}, "is no number"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK=0 is none of LOCAL_WORLD_SIZE=0 processes"),
    ],
)
def test_a_place_that_is_half_told_is_named(told, words, monkeypatch, capsys):
    for name in {*NUMBERS, *ADDRESS}:
        monkeypatch.delenv(name, raising=False)
    for name, text in told.items():
        monkeypatch.setenv(name, text)
    assert main(["train", "qwen3-tiny", "--run.device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and "torchrun" in line


def test_without_a_launcher_there_is_one_process():
    assert Launch.read({}) == Launch(0, 1, 0)
    assert Launch.read({"LOCAL_RANK": "7"}) == Launch(0, 1, 7)  # as some launchers say it
    assert Launch.read({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == Launch(3, 4, 1)
    with processes(Layout(), torch.device("cpu"), Launch()) as mesh:
        assert mesh.world == 1
    with (
        pytest.raises(ValueError, match="needs 2 processes"),
        processes(Layout(dp=2), torch.device("cpu"), Launch()),
    ):
        pass


def test_ranks_are_connected_before_anything_fills_their_devices(monkeypatch):
    calls = []

    def noted(name):
        return lambda *args, **_: calls.append(name)

    for name in ("init_process_group", "all_reduce", "barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, noted(name))
    monkeypatch.setattr("packgraph.parallel.ranks.make_mesh", noted("mesh"))
    with processes(Layout(), torch.device("cpu"), Launch(world=2)):
        calls.append("work")
    assert calls[:4] == ["init_process_group", "all_reduce", "mesh", "work"]


@given(*[st.integers(1, 3)] * 5)
def test_groups_of_replicas_and_ranks_that_share_rows_divide_the_ranks(edp, ep, pp, cp, tp):
    layout = Layout(dp=edp * ep, pp=pp, cp=cp, tp=tp, ep=ep)
    places = [layout.coordinates(rank) for rank in range(edp * ep * pp * cp * tp)]
    for axis, size in (("copies", edp * ep * cp), ("expert_copies", edp * cp)):
        groups = layout.replica_ranks()[axis]
        assert sorted(rank for group in groups for rank in group) == list(range(len(places)))
        assert all(len(group) == size and group == sorted(group) for group in groups)
        for group in groups:
            alike = {(places[rank]["pp"], places[rank]["tp"]) for rank in group}
            experts = {places[rank]["dp"] % ep for rank in group}
            assert len(alike) == 1 and (axis == "copies" or len(experts) == 1)


def sum_over_experts(mesh):
    sums = {}
    for axis in ("dp", "ep", "edp", "copies", "expert_copies"):
        value = torch.tensor([mesh.rank])
        if mesh.group(axis) is not None:
            dist.all_reduce(value, group=mesh.group(axis))
            assert mesh.place.get(axis, dist.get_rank(mesh.group(axis))) == dist.get_rank(
                mesh.group(axis)
            )
            assert mesh.size(axis) == dist.get_world_size(mesh.group(axis))
        sums[axis] = int(value)
    return sums


@pytest.mark.parametrize(
    ("layout", "sums"),
    [
        (Layout(cp=2), [(2, 0, 2, 6, 6), (4, 1, 4, 6, 6), (2, 2, 2, 6, 6), (4, 3, 4, 6, 6)]),
        (Layout(cp=2, ep=2), [(2, 2, 0, 6, 1), (4, 4, 1, 6, 1), (2, 2, 2, 6, 5), (4, 4, 3, 6, 5)]),
        (Layout(cp=2, tp=2), [(0, 0, 0, 2, 2), (1, 1, 1, 4, 4), (2, 2, 2, 2, 2), (3, 3, 3, 4, 4)]),
    ],
    ids=str,
)
def test_groups_of_ranks_that_share_rows(layout, sums):
    assert [
        tuple(found.values()) for found in run_ranks(sum_over_experts, 4, layout=layout)
    ] == sums


def fail_on_one_rank(mesh):
    if mesh.rank == 1:
        raise ValueError("bad weights on this rank")
    dist.barrier()


def test_a_rank_that_raises_ends_all_with_its_error():
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 failed[^~]*bad weights on this rank"):
        run_ranks(fail_on_one_rank, 2)
    assert time.monotonic() - started < 30


def never_end(mesh):
    if mesh.rank == 0:
        time.sleep(60)


def test_ranks_that_hang_are_ended():
    with pytest.raises(RankFailed, match=r"ranks \[0\] did not finish"):
        run_ranks(never_end, 2, seconds=30.0 if torch.cuda.is_available() else 3.0)
