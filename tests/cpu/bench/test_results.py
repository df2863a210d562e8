"""From rows to tables and pictures, and the script that measures on a GPU: every command in it is
one that there is."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import plot
import pytest
import table
from bench import ALL, STEP_WAYS
from bench_command import read_bench
from result_rows import markdown, newest, read_rows

from packgraph.bench.rows import median, quantile, value

ROOT = Path(__file__).parents[3]
SCRIPT, RESULTS = ROOT / "benchmarks" / "h200.sh", ROOT / "benchmarks" / "results"
PAGES = [ROOT / "docs" / "benchmarks.md", *sorted((ROOT / "docs" / "benchmarks").glob("*.md"))]


def step_row(way: str, tokens: int, price: float, **more: Any) -> dict[str, Any]:
    return {
        "benchmark": "step",
        "way": way,
        "tokens": tokens,
        "model": "tiny",
        "layers": 2,
        "part": "layers",
        "reason": None,
        "attention_asked": "own",
        "device": "one",
        "commit": "abc",
        "agrees": None,
        "figures": {
            "ms_per_1000_tokens": {
                "median": price,
                "p10": price,
                "p90": price,
                "p99": price,
                "n": 1,
            }
        },
    } | more


def bank_row(benchmark: str, **more: Any) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "model": "tiny",
        "part": "layers",
        "tokens": 8,
        "device": "one",
        "reason": None,
        "commit": "abc",
        "figures": {},
    } | more


ROWS = [
    step_row("eager", 2048, 4.0),
    step_row("chunk", 1024, 2.0),
    step_row("eager", 1024, 3.0),
    step_row("eager", 1024, 5.0, attention_asked="flash"),
    bank_row("attention", way="flash", places="tight", forward_tax=1.0, backward_tax=1.0),
    bank_row("attention", way="flash", places="64", forward_tax=1.1, backward_tax=1.2),
    bank_row(
        "padding",
        way="chat",
        packed="64 at a time",
        buckets=["8x1"],
        padding=0.01,
        padding_alone=0.05,
        above_bound=0.0,
        above_bound_alone=0.1,
        seconds=0.5,
    ),
    bank_row(
        "memory", way="8 buckets", buckets=8, compile=True, peak_ratio=1.01, reserved_ratio=1.02
    ),
    bank_row("capture", way="chunk", buckets=8, capture_layer_seconds=0.004, capture_seconds=1.0),
]


def test_rows_are_read_and_the_last_of_a_kind_counts(tmp_path: Path) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in [*ROWS, {"tokens": 3}, step_row("layer", 1, 1.0) | {"reason": "no room"}]
        )
    )
    new.write_text(json.dumps(step_row("eager", 1024, 1.5)) + "\n")
    rows = read_rows([old, new])
    assert len(rows) == len(ROWS) + 1, "without what is no row and what was not measured"
    found = newest(rows, "step")
    assert [(row["way"], row["tokens"], row["attention_asked"]) for row in found] == [
        ("eager", 2048, "own"),
        ("chunk", 1024, "own"),
        ("eager", 1024, "own"),
        ("eager", 1024, "flash"),
    ]
    assert found[2]["figures"]["ms_per_1000_tokens"]["median"] == 1.5
    new.write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"new.jsonl:1 is no JSON"):
        read_rows([new])
    new.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"new.jsonl:1 is no JSON object"):
        read_rows([new])


def test_tables_of_markdown() -> None:
    columns = [
        ("way", value("way")),
        ("ms", median("ms_per_1000_tokens", 1)),
        ("old", quantile("unknown", "p99")),
    ]
    assert markdown([], columns) == ""
    assert markdown(ROWS[:2], columns).splitlines() == [
        "| way | ms | old |",
        "| --- | --- | --- |",
        "| eager | 4.0 | - |",
        "| chunk | 2.0 | - |",
    ]
    lines = table.price_table(ROWS[:3]).splitlines()
    assert lines[2:] == ["| eager | 3.000 | **4.000** |", "| chunk | **2.000** | - |"]


def test_the_pages_show_the_rows_that_there_are() -> None:
    """After new rows: python benchmarks/table.py benchmarks/results/*.jsonl --into
    docs/benchmarks/*.md, and plot.py."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    rows, whole = read_rows(sorted(RESULTS.glob("*.jsonl"))), "\n".join(texts.values())
    assert set(re.findall(r"<!-- (\w+) ?[\w.-]* -->", whole)) == {"step", *table.FLAT, "end"}
    assert [page for page in PAGES if table.with_tables(texts[page], rows) != texts[page]] == []
    assert set(table.tables(rows, "step").splitlines()) <= set(whole.splitlines()), "every model"
    assert [page.name for page in PAGES if len(page.read_bytes()) > 25_000] == []
    shown = re.findall(r"\]\(([\w.-]+\.svg)\)", whole)
    assert shown and all((PAGES[-1].parent / name).exists() for name in shown)


def test_the_figures_of_the_first_page_stand_in_the_pages_that_it_names() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    lines = re.findall(r"^\| (\d)\. \[.*?\]\((.+?)\)(.*)$", text, re.MULTILINE)
    for _, page, line in lines:
        *_, others, ours, _, commit, _ = line.split("|")
        figures = {*re.findall(r"\d[\d,.]*\d", others + ours), commit.strip(" `")}
        found = (PAGES[0].parent / page).read_text(encoding="utf-8")
        assert figures <= {*re.findall(r"\d[\d,.]*\d", found), *re.findall(r"\w+", found)}
    commands = re.findall(r"^# (\d)\n.*?(?:bench|(published))\.py (.*)$", text, re.MULTILINE)
    read = [line[0] for line in commands if line[1] or read_bench(line[2].split(), ALL)]
    assert read == [number for number, *_ in lines] == [*"12345"]


def test_readme_has_the_figures_of_its_picture_and_of_the_first_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    results = text[text.index("## Results") : text.index("## How it works")]
    speeds = plot.front_speeds(read_rows(sorted(RESULTS.glob("*.jsonl"))))
    drawn = {f"{speed:,.0f}" for _, *others in speeds.values() for speed in others}
    known = {*re.findall(r"\d+,\d+", PAGES[0].read_text(encoding="utf-8")), "1,024", "8,192"}
    shown = {*re.findall(r"\d+,\d+", results)}
    assert len(drawn) == 6 and drawn <= shown <= drawn | known
    commands = re.findall(r"`(?:python|torchrun [^`]*?) ?benchmarks/bench.py ([^`]+)`", results)
    assert len(commands) == 3 and all(read_bench(line.split(), ALL) for line in commands)
    assert plot.front_speeds(ROWS) == {}, "where a way was not measured there is no picture"


def test_pictures_are_the_same_for_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip(
        "matplotlib", reason="pictures need the extra `plot`; what they show is tested without it"
    )
    written = plot.draw_all(ROWS, tmp_path)
    assert [path.stem for path in written] == [
        "bench_step_tiny-2-layers_layers_own",
        "bench_step_tiny-2-layers_layers_flash",
        "bench_attention",
        "bench_padding",
        "bench_memory",
        "bench_capture",
    ]
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in plot.draw_all(ROWS, tmp_path)] == before
    assert plot.draw_all([], tmp_path) == []


def commands(out: Path, **environment: str) -> list[list[str]]:
    """The words of every benchmark that the script would run."""
    found = subprocess.run(
        ["bash", str(SCRIPT)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OUT": str(out), "PYTHON": "echo"} | environment,
    )
    return [shlex.split(line)[1:] for line in found.stdout.splitlines()]


@pytest.mark.skipif(sys.platform == "win32", reason="a script for bash")
def test_the_script_for_a_gpu_runs_benchmarks_that_there_are(tmp_path: Path) -> None:
    own, flash = commands(tmp_path), commands(tmp_path, ATTENTION="flash", COMMIT="abc123")
    for words in (*own, *flash):
        asked = read_bench(words, ALL)
        assert asked.device == "cuda" and asked.out is not None
        assert words[0] != "step" or (asked.part == "layers" and asked.ways[0] == "eager")
    sizes = [
        [words[words.index("--model") + 1], words[words.index("--tokens") + 1]] for words in own[:6]
    ]
    assert sizes == [
        ["qwen3-0.6b", "1024"],
        ["qwen3-0.6b", "2048"],
        ["qwen3-0.6b", "4096"],
        ["qwen3-0.6b", "8192"],
        ["qwen3-4b", "4096"],
        ["qwen3-4b", "16384"],
    ], "the whole grid before anything else"
    assert {words[0] for words in own} == {"step", "attention", "memory", "capture"}
    assert {
        way for words in own if words[0] == "step" for way in read_bench(words, ALL).ways
    } == set(STEP_WAYS)
    assert {words[0] for words in flash} == {"step"}
    assert all(
        "--commit abc123" in " ".join(words) and "--attention flash" in " ".join(words)
        for words in flash
    )


@pytest.mark.skipif(sys.platform == "win32", reason="a script for bash")
def test_the_script_for_a_gpu_ends_in_time(tmp_path: Path) -> None:
    words = commands(tmp_path, LIMIT="60")
    assert words and all(int(line[line.index("--seconds") + 1]) <= 35 for line in words)
    assert commands(tmp_path, LIMIT="30") == []
    assert "not run, the limit of 30 seconds is near" in (tmp_path / "h200_own.log").read_text()
