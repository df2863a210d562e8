"""A run of a model of transformers, by its own code: `packgraph train hf:PATH`.

    PATH/config.json ─▶ the model without memory ─▶ can it be packed? its stages and sizes
    PATH/*.safetensors, or values by run.seed ─▶ the model ─▶ packed ─▶ the trainer

`model.*` of such a run are only read for estimates (of memory, of buckets), and taken from its
config. The invariant: every value comes from the files or from the seed; weights that are missing
or left over are refused, pickles are not read, and no code beside the model is run.
"""

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.stages import Stage
from packgraph.integrations.transformers.deferred import (
    ConvertedWeightsError,
    defer_arbitrary,
    defer_copies,
    defer_stored,
    skeleton,
)
from packgraph.integrations.transformers.experts import expert_split_problems, experts_of
from packgraph.integrations.transformers.model import PackedModel, packed, precision_problems
from packgraph.integrations.transformers.tensor import tensor_problems
from packgraph.models.foreign import naming, read_object
from packgraph.models.hf import CONFIG, INDEX, WeightsError
from packgraph.ops.names import NATIVE
from packgraph.train.config.presets import LIVE
from packgraph.train.config.reading import ConfigError, ConfigLayer, one_problem, true_of
from packgraph.train.config.sections import TrainConfig

LOCAL = {"local_files_only": True, "trust_remote_code": False}
MOST_NAMED = 5  # tensors in one message
OTHERS = (INDEX, "generation_config.json")  # JSON that transformers reads with the weights
MOST_LAYERS = 10_000  # a module is made of each
CORRECT = "correct that file, or get it again"
# What estimates read: sections of the run's config, and entries of that of transformers.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "tie_embeddings": "tie_word_embeddings",
}


@dataclass(frozen=True)
class LiveShape:
    """Facts of a model before it has memory. token_weights: elements of the matrices that a token
    passes; None where it passes some of many experts. linear: last names of its linear layers but
    the head. in_float8: reasons why, in a precision, all layers but so many at both ends cannot be
    in float8. by_heads: what ranks that share rows can share by heads alone. scan, split, share:
    reasons why so many ranks cannot share heads of mixers with a state, split matrices (and rows
    between them), or share experts. experts: elements of those.
    """

    sizes: dict[str, Any]
    stages: Sequence[Stage]
    elements: int
    token_weights: int | None
    linear: frozenset[str]
    in_float8: Callable[[str, int], list[str]]
    by_heads: list[str]
    scan: Callable[[int], list[str]]
    split: Callable[[int, bool], list[str]]
    share: Callable[[int], list[str]]
    experts: int


def transformers_module() -> Any:
    """The package transformers. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            ["hf:PATH: needs the package `transformers`: pip install transformers"]
        ) from error


def live_config(path: str) -> Any:
    """The config of the model of transformers in the folder `path`. Raises ConfigError."""
    folder = Path(path).expanduser()
    file = folder / CONFIG
    if not file.is_file():
        raise ConfigError(
            [f"hf:{path}: there is no {file}; name a folder with a model of transformers"]
        )
    for weights in folder.glob("*.safetensors"):
        if weights.exists() and not weights.is_file():  # a pipe would be waited for
            raise one_problem(f"{weights}: this is no file; {CORRECT}")
    for name in OTHERS:
        if (folder / name).exists():
            read_object(folder / name, one_problem)
    for name, value in read_object(file, one_problem).items():
        if "layer" in name and isinstance(value, int) and value > MOST_LAYERS:
            raise one_problem(f"{file}: {name} is more than {MOST_LAYERS:,}; {CORRECT}")
    with naming(file, "not a config of transformers", one_problem, CORRECT):
        config = transformers_module().AutoConfig.from_pretrained(folder, **LOCAL)
    chosen = getattr(config, "num_experts_per_tok", None)
    if chosen is not None and chosen < 1:
        raise one_problem(f"{file}: num_experts_per_tok is {chosen}, must be at least 1; {CORRECT}")
    return config


def _of_config(path: str, what: str = "transformers cannot make a model of it") -> naming:
    """Names the config in what transformers raises as it makes something of it."""
    return naming(Path(path).expanduser() / CONFIG, what, one_problem, CORRECT)


def running(path: str | None) -> contextlib.AbstractContextManager[None]:
    """Within the block the model of transformers in the folder `path` runs; None is another model.

    What its own code raises becomes a ConfigError that names its config.
    """
    if path is None:
        return contextlib.nullcontext()
    return _of_config(path, "the model of transformers does not run")


def _try_out(model: nn.Module, path: str) -> None:
    """Run a model without memory on two tokens, as transformers itself does.

    Many values are looked at only as a model runs. What torch says is left to the first step: some
    operations cannot run without memory, or in this dtype.
    """
    # A root of a negative number: without memory nothing complains of it.
    if any(isinstance(getattr(one, "scaling", None), complex) for one in model.modules()):
        file = Path(path).expanduser() / CONFIG
        raise one_problem(f"{file}: its attention is scaled by a complex number; {CORRECT}")
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    with _of_config(path), contextlib.suppress(RuntimeError):
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)


@functools.lru_cache(maxsize=4)
def live_shape(path: str) -> LiveShape:
    """Sizes and stages of the model in `path`. Allocates nothing. Raises ConfigError."""
    with torch.device("meta"):
        with _of_config(path):
            model = transformers_module().AutoModelForCausalLM.from_config(
                live_config(path), attn_implementation="eager"
            )
        _try_out(model, path)
        wrapped = packed_or_refused(model, f"hf:{path}", prove=False)
    config = model.config  # of a checkpoint with images that of its text
    found = {field: getattr(config, name, None) for field, name in SIZES.items()}
    sizes = {field: value for field, value in found.items() if value is not None}
    sizes.setdefault("num_kv_heads", sizes.get("num_heads"))
    if sizes.get("num_heads") and "head_dim" not in sizes:
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_heads"]
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    stages = [Stage(stage.name, stage.layer, _never) for stage in wrapped.stages()]
    elements = sum(parameter.numel() for parameter in model.parameters())
    is_tied = model.get_input_embeddings().weight is getattr(head, "weight", None)
    looked_up = 0 if is_tied else model.get_input_embeddings().weight.numel()
    passed = None if getattr(config, "num_experts_per_tok", None) else elements - looked_up
    in_float8 = functools.partial(precision_problems, wrapped.layers)
    split = functools.partial(tensor_problems, wrapped)
    share = functools.partial(expert_split_problems, model)
    experts = sum(p.numel() for one in experts_of(model) for p in one.parameters())
    spread = wrapped.only_by_heads, wrapped.scan_problems, split, share, experts
    facts = elements, passed, frozenset(linear), in_float8, *spread
    return LiveShape(sizes, stages, *facts)


def _never(state: Any) -> Any:
    raise AssertionError("stages of a shape are not run")


def packed_or_refused(
    model: nn.Module, place: str, precision: str = NATIVE, bf16_ends: int = 1, prove: bool = True
) -> PackedModel:
    """`packed(model)`. Raises ConfigError naming `place` where it cannot be packed."""
    try:
        return packed(model, precision=precision, bf16_ends=bf16_ends, prove=prove)
    except (ValueError, TypeError) as error:
        raise ConfigError([f"{place}: {error}"]) from error


def live_layer(path: str) -> ConfigLayer:
    """The sizes of the model in `path` as values of a configuration, and its tokenizer, whether
    there is one or not: bytes must be asked for. Raises ConfigError."""
    shape = live_shape(path)
    by_rows = shape.split(1, True) == shape.split(1, False)  # what it can, as models of packgraph
    parallel = {"sequence": by_rows} | ({"cp_kind": "ulysses"} if shape.by_heads else {})
    values = {"model": shape.sizes, "data": {"tokenizer": path}, "parallel": parallel}
    return ConfigLayer(f"hf:{path}", values)


def live_problems(config: TrainConfig) -> list[str]:
    """Lists what a run of a model of transformers is asked for and cannot do."""
    if config.hf.path is None:
        return ["hf needs the folder of a model: hf:PATH, or --hf.path"] * (config.preset == LIVE)
    parallel, shape = config.parallel, live_shape(config.hf.path)
    sizes = shape.sizes
    here = {field: getattr(config.model, field) for field in sizes}
    by_heads = " and for ".join(shape.by_heads)
    found = [
        f"model.{field} is {value!r} in hf:{config.hf.path}, {here[field]!r} here: the shape is "
        "that of its config.json"
        for field, value in sizes.items()
        if value != here[field]
    ]
    if parallel.tp > 1:
        problems = shape.split(parallel.tp, parallel.sequence)
        found += [f"parallel.tp = {parallel.tp}: {problem}" for problem in problems]
    if parallel.cp > 1:
        found += [f"parallel.cp = {parallel.cp}: {problem}" for problem in shape.scan(parallel.cp)]
    if parallel.ep > 1:
        found += [f"parallel.ep = {parallel.ep}: {problem}" for problem in shape.share(parallel.ep)]
    return found + true_of(
        {
            f"parallel.dispatcher = {parallel.dispatcher_name} is for models of packgraph: ranks "
            "share the experts of hf:PATH by padded": (
                parallel.ep > 1 and parallel.dispatcher_name != "padded"
            ),
            f"loss.name = {config.loss.name} with experts of hf:PATH is not there yet": (
                config.loss.is_of_pairs and shape.experts > 0
            ),
            "parallel.expert_stash is for models of packgraph, not for hf:PATH": bool(
                parallel.expert_stash
            ),
            f"parallel.cp_kind must be ulysses for {by_heads}": (
                parallel.cp > 1 and bool(by_heads) and parallel.cp_kind != "ulysses"
            ),
            "offload.modules are those of models of packgraph, not of hf:PATH": bool(
                config.offload.modules
            ),
            "run.init_from is for models of packgraph; hf:PATH reads the weights at PATH": (
                config.run.init_from is not None
            ),
        }
    )


def build_live(
    config: TrainConfig, device: torch.device, weights: bool, deferred: bool = False
) -> PackedModel:
    """The packed model of a run. weights: read them (or draw them, with `hf.random`); else they
    are about to be loaded and arbitrary. deferred: matrices get memory and values with the
    optimizer, which knows the parts. Raises ConfigError and WeightsError."""
    path = config.hf.path
    assert path is not None
    library, dtype = transformers_module(), getattr(torch, config.run.dtype)
    shape = config.model
    made = _deferred(library, path, dtype, device, weights, config.hf.random) if deferred else None
    if made is None:
        if weights and not config.hf.random:
            made = _pretrained(library, Path(path).expanduser(), dtype)
        else:  # values are drawn on the host, so that they do not depend on the device
            with torch.random.fork_rng(devices=[]), _of_config(path):
                torch.manual_seed(config.run.seed)
                made = library.AutoModelForCausalLM.from_config(live_config(path), dtype=dtype)
        if deferred:
            defer_copies(made, device)
        else:
            made = made.to(device)
    return packed_or_refused(made, f"hf:{path}", shape.precision, shape.bf16_ends)


def _deferred(
    library: Any, path: str, dtype: torch.dtype, device: torch.device, weights: bool, random: bool
) -> Any:
    """The model without memory for matrices; None where it must be whole on the host first."""
    if weights and random:  # one stream of random numbers for all of it
        return None
    made = skeleton(library.AutoModelForCausalLM, live_config(path), dtype)
    if not weights:
        defer_arbitrary(made, device)
        return made
    try:
        defer_stored(made, Path(path).expanduser(), device)
    except (ConvertedWeightsError, FileNotFoundError, WeightsError) as error:
        warnings.warn(
            f"hf:{path}: each rank holds all weights in host memory as it starts, since "
            f"transformers converts them: {error}",
            PackgraphWarning,
            stacklevel=2,
        )
        return None
    return made


def _pretrained(library: Any, folder: Path, dtype: torch.dtype) -> Any:
    logging = importlib.import_module("transformers.utils.logging")
    shows, tells = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)  # what is wrong is said once, below
    what = "transformers cannot load its weights, which may be of another config"
    remedy = "with --hf.random values are drawn anew"
    try:
        with naming(folder, what, WeightsError, remedy):
            model, found = library.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **LOCAL
            )
    finally:
        logging.set_verbosity(tells)
        if shows:
            logging.enable_progress_bar()
    wrong = {
        kind: sorted(map(str, found.get(f"{kind}_keys") or ()))
        for kind in ("missing", "unexpected", "mismatched")
    }
    if told := [
        f"{kind} {', '.join(names[:MOST_NAMED])}" for kind, names in wrong.items() if names
    ]:
        raise WeightsError(f"{folder}: its weights are not those of its config: {'; '.join(told)}")
    return model
