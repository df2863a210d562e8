"""The stash's kernels against the operations that specify them, in Triton's interpreter."""

import random

import pytest
import torch
from interpreterkit import inside, needs_triton, outside, run_in_interpreter

from packgraph.moe.stash.pages import Pages, naive_put, naive_release, naive_reserve, naive_take

pytestmark = needs_triton
PAGE, CPU = 16, torch.device("cpu")


@inside
@pytest.mark.parametrize(
    ("pages", "host_pages", "rows", "widths", "dtype"),
    [
        (9, 0, 70, (40, 8), torch.float32),
        (5, 4, 70, (300, 24), torch.bfloat16),
        (3, 2, 33, (8,), torch.float16),
        (0, 0, 40, (8,), torch.float32),
        (300, 0, 4500, (8,), torch.bfloat16),
    ],
    ids=str,
)
def test_kernels_equal_the_operations(pages, host_pages, rows, widths, dtype):
    """One random history of reserving, copying, releasing, resets and overflows, done twice."""
    from packgraph.moe.stash.pages import put_rows, release_pages, reserve_pages, take_rows

    order, sizes = random.Random(0), (PAGE, pages, host_pages)
    pools = [Pages(pages, host_pages, CPU) for _ in range(2)]
    buffers = [torch.full((pages * PAGE + 1, width), float("nan"), dtype=dtype) for width in widths]
    hosts = [
        torch.full((host_pages * PAGE + 1, width), float("nan"), dtype=dtype)
        if host_pages
        else None
        for width in widths
    ]
    memories = [
        [(b.clone(), h if h is None else h.clone()) for b, h in zip(buffers, hosts)]
        for _ in range(2)
    ]
    out, overflows = [], 0
    for step in range(40 if rows < 1000 else 6):
        if order.random() < 0.6 or not out:
            live = order.choice([0, 1, PAGE, PAGE + 1, rows, rows + 5, order.randrange(rows)])
            offsets = torch.tensor([0, live], dtype=order.choice([torch.int32, torch.int64]))
            records = [
                reserve(pool.state, offsets, rows, *sizes)
                for reserve, pool in zip((reserve_pages, naive_reserve), pools)
            ]
            assert torch.equal(*records)
            for number, width in enumerate(widths):
                source = torch.randn(rows, width + 8).to(dtype)[:, :width]
                for put, record, memory in zip((put_rows, naive_put), records, memories):
                    put(*memory[number], source, record, PAGE)
            out.append(records)
        else:
            records = out.pop(order.randrange(len(out)))
            for number in range(len(widths) if pages else 0):
                taken = [
                    take(pool.state, *memory[number], record, rows, PAGE)
                    for take, pool, memory, record in zip(
                        (take_rows, naive_take), pools, memories, records
                    )
                ]
                assert torch.equal(*taken)
            for release, pool, record in zip((release_pages, naive_release), pools, records):
                release(pool.state, record, *sizes)
        assert torch.equal(pools[0].state[:-1], pools[1].state[:-1])
        overflows += int(pools[0].state[0])
        for pool in pools:
            if step % 5 == 4:
                pool.clear()
            if step == 25:
                pool.reset()
    assert (overflows > 0) == (pages > 0)


@outside
def test_in_the_interpreter():
    run_in_interpreter(__file__)
