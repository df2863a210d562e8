"""Exports what was trained as a folder that transformers loads, and tries it in a chat.

    runs/NAME/checkpoints/step-N ─▶ the model, its adapters merged ─▶ config.json, safetensors
                                 ─▶ the adapter alone (`--adapter`) ─▶ adapter_config.json, ...
    the tokenizer's files        ─▶ the same files, generation_config.json

All is written into a folder within the target first, and moved up at the end, config.json (or
adapter_config.json) last: a folder with that file is whole, and an export that was killed is
repeated by the same command. Of a stranger's folder only its own files are copied: a link may lead
out of it. A chat goes through the export, so what answers is what others will load.
"""

import importlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from packgraph.integrations.transformers.model import PackedModel
from packgraph.models.decoder import DecoderModel, ModelChunks
from packgraph.models.foreign import read_object
from packgraph.models.hf import CONFIG as CONFIG_FILE
from packgraph.models.hf import INDEX, WEIGHTS, WeightsError, save_pretrained
from packgraph.train.build import build_model
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.checkpoint.writer import (
    best_checkpoint,
    latest_checkpoint,
    load_state,
    load_tensors,
)
from packgraph.train.config.commands import ChatArguments, ExportArguments
from packgraph.train.config.presets import preset
from packgraph.train.config.reading import (
    ConfigError,
    path_problem,
    read_config,
    shown,
)
from packgraph.train.config.sections import ParallelConfig, TrainConfig
from packgraph.train.config.stored import stored_config
from packgraph.train.data import MissingPackageError, Tokenizer, build_tokenizer
from packgraph.train.data.source import Message
from packgraph.train.features.live import transformers_module
from packgraph.train.features.lora import (
    ADAPTER,
    base_fingerprints,
    check_base,
    merge_adapters,
    needs_merged,
    save_adapter,
)
from packgraph.train.launch import choose_device
from packgraph.train.progress import SILENT, Phases, phases_of_command
from packgraph.train.run_files import CHECKPOINTS, CONFIG, WRITING, sync_file, sync_folder, writing

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
GENERATION = "generation_config.json"


def export(
    run: Path,
    folder: Path,
    *,
    adapter: bool = False,
    best: bool = False,
    phases: Phases = SILENT,
) -> Path:
    """Write the weights of the newest checkpoint of the run in the folder `run` as a Hugging Face
    checkpoint, adapters merged into them.

    Files of the tokenizer that the run was trained with are copied, and what ends a generated text
    is written. adapter: write the adapter alone instead. best: take the checkpoint of the lowest
    loss instead of the newest. phases: shows how far it is. Returns the checkpoint's folder. Raises
    ConfigError, CheckpointError, WeightsError and RunFileError.
    """
    problems = [
        f"{shown(str(path))} cannot be the path of a folder: {problem}"
        for path in (run, folder)
        if (problem := path_problem(str(path))) is not None
    ]
    if not problems and folder.exists() and not folder.is_dir():
        problems = [f"{folder}: this is no folder; the weights cannot go there, name a new one"]
    if problems:
        raise ConfigError(problems)
    config = config_of(run)
    if adapter:
        needs_merged(config)
    # Files whose content goes into an export lie in their folder, or beside it in the hub's cache;
    # tokenizer.json is known as a file of its own.
    source = _tokenizer_folder(config)
    read = [] if source is None else [source / name for name in TOKENIZER_FILES[1:]]
    read += [] if config.hf.path is None else [Path(config.hf.path).expanduser() / GENERATION]
    for file in filter(Path.is_file, read):
        home = file.parent.resolve()
        cache = [above.parent / "blobs" for above in home.parents if above.name == "snapshots"]
        if not any(file.resolve().is_relative_to(root) for root in (home, *cache)):
            raise WeightsError(
                f"{file}: a link to {file.resolve()}, which is none of the model's files; remove "
                "the link, or put a copy in its place"
            )
    with phases.during(f"reading the checkpoint of {run}"):
        model, checkpoint = load_trained(run, config, best=best)
    with (
        writing(folder, "Make room there or choose another folder"),
        _moved_into(folder) as new,
        phases.during(f"writing weights to {folder}"),
    ):
        try:
            if adapter and isinstance(model, PackedModel):
                save_adapter(model, config, new)
                return checkpoint
            if config.lora.enabled:
                merge_adapters(model)
            if isinstance(model, DecoderModel):
                save_pretrained(model, new)
            else:
                model.causal.save_pretrained(new)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        except ValueError as error:
            raise WeightsError(str(error)) from error
        _copy_tokenizer(config, new)
        _check_loads(new)
    return checkpoint


@contextmanager
def _moved_into(folder: Path) -> Iterator[Path]:
    """Yields a new folder, whose files are those of `folder` when the block ends without an error.
    Raises WeightsError where a checkpoint is there."""
    new = folder / f"{WRITING}export"  # beside it, what is there is of an export that was killed
    last = (ADAPTER, CONFIG_FILE)
    present = sorted(name for name in (*last, WEIGHTS, INDEX) if (folder / name).exists())
    if present and not new.exists():
        raise WeightsError(
            f"{folder} already holds a checkpoint ({', '.join(present)}); save to a new folder."
        )
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        names = sorted((file.name for file in new.iterdir()), key=last.__contains__)
        for name in names:
            os.replace(new / name, folder / name)
        for name in names:
            sync_file(folder / name)
        sync_folder(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _tokenizer_folder(config: TrainConfig) -> Path | None:
    """Folder of the tokenizer's files, or None."""
    tokenizer = Path(config.data.tokenizer).expanduser()
    if config.data.tokenizer == "bytes" or not tokenizer.exists():
        return None
    return tokenizer if tokenizer.is_dir() else tokenizer.parent


def load_trained(
    run: Path, config: TrainConfig, *, best: bool = False
) -> tuple[DecoderModel | PackedModel, Path]:
    """The model of a run on the CPU, with the weights of its newest or best checkpoint (adapters
    not merged), and that checkpoint. Raises ConfigError, CheckpointError and WeightsError."""
    if (checkpoint := (best_checkpoint if best else latest_checkpoint)(run / CHECKPOINTS)) is None:
        raise CheckpointError(
            f"{run / CHECKPOINTS}: there is no checkpoint "
            + ("that is called the best" if best else "to export")
        )
    _, state = load_state(checkpoint)
    alone = replace(
        config, run=replace(config.run, resume=True), parallel=ParallelConfig()
    )  # a checkpoint has the weights
    model = build_model(alone, torch.device("cpu"))
    chunks = ModelChunks([model], adapters_only=config.lora.enabled)
    if config.lora.enabled:
        check_base(checkpoint, state, base_fingerprints(chunks))
    load_tensors(
        checkpoint,
        {f"model.{name}": value for name, value in chunks.stored().items()},
        optional=("optimizer.", "random."),
    )
    return model, checkpoint


def config_of(run: Path) -> TrainConfig:
    """The configuration of the run in a folder. Raises ConfigError."""
    layer = stored_config(run)[0]
    name = layer.values.get("preset")
    if not isinstance(name, str):
        raise ConfigError([f"{run / CONFIG}: says no preset; is this the folder of a run?"])
    return read_config(preset(name), [layer])


def _copy_tokenizer(config: TrainConfig, folder: Path) -> None:
    """Copy the files of the tokenizer beside the weights, and say what ends and pads a text."""
    if (source := _tokenizer_folder(config)) is None:
        return
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    path = folder / GENERATION
    known = (
        [path] if config.hf.path is None else [Path(config.hf.path).expanduser() / GENERATION, path]
    )
    found: dict[str, Any] = next(
        (read_object(file, WeightsError) for file in known if file.is_file()), {}
    )
    special: dict[str, Any] = _special_ids(source)
    try:
        ends = build_tokenizer(config.data).ends
    except MissingPackageError:  # without transformers, a chat template cannot be asked
        ends = ()
    if ends:  # of a text, and of a turn where that is another one
        special["eos_token_id"] = list(ends) if len(ends) > 1 else ends[0]
    path.write_text(json.dumps(found | special, indent=2) + "\n", encoding="utf-8")


def _special_ids(source: Path) -> dict[str, int]:
    """Ids of the special tokens that tokenizer_config.json names."""
    named, words = source / "tokenizer_config.json", source / "tokenizer.json"
    if not (named.is_file() and words.is_file()):
        return {}
    content = read_object(words, WeightsError)
    vocabulary = content.get("model", {}).get("vocab", {})
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    ids |= {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    options = read_object(named, WeightsError)
    found = {}
    for kind in ("bos", "eos", "pad"):
        token = options.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            found[f"{kind}_token_id"] = ids[token]
    return found


class Chat:
    """Answers, and remembers the turns."""

    def __init__(self, model: Any, tokenizer: Tokenizer, asked: ChatArguments) -> None:
        """model: of transformers."""
        self._model, self._tokenizer, self._asked = model.eval(), tokenizer, asked
        self._turns: list[Message] = []
        self._drawing: dict[str, Any] = {"do_sample": asked.temperature > 0}
        if asked.temperature > 0:
            self._drawing |= {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": 0}

    @torch.no_grad()
    def answer(self, prompt: str, streamer: Any = None) -> str:
        """Returns the model's answer to `prompt`. streamer: of transformers; gets it in pieces."""
        if self._asked.text:
            ids = self._tokenizer.start(prompt)
        else:
            self._turns.append(Message("user", prompt))
            ids = self._tokenizer.ask(self._turns)
        given = torch.tensor([ids], device=self._model.device)
        found = self._model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=self._asked.tokens,
            eos_token_id=list(self._tokenizer.ends) or None,
            pad_token_id=(self._tokenizer.ends or (0,))[0],
            streamer=streamer,
            **self._drawing,
        )
        text = self._tokenizer.decode(found[0, len(ids) :].tolist())
        if not self._asked.text:
            self._turns.append(Message("assistant", text))
        return text


def _check_loads(folder: Path) -> None:
    """Loads an export by transformers, without memory for its values, where that and accelerate are
    installed. Raises WeightsError where a tensor is missing, misshapen or of nothing."""
    if find_spec("transformers") is None or find_spec("accelerate") is None:
        return
    library = transformers_module()
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    kind = read_object(folder / CONFIG_FILE, WeightsError).get("model_type")
    if kind not in library.CONFIG_MAPPING:  # it came later than this version of transformers
        return
    _, found = library.AutoModelForCausalLM.from_pretrained(
        folder,
        local_files_only=True,
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    if any(found.values()):
        told = "; ".join(f"{what}: {next(iter(names))}" for what, names in found.items() if names)
        raise WeightsError(f"transformers does not load this model as it was trained ({told})")


def run_export(asked: ExportArguments) -> int:
    """Run `packgraph export`; returns the exit code. Raises as `export` does."""
    with phases_of_command() as phases:
        checkpoint = export(
            asked.run, asked.folder, adapter=asked.adapter, best=asked.best, phases=phases
        )
    print(f"{checkpoint} written to {asked.folder}", file=sys.stderr)
    if (asked.folder / TOKENIZER_FILES[0]).is_file():
        print(f"to serve it:  vllm serve {shlex.quote(str(asked.folder))}", file=sys.stderr)
    return 0


def run_chat(asked: ChatArguments) -> int:
    """Run `packgraph chat`; returns the exit code. Raises ConfigError and what `export` raises."""
    config, library, device = (
        config_of(asked.run),
        transformers_module(),
        choose_device(asked.device),
    )
    tokenizer = build_tokenizer(config.data)
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    with phases_of_command() as phases, tempfile.TemporaryDirectory() as folder:
        export(asked.run, Path(folder) / "weights", best=asked.best, phases=phases)
        with phases.during(f"loading the weights on {device}"):
            model = library.AutoModelForCausalLM.from_pretrained(
                Path(folder) / "weights", local_files_only=True, dtype="auto"
            ).to(device)
    torch.manual_seed(asked.seed)
    chat, streamer = (
        Chat(model, tokenizer, asked),
        library.TextStreamer(tokenizer, skip_prompt=True),
    )
    for line in sys.stdin if asked.prompt is None else [asked.prompt]:
        if asked.prompt is not None or line.strip():
            chat.answer(line.rstrip("\n"), streamer)
    return 0
