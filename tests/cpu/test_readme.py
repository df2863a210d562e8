"""What README and the guides show runs as it stands."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
README, GUIDES = ROOT / "README.md", sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def run(page: Path, names: dict[str, object], change: tuple[str, str] = ("", "")) -> None:
    for number, block in enumerate(blocks(page, "python")):
        assert change[0] in block
        block = block.replace(*change)
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_the_python_of_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    run(README, names)
    stats = names["graphed"].stats  # type: ignore[attr-defined]
    assert stats.replayed > 10 and stats.fallbacks == {"warm-up": 2}
    assert str(stats) in capsys.readouterr().out


@pytest.mark.parametrize(
    "guide", [guide for guide in GUIDES if blocks(guide, "python")], ids=lambda guide: guide.stem
)
def test_the_python_of_a_guide_runs_after_that_of_readme(guide: Path) -> None:
    names: dict[str, object] = {}
    run(README, names, ("documents[:16]", "documents[8:16]"))  # whole in the test above
    run(guide, names)


def test_the_tutorial_runs_from_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    run(ROOT / "docs" / "tutorial.md", names)
    said = capsys.readouterr().out
    assert names["graphed"].stats.replayed > 50 and names["found"]  # type: ignore[attr-defined]
    assert "Tensor.item() waits for the device" in said and "57% of 34456 places" in said


def test_the_commands_name_real_options() -> None:
    from packgraph.cli import main
    from packgraph.train.config.command_line import all_options
    from packgraph.train.config.presets import preset

    text = "\n".join(block for page in (README, *GUIDES) for block in blocks(page, "bash")).replace(
        "\\\n", ""
    )
    text = re.sub(
        r"^(?:srun )?(?:torchrun .*?-m packgraph.cli|packgraph)", "packgraph", text, flags=re.M
    )
    known = {*all_options(preset("qwen3-tiny")), "--config", "--resume", "--help"}
    trained = [
        line.partition("#")[0] for line in text.splitlines() if line.startswith("packgraph train")
    ]
    assert (
        trained
        and {word for line in trained for word in line.split() if word.startswith("--")} <= known
    )
    for name in {line.split()[1] for line in text.splitlines() if line.startswith("packgraph ")}:
        assert main([name, "--help"]) == 0


def test_commands_of_readme_find_their_files() -> None:
    """From a fresh clone: a file is in the repository, or the first run makes it."""
    (text,) = [block for block in blocks(README, "bash") if block.startswith("packgraph")]
    assert text.index("--run.name first") < text.index("runs/first")
    file = re.compile(r"\w[\w.-]*/[\w./-]+|\w+\.(?:jsonl?|toml|py)|docs")
    named = [word for word in text.split() if file.fullmatch(word)]
    there = [name for name in named if (ROOT / name).exists() or name.startswith("runs/first")]
    assert there == named and len(there) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_shell_and_yaml_can_be_read(page: Path) -> None:
    for script in blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert not done.returncode and not done.stderr, done.stderr
    assert all([*yaml.safe_load_all(text)] for text in blocks(page, "yaml"))


def test_nothing_is_installed_from_an_index_under_our_name() -> None:
    """The name is not ours there: who claims it would be installed."""
    texts = [*PAGES, *ROOT.glob("src/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    ours = re.compile(r"pip install[\s\"'`#]+packgraph(?!\[?\w*\]? @ )")
    assert [path for path in texts if ours.search(path.read_text(encoding="utf-8"))] == []


def test_readme_is_short_and_lines_are_not_long() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    long, fenced = [], False
    for page in (README, *(ROOT / "docs").rglob("*.md")):
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
            fenced ^= line.lstrip().startswith("```")
            no_prose = fenced or line.lstrip().startswith(("|", "![", "#")) or line[:4] == "    "
            if len(line) > 100 and not no_prose:
                long.append(f"{page.name}:{number}")
    assert not long
