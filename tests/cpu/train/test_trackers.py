"""Trackers: what they are told, that a run goes on there, and that they never end one."""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from trainkit import StopAfter, ran, tiny

from packgraph.train import metrics as module
from packgraph.train import validate as validation
from packgraph.train.config.sections import RunConfig, TrainConfig
from packgraph.train.metrics import NAMES, MetricsLog, TensorBoard
from packgraph.train.run_files import RunFileError
from packgraph.train.validate import validate


class WandbRun:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.rows, self.defined = arguments, list[dict[str, Any]](), []
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


class MlflowClient:
    """What `mlflow.MlflowClient` does for one server, which all of them share."""

    experiments: dict[str, str] = {}
    runs: list[types.SimpleNamespace] = []

    def get_experiment_by_name(self, name: str) -> Any:
        known = self.experiments.get(name)
        return types.SimpleNamespace(experiment_id=known) if known else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments) + 1))

    def search_runs(self, experiments: list[str], filter_string: str) -> list[Any]:
        name = filter_string.split("'")[1]
        return [run for run in self.runs if run.tags == {"packgraph": name}]

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
        info = types.SimpleNamespace(run_id=f"id{len(self.runs)}")
        made = types.SimpleNamespace(
            info=info, tags=tags, name=run_name, rows=[], params={}, status="RUNNING"
        )
        self.runs.append(made)
        return made

    def _run(self, number: str) -> Any:
        return next(run for run in self.runs if run.info.run_id == number)

    def update_run(self, number: str, status: str) -> None:
        self._run(number).status = status

    def log_param(self, number: str, key: str, value: Any) -> None:
        self._run(number).params[key] = value

    def log_batch(self, number: str, metrics: list[tuple[Any, ...]]) -> None:
        self._run(number).rows += metrics

    def set_terminated(self, number: str) -> None:
        self._run(number).status = "FINISHED"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[WandbRun]:
    """Stand-ins for wandb and mlflow; the runs of the first."""
    runs: list[WandbRun] = []

    def init(**arguments: Any) -> WandbRun:
        runs.append(WandbRun(arguments))
        return runs[-1]

    monkeypatch.setattr(MlflowClient, "experiments", {})
    monkeypatch.setattr(MlflowClient, "runs", [])
    found = {
        "wandb": types.SimpleNamespace(init=init),
        "mlflow": types.SimpleNamespace(MlflowClient=MlflowClient),
        "mlflow.entities": types.SimpleNamespace(Metric=lambda *values: values),
    }
    for place in (module, validation):
        monkeypatch.setattr(place, "find_spec", lambda name: name)
    monkeypatch.setattr(module, "import_module", lambda name: found[name])
    return runs


def settings(*trackers: str) -> TrainConfig:
    return tiny(tracker=trackers)


def test_a_run_and_its_rest_are_one_run_to_all_trackers(
    tmp_path: Path, installed: list[WandbRun]
) -> None:
    config = settings("wandb", "mlflow")
    assert not validate(config, "cpu")
    begun = ran(tmp_path / "run", config, stop=StopAfter(3))[0].step
    ran(tmp_path / "run", config, resume=True)
    first, second = installed
    assert first.arguments["id"] == second.arguments["id"] and first.arguments["name"] == "run"
    assert first.arguments["config"]["run"]["steps"] == 6 and first.finished and second.finished
    assert [row["step"] for row in first.rows + second.rows] == [1, 2, 3, 4, 5, 6]
    assert first.rows[-1]["step"] == begun and first.defined[0] == ("train/*", "step")
    assert {"train/loss", "train/tokens", "step"} <= first.rows[0].keys()
    (run,) = MlflowClient.runs
    assert run.status == "FINISHED" and run.params["run.steps"] == 6
    losses = [(step, value) for key, value, _, step in run.rows if key == "train/loss"]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in losses[:begun]] == [row["train/loss"] for row in first.rows]
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_another_run_in_the_same_folder_is_another_one(
    tmp_path: Path, installed: list[WandbRun]
) -> None:
    for _ in range(2):
        ran(tmp_path / "run", settings("wandb"))
    assert installed[0].arguments["id"] != installed[1].arguments["id"]


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_noted_once_and_the_run_goes_on(
    where: str, tmp_path: Path, installed: list[WandbRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no answer")

    monkeypatch.setattr(WandbRun, {"init": "__init__"}.get(where, where), fails)
    _, summary = ran(tmp_path / "run", settings("wandb", "tensorboard"))
    assert summary["steps"] == 6
    told = (tmp_path / "log").read_text()
    assert told.count("wandb has failed and gets no more rows, the run goes on") == 1
    assert "ConnectionError: no answer" in told
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_ctrl_c_and_files_of_the_run_pass(
    tmp_path: Path, installed: list[WandbRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    for error in (KeyboardInterrupt(), RunFileError("full")):

        def fails(*arguments: Any, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(WandbRun, "log", fails)
        opened = MetricsLog(tmp_path, last_step=0, trackers=["wandb"], note=notes.append)
        with pytest.raises(type(error)):
            opened.write({"step": 1, "loss": 1.0})
    assert not notes


def test_events_that_cannot_be_written_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(RunFileError, match="tensorboard"):
        TensorBoard(tmp_path, 0, {}, "")


def test_what_is_missing_or_unknown_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="tracker must be of tensorboard, wandb, mlflow, got"):
        RunConfig(tracker=("wandb", "paper"))
    monkeypatch.setattr(validation, "find_spec", lambda name: None)
    found = validate(settings("wandb"), "cpu")
    assert found == [
        "run.tracker names wandb, which is not installed: pip install wandb, or leave it out"
    ]
    assert not validate(settings("tensorboard"), "cpu")


def test_without_tensorboard_a_note_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    ran(tmp_path / "run", settings("tensorboard"))
    assert "tensorboard gets no rows: it is not installed" in (tmp_path / "log").read_text()
    assert not (tmp_path / "run" / NAMES).exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_the_real_ones_take_rows_without_a_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    notes: list[str] = []
    (tmp_path / "run").mkdir()
    for last in (0, 1):
        opened = MetricsLog(
            tmp_path / "run",
            last_step=last,
            trackers=[name],
            config={"run": {"steps": 2}},
            note=notes.append,
        )
        opened.write({"step": last + 1, "loss": 2.5, "starting": True, "skipped": None})
        opened.close()
    assert not notes
    if name == "mlflow":
        client = sys.modules["mlflow"].MlflowClient()
        experiment = client.get_experiment_by_name("packgraph")
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "train/loss")
        assert [(point.step, point.value) for point in history] == [(1, 2.5), (2, 2.5)]
        assert run.data.params == {"run.steps": "2"} and run.info.status == "FINISHED"
