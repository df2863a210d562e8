"""The audit of pinned packages says what it could not look at."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "requirements" / "audit.py"
HASH = "--hash=sha256:" + "0" * 64
GOOD = {"name": "a", "version": "1", "vulns": []}
HOLE = {
    "name": "b",
    "version": "2",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"], "aliases": [], "description": ""}],
}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI: c (1)"}


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_pin_has_a_hash_but_torch(audit):
    for file in audit.FILES:
        assert not list(audit.pins_without_hashes(file.read_text()))
    assert {file.name for file in audit.FILES} == {path.name for path in PATH.parent.glob("*.txt")}


def test_a_pin_without_a_hash_is_named(audit):
    text = (
        f"# a comment\n-r run.txt\na==1 \\\n    {HASH} \\\n    {HASH}\nb==2\nc==3 --hash=sha256:1\n"
    )
    assert list(audit.pins_without_hashes(text)) == ["b", "c"]
    assert not list(audit.pins_without_hashes("torch==2.13.0\n"))


@pytest.mark.parametrize(
    ("dependencies", "licences", "code", "words"),
    [
        ([GOOD], True, 0, "vulnerabilities: 0 known"),
        ([GOOD, HOLE], True, 1, "b 2: PYSEC-1, mended in 3"),
        ([GOOD, SKIPPED], True, 3, "NOT LOOKED AT for 1 packages"),
        ([HOLE, SKIPPED], True, 1, "NOT LOOKED AT for 1 packages"),
        (None, True, 3, "NOT LOOKED AT: pip-audit got no answer (torch.txt: refused)"),
        (None, False, 1, "licences: one of GPL"),
        ([], True, 3, "NOT LOOKED AT"),
    ],
)
def test_the_exit_code_says_what_was_found(
    audit, tmp_path, capfd, dependencies, licences, code, words
):
    report = "" if dependencies is None else json.dumps({"dependencies": dependencies, "fixes": []})
    for name, text, result in (
        ("pip-audit", f"print({report!r}); print('refused', file=sys.stderr)", 1),
        ("pip-licenses", "", int(not licences)),
    ):
        tool = tmp_path / name
        tool.write_text(f"#!{sys.executable}\nimport sys\n{text}\nsys.exit({result})\n")
        tool.chmod(0o755)
    assert audit.main(["--tools", str(tmp_path), "--python", sys.executable]) == code
    said = capfd.readouterr().out
    assert words in said and "hashes: every pin has some" in said
