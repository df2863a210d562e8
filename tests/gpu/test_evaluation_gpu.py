"""Evaluations of a run with CUDA graphs: bitwise those of eager forwards, and training goes on as
without them."""

import dataclasses
from pathlib import Path

import pytest
import torch
from evalkit import config, documents, learned, made, rows
from trainkit import equal, state_of

from packgraph.train.config.sections import EvalConfig
from packgraph.train.signals import StopRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
SHARE = EvalConfig(every=2, share=0.2)


@pytest.mark.parametrize("granularity", ["layer", "chunk", "step"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evaluations_replay_and_disturb_nothing(
    tmp_path: Path, dtype: str, granularity: str
) -> None:
    data, states, summaries = documents(tmp_path / "data.jsonl"), [], []
    for name, every, enabled in (("plain", 0, True), ("graphs", 2, True), ("eager", 2, False)):
        options = config(
            data,
            dataclasses.replace(SHARE, every=every),
            steps=8,
            dtype=dtype,
            graph_={"granularity": granularity, "enabled": enabled},
        )
        run = made(tmp_path / name, options, device=CUDA)
        summaries.append(run.run(StopRequest()))
        states.append(state_of(run))
        run.close()
    equal(states[0], states[1])
    equal(states[0], states[2])
    plain, graphs, eager = (rows(tmp_path / name) for name in ("plain", "graphs", "eager"))
    assert list(map(learned, plain)) == list(map(learned, graphs))
    assert [row.get("eval_loss") for row in graphs] == [row.get("eval_loss") for row in eager]
    found = summaries[1]["evaluation"]
    assert found["replayed"] > 0 and not found["fallbacks"]
