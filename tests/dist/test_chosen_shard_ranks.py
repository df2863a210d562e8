"""`parallel.shard = auto` in `packgraph train`: ranks choose by the memory each of them has."""

import json
import os
import subprocess
import sys
from pathlib import Path

from packgraph.train.config.presets import preset
from packgraph.train.config.reading import ConfigLayer, read_config
from packgraph.train.memory import SHARE, predicted_peak

MODEL = {"num_layers": 6, "hidden_size": 64, "intermediate_size": 192}
OPTIONS = {
    "model": MODEL,
    "graph": {"capacities": "128x4"},
    "run": {"steps": 4, "tokens_per_step": 400, "dtype": "float32"},
}
# What is there on each rank comes from the test: rank 1 has less.
PROGRAM = """
import sys
from packgraph import cli
from packgraph.train import launch
from packgraph.parallel.ranks import Launch
first, second = int(sys.argv[1]), int(sys.argv[2])
launch.available_memory = lambda *_: (first, second)[Launch.read().rank]
sys.exit(cli.main(sys.argv[3:]))
"""


def peak(shard: str) -> int:
    layer = ConfigLayer("options", OPTIONS | {"parallel": {"shard": shard}})
    return predicted_peak(read_config(preset("qwen3-tiny"), [layer]), "cpu", 2)


def test_ranks_choose_what_fits_the_one_with_the_least_memory(tmp_path: Path) -> None:
    between = round((peak("none") + peak("gradients")) / 2 / SHARE)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [
        f"--{section}.{name.replace('_', '-')}={value}"
        for section, options in OPTIONS.items()
        for name, value in options.items()
    ]
    source = str(Path(__file__).parents[2] / "src")
    found = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(program), str(2**40), str(between)),
            *("train", "qwen3-tiny", f"--run.folder={tmp_path}", "--run.name=mine", *words),
        ],
        capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "parallel.shard auto chose gradients" in " ".join(found.stderr.split())
    stored = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert stored["parallel"]["shard"] == "gradients", "a run goes on with what it has"
