"""Whole steps of a model of transformers (`hf:FOLDER`) beside those of packgraph's own decoder of the
same shape: the same documents, layout and options, by turns, each in processes of its own.

    PYTHONPATH=src python benchmarks/live_and_own.py benchmarks/configs/llama-3-8b.json --layers 8
    PYTHONPATH=src python benchmarks/live_and_own.py benchmarks/configs/llama-3-8b.json --layers 16 \
        --ranks 2 -- --parallel.tp 2                          words behind -- are those of both runs
    PYTHONPATH=src python benchmarks/live_and_own.py CONFIG --tiny               a toy on the CPU

Weights are random. Tokens a second are real tokens of a step over its seconds, at the median of the
steps behind warm-up and capture; the ratio is live over own.
"""  # noqa: E501

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from result_rows import commit_of_source

from packgraph.models.hf_config import config_from_json, shape_values
from packgraph.train.config.reading import render
from packgraph.train.metrics import METRICS, read_metrics

AHEAD = 4  # steps that do not count: eager and compiling, capture
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
TINY |= {"num_key_value_heads": 2, "vocab_size": 512}


def words_of(content: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    """What each way is called with."""
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    read = content | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    shape = shape_values(config_from_json(read)) | {"qk_norm": content["model_type"] == "qwen3"}
    own = [f"--model.{name.replace('_', '-')}={render(value)}" for name, value in shape.items()]
    return {"own": ["qwen3-0.6b", *own], "live": [f"hf:{folder}", "--hf.random=true"]}


def tokens_per_second(words: Sequence[str], ranks: int, folder: Path) -> tuple[float, float]:
    """Of one run: tokens a second, and the peak of memory in GiB (0 on a CPU)."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [sys.executable, "-m", *(launcher if ranks > 1 else ()), "packgraph.cli", "train"]
    where = [f"--run.folder={folder}", "--run.name=run"]
    done = subprocess.run([*command, *words, *where], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    rows = read_metrics(folder / "run" / METRICS)[AHEAD:]
    peaks = [row.get("peak_memory", 0) for row in rows]
    return median(row["tokens"] / row["seconds"] for row in rows), max(peaks) / 2**30


def main() -> None:
    """Print a line for every run and the ratio, and write a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="config.json of a Qwen3 or a Llama")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192, help="of a row")
    parser.add_argument("--rows", type=int, default=2, help="of a step and replica")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a toy")
    parser.add_argument("--out", type=Path, help="append the row as JSON")
    given = [*sys.argv[1:], "--"]
    more = given[given.index("--") + 1 : -1]
    options = parser.parse_args(given[: given.index("--")])
    content = json.loads(options.config.read_text(encoding="utf-8"))
    content |= {"num_hidden_layers": options.layers} | (TINY if options.tiny else {})
    common = [
        *("--data.source=stdlib", "--data.tokenizer=bytes", "--data.overlong=split"),
        f"--graph.capacities={options.tokens}x{max(4, options.tokens // 256)}",
        f"--run.tokens-per-step={options.rows * options.tokens - options.tokens // 2}",
        *(f"--run.steps={options.steps}", "--run.checkpoint-every=0", "--run.dtype=bfloat16"),
        *more,
    ]
    found: dict[str, list[float]] = {"own": [], "live": []}
    for turn in range(options.turns):
        for way in sorted(found, reverse=bool(turn % 2)):
            with tempfile.TemporaryDirectory() as place:
                words = [*words_of(content, Path(place))[way], *common]
                speed, peak = tokens_per_second(words, options.ranks, Path(place))
            found[way].append(round(speed))
            print(f"{way}: {speed:,.0f} tokens/s, {peak:.1f} GiB", flush=True)
    ratio = median(found["live"]) / median(found["own"])
    print(f"live over own: {ratio:.3f}")
    if options.out is not None:
        row = {"benchmark": "live_and_own", "config": options.config.name, "ratio": ratio} | found
        row |= {name: getattr(options, name) for name in ("layers", "ranks", "tokens", "rows")}
        row |= {"words": more, "commit": os.environ.get("COMMIT") or commit_of_source()}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
