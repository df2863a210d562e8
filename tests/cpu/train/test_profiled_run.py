"""A training run under a profiler: its parts are named, its numbers are the same."""

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile
from trainkit import equal, ran, state_of, tiny

from packgraph.train.metrics import METRICS, read_metrics


@pytest.mark.parametrize("whole_steps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_profiled_run_names_its_parts_and_changes_no_bit(
    tmp_path: Path, whole_steps: bool
) -> None:
    config = tiny(graph=True)
    way: dict[str, Any] = {"granularity": "step" if whole_steps else "chunk"}
    options = dataclasses.replace(config.graph, **way, optimizer=whole_steps)
    config = dataclasses.replace(config, graph=options)
    expected = state_of(ran(tmp_path / "plain", config)[0])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        seen, summary = ran(tmp_path / "seen", config)
    equal(expected, state_of(seen))
    names = [event.name for event in profiler.events() if event.name.startswith("packgraph")]
    kinds = Counter(re.sub(r" \d.*", "", name.removeprefix("packgraph ")) for name in names)
    rows = read_metrics(tmp_path / "seen" / METRICS)
    apart = rows[: options.warmup] if whole_steps else rows  # steps that are not one graph
    assert kinds["microbatch"] == sum(row["microbatches"] for row in apart)
    assert kinds["optimizer update"] == len(apart)
    assert kinds["step slot"] == len(rows) - len(apart)
    compared = summary["captured"]  # the first replay of a key is made twice
    assert kinds["embed to head"] == (0 if whole_steps else 2 * (summary["replayed"] + compared))
    assert any(re.fullmatch(r"packgraph microbatch 0 \d+x\d", name) for name in names)
