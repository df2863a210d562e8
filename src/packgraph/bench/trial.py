"""`packgraph.try_module` and `packgraph try`: is it faster for me?

    eager                  the module as it is
    graph                  packgraph.graph(module)
    graph + compile        packgraph.graph(module, compile=True)
    compile                torch.compile(module)

Each way runs forward and backward of the same batches, over the same parameters and gradients, by
turns. The report says tokens a second, memory, what ran eagerly and why, and the lines to change.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.bench.comparison import (
    Check,
    Comparison,
    Deadline,
    Sample,
    agreement,
    shared_copy,
    time_calls,
)
from packgraph.bench.rows import Row, Rows, gibibytes
from packgraph.graphs.graphed import GraphedModule, control, graph
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.ranks import Launch
from packgraph.train.build import build_model, with_shape
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.request import RunRequest
from packgraph.train.features.live import running
from packgraph.train.launch import choose_device, prepare
from packgraph.train.run_folder import model_name
from packgraph.verification.module import Loss, sum_of_outputs, tensors_of
from packgraph.viz.drawing import aligned

EAGER, GRAPH, BOTH, COMPILE = "eager", "graph", "graph + compile", "compile"
WAYS = EAGER, GRAPH, BOTH, COMPILE  # in the order of measuring; the report has that of ORDER
ORDER = EAGER, COMPILE, GRAPH, BOTH
SECONDS = 120.0
ROUNDS, LEAST_ROUNDS = 10, 3
TOGETHER = 2  # eager and another one: memory of a third would not always be there
FIRST_CALLS = 3  # of every shape: warm-up, capture, replay
CPU = "cpu"
SKIPPED, BATCHES = 4, 8  # rows of a run that are left out, and that are timed
GAIN = 1.03  # less is what a machine's slow changes make


@dataclass(frozen=True)
class Trial:
    """Result of `packgraph.try_module`; `str()` of it is the report.

    Attributes:
        rows: A row for each way, by its name: `figures`, `ratio` to eager, `peak_bytes`, `reason`
            where it could not be measured.
        fallbacks: Why calls of graphs ran eagerly behind the first ones, with their counts, by way.
        title: What was run.
        device: What it ran on; on a `cpu` graphs are replayed one operation after another.
        unit: What is counted: `tokens`, or `calls` of batches that are no `PackedBatch`.
        change: The lines to change, by way.
    """

    rows: Mapping[str, Row]
    fallbacks: Mapping[str, Mapping[str, int]]
    title: str
    device: str
    unit: str = "tokens"
    change: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The fastest way; eager where none is faster by more than a machine's noise."""
        equal = [name for name, row in self.rows.items() if row.get("agrees") is not False]
        way = max(equal, key=lambda name: self.rows[name]["ratio"] or 0.0)
        return way if (self.rows[way]["ratio"] or 0.0) >= GAIN else EAGER

    def __str__(self) -> str:
        table = [["", f"{self.unit}/s", "x eager", "peak GiB", "ready after s", "result"]]
        for name, row in self.rows.items():
            median = row["figures"].get("ms_per_1000_tokens", {}).get("median")
            table.append(
                [
                    name,
                    "-" if median is None else f"{1e6 / median:,.0f}",
                    "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
                    gibibytes("peak_bytes")(row),
                    "-" if row.get("prepare_seconds") is None else f"{row['prepare_seconds']:.1f}",
                    agreement(row) if name != EAGER else "",
                ]
            )
        lines = [f"{self.title}, on {self.device}", "", *aligned(table), ""]
        lines += [
            f"{name}: {row['reason']}"
            for name, row in self.rows.items()
            if row["reason"] is not None
        ]
        lines += [
            f"{name}: {count} calls ran eagerly: {reason}"
            for name, found in self.fallbacks.items()
            for reason, count in found.items()
        ]
        if self.device == CPU:
            lines.append("Graphs gain nothing on a CPU, where they are proven: try it on a GPU.")
        elif self.rows[EAGER]["reason"] is not None:
            lines.append("Eager could not be measured, so nothing can be compared with it.")
        elif self.best == EAGER:
            lines.append("Nothing is faster than eager here by more than 3 %: change nothing.")
        else:
            ratio = self.rows[self.best]["ratio"]
            lines.append(f"{self.best} is {ratio:.2f} times as fast as eager. The lines to change:")
            lines += ["", *(f"    {line}" for line in self.change[self.best].splitlines())]
        return "\n".join(lines)


def try_module(
    module: nn.Module,
    batches: Sequence[Any],
    *,
    loss: Loss | None = None,
    seconds: float = SECONDS,
    compile: bool | str | Mapping[str, Any] = True,
    **options: Any,
) -> Trial:
    """Times a module on this device: eager, through graphs, and compiled, by turns.

    Forward and backward of every batch are timed, without the optimizer's update, which is the same
    for all ways. The module's values stay as they are; its `.grad` are zero afterwards.

    Args:
        module: On the device, in the mode and dtype of training; must work with `copy.deepcopy`.
        batches: The arguments of each call, a tuple or a single one, on the module's device. Shapes
            that occur in training should occur in them.
        loss: Makes a scalar of the module's output. By default the sum of all floating-point
            outputs, in float32.
        seconds: Nothing further begins after this time. What is being compiled then is waited for;
            an interrupt (Ctrl-C) ends with the report of what was measured.
        compile: Option of `packgraph.graph` for the way that compiles; a name is the compiler of
            torch.compile, too.
        **options: Further options of `packgraph.graph` for both ways of graphs, such as
            `capacities`.

    Returns:
        The figures of all ways; printed, it is a report that ends with the lines to change.

    Raises:
        ValueError: If there are no batches.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        >>> found = packgraph.try_module(model, [torch.randn(4, 8)], compile="aot_eager")
        >>> sorted(found.rows)
        ['compile', 'eager', 'graph', 'graph + compile']
    """
    if not batches:
        raise ValueError("try_module needs at least one batch: the arguments of a call")
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    comparison = _Ways(module, batches, loss or sum_of_outputs, Deadline(seconds), device)
    comparison.options, comparison.compile = options, compile
    rows = Rows({}, write=False)
    try:
        comparison.measure(rows, TOGETHER)
    except KeyboardInterrupt:  # a compiler may take minutes; what was measured is the report
        if not rows.measured:
            raise
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    found = {row["way"]: row for row in rows.all}
    return Trial(
        {name: found[name] for name in ORDER if name in found},
        comparison.fallbacks,
        f"{type(module).__name__}: forward and backward of {len(batches)} batches",
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "tokens" if _places(batches[0]) is not None else "calls",
        {
            GRAPH: f"model = packgraph.graph(model{given})",
            BOTH: f"model = packgraph.graph(model, compile={compile!r}{given})",
            COMPILE: "model = torch.compile(model)",
        },
    )


def run_try(asked: RunRequest, seconds: float, given: str) -> int:
    """Times the model and the documents of a run, on its device, and prints the report.

    Args:
        asked: The run.
        seconds: As in `try_module`.
        given: The run's words behind `packgraph train`, for the lines to change.

    Returns:
        The exit code: 1 where nothing could be measured.

    Raises:
        ConfigError: Where the run cannot be made, or asks for several processes.
        DataError: Where its documents cannot be read.
    """
    launch = Launch.read()
    if launch.world > 1:
        raise ConfigError([f"packgraph try times one process, not {launch.world}"])
    device = choose_device(asked.read()[0].run.device)
    config, notes = with_shape(asked, device.type)
    if config.loss.is_of_pairs:
        raise ConfigError([f"packgraph try times token losses, not loss.name = {config.loss.name}"])
    prepared = prepare(config, device)
    config, packs = prepared.config, prepared.microbatches
    with running(config.hf.path):
        model = build_model(config, device)
        # The first rows hold the longest documents.
        taken = list(itertools.islice(packs, SKIPPED + BATCHES))
        batches = taken[-min(BATCHES, len(taken)) :]
        whole = config.graph.granularity == "step"
        found = try_module(
            model,
            [batch.to(device) for batch in batches],
            seconds=seconds,
            capacities=config.graph.captured_capacities(),
            granularity="chunk" if whole else config.graph.granularity,
            scope=config.graph.scope,
        )
    places = sum(batch.capacity.tokens for batch in batches)
    documents = sum(batch.num_documents for batch in batches)
    real = sum(batch.num_tokens for batch in batches)
    title = f"{model_name(config)}: forward and backward of {len(batches)} rows, {documents} "
    title += (
        f"documents of {real / documents:,.0f} tokens in the mean, padding {1 - real / places:.1%}"
    )
    change = {
        GRAPH: f"packgraph train {given}",
        BOTH: f"packgraph train {given} --graph.compile true",
        COMPILE: "model = torch.compile(model)  # in a loop of your own",
    }
    print(
        *(f"note: {note}" for note in notes), replace(found, title=title, change=change), sep="\n"
    )
    return 0 if any(row["reason"] is None for row in found.rows.values()) else 1


class _Way:
    """One way, ready to run."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name, self.call, self.first = name, call, Counter[str]()

    def fallbacks(self) -> Counter[str]:
        """Counts the calls that ran eagerly so far, by reason."""
        if not isinstance(self.call, GraphedModule):
            return Counter()
        return Counter(control(self.call).stats.fallbacks)

    def facts(self) -> Row:
        return {}

    def complaint(self) -> str | None:
        return None

    def close(self) -> None:
        if isinstance(self.call, GraphedModule):
            control(self.call).close()


class _Ways(Comparison[_Way]):
    """All ways of calling one module."""

    main, least_rounds = "device_ms", LEAST_ROUNDS

    def __init__(
        self,
        module: nn.Module,
        batches: Sequence[Any],
        loss: Loss,
        deadline: Deadline,
        device: torch.device,
    ) -> None:
        super().__init__(WAYS, ROUNDS, device, deadline)
        self.module, self.loss, self.share = module, loss, 0.0
        self.options: Mapping[str, Any] = {}
        self.compile: bool | str | Mapping[str, Any] = True
        self.batches = [each if isinstance(each, tuple) else (each,) for each in batches]
        self.fallbacks: dict[str, dict[str, int]] = {}
        self.gradients = [
            parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]
        trained = (each for each in module.parameters() if each.requires_grad)
        for parameter, gradient in zip(trained, self.gradients, strict=True):
            parameter.grad = gradient

    def make(self, name: str) -> _Way:
        """The module in a form of its own, over the same values and gradients."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        module = shared_copy(self.module)
        if name in (GRAPH, BOTH):
            compile = self.compile if name == BOTH else False
            return _Way(name, graph(module, warmup=1, compile=compile, **self.options))
        compiler = self.compile if isinstance(self.compile, str) else "inductor"
        return _Way(name, torch.compile(module, backend=compiler) if name == COMPILE else module)

    def measure_group(self) -> None:
        """Gives every group of ways its share of the time."""
        self.share += 1 / (len(WAYS) - 1)
        super().measure_group()

    def late(self) -> bool:
        """Returns whether the time of this group is up."""
        return self.deadline.passed(self.share)

    def too_late(self, name: str) -> str | None:
        """Returns the reason why a way is not prepared any more, or None."""
        return self.deadline.reason if self.deadline.passed() else None

    def warm_up(self, way: _Way) -> None:
        """Captures and compiles every shape that occurs, the largest first."""
        kinds = {_kind(args): args for args in sorted(self.batches, key=_elements)}
        for args in reversed(kinds.values()):
            for _ in range(FIRST_CALLS):
                self.run(way, args)
        way.first = way.fallbacks()

    def check(self, way: _Way) -> Check:
        """Loss and norm of the gradients of the first batch, from the same random state."""
        self.zero_gradients()
        devices = [self.device] * (self.device.type == "cuda")
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            found = self.run(way, self.batches[0])
        norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in self.gradients]
        return Check(float(found), float(torch.stack(norms).norm()) if norms else 0.0)

    def heaviest(self, way: _Way) -> object:
        """Runs the largest batch."""
        return self.run(way, max(self.batches, key=_elements))

    def time(self, way: _Way, number: int) -> list[Sample]:
        """All batches in a row, behind one that keeps the device busy."""
        self.zero_gradients()

        def run(mark: Callable[[], None]) -> None:
            for args in self.batches:
                self.run(way, args)
                mark()

        laps, host = time_calls(self.device, run, lambda: self.run(way, self.batches[-1]))
        tokens = sum(_places(args[0]) or 1 for args in self.batches)
        return [Sample({"device_ms": sum(laps), "host_ms": host}, tokens)]

    def what(self, name: str) -> Row:
        """The name of a way."""
        return {"way": name}

    def after(self, way: _Way) -> Row:
        """Notes which calls of graphs ran eagerly."""
        if isinstance(way.call, GraphedModule):
            self.fallbacks[way.name] = dict(way.fallbacks() - way.first)
        return {}

    def tolerance(self, name: str) -> float:
        """Returns what rounding may do to a loss: more where gradients are sums in 16 bits."""
        short = any(each.dtype.itemsize < 4 for each in self.gradients)
        return max(super().tolerance(name), 1e-2 if short else 0.0)

    def run(self, way: _Way, args: tuple[Any, ...]) -> Tensor:
        """Forward and backward of a batch; returns the loss."""
        loss = self.loss(way.call(*args))
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    def zero_gradients(self) -> None:
        """Zeroes all gradients in place."""
        for gradient in self.gradients:
            gradient.zero_()


def _places(batch: Any) -> int | None:
    """Real tokens of a packed batch; None for other arguments."""
    first = batch[0] if isinstance(batch, tuple) else batch
    return first.num_tokens if isinstance(first, PackedBatch) else None


def _elements(args: tuple[Any, ...]) -> int:
    return sum(tensor.numel() for _, tensor in tensors_of(args))


def _kind(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype) for _, tensor in tensors_of(args))
