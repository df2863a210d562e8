"""Drawings: every action with its slot and bucket at its time, in 120 columns; well-formed SVG; the
command."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packgraph import cli
from packgraph.parallel.pipeline.schedule import make_schedule, slot_counts, to_csv
from packgraph.viz.schedule import draw_text, make_picture, summarize

SVG = "{http://www.w3.org/2000/svg}"


def test_a_small_schedule_is_drawn_to_scale() -> None:
    text = draw_text(make_picture(make_schedule(2, 1, 3)))
    assert text.splitlines()[1:] == [
        "",
        "rank 0  F0 F1       B0─── F2 B1───    B2───",
        "  slot  a0 a1       a0    a0 a1       a0",
        "rank 1     F0 B0─── F1 B1─── F2 B2───",
        "  slot     a0 a0    a0 a0    a0 a0",
    ]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 24), st.integers(60, 120))
def test_text_shows_every_action_within_the_width(
    ranks: int, chunks: int, microbatches: int, width: int
) -> None:
    picture = make_picture(make_schedule(ranks, chunks, microbatches))
    narrow = draw_text(picture, width, most_panels=1000).splitlines()
    assert max(map(len, narrow[1:])) <= width
    whole = draw_text(picture, 10**6).splitlines()
    for rank, row in enumerate(picture.rows):
        (index,) = (index for index, line in enumerate(whole) if line.startswith(f"rank {rank} "))
        assert re.findall(r"[FB]\d+", whole[index]) == [block.label for block in row]
        assert whole[index + 1].split()[1:] == [block.slot_name for block in row]
        panels = " ".join(line for line in narrow if line.startswith(f"rank {rank} "))
        # A backward that two panels share is named in both.
        assert len(row) <= len(re.findall(r"[FB]\d+", panels)) <= len(row) + narrow.count("") - 1


def test_the_summary_counts_slots_and_tokens() -> None:
    picture = make_picture(make_schedule(4, 2, 8), [1024, 2048], [0] * 8)
    text = summarize(picture, slot_counts(4, 2))
    assert re.search(r"rank 0 +8 +4 +12 +12 +24,576\n", text) and re.search(
        r"rank 3 +5 +1 +6 +6 +12,288\n", text
    )
    assert "12 slots on the fullest rank" in text and "would be 16 here" in text and "15.8%" in text
    assert (
        "0: 1,024 tokens, 8 microbatches\n" in text and "1: 2,048 tokens, 0 microbatches\n" in text
    )
    assert max(map(len, text.splitlines())) <= 120


def test_the_command_draws_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, csv = tmp_path / "plan.svg", tmp_path / "plan.csv"
    words = [
        "plan",
        "--ranks",
        "2",
        "--chunks",
        "2",
        "--microbatches",
        "5",
        "--capacities",
        "1024,2048",
        "--buckets",
        "0,1,0,1,0",
        "--svg",
        str(svg),
        "--csv",
        str(csv),
    ]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "interleaved 1F1B in groups of 2: 2 ranks, 2 chunks each, 5 microbatches\n"
    )
    assert (
        "bucket  0" in text and "steady memory" in text and max(map(len, text.splitlines())) <= 120
    )
    assert ElementTree.parse(svg).getroot().tag == f"{SVG}svg"
    assert csv.read_text() == to_csv(make_schedule(2, 2, 5))
    assert cli.main(["plan", "--ranks", "1", "--microbatches", "1"]) == 0
    assert cli.main(["plan", "--help"]) == 0
    assert "--microbatches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "4"], "--microbatches: required"),
        (
            ["--ranks", "0", "--microbatches", "2", "--buckets", "1"],
            "ranks must be .*\n  buckets are indices of capac",
        ),
        (
            ["--ranks", "2", "--microbatches", "2", "--capacities", "8,0", "--buckets", "2,0"],
            "got 0\n  micro.* 2, only",
        ),
        (
            ["--ranks", "2", "--microbatches", "2", "--capacities", "8,x"],
            "--capacities: expected a whole number, got 'x'",
        ),
        (
            ["--ranks", "2", "--microbatches", "2", "--svg", "/nowhere/x.svg"],
            "/nowhere/x.svg: cannot be written",
        ),
        (
            ["--ranks", "4", "--chunks", "2", "--microbatches", "2", "--group", "2"],
            "group .2. must be at least ranks .4.",
        ),
    ],
)
def test_the_command_refuses_mistakes(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and re.search(said, captured.err) and "Traceback" not in captured.err


def test_the_guide_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--ranks", "2", "--chunks", "2", "--microbatches", "4"]) == 0
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "pipelines.md").read_text(
        encoding="utf-8"
    )
    assert (
        f"$ packgraph plan --ranks 2 --chunks 2 --microbatches 4\n{capsys.readouterr().out}```"
        in guide
    )
