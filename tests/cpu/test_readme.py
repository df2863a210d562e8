"""What README shows runs as it stands."""
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_python_blocks_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    python = blocks("python")
    assert len(python) >= 3
    for number, block in enumerate(python):
        exec(compile(block, f"README block {number}", "exec"), names)
    shown = capsys.readouterr().out
    stats = names["graphed"].stats  # type: ignore[attr-defined]
    assert stats.replayed > 10 and stats.fallbacks == {"warm-up": 2}
    assert str(stats) in shown


def test_the_commands_name_real_options() -> None:
    from packgraph.cli import main
    from packgraph.train.command_line import all_options
    from packgraph.train.presets import preset

    text = "\n".join(blocks("bash"))
    known = {*all_options(preset("qwen3-tiny")), "--config", "--resume"}
    trained = [line.partition("#")[0] for line in text.splitlines() if line.startswith("packgraph train")]
    assert trained and {word for line in trained for word in line.split() if word.startswith("--")} <= known
    for name in {line.split()[1] for line in text.splitlines() if line.startswith("packgraph ")}:
        assert main([name, "--help"]) == 0
