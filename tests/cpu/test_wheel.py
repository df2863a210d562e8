"""The wheel holds the package and nothing else, and works in an environment of its own."""

import configparser
import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
NO_NETWORK = re.compile(
    "NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|name resolution"
)


def quiet(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command with no other packgraph in reach."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        **options,  # type: ignore[call-overload]
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what is needed, since a build writes beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    for path in [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE", *sources()]:
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-w", folder]
    built = quiet(sys.executable, "-m", "pip", "wheel", *options, tree)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = folder.glob("packgraph-*.whl")
    return found


def sources() -> list[Path]:
    return [
        path
        for path in (SOURCE / "packgraph").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (scripts,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        (about,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(scripts).decode())
        facts = Parser().parsestr(archive.read(about).decode())
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert names == {path.relative_to(SOURCE).as_posix() for path in sources()}
    assert "packgraph/py.typed" in names and len(licences) == 1
    assert dict(entries["console_scripts"]) == {"packgraph": "packgraph.cli:main"}
    assert "train" in (facts.get_all("Provides-Extra") or [])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_installed_wheel_runs_the_loop_of_readme_and_trains(
    wheel: Path, tmp_path: Path
) -> None:
    """With the torch release of these tests: the newest one for CUDA takes several GB."""
    made = quiet(sys.executable, "-m", "venv", tmp_path / "venv")
    assert made.returncode == 0, made.stderr
    python, command = (tmp_path / "venv" / "bin" / name for name in ("python", "packgraph"))
    release = torch.__version__.partition("+")[0]
    installed = quiet(
        python, "-m", "pip", "install", "-q", f"{wheel}[train]", f"torch=={release}", timeout=800
    )
    if installed.returncode and NO_NETWORK.search(installed.stderr):
        pytest.skip("no package index can be reached to install what the wheel needs")
    assert installed.returncode == 0, installed.stderr

    shown = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M)
    assert shown is not None
    (tmp_path / "loop.py").write_text(shown[1])
    looped = quiet(python, "loop.py", cwd=tmp_path)
    assert looped.returncode == 0 and "replayed" in looped.stdout, looped.stdout + looped.stderr
    assert quiet(command, "--help").returncode == 0
    options = ["--run.steps", "3", "--model.num-layers", "1", "--run.folder", tmp_path / "runs"]
    trained = quiet(command, "train", "qwen3-tiny", *options, cwd=tmp_path)
    assert trained.returncode == 0, trained.stdout + trained.stderr
