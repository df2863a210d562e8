"""Preferences with CUDA graphs: bitwise those of eager training, on held-out pairs, too."""

from pathlib import Path

import pytest
import torch
from evalkit import config, made, rows
from trainkit import equal, state_of
from tuningkit import preferences

from packgraph.packing.capacity import Capacity
from packgraph.train.config.sections import EvalConfig
from packgraph.train.features.preference import FIGURES
from packgraph.train.signals import StopRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
NAMES = ("loss", "gradient_norm", *FIGURES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "rank", "granularity"),
    [("dpo", 0, "layer"), ("dpo", 4, "chunk"), ("simpo", 0, "chunk"), ("orpo", 0, "layer")],
)
def test_replays_equal_eager_bitwise(
    tmp_path: Path, name: str, rank: int, granularity: str, dtype: str
) -> None:
    data, states, found = str(preferences(tmp_path / "pairs.jsonl")), [], []
    for enabled in (True, False):
        graph = {
            "enabled": enabled,
            "granularity": granularity,
            "capacities": (Capacity(128, 6), Capacity(192, 12)),
        }
        options = config(
            data, EvalConfig(every=4, share=0.2), dtype=dtype, tokens_per_step=300, graph_=graph,
            loss_={"name": name}, lora_={"rank": rank}, model_={"dropout": 0.0},
        )  # fmt: skip
        run = made(tmp_path / str(enabled), options, device=CUDA)
        summary = run.run(StopRequest())
        assert summary["replayed"] > 0 or not enabled
        states.append(state_of(run))
        run.close()
        every = rows(tmp_path / str(enabled))
        found.append(
            [row.get(key) for row in every for key in (*NAMES, *(f"eval_{n}" for n in NAMES))]
        )
    equal(*states)
    assert found[0] == found[1]
    margin = len(NAMES) - 1
    assert found[0][-len(NAMES) - 1] > found[0][margin], "it learns"
