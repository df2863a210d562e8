"""The trainer with CUDA graphs: nothing in a step waits for the device, and a stopped run goes on
bitwise."""

import dataclasses
from pathlib import Path

import pytest
import torch
from trainkit import RandomPacks, goes_on, state_of, tiny, trainer

from packgraph.train.signals import StopRequest
from packgraph.verification.matrix import default_matrix
from packgraph.verification.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graph", [False, True])
def test_no_host_sync_in_a_step(
    tmp_path: Path, graph: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path / "run", tiny(graph, dtype=dtype, steps=8), device=CUDA)
    original = run._one_step

    def watched() -> bool:
        # Capture itself waits for the device; every step after it must not.
        if run.step > run.config.graph.warmup:
            torch.cuda.set_sync_debug_mode("error")
        done = original()
        torch.cuda.set_sync_debug_mode("default")
        return done

    monkeypatch.setattr(run, "_one_step", watched)
    summary = run.run(StopRequest())
    assert summary["steps"] == 8 and (summary["replayed"] > 0) == graph
    run.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(tmp_path: Path, dtype: str) -> None:
    goes_on(tmp_path, tiny(True, dtype=dtype), device=CUDA)


def test_the_default_matrix_is_bitwise_equal() -> None:
    assert all(report.good for report in default_matrix(CUDA, steps=8))


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_bfloat16_is_bitwise_equal(granularity: str) -> None:
    config = tiny(True, dtype="bfloat16", steps=10)
    config = dataclasses.replace(
        config, graph=dataclasses.replace(config.graph, granularity=granularity)
    )
    report = verify("bfloat16", config, iter(RandomPacks()), CUDA)
    assert report.good, report


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_update_inside_the_graph_of_a_step_is_bitwise_equal(tmp_path: Path, dtype: str) -> None:
    states = []
    for enabled in (False, True):
        config = tiny(enabled, dtype=dtype, steps=12)
        graph = dataclasses.replace(config.graph, granularity="step", optimizer=True, strict=True)
        run = trainer(
            tmp_path / str(enabled), dataclasses.replace(config, graph=graph), device=CUDA
        )
        assert (run.run(StopRequest())["replayed"] > 0) == enabled
        states.append(state_of(run))
        run.close()
    assert [
        name for name, value in states[0].items() if not torch.equal(value, states[1][name])
    ] == []
