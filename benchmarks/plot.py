"""The pictures of docs/benchmarks from rows: python benchmarks/plot.py benchmarks/results/*.jsonl
[--out docs/benchmarks]

One SVG file for each kind of row that there is, and `front.svg`, the first picture of README; what
was not measured is not drawn. Needs matplotlib (`pip install matplotlib`).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from result_rows import newest, read_rows, step_kinds

from packgraph.bench.rows import Row

ROOT = Path(__file__).parents[1]
Series = dict[str, list[tuple[float, float]]]
MARKS = "osD^vP*Xhd<>p"
# The first picture of README: its rows, and what its bars are called.
FRONT, FRONT_TOKENS = ("qwen3-0.6b", 28, "layers", "flash"), (1024, 8192)
FRONT_WAYS = {
    "eager": "eager",
    "compile": "torch.compile",
    "reduce-overhead": "torch.compile,\nreduce-overhead",
    "auto+compile": "packgraph,\ngraphs + compile",
}


def by_tokens(rows: Sequence[Row], figure: str) -> Series:
    """For each way the median of a figure at each number of tokens, ascending."""
    found: Series = {}
    for row in rows:
        found.setdefault(row["way"], []).append((row["tokens"], row["figures"][figure]["median"]))
    return {way: sorted(points) for way, points in found.items()}


def tax(rows: Sequence[Row], part: str) -> Series:
    """For each backend and number of places how many times as long `part` takes as with tight
    boundaries."""
    found: Series = {}
    for row in rows:
        if row["places"] != "tight" and f"{part}_tax" in row:
            found.setdefault(f"{row['way']}, {row['places']} places", []).append(
                (row["tokens"], row[f"{part}_tax"])
            )
    return {name: sorted(points) for name, points in found.items()}


def lines(axes: Any, series: Series, title: str, unit: str) -> None:
    """Draw one line per name over the number of tokens."""
    for mark, (name, points) in zip(MARKS * 3, series.items()):
        axes.plot(*zip(*points), marker=mark, markersize=4, linewidth=1.2, label=name)
    axes.set(title=title, xlabel="tokens in the row", ylabel=unit, xscale="log")
    sizes = sorted({tokens for points in series.values() for tokens, _ in points})
    axes.set_xticks(
        sizes, [f"{size // 1024}k" if size % 1024 == 0 else str(size) for size in sizes]
    )
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def bars(
    axes: Any, names: Sequence[str], groups: dict[str, list[float]], title: str, unit: str
) -> None:
    """Draw for each name one bar of every group, side by side."""
    width = 0.8 / len(groups)
    for number, (group, values) in enumerate(groups.items()):
        places = [place + width * (number - (len(groups) - 1) / 2) for place in range(len(names))]
        shown = axes.bar(places, values, width, label=group)
        axes.bar_label(shown, fmt="%.2g", fontsize=6)
    axes.set(title=title, ylabel=unit)
    axes.set_xticks(range(len(names)), names, fontsize=7, rotation=20, ha="right")
    axes.legend(fontsize=7)


def front_speeds(rows: Sequence[Row]) -> dict[int, list[float]]:
    """Real tokens a second of each way of the first picture, for each number of tokens in a row;
    nothing where one was not measured."""
    price = {
        (row["way"], row["tokens"]): row["figures"]["ms_per_1000_tokens"]["median"]
        for row in newest(rows, "step")
        if (row["model"], row["layers"], row.get("part"), row.get("attention_asked")) == FRONT
    }
    if not all((way, tokens) in price for way in FRONT_WAYS for tokens in FRONT_TOKENS):
        return {}
    return {tokens: [1e6 / price[way, tokens] for way in FRONT_WAYS] for tokens in FRONT_TOKENS}


def draw_front(axes: Any, tokens: int, speeds: Sequence[float]) -> None:
    """Draws a bar for each way with its speed, and how many times that of eager it is."""
    shown = axes.barh(list(FRONT_WAYS.values()), speeds, 0.7, color=[*["#9aa5b1"] * 3, "#3f51b5"])
    labels = [
        f" {speed / 1000:,.0f}k" + (f"  ({speed / speeds[0]:.1f}×)" if number else "")
        for number, speed in enumerate(speeds)
    ]
    axes.bar_label(shown, labels, fontsize=10)
    axes.set_title(f"rows of {tokens:,} tokens", fontsize=11, loc="left")
    axes.set(xlim=(0, 180_000), xticks=range(0, 200_000, 50_000))
    axes.xaxis.set_major_formatter(lambda speed, _: f"{speed / 1000:g}k" if speed else "0")
    axes.invert_yaxis()  # the first way on top
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_all(rows: list[Row], out: Path) -> list[Path]:
    """Write every picture that there are rows for; returns the files."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "packgraph", "figure.constrained_layout.use": True}
    from matplotlib import pyplot

    written: list[Path] = []

    def save(figure: Any, name: str) -> None:
        written.append(out / f"{name}.svg")
        figure.savefig(written[-1], metadata={"Date": None})
        pyplot.close(figure)

    if speeds := front_speeds(rows):
        figure, both = pyplot.subplots(2, 1, figsize=(6.6, 4.6), sharex=True)
        for axes, (tokens, found) in zip(both, speeds.items()):
            draw_front(axes, tokens, found)
        both[-1].set_xlabel("tokens per second")
        save(figure, "front")
    for (model, part, asked), mine in step_kinds(newest(rows, "step")).items():
        figure, axes = pyplot.subplots(figsize=(6.4, 4.4))
        lines(
            axes,
            by_tokens(mine, "ms_per_1000_tokens"),
            f"{model}, {part}, attention: {asked}; {mine[0]['device']}",
            "ms per 1,000 real tokens",
        )
        axes.set_yscale("log")
        save(figure, f"bench_step_{model}_{part}_{asked}")
    if found := newest(rows, "attention"):
        figure, both = pyplot.subplots(1, 2, figsize=(9, 3.6))
        for axes, part in zip(both, ("forward", "backward")):
            lines(
                axes,
                tax(found, part),
                f"attention {part}; {found[0]['device']}",
                "times the tight one",
            )
        save(figure, "bench_attention")
    if found := newest(rows, "padding"):
        figure, axes = pyplot.subplots(figsize=(8, 3.6))
        bars(
            axes,
            [f"{row['way']}, {row['packed']}" for row in found],
            {
                "chosen buckets": [100 * row["padding"] for row in found],
                "the largest alone": [100 * row["padding_alone"] for row in found],
            },
            f"places for tokens that stay empty; rows of at most {found[0]['tokens']} tokens",
            "%",
        )
        save(figure, "bench_padding")
    if found := [row for row in newest(rows, "memory") if row.get("peak_ratio") is not None]:
        figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
        bars(
            axes,
            [
                f"{row['way']}{', compiled' if row['compile'] else ''}, T = {row['tokens']}"
                for row in found
            ],
            {
                "held at most": [row["peak_ratio"] for row in found],
                "reserved at most": [row["reserved_ratio"] for row in found],
            },
            f"memory over eager's; {found[0]['model']}, {found[0]['part']}",
            "times eager",
        )
        save(figure, "bench_memory")
    if found := newest(rows, "capture"):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
        bars(
            axes,
            [
                f"{row['way']}, {row['buckets']} bucket{'s' if row['buckets'] > 1 else ''}"
                for row in found
            ],
            {"capture": [1000 * row["capture_layer_seconds"] for row in found]},
            f"capture; {found[0]['model']}, {found[0]['device']}",
            "ms per layer and bucket",
        )
        save(figure, "bench_capture")
    return written


def main() -> None:
    """Read the files named on the command line, draw, say what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    asked = parser.parse_args()
    for path in draw_all(read_rows(asked.files), asked.out):
        print(path)


if __name__ == "__main__":
    main()
