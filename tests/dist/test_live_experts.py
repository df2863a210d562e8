"""Experts of transformers' models shared by ranks: losses and all gradients are those of one
process with all of them, graphs equal eager, and rows without room are noticed."""

import functools

import pytest
import torch
from dispatchkit import EmulatedBuffers
from distkit import CPU, run_ranks
from memorykit import counting

import packgraph
from packgraph.moe.dispatch.over_ranks import make_dispatcher
from packgraph.parallel.deferred import values_of
from packgraph.parallel.expert import split_experts
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import part_of
from packgraph.train.features.moe import Overflow

pytest.importorskip("transformers", reason="the models are of this library")

from packed_families import (
    CAPACITY,
    CASES,
    DOCUMENTS,
    any_decoder,
    batch_of,
    build,
    draw_weights,
    random_batches,
)

from packgraph.integrations.transformers import load_deferred, packed
from packgraph.integrations.transformers.experts import (
    exchanged_width,
    expert_split_problems,
    experts_of,
)

LISTED = (
    *("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "qwen3_next"),
)
UNLISTED = (
    *("olmoe", "ernie4_5_moe", "dots1", "minimax_m2", "qwen2_moe", "granitemoe"),
    "hunyuan_v1_moe",
)
TOLERANCE = 2e-5  # float32: an expert's gradient is a sum over both replicas in another order
EP = Layout(ep=2)


def whole(family):
    made = build(family) if family in CASES else draw_weights(any_decoder(family))
    return packed(made, prove=False)  # tests of `packed` prove the others


def split(family, mesh, name="padded", factor=2.0):
    live = whole(family)
    pairs = CAPACITY.tokens * live.config.num_experts_per_tok
    width, group = exchanged_width(live), mesh.group("ep")
    buffers = EmulatedBuffers(group, pairs, factor, width, torch.float32)
    split_experts(
        live, mesh, functools.partial(make_dispatcher, name, factor=factor, buffers=buffers)
    )
    return live


def trained(live, batch, tokens):
    """Loss of a batch of a step with so many tokens, and every gradient."""
    live.zero_grad()
    loss = live(batch, torch.tensor(tokens))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in live.named_parameters() if p.grad is not None}


def off(found, expected):
    """How far apart, as a part of the largest number that was expected."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def compare(mesh, families, names):
    """By family and dispatcher: the most that a loss or a gradient is off, and how many gradients
    were those of parts."""
    batches = [batch_of(DOCUMENTS), batch_of([document[::-1] for document in DOCUMENTS[:3]])]
    tokens = sum(batch.num_loss_tokens for batch in batches)
    found = {}
    for family in families:
        one = whole(family).eval()
        losses, gradients = zip(*(trained(one, batch, tokens) for batch in batches), strict=True)
        for name in names:
            live = split(family, mesh, name).eval()
            loss, mine = trained(live, batches[mesh.rank], tokens)
            assert mine.keys() == gradients[0].keys() | gradients[1].keys()
            most, parts = abs(loss / losses[mesh.rank] - 1), 0
            for key, parameter in live.named_parameters():
                if key not in mine:
                    continue
                if (part := part_of(parameter)) is None:
                    expected = gradients[mesh.rank][key]
                else:
                    first, parts = part.offsets[0], parts + 1
                    assert part.shape == one.get_parameter(key).shape and part.shape[0] == 4
                    expected = (gradients[0][key] + gradients[1][key])[first : first + 2]
                    assert torch.equal(parameter, one.get_parameter(key)[first : first + 2])
                most = max(most, off(mine[key], expected))
            assert not any(experts.dispatching.evaluation_demand for experts in experts_of(live))
            found[family, name] = most, parts, len(experts_of(live))
    return found


@pytest.mark.parametrize("families", [LISTED, UNLISTED], ids=["listed", "unlisted"])
def test_shared_experts_are_those_of_one_process(families):
    for found in run_ranks(compare, 2, families, ("padded", "symmetric"), layout=EP):
        assert len(found) == 2 * len(families)
        for which, (most, parts, layers) in found.items():
            stacks = 4 if which[0] == "gpt_oss" else 2
            assert layers and parts == stacks * layers, which
            assert most < TOLERANCE, which


def test_rows_of_exactly_what_is_routed_give_the_same():
    for found in run_ranks(compare, 2, ("qwen3_moe", "gpt_oss"), ("host_splits",), layout=EP):
        assert all(most < TOLERANCE for most, _, _ in found.values())


def replayed(mesh, family, name):
    traces = []
    for wrap in (lambda live: live, functools.partial(packgraph.graph, warmup=1, strict=True)):
        called = wrap(split(family, mesh, name))
        batches = random_batches(5, seed=mesh.rank)
        traces.append([trained(called, batch, 40) for batch in batches])
    return traces, called.stats.replayed


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_moe", "padded"), ("gpt_oss", "symmetric")], ids=str
)
def test_their_graphs_equal_eager_bit_by_bit(family, name):
    for (eager, graphed), replays in run_ranks(replayed, 2, family, name, layout=EP):
        assert replays == 4
        for (loss, ours), (expected, theirs) in zip(graphed, eager, strict=True):
            assert loss == expected
            assert all(torch.equal(*pair) for pair in zip(ours.values(), theirs.values()))


def crowd(live):
    """Let all tokens choose the experts of the first rank."""
    for name, value in [*live.named_parameters(), *live.named_buffers()]:
        if name.endswith(("router.bias", "e_score_correction_bias")):
            value.data.copy_(torch.tensor([9.0, 9.0, -9.0, -9.0]))


def overflows(mesh, family, name):
    batch, tokens = batch_of(), 2 * batch_of().num_loss_tokens
    one, live = whole(family), split(family, mesh, name, factor=1.0)
    crowd(one), crowd(live)
    expected, _ = trained(one, batch, tokens)
    overflow = Overflow([live], mesh.everyone(), CPU)
    with torch.no_grad():
        live(batch)
    evaluated = overflow.take_demand("evaluation_demand")
    losses, blocked, told = [], [], ""
    for attempt in range(2):
        losses.append(abs(trained(live, batch, tokens)[0] / expected - 1))
        blocked.append(bool(overflow.agree()))
        told += overflow.make_room() if attempt == 0 else ""
    return evaluated, losses, blocked, told


@pytest.mark.parametrize(
    ("family", "name"), [("deepseek_v3", "padded"), ("gpt_oss", "symmetric")], ids=str
)
def test_rows_without_room_block_the_step_and_get_room(family, name):
    for evaluated, losses, blocked, told in run_ranks(overflows, 2, family, name, layout=EP):
        assert evaluated > 1 and blocked == [True, False] and "a rank needed" in told
        assert losses[0] > 1e-3 and losses[1] < TOLERANCE


def deferred(mesh, folder):
    """The names of parts that differ from those of the whole model; the most memory that the
    process took, as a part of the experts."""
    with counting() as held:
        live = packed(load_deferred(folder, dtype=torch.float32))
        split_experts(live, mesh, functools.partial(make_dispatcher, "padded", factor=2.0))
        most = held.peak
    expected, different, experts = whole("qwen3_moe"), [], 0
    for name, parameter in live.named_parameters():
        if (fill := values_of(parameter)) is None:
            continue
        part, target = part_of(parameter), torch.empty(parameter.shape)
        first = 0 if part is None else part.offsets[0]
        fill([((first,) + (0,) * (target.ndim - 1), target)])
        wanted = expected.get_parameter(name)[first : first + len(target)]
        if not torch.equal(target, wanted):
            different.append(name)
        experts += 0 if part is None else part.shape.numel() * 4
    return different, experts, most / experts


def test_no_rank_has_memory_for_all_experts(tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    for different, experts, share in run_ranks(deferred, 2, str(tmp_path), layout=EP):
        assert not different and experts and share < 0.5


def refused(mesh):
    live = split("qwen3_moe", mesh)
    by = functools.partial(make_dispatcher, "padded", factor=2.0)
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.experts: these experts were split before"
    ):
        split_experts(live, mesh, by)
    sizes = dict.fromkeys(("num_experts", "num_local_experts"), 5)
    five = packed(build("qwen3_moe", **sizes), prove=False)
    with pytest.raises(ValueError, match="5 experts cannot be shared equally by 2 ranks"):
        split_experts(five, mesh, by)
    waiting = split("qwen3_moe", mesh, "host_splits")
    assert all("the host reads" in stage.eager for stage in waiting.stages()[1:-1])
    expected = trained(waiting, batch_of(), 40)
    graphed = packgraph.graph(waiting, warmup=0, strict=True)
    for _ in range(2):
        assert trained(graphed, batch_of(), 40)[0] == expected[0]
    return True


def test_what_cannot_be_is_refused():
    assert all(run_ranks(refused, 2, layout=EP))


def test_why_experts_cannot_be_shared():
    assert expert_split_problems(whole("llama"), 2) == [
        "it has no experts that run through transformers' interface"
    ]
    live = whole("gpt_oss")
    assert not expert_split_problems(live, 2)
    name, experts = "GptOssExperts", experts_of(live)
    (unequal,) = expert_split_problems(live, 3)
    assert unequal == f"3 ranks cannot share the 4 experts of {name} equally"
    experts[1].scale = torch.nn.Parameter(torch.ones(()))
    experts[1].register_buffer("limits", torch.ones(4))
    assert expert_split_problems(live, 3) == [
        unequal,
        f"scale of {name} is no stack of its 4 experts",
        f"{name} has buffers, which would stay whole",
    ]


def test_adapters_of_experts_cannot_be_shared():
    peft = pytest.importorskip("peft", reason="the adapters are of this library")
    config = peft.LoraConfig(target_parameters=["experts.down_proj"])
    with_adapters = peft.get_peft_model(build("qwen3_moe"), config)
    assert "adapters of its experts would stay whole" in expert_split_problems(with_adapters, 2)


def test_experts_that_came_later_are_refused():
    live = whole("qwen3_moe")
    block = live.layers[0].mlp
    block.experts = type(block.experts)(live.config)
    with pytest.raises(ValueError, match=r"Qwen3MoeExperts came after packed\(model\)"):
        live(batch_of())
