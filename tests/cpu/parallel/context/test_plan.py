"""Dynamic context parallelism: every document once, in rows that hold it; near the lower bound,
which nothing beats."""

import itertools
import json
import random
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from bench_padding import DISTRIBUTIONS, lengths_like

from packgraph import cli
from packgraph.packing.buckets.cost import FLASH4, CostModel
from packgraph.parallel.context.plan import ContextPlan, _share, lower_bound, plan_context
from packgraph.parallel.context.request import ContextCost, ContextRequest, fit
from packgraph.parallel.layout import powers_of_two
from packgraph.viz.context import context_values, describe_context, draw_context_svg

pytest.importorskip("hypothesis")
from hypothesis import given, strategies

SVG = "{http://www.w3.org/2000/svg}"
TOKENS = 32
WORST, MEAN = (
    1.35,
    1.005,
)  # times the best plan there is, for at most 6 documents on at most 4 ranks
VARLEN, FLASH = ContextCost.of(CostModel()), ContextCost.of(FLASH4)
PLAIN = ContextCost(
    microbatch_us=10.0,
    token_us=1.0,
    attention_us=0.1,
    group_us=10.0,
    exchange_us=0.5,
    document_us=1.0,
)
COSTS = strategies.one_of(
    strategies.sampled_from([VARLEN, FLASH, PLAIN]),
    strategies.builds(
        ContextCost,
        microbatch_us=strategies.sampled_from([0.0, 10.0]),
        token_us=strategies.just(1.0),
        attention_us=strategies.sampled_from([0.0, 0.01, 1.0]),
        group_us=strategies.sampled_from([0.0, 50.0]),
        exchange_us=strategies.sampled_from([0.0, 0.3, 2.0]),
        document_us=strategies.sampled_from([0.0, 1.0]),
        gather_us=strategies.sampled_from([0.0, 0.3]),
        zigzag=strategies.sampled_from([(), (2, 4, 8), (4, 8, 12)]),
    ),
)
PLACES = strategies.sampled_from([(2,), (2, 4), (1, 8), (16, 64)])


@strategies.composite
def requests(draw, worlds=(1, 2, 3, 4, 6, 8, 12)):
    """Requests with any legal sizes: powers of two, or any divisors that have the smallest in
    common."""
    world = draw(strategies.sampled_from(worlds))
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    smallest = draw(strategies.sampled_from(divisors))
    others = draw(
        strategies.sets(
            strategies.sampled_from([size for size in divisors if size % smallest == 0])
        )
    )
    sizes = draw(strategies.sampled_from([(), (smallest, *others)]))
    return ContextRequest(
        world=world, tokens=TOKENS, sizes=sizes, places=draw(PLACES), cost=draw(COSTS)
    )


def lengths_for(request, most):
    return strategies.lists(
        strategies.integers(1, request.longest) | strategies.integers(1, 8), max_size=most
    )


def check(plan: ContextPlan) -> None:
    """Everything that holds of every plan."""
    request, lengths = plan.request, plan.lengths
    placed = [
        document
        for microstep in plan.microsteps
        for group in microstep
        for document in group.documents
    ]
    assert sorted([*placed, *plan.left]) == list(range(len(lengths))), (
        "every document once, or it waits"
    )
    for microstep in plan.microsteps:
        assert [rank for group in microstep for rank in group.ranks] == list(
            range(request.world)
        ), "all ranks, once"
        for group in microstep:
            tokens = [lengths[document] for document in group.documents]
            assert group.size in request.sizes and group.first % group.size == 0
            assert group.bucket.holds(sum(tokens), len(tokens), max(tokens, default=0))
            assert group.bucket == request.bucket(group.size, len(tokens)), (
                "the fewest places that are enough"
            )
            pairs = sum(length * length for length in tokens)
            assert group.us == pytest.approx(
                request.cost.row_us(group.size, request.tokens, group.bucket.documents, pairs)
            )
            assert tokens or group.size == request.sizes[0], (
                "ranks without documents run the cheapest empty row"
            )
    assert plan.step_us == pytest.approx(max(plan.rank_us)), (
        "no rank waits before the end of the step"
    )
    assert plan.step_us <= plan.barrier_us * (1 + 1e-12)
    assert plan.balance <= 1 + 1e-9, "the bound is one"
    assert len(plan.microsteps) >= plan.bound.microsteps
    assert len(plan.buckets) <= len(request.sizes) * len(request.places)
    sizes = sorted({size for size, _ in plan.buckets})
    assert all(large % small == 0 for small, large in itertools.pairwise(sizes)), (
        "blocks are nested"
    )


def brute_force(lengths, request, microsteps, best):
    """The least time of the busiest rank in so many microsteps, if below `best`: branch and bound
    over all rows."""
    cost, tokens = request.cost, request.tokens
    empty = cost.row_us(request.sizes[0], tokens, request.places[0], 0.0)
    loads, used, rows = [empty * microsteps] * request.world, [0] * request.world, []
    order = sorted(lengths, reverse=True)

    def us(size, row):
        return cost.row_us(
            size, tokens, request.places_for(max(1, len(row))), sum(length**2 for length in row)
        )

    def change(size, first, microseconds, rows_more):
        for rank in range(first, first + size):
            loads[rank] += microseconds
            used[rank] += rows_more

    def place(number, best):
        if max(loads) >= best * (1 - 1e-12) or number == len(order):
            return min(best, max(loads))
        length, tried = order[number], set()
        for size, first, row in list(rows):
            if sum(row) + length <= size * tokens and len(row) < request.places[-1]:
                more = us(size, [*row, length]) - us(size, row)
                row.append(length)
                change(size, first, more, 0)
                best = place(number + 1, best)
                change(size, first, -more, 0)
                row.pop()
        for size in request.sizes:
            for first in range(0, request.world if size * tokens >= length else 0, size):
                if max(used[first : first + size]) < microsteps and not (
                    not rows and size in tried
                ):
                    tried.add(size)
                    more = us(size, [length]) - empty
                    rows.append((size, first, [length]))
                    change(size, first, more, 1)
                    best = place(number + 1, best)
                    change(size, first, -more, -1)
                    rows.pop()
        return best

    return place(0, best)


@given(strategies.data())
def test_every_plan_is_legal_and_the_same_twice(data):
    request = data.draw(requests())
    lengths = data.draw(lengths_for(request, 40))
    plan = plan_context(lengths, request)
    check(plan) if lengths else None
    assert plan.left == () and plan == plan_context(lengths, request)


@given(strategies.data(), strategies.integers(1, 4))
def test_a_step_of_so_many_microsteps_leaves_the_rest_for_the_next(data, microsteps):
    asked = data.draw(requests())
    request = ContextRequest(
        world=asked.world,
        tokens=TOKENS,
        sizes=asked.sizes,
        places=asked.places,
        cost=asked.cost,
        microsteps=microsteps,
    )
    waiting = data.draw(lengths_for(request, 30))
    while waiting:
        plan = plan_context(waiting, request)
        check(plan)
        assert len(plan.microsteps) <= microsteps and 0 not in plan.left, (
            "who waits longest always gets in"
        )
        waiting = [waiting[document] for document in plan.left]


def test_a_step_uses_the_microsteps_it_may_before_it_leaves_documents():
    """Three documents of two thirds of a rank fill one rank's two microsteps by tokens and need
    three."""
    lengths = [2 * TOKENS // 3] * 3
    plans = [
        plan_context(lengths, ContextRequest(world=1, tokens=TOKENS, microsteps=microsteps))
        for microsteps in (2, 3, 8)
    ]
    assert [(len(plan.microsteps), plan.left) for plan in plans] == [(2, (2,)), (3, ()), (3, ())]


def compare(lengths, request):
    """The plan's time over the best there is in as many microsteps or one less."""
    plan = plan_context(lengths, request)
    check(plan)
    upper = plan.step_us * (1 + 1e-9)
    best = min(
        brute_force(lengths, request, microsteps, upper)
        for microsteps in {
            max(plan.bound.microsteps, len(plan.microsteps) - 1),
            len(plan.microsteps),
        }
    )
    assert plan.bound.step_us <= best * (1 + 1e-9), "nothing is faster than the bound"
    return plan.step_us / best


@given(strategies.data())
def test_small_plans_against_brute_force(data):
    request = data.draw(requests(worlds=(1, 2, 3, 4)))
    lengths = data.draw(lengths_for(request, 5).filter(len))
    assert 1 - 1e-8 <= compare(lengths, request) <= WORST


def test_small_plans_are_best_nearly_always():
    draw, ratios = random.Random(0), []
    for number in range(400):
        world = draw.choice([2, 4])
        request = ContextRequest(
            world=world, tokens=TOKENS, cost=[VARLEN, FLASH, PLAIN][number % 3], places=(2, 4)
        )
        longest = draw.choice([1, 2, world]) * TOKENS
        ratios.append(
            compare([draw.randint(1, longest) for _ in range(draw.randint(1, 6))], request)
        )
    assert sum(ratios) / len(ratios) < MEAN
    assert sum(ratio < 1.001 for ratio in ratios) > 0.9 * len(ratios)


@pytest.mark.parametrize("cost", [VARLEN, FLASH], ids=["varlen", "flash4"])
def test_the_public_workload_is_balanced(cost):
    """8 ranks, 2,048 tokens each, 8 microbatches, lengths lognormal(mean 1024, sigma 1.5, at most
    8192)."""
    request = ContextRequest(world=8, tokens=2048, microsteps=8, cost=cost)
    plans = [plan_context(lengths_like("lognormal", 400, 8192, seed), request) for seed in range(5)]
    for plan in plans:
        check(plan)
        assert len(plan.microsteps) == 8 and plan.balance >= 0.97 and plan.padding < 0.01
        assert len(plan.buckets) <= 6
    assert sum(plan.balance for plan in plans) / 5 >= 0.98


@pytest.mark.parametrize("world", [4, 16])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_other_families_are_balanced(kind, world):
    plan = plan_context(
        lengths_like(kind, 100 * world, 8192, 1),
        ContextRequest(world=world, tokens=2048, microsteps=8),
    )
    check(plan)
    assert plan.balance >= 0.98 and plan.padding < 0.01


def test_edges():
    request = ContextRequest(world=4, tokens=TOKENS, places=(4, 16, 64), cost=PLAIN)
    whole = plan_context([4 * TOKENS], request)
    assert [group.size for microstep in whole.microsteps for group in microstep] == [
        4
    ] and whole.padding == 0
    one = plan_context([3], request)
    check(one)
    assert (
        len(one.microsteps) == 1 and sum(not group.documents for group in one.microsteps[0]) == 3
    ), "empty ranks"
    assert one.group_of(0, 2).documents == () and one.group_of(0, 2).bucket.documents == 4
    none = plan_context([], request)
    assert none.microsteps == () and none.balance == 1 and none.step_us == 0 and none.padding == 0
    assert "in 0 microsteps" in describe_context(none) and draw_context_svg(none, "none")
    begun = time.process_time()
    tiny = plan_context([2] * 3000, request)
    assert time.process_time() - begun < 5
    check(tiny)
    assert len(tiny.microsteps) == tiny.bound.microsteps == 47 and tiny.balance > 0.9


def test_groups_are_as_large_as_it_pays():
    """Dear exchange keeps groups small; free exchange and dear attention make them large."""
    lengths = [TOKENS, 4, 4, 4]
    dear = ContextCost(microbatch_us=1.0, token_us=1.0, attention_us=0.01, exchange_us=50.0)
    free = ContextCost(
        microbatch_us=1.0, token_us=1.0, attention_us=1.0, exchange_us=0.0, group_us=0.0
    )
    sizes = [
        {
            group.size
            for microstep in plan_context(
                lengths, ContextRequest(world=4, tokens=TOKENS, cost=cost)
            ).microsteps
            for group in microstep
        }
        for cost in (dear, free)
    ]
    assert sizes == [{1}, {4}]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(
        ValueError, match=r"world must be at least 1, got 0; tokens .* got 0; microsteps .* got 0"
    ):
        ContextRequest(world=0, tokens=0, microsteps=0)
    with pytest.raises(ValueError, match="sizes: 3 does not divide the 8 ranks"):
        ContextRequest(world=8, tokens=1, sizes=(1, 3))
    with pytest.raises(ValueError, match="smallest, 2, must divide all others"):
        ContextRequest(world=6, tokens=1, sizes=(2, 3))
    with pytest.raises(
        ValueError, match="places for documents must be whole numbers of at least 1"
    ):
        ContextRequest(world=6, tokens=1, places=())
    with pytest.raises(
        ValueError,
        match=r"document 1 has 129 tokens, and the largest group holds 128 \(4 ranks x 32",
    ):
        plan_context([5, 129], ContextRequest(world=4, tokens=32))
    with pytest.raises(ValueError, match="document 0 has 0 tokens"):
        plan_context([0], ContextRequest(world=4, tokens=32))
    with pytest.raises(ValueError, match="exchange_us must be positive"):
        ContextCost(microbatch_us=1.0, token_us=1.0, attention_us=1.0, exchange_us=-1.0)
    with pytest.raises(ValueError, match="needs measured times"):
        fit([], PLAIN)


def test_sizes():
    assert powers_of_two(12) == (1, 2, 4) and ContextRequest(world=8, tokens=1).sizes == (
        1,
        2,
        4,
        8,
    )
    request = ContextRequest(world=12, tokens=10, sizes=(12, 1, 2, 3, 4, 6))
    assert set(request.chains()) == {(1, 2, 4, 12), (1, 2, 6, 12), (1, 3, 6, 12)}
    assert [request.needed(length) for length in (1, 10, 11, 30, 31, 70)] == [1, 1, 2, 3, 4, 12]
    assert request.bucket(3, 17).tokens == 30 and request.bucket(3, 17).documents == 64


@given(
    strategies.lists(strategies.integers(1, 64), min_size=1, max_size=8), strategies.integers(0, 7)
)
def test_documents_of_a_row_never_pay_more_than_the_row(lengths, steps):
    while sum(lengths) > 64:
        lengths.pop()
    assert sum(_share(length, 64, steps) for length in lengths) <= 1 + 1e-9


def test_the_bound_knows_that_two_long_documents_share_no_pair_of_ranks():
    request = ContextRequest(world=2, tokens=TOKENS, cost=PLAIN)
    lengths = [TOKENS + 1] * 3
    plan, bound = plan_context(lengths, request), lower_bound(lengths, request)
    assert len(plan.microsteps) == bound.microsteps == 3 and bound.step_us == pytest.approx(
        plan.step_us
    )
    assert lower_bound(lengths, request, 4).step_us > bound.step_us


def test_the_drawings_show_every_document():
    lengths = lengths_like("lognormal", 40, 8192, 3)
    plan = plan_context(lengths, ContextRequest(world=4, tokens=2048))
    text = describe_context(plan)
    assert (
        max(map(len, text.splitlines())) <= 120
        and text.count("\nrank ") == 3
        and text.startswith("rank 0  ")
    )
    assert f"balance   {plan.balance:.1%}" in text
    for document, length in enumerate(lengths):
        assert f"{document} ({length:,})" in describe_context(plan, 10_000)
    image = ElementTree.fromstring(draw_context_svg(plan, "<lengths> & more"))
    told = [title.text or "" for title in image.iter(f"{SVG}title")]
    assert sum(one.startswith("document ") for one in told) == len(lengths)
    width, height = float(image.get("width", 0)), float(image.get("height", 0))
    for box in image.iter(f"{SVG}rect"):
        right = float(box.get("x", 0)) + float(box.get("width", 0))
        assert (
            right <= width + 0.01 and float(box.get("y", 0)) + float(box.get("height", 0)) <= height
        )
    values = json.loads(json.dumps(context_values(plan)))
    assert sum(
        len(group["documents"]) for microstep in values["waves"] for group in microstep
    ) == len(lengths)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Documents of 2 to 512 bytes and one of 5,000."""
    path = tmp_path / "data.jsonl"
    draw = random.Random(1)
    sizes = [*(draw.randint(2, 512) for _ in range(60)), 5000]
    path.write_text(
        "".join(json.dumps({"text": "x" * size}) + "\n" for size in sizes), encoding="utf-8"
    )
    return path


def test_the_command(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(data), "--world", "4", "--tokens-per-rank", "256", "--microbatches", "3"]
    drawn = tmp_path / "plan.svg"
    assert cli.main([*words, "--svg", str(drawn)]) == 0
    text = capsys.readouterr().out
    assert "on 4 ranks of 256 tokens, 3 microbatches" in text and "wait for the next step" in text
    assert max(map(len, text.splitlines())) <= 200
    ElementTree.parse(drawn)
    assert cli.main([*words, "--json", "--sizes", "1,4", "--places", "8,32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["world"] == 4 and len(found["waves"]) == 3 and 0.5 < found["balance"] <= 1
    assert {size for size, _, _ in found["buckets"]} <= {1, 4} and {
        row[2] for row in found["buckets"]
    } <= {8, 32}
    assert cli.main(["plan", str(data), "--help"]) == 0
    assert "--tokens-per-rank N" in capsys.readouterr().out


def test_the_command_plans_rows_in_zigzag_as_a_run_would(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """qwen3-tiny has 4 heads: 8 ranks cannot share them. Documents are then counted with the
    padding of a run."""
    words = ["plan", str(data), "--world", "8", "--tokens-per-rank", "256", "--microbatches", "2"]
    assert cli.main(words) == 0
    told = (
        "rows are cut in zigzag (8 ranks: 8 ranks do not divide 4 heads), documents take up "
        "multiples of 16 places"
    )
    assert told in capsys.readouterr().out
    steps = {}
    for kind in ("ulysses", "zigzag"):
        assert cli.main([*words, "--json", "--sizes", "1,4", "--parallel.cp-kind", kind]) == 0
        found = json.loads(capsys.readouterr().out)
        multiple = 8 if kind == "zigzag" else 1
        tokens = {group["tokens"] % multiple for microstep in found["waves"] for group in microstep}
        assert tokens == {0} and found["tokens"] % multiple == 0
        steps[kind] = found["step_us"]
    assert steps["ulysses"] != steps["zigzag"]


def test_the_command_needs_data_wherever_it_stands(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--world", "4"]) == 2
    assert (
        "whose documents? For example: packgraph plan stdlib --world 8" in capsys.readouterr().err
    )
    assert cli.main(["plan", "--world", "4", str(data)]) == 0
    assert "on 4 ranks of 2,048 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "1,2"], "--sizes: goes with --world N"),
        (["--tokens-per-rank", "8"], "--tokens-per-rank: goes with --world N"),
        (["--world", "6", "--sizes", "1,4"], "4 does not divide the 6 ranks"),
        (
            ["--world", "8", "--parallel.cp-kind", "ulysses"],
            "num_heads (4) must be a multiple of 8 (--sizes)",
        ),
        (["--world", "8", "--sizes", "0,1"], "sizes: 0 does not divide the 8 ranks"),
        (
            ["--world", "2", "--tokens-per-rank", "255", "--parallel.cp-kind", "zigzag"],
            "a row of 510 tokens cannot be cut into the 4 parts that zigzag needs",
        ),
        (["--world", "0"], "world must be at least 1, got 0"),
        (["--world", "x"], "--world: expected a whole number, got 'x'"),
        (["--world", "4", "--places", "a"], "--places: expected a whole number, got 'a'"),
        (["--world", "4", "--batch", "2"], "give one of them"),
        (["--world", "4", "--svg", "nowhere/plan.svg"], "nowhere/plan.svg: cannot be written"),
        (
            ["--world", "4", "--tokens-per-rank", "256", "--data.overlong", "error"],
            "a document has",
        ),
        (
            ["--world", "1", "--tokens-per-rank", "1", "--data.overlong", "drop"],
            "no document has at most 1 tokens",
        ),
    ],
)
def test_the_command_refuses_mistakes(
    words: list[str], said: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(data), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and "Traceback" not in captured.err
