"""A run as words and files describe it, before the files of its model and data are opened.

    preset ─▶ layers: what the model's folder says, files, options ─▶ configuration ─▶ settled
                      └ read with torch (`train/build.py`)

Everything that the values alone tell is told from here, without torch: values that are wrong,
options that contradict each other, files that are not there.

A default gives way to an option that contradicts it, with a note; two options that contradict each
other are an error. What a file says is no default.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from packgraph.packing.capacity import Capacity
from packgraph.train.config.contradictions import (
    context_problems_of_run,
    contradictions,
    idle_expert_options,
    optimizer_problems,
    replica_problems,
)
from packgraph.train.config.hub import local_folders
from packgraph.train.config.reading import ConfigError, ConfigLayer, flat, read_config, render
from packgraph.train.config.sections import AUTO, TrainConfig
from packgraph.train.run_files import CONFIG


@dataclass(frozen=True)
class RunRequest:
    """A run that was asked for.

    Attributes:
        name: Of the preset.
        base: Its values.
        layers: What is laid over them, later ones winning.
    """

    name: str
    base: TrainConfig
    layers: tuple[ConfigLayer, ...]

    def read(self, *shapes: ConfigLayer, device_type: str = "cpu") -> tuple[TrainConfig, list[str]]:
        """Lays the layers over the preset, and lets defaults give way.

        Args:
            shapes: Layers below the others: the shape of the model that the run begins from.
            device_type: Of the device that it runs on, `cpu` or `cuda`.

        Returns:
            The configuration, and notes on what gave way.

        Raises:
            ConfigError: For values that are wrong.
        """
        config = read_config(self.base, [*shapes, *self.layers])
        given = {path for layer in self.layers for path in flat(layer.values)}
        return settled(replace(config, preset=self.name), given, device_type)

    def with_local_folders(self) -> "RunRequest":
        """The same run, with folders in the place of names of the Hugging Face hub. Raises
        ConfigError."""
        found = local_folders(self.read()[0])
        return replace(self, layers=(*self.layers, ConfigLayer("hub", found))) if found else self

    def check(self, world: int) -> None:
        """Raises ConfigError for what `world` processes cannot run on any device."""
        config = self.read()[0]
        problems = missing_files(config)
        if config.hf.path is None:  # else the model's own code has reasons, too
            problems += contradictions(config) + optimizer_problems(config, world)
            problems += replica_problems(config, world) + context_problems_of_run(config)
            if config.run.init_from is None:  # else the shape is not known
                problems += idle_expert_options(config)
        if problems:
            raise ConfigError(problems)


def settled(
    config: TrainConfig, given: Collection[str], device_type: str
) -> tuple[TrainConfig, list[str]]:
    """`config` whose defaults give way to the options that contradict them, and notes on these.

    given: dotted names of the values that are no defaults; with dashes or underscores.
    """
    given = {name.replace("-", "_") for name in given}
    graph, run, parallel, options = config.graph, config.run, config.parallel, config.optimizer
    wanted: dict[str, tuple[object, str]] = {}
    if graph.enabled and graph.warmup >= run.steps > 1:
        why = f"so that a step of run.steps = {run.steps} is left to replay"
        wanted["graph.warmup"] = run.steps - 1, why
    if graph.enabled and graph.optimizer and graph.granularity != "step":
        wanted["graph.granularity"] = "step", "graph.optimizer is part of no other graph"
    if options.resident != AUTO and not options.offload:
        why = f"optimizer.resident = {options.resident} is of a state on the host"
        wanted["optimizer.offload"] = True, why
    narrow = {
        "optimizer.gradients = bfloat16": options.gradients == "bfloat16",
        f"model.precision = {config.model.precision} on a GPU": device_type == "cuda"
        and config.model.precision != "bf16",
        f"model.attention_backend = {config.model.attention_backend}": device_type == "cuda"
        and config.model.attention_backend in ("varlen", "flash"),
    }
    if run.dtype == "float32" and (needs := [name for name, asked in narrow.items() if asked]):
        wanted["run.dtype"] = "bfloat16", f"{needs[0]} needs it"
    if parallel.dynamic_cp and parallel.cp > 1 and graph.capacities != AUTO:
        largest = max(graph.declared_capacities())
        row = Capacity(parallel.cp * largest.tokens, largest.documents)
        why = f"a row on parallel.cp = {parallel.cp} ranks of {largest.tokens} tokens each"
        wanted["graph.capacities"] = (row,), why
    notes = []
    for path, (value, why) in wanted.items():
        section, _, name = path.partition(".")
        if path not in given:
            before = render(getattr(getattr(config, section), name))
            notes.append(f"{path} = {render(value)} instead of {before}: {why}")
            part = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: part})
    return config, notes


def missing_files(config: TrainConfig) -> list[str]:
    """Lists the files and folders of a run that are not there."""
    data, run = config.data, config.run
    named = [("data.path", data.path or ""), *(("data.mixture", one) for one in data.weights())]
    named += [("eval.path", path) for path in config.eval.path]
    found = [
        f"{path}: no such file or folder ({name})"
        for name, path in named
        if path and not Path(path).expanduser().exists()
    ]
    if data.tokenizer != "bytes" and not Path(data.tokenizer).expanduser().exists():
        found.append(
            f"{data.tokenizer}: no such file; data.tokenizer must be `bytes` or the path of a "
            "tokenizer.json"
        )
    live, begin = (Path(one or "").expanduser() / CONFIG for one in (config.hf.path, run.init_from))
    if config.hf.path is not None and not live.exists():
        found.append(
            f"hf:{config.hf.path}: there is no {live}; name a folder with a model of "
            "transformers, or a model of the hub, ORG/NAME"
        )
    # A run that goes on has the weights of its checkpoint.
    if run.init_from is not None and not run.resume and not begin.exists():
        found.append(f"run.init_from: {begin} does not exist; name a folder with a model")
    return found
