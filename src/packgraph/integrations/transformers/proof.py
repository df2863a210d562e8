"""Proof that a model of transformers computes the same over packed documents.

    config -> a twin of few layers, float32, random values
                 |-- its own forward, document by document   hidden states, loss, gradients
                 |-- packed, all documents in one row        hidden states, loss, gradients   equal?

The twin is of the model's class and configuration, at its widths, with as many layers as its kinds
of layers need. Every integer of the configuration that shapes no tensor and that short documents
would not reach (windows, chunks, places from which scales change, the most keys that are read) is
made smaller than they are, whatever it is called. The proof is made once for a class, a
configuration and the versions of both libraries. It also counts the modules of each layer that read
other tokens: a later call in which fewer run is refused.
"""

import copy
import functools
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packgraph.integrations.transformers.mixers import BATCH
from packgraph.models.foreign import naming
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

LENGTHS, ROW = (21, 9, 14), Capacity(56, 4)  # of documents; the rest of the row is padding
FEWEST_LAYERS, MOST_LAYERS = 2, 8
REACHED = 8  # a place that every document goes beyond
FEWEST_WORDS = 512
# What making a model raises where a number is none of its settings.
UNMADE = (
    *(ValueError, TypeError, RuntimeError, LookupError, AttributeError),
    *(ArithmeticError, AssertionError),
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k", "n_group")  # twice as many are kept
FEWEST_EXPERTS = 16
LIMIT = 1e-3  # of the largest value: float32 rounds at 1e-6 in a layer, a token that leaks is 1e-2
# Norms of states that are nearly zero make 1e-3 of rounding, in some draws of values.
ROUNDED, OTHER_DRAWS = 1e-2, (1, 2)
OF_NO_MATTER = ("_idx", "_id", "_index", "training", "checkpointing", "token_mixers", "precision")
SAME = "packed documents differ from single ones"


class Proof(NamedTuple):
    """Result of a proof.

    problem: what differs, and in which layer; None where all is equal. mixers: modules of a layer
    that read other tokens, by its `kind_of`.
    """

    problem: str | None
    mixers: Mapping[str, int]


_KNOWN: dict[str, Proof] = {}


def prove(causal: Any, pack: Callable[[Any], nn.Module]) -> Proof:
    """Compares packed documents with documents one by one, in a twin of a model.

    Args:
        causal: A PreTrainedModel with a language-model head. It is not run or changed, and may be
            without memory.
        pack: Makes a model of its class take packed batches.

    Returns:
        No problem where hidden states, loss and every gradient are equal within rounding.

    Raises:
        ValueError: If the model's own code cannot make or run a twin.
    """
    device = _device_of(causal)
    name = f"{type(causal).__module__}.{type(causal).__qualname__}"
    free = {"_name_or_path": "", "dtype": "", "architectures": None}
    config, version = causal.config.to_dict() | free, _transformers().__version__
    facts = [name, version, torch.__version__, device.type, config, sorted(_kinds(causal))]
    key = json.dumps(facts, sort_keys=True, default=str)
    if key not in _KNOWN:
        with _exactly(device):
            _KNOWN[key] = _compare(causal, pack)
        if _KNOWN[key].problem is not None:
            with _exactly(device):
                rounded = _compare(causal, pack, ROUNDED).problem is None
            for seed in OTHER_DRAWS if rounded else ():
                with _exactly(device):
                    torch.manual_seed(seed)
                    if (other := _compare(causal, pack)).problem is None:
                        _KNOWN[key] = other
                        break
    return _KNOWN[key]


def prove_split(
    causal: Any,
    pack: Callable[[Any], nn.Module],
    split: Callable[[nn.Module], None],
    group: dist.ProcessGroup,
) -> None:
    """Compares a twin of a model that is split over ranks with the whole one. Collective.

    Args:
        causal: As of `prove`.
        pack: As of `prove`.
        split: Splits a packed twin over the ranks of `group`, in place.
        group: The ranks.

    Raises:
        ValueError: On all ranks, where the loss or a gradient on any of them is another.
    """
    with _exactly(_device_of(causal)):
        twin = _twin(causal)
        documents = _documents(twin)
        places = -(-ROW.tokens // group.size()) * group.size()  # ranks may have a part each
        row = Capacity(places, ROW.documents)
        batch = PackedBatch.build([one.cpu() for one in documents], row).to(documents[0].device)
        made = pack(twin)
        whole = _on_host(made, batch)
        split(made)  # in place: there is room for one twin
        parts = _on_host(made, batch)
        gradients = list(whole.values())[1:]
        largest = max(float(value.abs().max()) for value in gradients) / 1000
        found = {name: _apart(parts[name], value, largest) for name, value in whole.items()}
        differing = [f"{what}: {told}" for what, told in found.items() if told]
        everywhere = torch.tensor([len(differing)])
        dist.all_reduce(everywhere, group=group)
    if everywhere.item():
        told = differing[0] if differing else "on another rank"
        raise ValueError(f"a twin of {type(causal).__name__} split over ranks differs in {told}")


def _on_host(made: nn.Module, batch: PackedBatch) -> dict[str, Tensor]:
    """The loss of a packed twin and the gradients of its parameters, whole, on the host."""
    loss = made(batch)
    loss.backward()
    gradients = {name: _taken(value).cpu() for name, value in made.named_parameters()}
    return {"the loss": loss.detach().cpu()} | {
        f"the gradient of {name}": value for name, value in gradients.items()
    }


def _device_of(causal: Any) -> torch.device:
    live = (value.device for value in causal.parameters() if not value.is_meta)
    return next(live, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@contextmanager
def _exactly(device: torch.device) -> Iterator[None]:
    """For the block numbers on `device` are float32, and drawn alike every time."""
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
            torch.random.fork_rng([device] * (device.type == "cuda")),
            torch.device(device),
        ):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def kind_of(layer: nn.Module) -> str:
    """Tells layers apart that compute otherwise: the modules of transformers and their settings.
    Adapters and quantised products, which see single tokens, make no other kind."""
    found = []
    for name, module in layer.named_modules():
        if type(module).__module__.startswith("transformers."):
            settings = {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, bool | int | str) and not key.endswith(OF_NO_MATTER)
            }
            found.append((name, type(module).__name__, sorted(settings.items())))
    return repr(found)


def layers_of(causal: Any) -> nn.ModuleList:
    """The list of decoder layers of a model. Raises ValueError where there is none."""
    for module in causal.base_model.children():
        if isinstance(module, nn.ModuleList) and len(module) == causal.config.num_hidden_layers:
            return module
    raise ValueError("its decoder has no list of config.num_hidden_layers layers")


def _transformers() -> Any:
    return importlib.import_module("transformers")


def _kinds(causal: Any) -> list[str]:
    return [kind_of(layer) for layer in layers_of(causal)]


def _compare(causal: Any, pack: Callable[[Any], nn.Module], limit: float = LIMIT) -> Proof:
    apart = functools.partial(_apart, limit=limit)
    own = "a small model of its configuration cannot be made and run by its own code"
    with naming(type(causal).__name__, own, ValueError):
        twin = _twin(causal)
        documents = _documents(twin)
        if _begins_at_random(twin, documents[0]):
            what = "what its layers read is random in training, as by dropout: set that to 0"
            return Proof(what, {})
        with _watched(twin) as expected:
            loss = torch.stack([_own_loss(twin, document) for document in documents]).sum()
            loss = loss / sum(length - 1 for length in LENGTHS)
            loss.backward()
    gradients = {name: _taken(value) for name, value in twin.named_parameters()}
    # Some are zero but for rounding, such as those of the biases of keys.
    largest = max(float(value.abs().max()) for value in gradients.values()) / 1000
    made = pack(twin)
    try:
        with _watched(twin) as found:
            packed_loss = made(
                PackedBatch.build([one.cpu() for one in documents], ROW).to(loss.device)
            )
            packed_loss.backward()
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
        return Proof(f"packed documents cannot run: {type(error).__name__}: {error}", {})
    mixers = dict(zip(_kinds(causal), found.ran))
    tokens, layers = sum(LENGTHS), layers_of(twin)
    places = [
        "the embedding",
        *(f"layer {n} ({type(one).__name__})" for n, one in enumerate(layers)),
    ]
    for place, mine, theirs in zip(places, found.hidden, expected.hidden, strict=True):
        if told := apart(torch.cat(mine)[:tokens], torch.cat(theirs)):
            return Proof(f"{SAME} behind {place}: {told}", mixers)
    if told := apart(packed_loss, loss):
        return Proof(f"{SAME} in the loss, behind norm, head and scales: {told}", mixers)
    for name, value in twin.named_parameters():
        if told := apart(_taken(value), gradients[name], largest):
            return Proof(f"{SAME} in the gradient of {name}: {told}", mixers)
    if len(mixers) < len({*_kinds(causal)}):
        return Proof(f"its layers are of more kinds than {MOST_LAYERS} layers show", mixers)
    return Proof(None, mixers)


def _twin(causal: Any) -> Any:
    """A model of the class and configuration of `causal` with few layers, in float32 and in
    evaluation mode, with random values."""
    config, kinds = copy.deepcopy(causal.config), _kinds(causal)
    layers = max(FEWEST_LAYERS, 1 + max(kinds.index(kind) for kind in {*kinds}))
    layers = min(layers, len(kinds), MOST_LAYERS)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == len(kinds):
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    config.pad_token_id = None if getattr(config, "pad_token_id", None) is None else 0
    kept = max(FEWEST_EXPERTS, *(2 * int(getattr(config, name, 0) or 0) for name in CHOSEN))
    for name, most in ({"vocab_size": FEWEST_WORDS} | dict.fromkeys(EXPERTS, kept)).items():
        now = getattr(config, name, None)
        if isinstance(now, int) and now > most:
            setattr(config, name, most)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    _bring_within_reach(type(causal), config)
    twin = type(causal)(config).float()
    twin.set_attn_implementation("eager")
    if any(hasattr(module, "is_concatenated") for module in twin.modules()):
        twin.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=min(parameter.shape[-2:]) ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return twin.eval()


def _bring_within_reach(kind: Any, config: Any) -> None:
    """Set every integer of `config` that no document reaches (tokens of the vocabulary and bases of
    rotary positions are none) to one that all do, if models of `kind` keep the shapes of
    all their tensors."""

    def shapes() -> list[Any]:
        with torch.device("meta"):
            made = kind(config)
        return [(name, value.shape) for name, value in _tensors(made)]

    usual = shapes()
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = [table for table in rotary.values() if isinstance(table, dict)]
    for table in (vars(config), rotary, *kinds):
        for name, value in list(table.items()):
            counts = type(value) is int and not name.endswith(("_id", "theta"))
            if counts and value > max(LENGTHS):
                table[name] = REACHED
                try:
                    same = shapes() == usual
                except UNMADE:
                    same = False
                table[name] = table[name] if same else value


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _documents(twin: Any) -> list[Tensor]:
    """Documents of random tokens, that of padding among them, whose embedding may be untrained."""
    found = [torch.randint(twin.config.vocab_size, (length,)) for length in LENGTHS]
    for document in found:
        document[3] = 0
    return found


def _own_loss(twin: Any, document: Tensor) -> Tensor:
    """Sum of the losses of the next tokens, by the model's own forward."""
    logits = twin(input_ids=document[None], use_cache=False).logits[0]
    return nn.functional.cross_entropy(logits[:-1].float(), document[1:], reduction="sum")


def _begins_at_random(twin: Any, document: Tensor) -> bool:
    """Tells whether two calls in training mode give the first layer other states."""
    twin.train()
    with torch.no_grad(), _watched(twin) as found:
        for _ in range(2):
            twin(input_ids=document[None], use_cache=False)
    twin.eval()
    return not torch.equal(*found.hidden[0])


def _taken(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, which has none afterwards."""
    found, parameter.grad = parameter.grad, None
    taken = torch.zeros_like(parameter) if found is None else found
    return taken.full_tensor() if isinstance(taken, DTensor) else taken


def _apart(mine: Tensor, theirs: Tensor, least: float = 1e-6, limit: float = LIMIT) -> str | None:
    """Says how far values are apart, relative to the largest, where that is no rounding."""
    if mine.shape != theirs.shape:
        return f"shapes {tuple(mine.shape)} and {tuple(theirs.shape)}"
    mine, theirs = mine.detach(), theirs.detach()
    apart = float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=least))
    return None if apart <= limit else f"{apart:.0e} of the largest value"


class _Watched(NamedTuple):
    """What layers got and gave. hidden: states [T, H] before the first layer and behind every one,
    of each call. ran: modules of each layer that read other tokens, in the last call."""

    hidden: list[list[Tensor]]
    ran: list[int]


@contextmanager
def _watched(twin: Any) -> Iterator[_Watched]:
    layers = layers_of(twin)
    found = _Watched([[] for _ in range(len(layers) + 1)], [0] * len(layers))

    def before(layer: nn.Module, args: Any, kwargs: Any) -> None:
        found.hidden[0].append((args[0] if args else kwargs["hidden_states"])[0].detach())

    def behind(number: int, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        found.hidden[number + 1].append((out[0] if isinstance(out, tuple) else out)[0].detach())
        found.ran[number] = len(kwargs[BATCH].ran) if BATCH in kwargs else 0

    hooks = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [
        layer.register_forward_hook(functools.partial(behind, number), with_kwargs=True)
        for number, layer in enumerate(layers)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
