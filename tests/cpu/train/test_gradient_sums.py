"""The dtype in which a run adds up gradients of a step's microbatches: which, its bits, and what a
run says of it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainkit import CAPACITIES, RandomPacks, equal, ran, state_of, tiny

from packgraph.packing.batch import PackedBatch
from packgraph.train.checkpoint.background import Saves
from packgraph.train.config.reading import ConfigError, ConfigLayer, read_config
from packgraph.train.config.sections import TrainConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.run_folder import check_same_run
from packgraph.train.validate import validate

NARROW, WIDE = "bfloat16", "float32"


class OnePack(RandomPacks):
    """The same pack, always: of 14 tokens."""

    def __next__(self) -> PackedBatch:
        self.position += 1
        return PackedBatch.build([list(range(9)), list(range(9, 14))], CAPACITIES[0])


def config(gradients: str = "auto", graph: bool = False, **run: Any) -> TrainConfig:
    made = tiny(graph=graph, **{"dtype": NARROW, "steps": 5} | run)
    return dataclasses.replace(
        made, optimizer=dataclasses.replace(made.optimizer, gradients=gradients)
    )


def run(*arguments: Any, **options: Any) -> dict[str, Tensor]:
    return state_of(ran(*arguments, **options)[0])


def rows(folder: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["gradient_norm"]) for row in read_metrics(folder / METRICS)]


def log(folder: Path) -> str:
    return " ".join((folder.parent / "log").read_text().split())


@pytest.mark.parametrize("granularity", ["layer", "chunk", "step"])
@pytest.mark.parametrize("gradients", [WIDE, NARROW])
@pytest.mark.few(3)
def test_graphs_train_as_eager_steps_do(gradients: str, granularity: str, tmp_path: Path) -> None:
    made = config(gradients, graph=True)
    options = {"granularity": granularity, "optimizer": granularity == "step"}
    made = dataclasses.replace(made, graph=dataclasses.replace(made.graph, **options))
    found = run(tmp_path / "graph", made)
    expected = run(tmp_path / "eager", config(gradients))
    equal(found, expected)
    assert rows(tmp_path / "graph") == rows(tmp_path / "eager")


def test_the_dtype_is_that_of_the_weights_only_where_nothing_adds_up() -> None:
    assert config().gradient_dtype(1) == config(WIDE).gradient_dtype(1) == WIDE
    assert config(NARROW).gradient_dtype(1) == NARROW
    assert config(dtype=WIDE).gradient_dtype(1) == WIDE
    assert config(tokens_per_step=1).gradient_dtype(1) == NARROW
    assert config(tokens_per_step=2).gradient_dtype(1) == WIDE, "a pack may have one token"
    assert config(tokens_per_step=2).gradient_dtype(2) == NARROW, "each replica has a pack"
    assert config(WIDE, tokens_per_step=1).gradient_dtype(1) == WIDE
    planned = config(tokens_per_step=2 * max(each.tokens for each in CAPACITIES))
    planned = dataclasses.replace(
        planned, parallel=dataclasses.replace(planned.parallel, dynamic_cp=True)
    )
    assert [planned.gradient_dtype(world) for world in (1, 2)] == [WIDE, NARROW]


def test_one_microbatch_a_step_has_the_bits_of_bfloat16(tmp_path: Path) -> None:
    options = {"tokens_per_step": 1, "steps": 3}
    narrow = run(tmp_path / "narrow", config(**options))
    equal(narrow, run(tmp_path / "asked", config(NARROW, **options)))
    wide = run(tmp_path / "wide", config(WIDE, **options))
    assert not all(torch.equal(value, wide[name]) for name, value in narrow.items())


def test_the_norm_of_many_equal_microbatches_is_that_of_one(tmp_path: Path) -> None:
    """Dropout draws other numbers each time, so there is none; bfloat16 is the control."""
    norms = {}
    for gradients, packs in ((WIDE, 1), (WIDE, 1031), (NARROW, 1031)):
        made = config(gradients, tokens_per_step=14 * packs, steps=1)
        made = dataclasses.replace(made, model=dataclasses.replace(made.model, dropout=0.0))
        run(tmp_path / f"{gradients}{packs}", made, OnePack())
        ((_, norms[gradients, packs]),) = rows(tmp_path / f"{gradients}{packs}")
    assert norms[WIDE, 1031] == pytest.approx(norms[WIDE, 1], rel=1e-3)
    assert norms[NARROW, 1031] < 0.9 * norms[WIDE, 1]


@pytest.mark.parametrize(
    ("gradients", "packs", "warns"), [(NARROW, 17, True), (NARROW, 16, False), (WIDE, 17, False)]
)
def test_many_microbatches_in_bfloat16_are_told_once(
    gradients: str, packs: int, warns: bool, tmp_path: Path
) -> None:
    made = config(gradients, tokens_per_step=14 * packs, steps=3)
    run(tmp_path / "run", made, OnePack())
    told = f"gradients of {packs} microbatches are added up in bfloat16"
    assert log(tmp_path / "run").count(told) == (1 if warns else 0)


@pytest.mark.parametrize("gradients", ["auto", NARROW])
def test_a_run_from_before_says_what_differs_or_goes_on_bitwise(
    gradients: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint knows nothing of the dtype: sums had that of the weights."""
    write = Saves.write

    def before(self: Any, step: int, tensors: Any, state: dict[str, Any], *args: Any, **more: Any):
        del state["gradients"], state["config"]["optimizer"]["gradients"]
        return write(self, step, tensors, state, *args, **more)

    whole = run(tmp_path / "whole", config(NARROW, steps=6))
    with monkeypatch.context() as patch:
        patch.setattr(Saves, "write", before)
        run(tmp_path / "run", config(NARROW, steps=3))
    again = run(tmp_path / "run", config(gradients, steps=6), resume=True)
    same = all(torch.equal(value, whole[name]) for name, value in again.items())
    told = "added up in bfloat16 so far, and are in float32 from here on"
    assert same is (gradients == NARROW) and (told in log(tmp_path / "run")) is not same


def test_a_run_may_change_its_sums_by_saying_so(tmp_path: Path) -> None:
    """What the note above advises also serves where the run went on with other sums meanwhile."""
    run(tmp_path / "run", config(steps=3))
    name = "optimizer.gradients"
    (note,) = check_same_run(tmp_path / "run", config(NARROW, steps=3), asked=[name])
    assert note.startswith(f"{name} changes from auto to bfloat16")
    with pytest.raises(ConfigError, match=f"{name}: the run has 'auto', now it is 'bfloat16'"):
        check_same_run(tmp_path / "run", config(NARROW, steps=3))


def test_a_run_that_goes_on_with_the_same_sums_says_nothing(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", config(steps=6))
    run(tmp_path / "run", config(steps=3))
    equal(run(tmp_path / "run", config(steps=6), resume=True), whole)
    assert "added up" not in log(tmp_path / "run")


def test_float32_weights_have_no_gradients_in_bfloat16() -> None:
    (problem,) = validate(config(NARROW, dtype=WIDE), "cpu")
    assert problem.startswith("optimizer.gradients = bfloat16 needs run.dtype = bfloat16")
    with pytest.raises(ConfigError, match="gradients"):
        read_config(tiny(), [ConfigLayer("options", {"optimizer": {"gradients": "float64"}})])
