"""Adapters of low rank (LoRA, Hu et al. 2021, arXiv:2106.09685; DoRA, Liu et al. 2024,
arXiv:2402.09353) by the package peft: only they are trained, and only they are in checkpoints.

    base      frozen; read again at every start, and held against its fingerprint
    adapters  in all linear layers but the head, or in those of `lora.targets`; drawn by run.seed
    merged    W + B A alpha / rank, as `packgraph export` writes it

The invariant: a run goes on with the very base that its adapters were trained on, or not at all.
"""

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packgraph.integrations.transformers.model import PackedModel
from packgraph.models.decoder import DecoderModel, ModelChunks
from packgraph.models.hf import WeightsError
from packgraph.parallel.deferred import values_of
from packgraph.parallel.mesh import Mesh, single_process
from packgraph.parallel.ranks import from_all
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.config.hub import repository_of
from packgraph.train.config.reading import ConfigError, true_of
from packgraph.train.config.sections import TrainConfig
from packgraph.train.features.live import live_shape

NAME = "default"  # of the adapter, within the names of its parameters
ADAPTER = "adapter_config.json"
BASE = "base"  # key of the fingerprint in the state of a checkpoint
OWN_LINEAR = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)


def lora_problems(config: TrainConfig) -> list[str]:
    """Lists what keeps a run from training adapters as asked."""
    if not config.lora.enabled:
        return []
    model, parallel, live = config.model, config.parallel, config.hf.path is not None
    known = _linear_layers(config)
    missing = sorted({*(config.lora.targets or ())} - known)
    return true_of(
        {
            "lora.rank needs the package `peft`: pip install peft": importlib.util.find_spec("peft")
            is None,
            f"lora.rank with parallel.ep = {parallel.ep} is not there yet: adapters run on "
            "replicas (parallel.dp), contexts (parallel.cp) and, with hf:PATH, in pipelines "
            "(parallel.pp) and on tensor parallel ranks (parallel.tp)": parallel.ep > 1,
            f"lora.rank with parallel.pp = {parallel.pp} is for hf:PATH": not live
            and parallel.pp > 1,
            f"lora.rank with parallel.tp = {parallel.tp} is for hf:PATH": not live
            and parallel.tp > 1,
            "lora.rank is for models of attention and dense feed-forward layers, or "
            "hf:PATH": not live
            and (model.experts.enabled or model.latent.enabled or bool(model.pattern)),
            f"lora.rank with model.mtp_layers = {model.mtp_layers} is not there yet: layers of "
            "multi-token prediction are trained whole": not live and model.mtp_layers > 0,
            f"lora.targets: no linear layer is called {', '.join(missing)}; there are "
            f"{', '.join(sorted(known))}": bool(missing),
        }
    )


def _linear_layers(config: TrainConfig) -> frozenset[str]:
    return OWN_LINEAR if config.hf.path is None else live_shape(config.hf.path).linear


def add_adapters(model: DecoderModel | PackedModel, config: TrainConfig) -> None:
    """Freeze `model` and put adapters into it, whose values depend on `run.seed` alone."""
    peft: Any = importlib.import_module("peft")
    inner = model.causal if isinstance(model, PackedModel) else model
    # The host's generator draws them, whatever device they are on then.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        peft.inject_adapter_in_model(_options(config), inner, NAME)
    dtype = getattr(torch, config.run.dtype)  # masters of the optimizer are float32 anyway
    for parameter in inner.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def refuse_untrained_stages(model: PackedModel, stages: Sequence[range]) -> None:
    """Raises ConfigError where stages of a pipeline, by the numbers of their layers, would have no
    adapter of `model`."""
    trained = [
        number
        for number, layer in enumerate(model.layers)
        if any(parameter.requires_grad for parameter in layer.parameters())
    ]
    bare = [part for part in stages if not any(number in part for number in trained)]
    if bare:
        first = ", ".join(f"{part.start} to {part.stop - 1}" for part in bare[:4])
        raise ConfigError(
            [
                f"lora.targets: a stage of the pipeline has no adapter (layers {first}), so it has "
                "nothing to train; name more of them, or use fewer stages"
            ]
        )


def _options(config: TrainConfig) -> Any:
    peft: Any = importlib.import_module("peft")
    lora, known = config.lora, repository_of(config.hf.path or "")
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        target_modules=sorted(lora.targets or _linear_layers(config)),
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.hf.path if known is None else known[0],
        revision=None if known is None else known[1],
    )


def base_fingerprints(
    model: ModelChunks, mesh: Mesh | None = None, *, resumed: bool = True
) -> tuple[str, ...]:
    """SHA-256 of all that is not trained: names, shapes, types and values, of all stages of a
    pipeline together. Collective.

    Args:
        model: Before its layers are sharded.
        mesh: Of the ranks that hold it; None = this process alone.
        resumed: Whether it may be compared with what a checkpoint has.

    Returns:
        What a checkpoint stores, and where `resumed` what earlier versions stored, which knew no
        stages: one that a stage has of its own layers is not it.

    Raises:
        RuntimeError: For weights that have no values yet.
        WeightsError: On all ranks of `mesh` if theirs differ: nothing would make replicas equal.
    """
    frozen = _frozen(model)
    mine = {name: _digest([(name, tensor)]) for name, tensor in frozen}
    every = from_all(mesh or single_process(), mine)
    whole = {name: found for rank in reversed(every) for name, found in rank.items()}
    if differing := [rank for rank, one in enumerate(every) if not one.items() <= whole.items()]:
        raise WeightsError(
            f"ranks {', '.join(map(str, differing[:8]))} have read other weights under the "
            "adapters than ranks before them; give all nodes the same files"
        )
    found = hashlib.sha256(json.dumps(sorted(whole.items())).encode()).hexdigest()
    return (found, _digest(frozen)) if resumed else (found,)


def _frozen(model: ModelChunks) -> list[tuple[str, Tensor]]:
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    return [
        (name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        for name, tensor in sorted(model.state_dict().items())
        if name not in trained
    ]


def _digest(named: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        if values_of(tensor) is not None:
            raise RuntimeError(f"{name} has no values yet, of which a fingerprint could be")
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def check_base(path: Path, state: Mapping[str, Any], fingerprints: Sequence[str]) -> None:
    """Raise CheckpointError unless the adapters in the checkpoint at `path`, if it has any, were
    trained on the base of these fingerprints; or its weights against the reference of them."""
    stored = state.get(BASE)
    if stored not in fingerprints and (stored or fingerprints):
        raise CheckpointError(
            f"{path}: its adapters were trained on other weights than those that are there now, or "
            "its loss compares with others (their fingerprint differs); put the base back, or name "
            "the folder that has it: "
            "--hf.path or --run.init-from. (A checkpoint of a version whose adapters knew no "
            "pipelines goes on without parallel.pp first.)"
        )


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add the adapters to the weights of their layers, in place, and take them out of `model`."""
    for module in _adapted(model).values():
        module.merge(safe_merge=True)  # raises for a value that is not finite
    take_out_adapters(model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def take_out_adapters(model: nn.Module) -> None:
    """Leave `model` with the layers under its adapters, if it has any."""
    for name, module in _adapted(model).items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module.get_base_layer())


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Layers with adapters, by name."""
    if importlib.util.find_spec("peft") is None:
        return {}
    layers: Any = importlib.import_module("peft.tuners.tuners_utils")
    named = model.named_modules()
    return {name: one for name, one in named if isinstance(one, layers.BaseTunerLayer)}


def save_adapter(model: PackedModel, config: TrainConfig, folder: Path) -> None:
    """Write the adapter alone, as `PeftModel.from_pretrained` reads it."""
    peft: Any = importlib.import_module("peft")
    tensors: dict[str, Tensor] = peft.get_peft_model_state_dict(
        model.causal, adapter_name=NAME, save_embedding_layers=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / ADAPTER).exists():
        raise FileExistsError(f"{folder} already holds an adapter; save to a new folder.")
    options = _options(config)
    options.inference_mode = True
    named = {f"base_model.model.{name}": value.contiguous() for name, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    options.save_pretrained(folder)  # last: a folder with this file is whole


def needs_merged(config: TrainConfig) -> None:
    """Raise ConfigError where an adapter cannot be written alone."""
    if not config.lora.enabled:
        raise ConfigError(["--adapter: this run has trained all weights, and no adapter"])
    if config.hf.path is None:
        raise ConfigError(
            [
                "--adapter: adapters of models of packgraph have no name in transformers; leave it "
                "out, and they are merged into the weights"
            ]
        )
