"""Audit of the pinned packages: hashes, licences, known vulnerabilities. Run by `make audit`.

    python requirements/audit.py --tools FOLDER --python PYTHON

The exit code says what was found: 0 = everything was looked at and is well; 1 = a pin without a
hash, a licence that is not allowed, or a known vulnerability; 3 = nothing bad was found, but not
everything could be looked at, since the service that knows of vulnerabilities did not answer.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
FILES = tuple(HERE / name for name in ("run.txt", "dev.txt", "docs.txt", "torch.txt"))
# Builds for CPUs and for each CUDA have hashes of their own, and come from an index of their own.
WITHOUT_HASHES = ("torch",)
NOT_ALLOWED = "GPL;SSPL;UNKNOWN"
WELL, BAD, NOT_ASKED = 0, 1, 3


class Vulnerabilities(NamedTuple):
    """What is known of pinned versions. unknown: packages that nothing was found out about, and
    why."""

    found: list[str]
    unknown: dict[str, str]


def pins_without_hashes(text: str) -> Iterator[str]:
    """Names of the pins in a requirements file that pip would not hold against a hash."""
    joined = re.sub(r"\\\s*\n", " ", text)
    for line in joined.splitlines():
        name = re.match(r"[A-Za-z0-9][\w.-]*", line.strip())
        if (
            name
            and name[0] not in WITHOUT_HASHES
            and not re.search(r"--hash=sha256:[0-9a-f]{64}", line)
        ):
            yield name[0]


def read_report(text: str) -> Vulnerabilities | None:
    """What pip-audit has found; None if it has found out nothing at all."""
    try:
        report: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(report, Mapping) or not report.get("dependencies"):
        return None
    found, unknown = [], {}
    for package in report["dependencies"]:
        if "skip_reason" in package:
            unknown[package["name"]] = package["skip_reason"]
        for known in package.get("vulns", ()):
            fixed = ", ".join(known["fix_versions"]) or "no version yet"
            found.append(
                f"{package['name']} {package['version']}: {known['id']}, mended in {fixed}"
            )
    return Vulnerabilities(found, unknown)


def vulnerabilities(tools: Path) -> tuple[Vulnerabilities, str]:
    """What pip-audit finds in the files; and why it could not ask about all, if so.

    It takes no file without hashes beside one that has some, so it looks at each by itself.
    """
    options = ["--format", "json", "--progress-spinner", "off", "--no-deps", "--disable-pip"]
    all_, why = Vulnerabilities([], {}), ""
    for file in FILES:
        done = subprocess.run(
            [tools / "pip-audit", *options, "-r", file], capture_output=True, text=True, check=False
        )
        known = read_report(done.stdout)
        if known is None:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            why = f"{file.name}: {last}"
            continue
        all_.found.extend(line for line in known.found if line not in all_.found)
        all_.unknown.update(known.unknown)
    return all_, why


def licences(tools: Path, python: str) -> bool:
    """Whether all packages that `python` has installed have licences that are allowed."""
    options = ["--partial-match", f"--fail-on={NOT_ALLOWED}", "--summary", "--python", python]
    return subprocess.run([tools / "pip-licenses", *options], check=False).returncode == 0


def main(words: Sequence[str]) -> int:
    """Look at everything, say what was found. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tools", type=Path, required=True, help="folder of pip-audit, pip-licenses"
    )
    parser.add_argument("--python", required=True, help="interpreter whose packages are looked at")
    asked = parser.parse_args(words)
    bad = []
    for file in FILES:
        if names := list(pins_without_hashes(file.read_text(encoding="utf-8"))):
            bad.append(f"{file.name}: pins without hashes: {', '.join(names)}")
    print(
        f"hashes: {'see below' if bad else 'every pin has some'}; not of "
        f"{', '.join(WITHOUT_HASHES)}, whose builds for CPUs and for each CUDA come from an index "
        "of their own"
    )
    if not licences(asked.tools, asked.python):
        bad.append(f"licences: one of {NOT_ALLOWED.replace(';', ', ')} is among them")
    known, why = vulnerabilities(asked.tools)
    bad += known.found
    print(*bad, sep="\n", end="\n" if bad else "")
    print(f"vulnerabilities: {len(known.found)} known")
    if why:
        print(f"vulnerabilities: NOT LOOKED AT: pip-audit got no answer ({why})")
    if known.unknown:
        reason = next(iter(known.unknown.values()))
        print(
            f"vulnerabilities: NOT LOOKED AT for {len(known.unknown)} packages, of which the "
            f"service knows nothing ({reason})"
        )
    return BAD if bad else NOT_ASKED if why or known.unknown else WELL


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
