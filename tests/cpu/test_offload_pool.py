"""What graphs of a module that offloads will take is said before they are captured, and saying it changes nothing."""
import pytest
import torch
from offloadkit import CAPACITIES, DENSE, EXPERTS, by_hand, config, engine_of

from packgraph.graphs.graphed import graph
from packgraph.graphs.memory_trace import predict_bank, trace_memory
from packgraph.models.decoder import DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.plan.offload.plan import CopySpeed
from packgraph.plan.offload.search import plan_for_time

ARGUMENTS = PackedBatch.build([[1, 2, 3], [4, 5, 6, 7]], CAPACITIES[0]), torch.tensor(7)
POLICIES = {"everything": None, "half": by_hand(fraction=0.5), "planned": lambda trace: plan_for_time(
    trace, CopySpeed(), 0.5)}


def warmed(modules=DENSE, *, experts=False, granularity="chunk", scope=None, slots=1, **options):
    """A graphed model with one eager microbatch behind it, its engine (None without modules) and a plan."""
    model = DecoderModel(config(layers=3, experts=experts), seed=1)
    graphed = graph(model, capacities=CAPACITIES[:1], granularity=granularity, scope=scope, warmup=1, slots=slots,
                    strict=True)
    engine = engine_of(graphed, model, modules, **options) if modules else None
    torch.manual_seed(2)
    graphed(*ARGUMENTS).backward()
    if engine is not None:
        engine.end_step()
        engine.settle()
    return graphed, engine


def predicted(graphed, slots=1) -> int:
    return predict_bank(graphed, {CAPACITIES[0]: trace_memory(graphed, ARGUMENTS)}, slots).pools


def captured(graphed) -> int:
    graphed.build([ARGUMENTS])
    return graphed.stats.pool_bytes


@pytest.mark.parametrize(("granularity", "slots"), [("layer", 1), ("chunk", 1), ("chunk", 3)])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("way", ["kept", *POLICIES])
def test_what_graphs_take_is_predicted_with_what_has_moved(way, experts, granularity, slots):
    modules = () if way == "kept" else EXPERTS if experts else DENSE
    parts = 8 if way == "planned" else 1
    graphed, engine = warmed(modules, experts=experts, granularity=granularity, slots=slots, parts=parts,
                             policy=POLICIES.get(way))
    assert engine is None or engine.policy is None or sum(engine.plan.moves) > 0
    said = predicted(graphed, slots)
    assert said == captured(graphed)


@pytest.mark.parametrize("way", POLICIES)
@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_what_eager_work_postpones_graphs_do_not(granularity, way):
    """So what is sent after the next launch of a graph in eager work is gone in time in a trace, too."""
    graphed, _ = warmed(granularity=granularity, policy=POLICIES[way], postpones=True)
    said = predicted(graphed)
    assert said == captured(graphed)


@pytest.mark.parametrize("postpones", [False, True])
@pytest.mark.parametrize("scope", [("attn",), ("mlp",)])
def test_what_eager_stages_between_have_saved_is_not_the_graphs(scope, postpones):
    graphed, _ = warmed(EXPERTS, experts=True, granularity="layer", scope=scope, postpones=postpones)
    said = predicted(graphed)
    assert said == captured(graphed)


@pytest.mark.parametrize("times_graphs", [False, True])
@pytest.mark.parametrize("way", POLICIES)
def test_a_trace_leaves_engine_and_lanes_as_they_were(way, times_graphs):
    """So what is captured after it is what would be captured without, and eager work stays eager work."""
    facts = []
    for traces in (0, 2):
        graphed, engine = warmed(policy=POLICIES[way], times_graphs=times_graphs, late=("out", "back"))
        passes, seen, trace = engine._looks, engine._times, engine.trace
        memory = engine.lanes.memories.arenas.nbytes()
        for _ in range(traces):
            predicted(graphed)
        assert engine.lanes.scope == 0 and engine.lanes.timed is None and not engine.lanes._under_way
        assert engine._looks == passes and engine._times is seen and engine.trace == trace
        assert engine.lanes.memories.arenas.nbytes() == memory and engine.times_graphs == times_graphs
        torch.manual_seed(3)
        for _ in range(3):
            graphed(*ARGUMENTS).backward()
        assert graphed.stats.replayed == 3
        assert (engine.replayed(CopySpeed()) is not None) == (times_graphs and engine.plan is not None)
        facts.append(([p.grad.clone() for p in graphed.parameters()], graphed.stats.pool_bytes, engine.plan))
    (plain, pool, plan), (after, taken, followed) = facts
    assert all(torch.equal(a, b) for a, b in zip(plain, after, strict=True)) and pool == taken
    assert (plan is None) == (followed is None)
