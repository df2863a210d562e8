"""Some of the malformed inputs that `malformed.py` makes by the thousand, in a process of their
own: one that has run autograd cannot be forked."""

import subprocess
import sys
from pathlib import Path

import pytest
from malformed import REFUSED, TRACEBACK, WORDY, Case, classify

SCRIPT = Path(__file__).with_name("malformed.py")


def test_malformed_inputs_are_refused_in_one_line_or_train_what_they_say():
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--count", "42", "--seed", "7"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "refused" in ended.stdout and "accepted" in ended.stdout


@pytest.mark.parametrize(
    ("code", "said", "kind"),
    [
        (2, "packgraph: error: a.json: wrong", REFUSED),
        (2, "note\npackgraph: error: 1 problem:\n  a.json: wrong", REFUSED),
        (2, "packgraph: error: somewhere: wrong", WORDY),
        (2, "packgraph: error: a.json: wrong\nand so on", WORDY),
        (2, "packgraph: error: a.json: " + "x" * 9999, WORDY),
        (2, "something else", TRACEBACK),
        (97, "Traceback (most recent call last):", TRACEBACK),
        (-11, "", TRACEBACK),
        (98, "AssertionError: 3 instead of 4", "SILENT"),
    ],
)
def test_what_is_no_refusal_is_seen(tmp_path, code, said, kind):
    (tmp_path / "log").write_text(said)
    case = Case("", [], ("a.json",), lambda: "")
    assert classify(case, code, tmp_path / "log").kind == kind
