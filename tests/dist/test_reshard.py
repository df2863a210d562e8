"""Checkpoints know no layout: saved by some processes, read by others, and the same run goes on."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distkit import RankFailed, run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor
from trainkit import RandomPacks, tiny, trainer

from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import Pieces, rectangles
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.random_state import random_states
from packgraph.train.run_folder import check_same_run
from packgraph.train.signals import StopRequest
from packgraph.train.trainer import Trainer
from packgraph.train.validate import validate

LAYOUTS = {"alone": Layout(1), "dp2": Layout(dp=2), "tp2": Layout(tp=2)}


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_rectangles_cover_a_flat_range_in_order(shape, data):
    count = torch.Size(shape).numel()
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = torch.arange(count).view(shape)
    covered = []
    for offsets, sizes in rectangles(start, stop, shape):
        part = numbers
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        covered += part.flatten().tolist()
    assert covered == list(range(start, stop))
    assert len(rectangles(start, stop, shape)) <= max(1, 2 * len(shape) - 1)


def config(layout, steps, **changes):
    made = tiny(graph=True, steps=steps, checkpoint_every=100, **changes)
    model = dataclasses.replace(made.model, num_heads=4, num_kv_heads=2, vocab_size=33)
    parallel = ParallelConfig(dp=layout.dp, tp=layout.tp, sequence=layout.tp > 1)
    # The last step of a part of a run is not the last step of the run.
    optimizer = dataclasses.replace(made.optimizer, decay_steps=20)
    return dataclasses.replace(made, model=model, optimizer=optimizer, parallel=parallel)


def whole(tensor: Tensor) -> Tensor:
    """The values that all ranks hold together."""
    if isinstance(tensor, Pieces):
        found = torch.full(tensor.shape, float("nan"))
        everyone = [(offsets, piece.clone()) for offsets, piece in tensor.pieces]
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, everyone)
        for offsets, piece in (entry for part in gathered for entry in part):
            found[tuple(slice(o, o + s) for o, s in zip(offsets, piece.shape))] = piece
        return found
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def go(mesh, folder, settings, resume):
    """Run to the end, from the start or the newest checkpoint; what was loaded, and what there is
    at last."""
    with contextlib.closing(_trainer(mesh, folder, settings)) as run:
        if resume:
            run.resume()
        loaded = {name: whole(value) for name, value in run.tensors().items()}
        run.run(StopRequest())
        return (
            loaded,
            {name: whole(value) for name, value in run.tensors().items()},
            random_states(run.device),
        )


def _trainer(mesh, folder, settings) -> Trainer:
    made = trainer(Path(folder), settings, RandomPacks())
    made.close()
    return Trainer(settings, Path(folder), RandomPacks(), made.device, made.view, mesh)


def ranks(layout, function, *arguments):
    world = (layout.dp or 1) * layout.tp
    return run_ranks(function, world, *arguments, layout=layout)


@pytest.mark.parametrize(
    ("first", "second", "dtype"),
    [("dp2", "alone", "bfloat16"), ("alone", "tp2", "float32"), ("tp2", "dp2", "bfloat16")],
)
def test_what_was_saved_is_loaded_at_another_layout(first, second, dtype, tmp_path):
    folder = str(tmp_path / "run")
    results = ranks(LAYOUTS[first], go, folder, config(LAYOUTS[first], 3, dtype=dtype), False)
    _, saved, _ = results[0]
    check_same_run(Path(folder), config(LAYOUTS[second], 5, dtype=dtype))
    for loaded, ended, _ in ranks(
        LAYOUTS[second], go, folder, config(LAYOUTS[second], 5, dtype=dtype), True
    ):
        assert loaded.keys() == saved.keys()
        assert not [name for name in saved if not torch.equal(loaded[name], saved[name])]
        assert ended["optimizer.step"] == 5 and all(
            value.isfinite().all() for value in ended.values()
        )
    assert any(name.endswith(".master") for name in saved) == (dtype == "bfloat16")


def test_sharded_layers_are_saved_and_loaded_over_any_number_of_ranks(tmp_path):
    """Two ranks that shard, four that do not, four that do in pairs and together, one; with
    embedding and head."""

    def settings(shard, ranks, within, steps):
        made = config(Layout(dp=ranks), steps, dtype="bfloat16")
        return dataclasses.replace(
            made,
            parallel=ParallelConfig(dp=ranks, shard=shard, shard_ranks=within),
            model=dataclasses.replace(made.model, tie_embeddings=False),
        )

    folder, before = str(tmp_path / "run"), None
    parts = [
        ("parameters", 2, 0),
        ("none", 4, 0),
        ("parameters", 4, 2),
        ("gradients", 4, 0),
        ("parameters", 1, 0),
    ]
    for number, (shard, ranks, within) in enumerate(parts):
        again = settings(shard, ranks, within, 2 * number + 2)
        layout = again.parallel.layout()
        for loaded, ended, _ in run_ranks(go, ranks, folder, again, number > 0, layout=layout):
            if before is not None:
                assert loaded.keys() == before.keys()
                assert not [name for name in before if not torch.equal(loaded[name], before[name])]
            assert ended["optimizer.step"] == 2 * number + 2
            assert all(value.isfinite().all() for value in ended.values())
        before = ended


def test_a_run_that_changes_its_layout_stays_the_same_run(tmp_path):
    """Without dropout, whose masks change with the layout: the data and the optimizer go on as if
    alone."""

    def settings(name, steps):
        made = config(LAYOUTS[name], steps)
        return dataclasses.replace(made, model=dataclasses.replace(made.model, dropout=0.0))

    folder = str(tmp_path / "moved")
    ranks(LAYOUTS["dp2"], go, folder, settings("dp2", 3), False)
    ranks(LAYOUTS["tp2"], go, folder, settings("tp2", 6), True)
    _, moved, _ = ranks(LAYOUTS["alone"], go, folder, settings("alone", 9), True)[0]
    _, alone, _ = ranks(LAYOUTS["alone"], go, str(tmp_path / "alone"), settings("alone", 9), False)[
        0
    ]
    for name in alone:
        torch.testing.assert_close(
            moved[name], alone[name], rtol=1e-3, atol=1e-4, msg=lambda m, name=name: name + m
        )


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(layout, tmp_path):
    straight = ranks(
        LAYOUTS[layout], go, str(tmp_path / "straight"), config(LAYOUTS[layout], 6), False
    )
    ranks(LAYOUTS[layout], go, str(tmp_path / "halves"), config(LAYOUTS[layout], 3), False)
    halves = ranks(LAYOUTS[layout], go, str(tmp_path / "halves"), config(LAYOUTS[layout], 6), True)
    for (_, left, left_random), (_, right, right_random) in zip(straight, halves, strict=True):
        assert not [name for name in left if not torch.equal(left[name], right[name])]
        assert torch.equal(left_random["cpu"], right_random["cpu"])


def stop_one(mesh, folder, settings):
    """Only rank 1 is asked to stop, after its second step."""
    run = _trainer(mesh, folder, settings)
    stop = StopRequest()
    one_step = run._one_step

    def step_and_ask():
        if run.step == 2 and mesh.rank == 1:
            stop.reason = "SIGTERM"
        return one_step()

    run._one_step = step_and_ask
    summary = run.run(stop)
    run.close()
    return run.step, summary["ended"]


def test_all_stop_after_the_same_step_when_one_is_asked_to(tmp_path):
    results = ranks(LAYOUTS["dp2"], stop_one, str(tmp_path / "run"), config(LAYOUTS["dp2"], 50))
    assert len({step for step, _ in results}) == 1 and results[0][0] < 10
    assert all(ended.startswith("stopped by") for _, ended in results)


def fail_to_save(mesh, folder, settings):
    with contextlib.closing(_trainer(mesh, folder, settings)) as run:
        if mesh.rank == 0:
            Path(folder).mkdir()
            (Path(folder) / "checkpoints").write_text("in the way")
        try:
            run.run(StopRequest())
        except CheckpointError as error:
            return str(error)
    return None


def test_a_checkpoint_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    errors = ranks(LAYOUTS["dp2"], fail_to_save, str(tmp_path / "run"), config(LAYOUTS["dp2"], 2))
    assert all("could not be written" in error for error in errors)


def resume_damaged(mesh, folder, settings):
    _trainer(mesh, folder, settings).resume()


def test_a_damaged_file_of_one_rank_is_refused_by_all(tmp_path):
    folder = tmp_path / "run"
    ranks(LAYOUTS["dp2"], go, str(folder), config(LAYOUTS["dp2"], 3), False)
    part = next((folder / "checkpoints" / "step-00000003").glob("__1_*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(RankFailed, match=r"__1_0\.distcp: damaged"):
        ranks(LAYOUTS["dp2"], resume_damaged, str(folder), config(LAYOUTS["dp2"], 6))


def test_layouts_that_do_not_fit_are_refused_all_at_once():
    made = dataclasses.replace(tiny(), parallel=ParallelConfig(dp=3, tp=4))
    problems = "\n".join(validate(made, "cpu", world=4))
    assert "needs 12 processes, but 4 were started" in problems
    assert "num_kv_heads to be a multiple of it; it is 1" in problems
    odd = config(Layout(dp=1, tp=2), 3)
    odd = dataclasses.replace(
        odd, graph=dataclasses.replace(odd.graph, capacities=(Capacity(15, 2),))
    )
    assert "multiple of it, not 15" in "\n".join(validate(odd, "cpu", world=2))
    with pytest.raises(ValueError, match="tp must be at least 1, got 0"):
        ParallelConfig(tp=0)


@pytest.mark.slow
def test_torchrun_trains_and_a_failing_rank_ends_it(tmp_path):
    shutil.copy(__file__, tmp_path / "documents.txt")
    options = f"""qwen3-tiny --data.source text --data.path {tmp_path}/documents.txt
        --run.steps 4 --run.device cpu --run.folder {tmp_path} --run.tokens-per-step 512
        --model.num-layers 2 --graph.capacities 256x8
        --run.name run --parallel.tp""".split()
    good = torchrun("-m", "packgraph.cli", "train", *options, "2", "--graph.strict")
    assert good.returncode == 0, good.stderr
    assert good.stderr.count("all steps done: 4 steps") == 1 and "tp 2" in good.stderr
    again = torchrun(
        "-m",
        "packgraph.cli",
        "train",
        "--config",
        str(tmp_path / "run" / "config.json"),
        "--resume",
        "--run.steps",
        "6",
        "--parallel.tp",
        "1",
        "--run.folder",
        str(tmp_path),
    )
    assert again.returncode == 0, again.stderr
    assert "all steps done: 6 steps" in again.stderr and "dp 2" in again.stderr
    started = time.monotonic()
    bad = torchrun("-m", "packgraph.cli", "train", *options[:-2], "other", "--parallel.tp", "3")
    assert bad.returncode != 0 and "tp 3 = 3 processes do not divide the 2" in bad.stderr
    assert time.monotonic() - started < 60


def torchrun(*words):
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    return subprocess.run(
        [*launcher, *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
