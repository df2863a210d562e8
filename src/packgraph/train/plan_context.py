"""`packgraph plan DATA --world N`: which rank would hold which document of a step, in groups of
which size.

Nothing is run. Costs are those of a measured model scaled to the run's, or those that a run has
measured.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packgraph.models.branches import head_sizes
from packgraph.models.config import DecoderConfig
from packgraph.ops.attention.kind import ContextChoice, row_problems
from packgraph.packing.buckets.cost import FLASH4, CostModel
from packgraph.packing.capacity import places
from packgraph.packing.pack import Overlong
from packgraph.parallel.context.plan import ContextPlan, plan_context
from packgraph.parallel.context.request import (
    COEFFICIENTS,
    EXCHANGE_US,
    GATHER_US,
    GROUP_US,
    PLACES,
    ContextCost,
    ContextRequest,
)
from packgraph.parallel.context.rows import context_problems
from packgraph.train.auto_capacities import read_lengths
from packgraph.train.config import ConfigError
from packgraph.train.config_values import CommandArguments, Count, option
from packgraph.train.context_rows import choices_of, common_multiple, notes_of, zigzag_sizes
from packgraph.train.data import build_tokenizer, open_documents
from packgraph.train.decoder_estimates import MEASURED_HEADS, MEASURED_LAYERS, decoder_cost
from packgraph.train.options import TrainConfig
from packgraph.train.run_files import read_json
from packgraph.train.run_folder import SUMMARY
from packgraph.viz.context import context_values, describe_context, draw_context_svg

MEASURED_KV_SHARE = 0.5  # of the measured model: heads of keys and values per head of queries
WITH_WORLD = frozenset(("tokens_per_rank", "sizes", "places", "microbatches", "costs", "svg"))


@dataclass(frozen=True, kw_only=True)
class PlanArguments(CommandArguments):
    """Own options of `packgraph plan DATA`."""

    data: str | None = option(
        None,
        "a .jsonl or .parquet file, a folder of text files, or stdlib; a preset or --config FILE "
        "name their own",
        positional=True,
    )
    preset: str | None = option(
        None,
        "the run whose model and options are meant (see `packgraph presets`)",
        positional=True,
    )
    config: Path | None = option(None, "values from a .toml or .json file", metavar="FILE")
    batch: Count | None = option(
        None,
        "so many documents are packed at a time and none waits for the next ones, as with "
        "`packgraph.pack`; without it they are packed as the trainer does, while data.window wait",
        metavar="N",
    )
    json: bool = option(False, "print JSON instead of a table")
    world: int | None = option(
        None,
        "share out one step's documents to N ranks (data x context parallel) instead, in groups of "
        "the size that each needs; the following options go with it",
        metavar="N",
    )
    tokens_per_rank: int = option(
        2048, "tokens that a rank has places for in a microbatch", metavar="N"
    )
    sizes: tuple[int, ...] = option(
        (),
        "sizes of groups, divisors of N (default: the powers of two that divide N)",
        metavar="C,C,...",
    )
    places: tuple[int, ...] = option(
        PLACES,
        "places for documents that a row may have, each a variant of the graphs",
        metavar="N,N,...",
    )
    microbatches: int = option(8, "of the step; documents that come later wait", metavar="N")
    costs: Path | None = option(
        None,
        "costs of rows as this run has measured them (--parallel.time-rows), its folder or its "
        "summary.json; without it they are estimates",
        metavar="RUN",
    )
    svg: Path | None = option(None, "also draw to this file, with all documents", metavar="FILE")

    def problems(self, given: Collection[str]) -> list[str]:
        """What is wrong with these options together, of which `given` were given."""
        alone = [f"--{name.replace('_', '-')}" for name in sorted(WITH_WORLD.intersection(given))]
        if self.world is None:
            return [f"{name}: goes with --world N" for name in alone]
        if self.batch is not None:
            return ["--batch: chooses buckets, and --world shares out documents; give one of them"]
        return []


def plan_data_context(config: TrainConfig, asked: PlanArguments) -> str:
    """The plan of the first step on the data of `config`, as text; draws the SVG. Raises
    ConfigError and DataError."""
    request, choices = _request(config, asked)
    read = read_lengths(config, open_documents(config.data), build_tokenizer(config.data))
    multiple = common_multiple(choices)
    fitting = _fitting(read.planned, request.longest // multiple * multiple, config.data.overlong)
    plan = plan_context([places(length, multiple) for length in fitting], request)
    title = _title(config, plan, asked)
    if asked.svg is not None:
        try:
            asked.svg.write_text(draw_context_svg(plan, title), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                [f"--svg {asked.svg}: cannot be written: {error.strerror}"]
            ) from error
    if asked.json:
        return json.dumps(context_values(plan), indent=2) + "\n"
    return "\n".join([title, *notes_of(choices), "", describe_context(plan)])


def _request(
    config: TrainConfig, asked: PlanArguments
) -> tuple[ContextRequest, dict[int, ContextChoice]]:
    """What is asked of the plan, and how the ranks of its groups share attention. Raises
    ConfigError."""
    assert asked.world is not None
    try:
        request = ContextRequest(
            world=asked.world,
            tokens=asked.tokens_per_rank,
            sizes=asked.sizes,
            places=asked.places,
            waves=asked.microbatches,
        )
    except ValueError as error:
        raise ConfigError(
            [f"{error} (--world, --tokens-per-rank, --sizes, --places, --microbatches)"]
        ) from error
    parallel, flash = config.parallel, config.model.attention_backend == "flash"
    problems = [
        f"{problem} (--sizes)"
        for size in request.sizes
        if size > 1
        for problem in context_problems(config.model, size, parallel.tp, parallel.cp_kind)
    ]
    if not problems:
        choices = choices_of(config, request.sizes)
        problems = [
            f"{problem} (--tokens-per-rank)"
            for size, choice in choices.items()
            for problem in row_problems(None, size * asked.tokens_per_rank, choice.kind, size)
        ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    cost = context_cost(
        config.model, parallel.tp, FLASH4 if flash else CostModel(), zigzag_sizes(choices)
    )
    return replace(
        request, cost=cost if asked.costs is None else _measured(asked.costs, cost)
    ), choices


def _measured(run: Path, prior: ContextCost) -> ContextCost:
    """What the summary of a run says that rows cost. Raises ConfigError where it says nothing."""
    path = run / SUMMARY if run.is_dir() else run
    found = read_json(path).get("context", {})
    coefficients = {name: found.get("cost", {}).get(name) for name in COEFFICIENTS}
    if not found.get("cost_is_measured") or None in coefficients.values():
        raise ConfigError(
            [
                f"--costs {run}: {path} holds no measured costs; name a run made with "
                "--parallel.dynamic-cp true --parallel.time-rows true, of more steps than its "
                "warm-up"
            ]
        )
    return replace(prior, **coefficients)


def context_cost(
    model: DecoderConfig, parts: int, measured: CostModel, zigzag: tuple[int, ...] = ()
) -> ContextCost:
    """`decoder_cost` and what groups exchange: by heads what every branch exchanges
    (`models/branches.py`), in zigzag keys and values alone.

    parts: ranks that share heads (tp). zigzag: sizes of groups whose rows are cut so. Latent
    attention exchanges keys and values of all heads.
    """
    attending = model.count("attn")
    exchanging = sum(model.count(name) for name, kind in model.kinds().items() if kind.is_mixer)
    key_heads = model.num_heads if model.latent.enabled else model.num_kv_heads
    columns = sum(
        model.count(name) * kind.exchanged_columns(model) for name, kind in model.kinds().items()
    )
    measured_columns = MEASURED_LAYERS * 2 * MEASURED_HEADS * (1 + MEASURED_KV_SHARE)
    gathered = (
        attending
        * key_heads
        * sum(head_sizes(model))
        / (MEASURED_LAYERS * 2 * MEASURED_HEADS * MEASURED_KV_SHARE)
    )
    return ContextCost.of(
        decoder_cost(model, parts, measured),
        zigzag=zigzag,
        group_us=GROUP_US * exchanging / MEASURED_LAYERS,
        exchange_us=EXCHANGE_US * columns / measured_columns / parts,
        gather_us=GATHER_US * gathered / parts,
    )


def _fitting(lengths: Sequence[int], longest: int, overlong: Overlong) -> list[int]:
    """`lengths` in their order, those of more than `longest` tokens split or dropped. Raises
    ConfigError for an error."""
    found: list[int] = []
    for length in lengths:
        if length <= longest:
            found.append(length)
        elif overlong == "error":
            raise ConfigError(
                [
                    f"a document has {length:,} tokens, and the largest group holds {longest:,}: "
                    "give ranks "
                    "more tokens (--tokens-per-rank) or allow larger groups (--sizes), or choose "
                    "--data.overlong split or drop"
                ]
            )
        elif overlong == "split":
            found += [min(longest, length - start) for start in range(0, length, longest)]
    if not found:
        raise ConfigError(
            [
                f"no document has at most {longest:,} tokens, and all others are dropped: give "
                "ranks more "
                "tokens (--tokens-per-rank), or choose --data.overlong split"
            ]
        )
    return found


def _title(config: TrainConfig, plan: ContextPlan, asked: PlanArguments) -> str:
    left = set(plan.left)
    placed = [length for index, length in enumerate(plan.lengths) if index not in left]
    source = config.data.path or config.data.source
    return (
        f"{source}: {len(placed):,} documents of {min(placed)} to {max(placed):,} tokens on "
        f"{plan.request.world} "
        f"ranks of {plan.request.tokens:,} tokens, {len(plan.waves)} microbatches; costs "
        + (
            f"estimated for {config.preset}"
            if asked.costs is None
            else f"as measured by {asked.costs}"
        )
    )
