"""Products by quack-kernels on a GPU of Hopper: near torch's, repeating bitwise, replayed, and what
compiled layers make of them."""

import pytest
import torch

import packgraph
from packgraph.bench.models import build_part, shape
from packgraph.kernels import quack
from packgraph.ops.grouped_gemm.products import naive_grouped_mm

pytestmark = pytest.mark.gpu
RELATIVE = 0.004  # bfloat16: half of its last place, summed in another order


@pytest.fixture(scope="module", autouse=True)
def installed():
    """Skips where the library is absent or the device is another one."""
    if torch.cuda.get_device_capability()[0] != quack.HOPPER:
        pytest.skip("the tile was measured on compute capability 9 only")
    if (reason := quack.library().reason) is not None:
        pytest.skip(reason)


def draw(*sizes, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*sizes, generator=generator, device="cuda").bfloat16()


def near(found, expected):
    expected = expected.float()
    assert ((found.float() - expected).norm() <= RELATIVE * expected.norm()).item()


@pytest.mark.parametrize("rows", [4096, 4001])
@pytest.mark.parametrize("transposed", [True, False], ids=["forward", "rows"])
def test_products_are_torchs_and_repeat(rows, transposed):
    left = draw(rows, 1096)
    right = draw(1032, 1096).t() if transposed else draw(1096, 1032)
    assert quack.is_faster(left, right)
    found = quack.product(left, right)
    near(found, left.float() @ right.float())
    assert torch.equal(found, quack.product(left, right))
    moved = torch.empty(left.numel() + 1, dtype=left.dtype, device="cuda")[1:].view_as(left)
    moved.copy_(left)
    assert torch.equal(found, quack.product(moved, right)), "wherever it lies"


@pytest.mark.parametrize("counts", [[0, 700, 130, 0, 3000, 1, 64, 0], [500] * 8], ids=str)
@pytest.mark.parametrize("transposed", [True, False], ids=["forward", "rows"])
def test_rows_of_experts_are_multiplied_and_nothing_behind_them_is_read(counts, transposed):
    used, experts = sum(counts), len(counts)
    rows = draw(used + 300, 336)
    rows[used:] = torch.nan
    matrices = draw(experts, 272, 336).mT if transposed else draw(experts, 336, 272)
    offsets = torch.tensor(counts, device="cuda").cumsum(0).int()
    found = quack.grouped_product(rows, matrices, offsets)[:used]
    near(found, naive_grouped_mm(rows.float(), matrices.float(), offsets)[:used])
    assert torch.equal(found, quack.grouped_product(rows, matrices, offsets)[:used])


def test_gradients_of_experts_are_added_and_those_without_rows_keep_theirs():
    counts = [0, 700, 130, 0, 3000, 1, 64, 0]
    used, experts = sum(counts), len(counts)
    left, right = draw(used + 300, 336), draw(used + 300, 272, seed=1)
    left[used:] = right[used:] = torch.nan
    offsets = torch.tensor(counts, device="cuda").cumsum(0).int()
    before = draw(experts, 336, 272, seed=2)
    totals = [before.clone(), before.clone()]
    for total in totals:
        quack.add_grouped(total, left, right, offsets)
    expected, start = before.float(), 0
    for number, end in enumerate(offsets.tolist()):
        expected[number] += left[start:end].float().mT @ right[start:end].float()
        start = end
    near(totals[0], expected)
    assert torch.equal(*totals)
    for number, count in enumerate(counts):
        assert count or torch.equal(totals[0][number], before[number])


def test_replays_multiply_by_their_own_offsets_and_nothing_waits():
    left, right = draw(4096, 336), draw(4096, 272, seed=1)
    matrices, total = draw(4, 336, 272), torch.zeros(4, 336, 272, device="cuda").bfloat16()
    offsets = torch.tensor([100, 2000, 2000, 4096], device="cuda").int()

    def work():
        quack.add_grouped(total, left, right, offsets)
        return quack.grouped_product(left, matrices, offsets), quack.product(left, matrices[0])

    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(3):
        left.copy_(draw(4096, 336, seed=seed + 5))
        offsets.copy_(torch.tensor([0, 500 * seed, 3000, 4000], device="cuda"))
        total.zero_()
        graph.replay()
        replayed = [found[0][:4000].clone(), found[1].clone(), total.clone()]
        total.zero_()
        made = work()
        assert all(map(torch.equal, replayed, [made[0][:4000], made[1], total]))


def test_compiled_layers_make_large_products_by_it_bitwise_in_graphs(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    made = []
    launch = quack._launch
    monkeypatch.setattr(
        quack, "_launch", lambda *x, **options: (made.append(x[0].shape), launch(*x, **options))
    )
    torch.use_deterministic_algorithms(True)
    tokens = 4096
    model = build_part("model", shape("qwen3-0.6b", 2), torch.device("cuda"), torch.bfloat16)
    documents = [[torch.randint(1000, (size,)) for size in sizes] for sizes in SIZES]
    capacity = packgraph.Capacity(tokens, 8, tokens)
    batches = [packgraph.PackedBatch.build(x, capacity).to("cuda") for x in documents]

    def run(model):
        for parameter in model.parameters():
            parameter.grad = None
        losses = []
        for batch in batches:
            loss = model(batch)
            loss.backward()
            losses.append(loss.detach().clone())
        return [*losses, *(parameter.grad.clone() for parameter in model.parameters())]

    graphed = packgraph.graph(model, warmup=1, strict=True, compile=True)
    with packgraph.eager("compare"):
        eager = run(graphed)
    assert len(made) >= 2 * 14, "seven products a layer each way"
    replayed = [run(graphed) for _ in range(2)][-1]
    assert graphed.stats.replayed >= 3
    assert all(map(torch.equal, eager, replayed))


SIZES = [[2000, 2000], [4096], [100, 3000, 900]]
