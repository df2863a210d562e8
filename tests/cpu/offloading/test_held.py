"""Who holds memory of a group beside the runtime is counted exactly, and what is held stays in the
next pass."""

from dataclasses import replace

import pytest
import torch
from offloadkit import CAPACITIES, DENSE, EXPERTS, by_hand, config, same, train
from torch import nn

from packgraph.graphs.copy_streams import captured_copy_streams
from packgraph.graphs.recorder.copy_streams import EmulatedCopyStreams
from packgraph.offloading.api import attach
from packgraph.offloading.group import SavedGroup
from packgraph.offloading.runtime import OffloadRuntime

INPUT = torch.linspace(0.0, 1.0, 8)
MODULES = ("core_attn", "attn_proj", "mlp_act")
WAYS = {
    "nothing moves": {"measures": True},
    "copied": {"in_flight": 0},
    "on its way": {"in_flight": 9},
    "postponed": {"postpones": True},
}


class Saving(nn.Module):
    """Three groups, of which the second saves what the first has saved. who: saves or gets it,
    too."""

    def __init__(self, who):
        super().__init__()
        self.who, self.offload = who, None
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 8))

    def forward(self, x):
        hidden, extra = x * self.weight, 0.0
        if self.who == "an operation before":
            extra = hidden.sin()
        with self.offload("core_attn"):
            out = hidden.cos()
        with self.offload("attn_proj"):
            out = out + hidden.sinh()
        if self.who == "an operation behind":
            extra = hidden.view(2, 4).sin().view(8)
        with self.offload("mlp_act"):
            loss = (out + extra).exp().sum()
        held = {
            "the caller": hidden,
            "the caller by a view": hidden.detach()[5:],
            "the caller by its graph": hidden.grad_fn,
        }
        return loss, held.get(self.who)


def saving(who, late=(), **options):
    """(what stays of every group, by passes; copies to the host, by passes; gradient)"""
    module, copy_streams = Saving(who), EmulatedCopyStreams(late)
    runtime = OffloadRuntime(MODULES, copy_streams, **{"min_bytes": 32} | options)
    attach(runtime, module)
    stays, copies = [], []
    for _ in range(3):
        before = copy_streams._count
        loss, held = module(INPUT)
        copies.append(
            copy_streams._count - before
            if not options.get("postpones")
            else len(copy_streams.postponed)
        )
        loss.backward()
        del loss, held
        stays.append([group.stays for group in runtime._pass.times.trace().groups])
        runtime.end_step()
    return stays, copies, module.weight.grad


@pytest.mark.parametrize("late", [(), ("out", "back")])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("who", "holds"),
    [
        ("nobody", False),
        ("the caller by its graph", False),
        ("an operation before", True),
        ("an operation behind", True),
        ("the caller", True),
        ("the caller by a view", True),
    ],
)
@pytest.mark.few(3)
def test_what_others_hold_stays_from_the_next_pass_on(who, holds, way, late):
    stays, copies, gradient = saving(who, late, **WAYS[way])
    first, *others = stays[0]
    assert bool(first) == holds and not any(others) and stays[1:] == stays[:1] * 2
    if way != "nothing moves":
        assert copies == ([2, 1, 1] if holds else [2, 2, 2]), "nothing is no copy"
    assert torch.equal(gradient, saving(who, measures=True)[2])


def test_the_last_traced_pass_decides():
    """Who holds memory in the first pass alone, as the compiler of a kernel may, keeps nothing from
    moving."""
    module = Saving("the caller")
    runtime = OffloadRuntime(
        MODULES, EmulatedCopyStreams(), min_bytes=32, policy=lambda trace: None
    )
    attach(runtime, module)
    bytes_of, moved, kept = [], [], []
    for keeps in (True, False, False, True):
        loss, held = module(INPUT)
        kept = [held] if keeps else []
        del held
        moved.append(sum(group.moved_bytes for group in runtime._pass.living()))
        loss.backward()
        runtime.end_step()
        bytes_of.append(runtime.trace.groups[0].bytes)
    assert kept and bytes_of == [0, 32, 32, 0], "of the newest pass"
    assert moved == [64, 32, 64, 64]


def test_nothing_that_a_plan_decides_changes_behind_it():
    """Passes that follow a plan, also one that began before it, find nothing new."""
    module = Saving("the caller")
    runtime = OffloadRuntime(MODULES, EmulatedCopyStreams(), min_bytes=32, policy=by_hand())
    attach(runtime, module)
    for _ in range(2):
        loss, held = module(INPUT)
        del held
        loss.backward()
        runtime.end_step()
    begun, held = module(INPUT)
    runtime.settle()
    begun.backward()
    for _ in range(2):
        loss, held = module(INPUT)
        loss.backward()
        runtime.end_step()
        assert held is not None and not any(runtime._stays.values())
    assert runtime.plan.moves == (True, False, True)


def shared(**options):
    made = config(experts=True, **options)
    return replace(made, experts=replace(made.experts, shared=1))


@pytest.mark.parametrize("granularity", [None, "layer", "chunk"])
@pytest.mark.few(3)
def test_graphs_leave_the_same_memory_where_it_is(granularity, monkeypatch):
    """Its places are the same in eager passes and in captures, though a graph takes in leaves."""
    counts = {"counts": (1, 1, 2, 1), "capacities": CAPACITIES}
    commit, moved = SavedGroup.commit, {True: {}, False: {}}

    def watched(self, *args, **options):
        commit(self, *args, **options)
        own = {memory.place: memory.moved for memory in self.large}
        moved[captured_copy_streams() is not None].setdefault((self.layer, self.name), []).append(
            own
        )

    modules = [name for name in EXPERTS if granularity == "chunk" or "norm" not in name]
    monkeypatch.setattr(SavedGroup, "commit", watched)
    found, runtime, _ = train(
        shared(), modules, granularity=granularity, late=("out", "back"), policy=by_hand(), **counts
    )
    assert same(found, train(shared(), **counts)[0])
    (group,) = [group for group in runtime.trace.groups if group.stays]
    assert (group.name, group.layer) == ("mlp_act", 1) and group.bytes > 0
    assert bool(moved[True]) == (granularity is not None)
    for key, passes in moved[True].items():
        assert all(own == moved[False][key][-1] for own in passes)
    last = moved[granularity is not None][1, "mlp_act"][-1]
    assert any(last.values()) and not any(last[place] for place in group.stays)


@pytest.mark.parametrize("granularity", [None, "chunk"])
def test_nobody_else_holds_what_all_modules_of_a_dense_layer_save(granularity):
    _, runtime, _ = train(config(), DENSE, granularity=granularity, counts=(1, 3, 1))
    assert all(group.bytes > 0 and not group.stays for group in runtime.trace.groups)
