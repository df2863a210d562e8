"""The tables of docs/benchmarks from rows.

    PYTHONPATH=src python benchmarks/table.py benchmarks/results/*.jsonl    prints them
    ... benchmarks/results/*.jsonl --into docs/benchmarks/*.md              puts them in place

In a page the tables of a benchmark stand between the lines `<!-- step -->` and `<!-- end -->`, or
those of models whose names begin with `qwen3` between `<!-- step qwen3 -->` and `<!-- end -->`.
"""

import argparse
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from bench import ALL
from published import COLUMNS as PUBLISHED
from published import SOURCES, sources, with_ratios
from result_rows import markdown, newest, read_rows, step_kinds
from step_figures import STEP_COLUMNS

from packgraph.bench.rows import Column, Row, value

MODEL: Column = ("model", value("model"))
COMMIT: Column = (
    "commit",
    value("commit"),
)  # where one table has rows of several runs; ratios are of the row's own
COMPILED: Column = ("compiled", lambda row: "yes" if row["compile"] else "no")
FLAT: dict[str, list[Column]] = {
    "hand_made": [
        MODEL,
        *((name, value(name)) for name in ("layers", "tokens", "documents", "attention")),
        *(
            (f"{way}, {said}, ms", value(f"{key}_{kind}_ms", ".2f"))
            for kind, said in (("row", "in a row"), ("waiting", "waiting"))
            for key, way in (("by_hand", "by hand"), ("ours", "packgraph"))
        ),
        ("ratio in a row", value("row", ".3f")),
        ("ratio waiting", value("waiting", ".3f")),
        ("mfu", value("mfu", ".3f")),
    ],
    "attention": [*ALL["attention"].columns],
    "padding": [*ALL["padding"].columns],
    **{
        name: [MODEL, *ALL[name].columns]
        for name in ("memory", "capture", "integrations", "pipeline")
    },
    "context": [
        ("longest", value("longest")),
        ("places", lambda row: " ".join(map(str, row["places"]))),
        *ALL["context"].columns,
        ("attention", lambda row: row["attention"].split(" ", 1)[0]),
        COMMIT,
    ],
    "shard": [
        MODEL,
        ("layers", value("layers")),
        *ALL["shard"].columns,
        ("attention", value("attention")),
        COMMIT,
    ],
    "offload": [
        MODEL,
        COMPILED,
        ("recompute", value("recompute")),
        ("connections", value("connections")),
        *ALL["offload"].columns,
        COMMIT,
    ],
    "published": PUBLISHED,
}
SORTED = {
    "offload": ("model", "compile", "connections", "tokens")
}  # rows of several runs in one table
DRAWN = ("attention", "padding", "memory", "capture")  # by plot.py, one picture each
PLACE = re.compile(r"(<!-- (\w+) ?([\w.-]*) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables(rows: Sequence[Row], benchmark: str, model: str = "") -> str:
    """All tables of one benchmark, of models whose names begin with `model`; nothing where there
    are no rows."""
    found = [row for row in newest(rows, benchmark) if str(row.get("model")).startswith(model)]
    if not found:
        return ""
    if benchmark == "step":
        return step_tables(found)
    more = ""
    if benchmark == "published":
        found = with_ratios(found)
        more = f"{markdown(sources(found), SOURCES)}\n"
    devices = measured_on(found)
    picture = f"![{benchmark}](bench_{benchmark}.svg)\n\n" if benchmark in DRAWN else ""
    if benchmark in SORTED:
        found.sort(
            key=lambda row: [str(row.get(name)).rjust(9) for name in SORTED[benchmark]]
        )  # else as they came
    return f"{picture}{markdown(found, FLAT[benchmark])}\n{more}{wrapped(devices)}\n"


def step_tables(rows: Sequence[Row]) -> str:
    """For each model, part and attention: price of every way by tokens, then all columns."""
    text = []
    for (model, part, asked), mine in step_kinds(rows).items():
        picture = f"![by tokens](bench_step_{model}_{part}_{asked}.svg)"
        caption = (
            f"**{model}, {part}, attention: {asked}** ({measured_on(mine)}), "
            "ms per 1,000 real tokens:"
        )
        text.append(
            f"{wrapped(caption)}\n\n"
            f"{price_table(mine)}\n{picture}\n\n{markdown(mine, STEP_COLUMNS)}"
        )
    return "\n".join(text)


def measured_on(rows: Sequence[Row]) -> str:
    """Each device with the commits that were measured on it."""
    commits: dict[str, list[str]] = {}
    for row in rows:
        known = commits.setdefault(str(row["device"]), [])
        if str(row["commit"]) not in known:
            known.append(str(row["commit"]))
    return "; ".join(
        f"{device}, commit{'s' if len(known) > 1 else ''} {', '.join(known)}"
        for device, known in commits.items()
    )


def wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)


def price_table(rows: Sequence[Row]) -> str:
    """Milliseconds per 1,000 real tokens: a line per way, a column per number of tokens; the least
    in bold."""
    sizes = sorted({row["tokens"] for row in rows})
    price = {
        (row["way"], row["tokens"]): row["figures"]["ms_per_1000_tokens"]["median"] for row in rows
    }
    least = {size: min(value for (_, at), value in price.items() if at == size) for size in sizes}

    def cell(way: str, size: int) -> str:
        found = price.get((way, size))
        if found is None:
            return "-"
        return f"**{found:.3f}**" if found == least[size] else f"{found:.3f}"

    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = [
        ["way", *(f"T = {size}" for size in sizes)],
        ["---"] * (1 + len(sizes)),
        *([way, *(cell(way, size) for size in sizes)] for way in ways),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_tables(text: str, rows: Sequence[Row]) -> str:
    """A page with the tables of `rows` in their places."""
    return PLACE.sub(lambda found: f"{found[1]}{tables(rows, found[2], found[3])}{found[4]}", text)


def main(words: Sequence[str] | None = None) -> None:
    """Print all tables that there are rows for, or put them into pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--into", nargs="+", type=Path, help="pages whose tables are replaced")
    asked = parser.parse_args(words)
    rows = read_rows(asked.files)
    for page in asked.into or ():
        page.write_text(with_tables(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    for benchmark in ("step", *FLAT):
        if asked.into is None and (text := tables(rows, benchmark)):
            print(f"## {benchmark}\n\n{text}")


if __name__ == "__main__":
    main()
