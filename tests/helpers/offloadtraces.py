"""Traces of offloading for tests: small ones of any kind, and layers as a decoder has them."""

from hypothesis import strategies as st

from packgraph.offloading.plan import CopySpeed, OffloadGroup, OffloadTrace

MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_act")


def make_trace(
    sizes: list[int],
    times: list[float],
    slots: int = 1,
    other_bytes: int = 0,
    backward_times: list[float] | None = None,
) -> OffloadTrace:
    """Groups one after another, and back in reverse; a backward takes twice as long as its forward,
    or as given."""
    back_times = backward_times or [2.0 * time for time in times]
    ends = [sum(times[: index + 1]) for index in range(len(times))]
    starts = [sum(back_times[index + 1 :]) for index in range(len(times))]
    groups = tuple(
        OffloadGroup(
            MODULES[index % len(MODULES)], index // len(MODULES), size, ends[index], starts[index]
        )
        for index, size in enumerate(sizes)
    )
    return OffloadTrace(groups, sum(times), sum(back_times), slots, other_bytes)


def decoder_trace(layers: int, slots: int = 1) -> OffloadTrace:
    """Layers of an 8B-shaped decoder at 8,192 tokens: about 0.8 GiB and 10 ms of forward each."""
    hidden = 8192 * 4096 * 2
    one = [
        (hidden, 20.0),
        (hidden, 1000.0),
        (3 * hidden // 2, 1400.0),
        (hidden, 700.0),
        (hidden, 20.0),
        (7 * hidden, 7000.0),
    ]
    return make_trace([size for size, _ in one] * layers, [time for _, time in one] * layers, slots)


def measured_trace(widths: str, forward_room: int = 0) -> OffloadTrace:
    """Eight layers at 8,192 tokens in bfloat16 as one H200 runs them: bytes as measured, times as
    the products' shares.

    widths: `qwen3-8b` or `moonlight`.
    """
    forward_us, layer = {
        "qwen3-8b": (
            53_000.0,
            (
                ("", 0, 2),
                ("qkv_linear", 145, 13),
                ("core_attn", 161, 9),
                ("attn_proj", 0, 8),
                ("", 0, 2),
                ("mlp_act", 832, 66),
            ),
        ),
        "moonlight": (
            33_000.0,
            (
                ("", 0, 2),
                ("qkv_linear", 72, 10),
                ("core_attn", 257, 13),
                ("attn_proj", 0, 4),
                ("", 0, 3),
                ("mlp_act", 176, 8),
                ("expert_fc1", 192, 20),
                ("moe_act", 176, 25),
                ("", 0, 15),
            ),
        ),
    }[widths]
    times = [share / 100 * forward_us / 8 for _ in range(8) for _, _, share in layer]
    groups = []
    for index in range(8 * len(layer)):
        name, mebibytes, _ = layer[index % len(layer)]
        if name:
            groups.append(
                OffloadGroup(
                    name,
                    index // len(layer),
                    mebibytes * 2**20,
                    sum(times[: index + 1]),
                    2 * sum(times[index + 1 :]),
                )
            )
    return OffloadTrace(tuple(groups), sum(times), 2 * sum(times), forward_room=forward_room)


def compiled_trace(widths: str, forward_room: int = 0, parts: int = 1) -> OffloadTrace:
    """Layers as `measured_trace`, compiled: what a layer saves comes and goes at one time, in
    mebibytes per tensor."""
    forward_us, sizes = {
        "qwen3-8b": (48_000.0, (64, 64, 16, 16, 64, 64, 192, 192, 64)),
        "moonlight": (28_000.0, (32, 64, 64, 32, 32, 32, 44, 44, 48, 96, 88, 64)),
    }[widths]
    groups, total = list[OffloadGroup](), sum(sizes)
    for layer in range(8):
        chosen = list[list[int]]()
        for index, size in enumerate(sizes):
            if parts * sum(sizes[:index]) >= len(chosen) * total:
                chosen.append([])
            chosen[-1].append(size)
        groups += [
            OffloadGroup(
                "layer",
                layer,
                2**20 * sum(part),
                forward_us / 8 * (layer + 1),
                2 * forward_us / 8 * (7 - layer),
                len(part),
                number,
            )
            for number, part in enumerate(chosen)
        ]
    return OffloadTrace(tuple(groups), forward_us, 2 * forward_us, forward_room=forward_room)


@st.composite
def small_traces(draw: st.DrawFn, least: int = 0, most: int = 6) -> OffloadTrace:
    """Any order of backwards, groups of no bytes and of no time, parts, rooms, several slots."""
    count = draw(st.integers(least, most))
    sizes = draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    ends = sorted(draw(st.lists(st.integers(0, 40), min_size=count, max_size=count)))
    starts = draw(st.lists(st.integers(0, 80), min_size=count, max_size=count))
    if draw(st.booleans()):
        starts.sort(reverse=True)
    parts = [0] * count
    for index in range(1, count):
        parts[index] = parts[index - 1] + 1 if draw(st.integers(0, 3)) == 0 else 0
    groups = tuple(
        OffloadGroup(
            "core_attn",
            index - parts[index],
            *values,
            draw(st.integers(1, 2)),
            parts[index],
            tuple(draw(st.sets(st.integers(0, 3), max_size=2))),
        )
        for index, values in enumerate(zip(sizes, ends, starts))
    )
    return OffloadTrace(
        groups,
        max(ends, default=0) + draw(st.integers(0, 9)),
        max(starts, default=0) + draw(st.integers(0, 9)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([0, 17])),
        draw(st.sampled_from([0, 6])),
        tuple(draw(st.lists(st.integers(0, 12), min_size=count, max_size=count)))
        if draw(st.booleans())
        else (),
    )


def speeds() -> st.SearchStrategy[CopySpeed]:
    """From hopeless to faster than needed."""
    rate = st.sampled_from([0.25, 0.5, 1.0, 2.0, 5.0])
    return st.builds(CopySpeed, rate, rate, st.sampled_from([0.0, 0.5, 2.0]))
