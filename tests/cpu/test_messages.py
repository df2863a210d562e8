"""What people read when they have mistyped something, or ask for what can have no effect."""

import re

import pytest
import torch

import packgraph
from packgraph.cli import main
from packgraph.graphs.fallback import Stats


def test_stats_print_as_a_short_table():
    capacity = packgraph.Capacity(tokens=8, documents=2)
    graphed = packgraph.graph(torch.nn.Linear(4, 4), capacities=[capacity], warmup=1)
    for _ in range(3):
        graphed(torch.ones(8, 4)).sum().backward()
    with pytest.warns(packgraph.PackgraphWarning, match="unknown shape"):
        graphed(torch.ones(9, 4)).sum().backward()
    with packgraph.eager("a comparison of one call with its eager twin, which is what it is for"):
        graphed(torch.ones(8, 4)).sum().backward()
    table = r"""captured      1  segments in \d\.\d s
replayed      2  calls
eager         1  warm-up
              1  unknown shape
                 .*test_messages\.py:\d+ in test_stats_print_as_a_short_table
              1  a comparison of one call with its eager twin, which is what it
                 is for
pools +\d+\.\d\d KiB"""
    assert re.fullmatch(table, str(graphed.stats)), str(graphed.stats)
    assert repr(graphed.stats).startswith(
        "Stats(captured=1, replayed=2, fallbacks=Counter({'warm-up"
    )
    stats = Stats(captured=123456, compiled=2, _pool_bytes=lambda: 3 * 2**30)
    stats.dropped("a larger bucket took their slot", 2)
    stats.recompiles["other inputs"] += 1
    assert (
        str(stats)
        == """\
captured   123456  segments in 0.0 s; compiled 2 pieces of code in 0.0 s
replayed        0  calls
recaptured      2  a larger bucket took their slot
recompiled      1  other inputs
pools    3.00 GiB"""
    )


def test_a_file_of_one_document_is_described_as_such(capsys, tmp_path):
    (tmp_path / "one.txt").write_text("a line of text\n" * 500)
    assert main(["plan", str(tmp_path / "one.txt"), "qwen3-tiny"]) == 0
    told = capsys.readouterr().out
    assert "1 document of " in told and "held out" not in told


def test_data_may_have_the_name_of_an_option(capsys, tmp_path, monkeypatch):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "one.txt").write_text("a line of text\n" * 500)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "json", "qwen3-tiny"]) == 0
    assert "1 document of " in capsys.readouterr().out
