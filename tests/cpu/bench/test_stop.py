"""A benchmark that is asked to end keeps the rows of what it has measured."""

import json
import os
import signal

import pytest
from benchkit import SMALL

from packgraph import cli
from packgraph.bench.step import StepComparison


def test_rows_of_finished_rounds_are_written_when_a_time_limit_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    time, rounds = StepComparison.time, []

    def ends_in_the_fifth(self, way, number):
        rounds.append(number)
        if len(rounds) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return time(self, way, number)

    monkeypatch.setattr(StepComparison, "time", ends_in_the_fifth)
    words = ["bench", "step", *SMALL, "--ways", "eager", "chunk", "--rounds", "9", "--calls", "1"]
    assert cli.main(words) == cli.INTERRUPTED
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["way"] for row in rows] == ["eager", "chunk"]
    assert all(row["rounds"] == 2 and row["figures"] for row in rows)
