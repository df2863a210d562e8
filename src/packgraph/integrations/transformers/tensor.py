"""Tensor parallelism of models of transformers, by the plan of their own config.

    hidden [1, T, H], whole --colwise--> this rank's heads or channels --rowwise, all-reduce--> whole

`base_model_tp_plan` says of each linear layer how its matrix is split (Megatron's scheme, Shoeybi
et al. 2019, arXiv:1909.08053). Between modules hidden states are plain tensors, whole and equal on
all ranks, or with `sequence` this rank's rows [1, T / ranks, H], which norms and residuals work on
(Korthikanti et al. 2022, arXiv:2205.05198); DTensors live within a module only. Embedding and head
are split by the vocabulary, as those of `packgraph.parallel.tensor`. Experts, and what no plan
names, stay whole and compute alike. Adapters of PEFT follow their layers: B is split with a layer's
outputs, A with its inputs, and the other of the two is whole.

The invariant: a whole parameter has the same gradient on all ranks. It would have a part of it
where it reads some of the heads, so a module with split layers must name all its parameters.
"""  # noqa: E501

import functools
import inspect
import re
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from packgraph.graphs.agreement import set_consensus
from packgraph.integrations.transformers.families import is_plain
from packgraph.integrations.transformers.mixers import experts_of
from packgraph.integrations.transformers.model import PackedModel, pack_twin
from packgraph.integrations.transformers.proof import prove_split
from packgraph.ops.float8.linear import Float8Linear
from packgraph.parallel.ranks import consensus_over
from packgraph.parallel.tensor import distribute

STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    # Its input [1, T, heads, D] is this rank's heads; the gradient of its weight is summed.
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=1, use_local_output=True),
}
BY_OUTPUTS, BY_INPUTS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")


def _linear(layer: nn.Module) -> nn.Module:
    """The layer that a LoRA layer of PEFT adapts, or the layer itself."""
    adapted = hasattr(layer, "lora_A") and hasattr(layer, "base_layer")
    return layer.get_submodule("base_layer") if adapted else layer


def _styles(name: str, layer: nn.Module, word: str, rows: Placement) -> dict[str, ParallelStyle]:
    """Parallel styles of a layer that the plan names and of its adapters, by the names of modules.
    rows: placement of its output where it is added to hidden states."""
    style = RowwiseParallel(output_layouts=rows) if word == "rowwise" else STYLES[word]
    if _linear(layer) is layer:
        return {name: style}
    found: dict[str, ParallelStyle] = {f"{name}.base_layer": style}
    for adapter in dict(layer.get_submodule("lora_A").named_children()):
        down, up, whole = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}", (Replicate(),)
        if word in BY_OUTPUTS:
            found[down] = PrepareModuleInput(
                input_layouts=whole, desired_input_layouts=whole, use_local_output=True
            )
            found[up] = style
        else:
            found[down] = style
            if rows != Replicate():  # this rank's rows, of which the gradient of B is a part
                found[up] = SequenceParallel(sequence_dim=1, use_local_output=True)
    return found


def _common_input(module: nn.Module, rows: Placement) -> ParallelStyle:
    """The style that makes a module's input one whole DTensor for all layers split by outputs in
    it: the gradients that they give it are added on this rank, and reduced over ranks once.

    rows: how hidden states lie before the module. Decoder layers of transformers give them to
    attention by name, and to what has no other argument by place.
    """
    name, *others = inspect.signature(module.forward).parameters
    whole = Replicate()
    if not others:
        return PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,))
    return PrepareModuleInput(
        input_kwarg_layouts={name: rows}, desired_input_kwarg_layouts={name: whole}
    )


def _common_owners(causal: Any, plan: dict[str, str]) -> list[str]:
    """Modules with several layers split by outputs that all read the module's own input: every
    linear layer in them is in the plan, and these layers have inputs of the hidden size."""
    found, hidden = list[str](), causal.config.hidden_size
    for name, module in causal.named_modules():
        linear = {
            f"{name}.{key}": child
            for key, child in module.named_children()
            if isinstance(_linear(child), nn.Linear)
        }
        inputs = [
            _linear(child).in_features
            for key, child in linear.items()
            if plan.get(key) == "colwise"
        ]
        if len(inputs) > 1 and {*inputs} == {hidden} and linear.keys() <= plan.keys():
            found.append(name)
    return found


def tensor_plan(causal: Any) -> dict[str, str]:
    """The word of the plan for each module of a model that it names, but for experts, and for
    embedding and head, which `parallelize` splits without a plan.

    Args:
        causal: A PreTrainedModel with a language-model head.

    Returns:
        By the name of the module in `causal`; empty where the config has no plan.
    """
    plan = getattr(causal.config, "base_model_tp_plan", None) or {}
    places = [
        (re.compile(re.escape(pattern).replace(r"\*", r"\d+")), word)
        for pattern, word in plan.items()
    ]
    left = {id(inner) for module in experts_of(causal) for inner in module.modules()}
    left |= {id(causal.get_input_embeddings()), id(causal.get_output_embeddings())}
    prefix, found = f"{causal.base_model_prefix}.", dict[str, str]()
    for name, module in causal.named_modules():
        inner = name.removeprefix(prefix)
        word = next((word for place, word in places if place.fullmatch(inner)), None)
        if word is not None and id(module) not in left:
            found[name] = word
    return found


def tensor_problems(packed: PackedModel, ranks: int, sequence: bool = False) -> list[str]:
    """Every reason why a packed model cannot be split over `ranks` tensor parallel ranks.
    sequence: norms and residuals with it."""
    causal = packed.causal
    plan, modules = tensor_plan(causal), dict(causal.named_modules())
    split = {name: word for name, word in plan.items() if word in (*BY_OUTPUTS, *BY_INPUTS)}
    if not split:
        return ["its config has no plan that splits layers (base_model_tp_plan)"]
    unknown = sorted({*plan.values()} - {*STYLES})
    problems = [f"its plan has {', '.join(unknown)}, which packgraph does not know"] * bool(unknown)
    for name, word in split.items():
        layer = _linear(modules[name])
        if getattr(modules[name], "lora_magnitude_vector", None):
            problems.append("DoRA is not split yet: its magnitudes read whole matrices")
        if type(layer) is not nn.Linear:
            problems.append(f"{name} is {type(layer).__name__}, not nn.Linear")
            continue
        size = layer.out_features if word in BY_OUTPUTS else layer.in_features
        owner = modules[name.rpartition(".")[0]]
        heads = getattr(owner, "head_dim", 1) if word == "colwise" else 1
        if size % (ranks * heads):
            problems.append(f"{size} features of {name} are no multiple of {ranks} x {heads}")
    problems += _lone_parameters(plan, modules)
    head, vocabulary = causal.get_output_embeddings(), packed.config.vocab_size
    kinds = {type(module) for module in causal.modules()}
    problems += [
        problem
        for problem, is_there in {
            "its head is not one matrix": packed.last and not is_plain(head),
            f"a vocabulary of {vocabulary} leaves some of {ranks} ranks without a row": (
                (ranks - 1) * -(-vocabulary // ranks) >= vocabulary
            ),
            "layers in float8 are not split yet": Float8Linear in kinds,
        }.items()
        if is_there
    ]
    problems += _sequence_problems(packed, plan) if sequence else []
    return list(dict.fromkeys(problems))


def _sequence_problems(packed: PackedModel, plan: dict[str, str]) -> list[str]:
    """Modules of layers that would see this rank's rows alone and must not: all but norms, those
    that gather their input, and those without parameters."""
    gathering, found = {*_common_owners(packed.causal, plan)}, list[str]()
    names = {id(module): name for name, module in packed.causal.named_modules()}
    for layer in packed.layers:
        for child in layer.children():
            whole = names[id(child)] in gathering or _is_norm(child)
            if not whole and next(child.parameters(), None) is not None:
                found.append(names[id(child)])
        if next(layer.parameters(recurse=False), None) is not None:
            found.append(names[id(layer)])
    others = sorted({*plan.values()} - {"colwise", "rowwise", "replicated_with_grad_allreduce"})
    problems = [f"with a part of the rows {', '.join(found[:3])} would not be known"] * bool(found)
    return problems + [f"its plan has {', '.join(others)}, which need all rows"] * bool(others)


def _is_norm(module: nn.Module) -> bool:
    """Tells whether it normalises each row by itself, as its name says."""
    return type(module).__name__.endswith("Norm") and not any(module.children())


def _lone_parameters(plan: dict[str, str], modules: dict[str, nn.Module]) -> list[str]:
    """Parameters beside `colwise` layers that the plan does not name: they may read some heads."""
    found = []
    for owner in sorted({name.rpartition(".")[0] for name, w in plan.items() if w == "colwise"}):
        for name, module in modules[owner].named_modules():
            place = f"{owner}.{name}" if name else owner
            inside = any(place == known or place.startswith(f"{known}.") for known in plan)
            lone = [key for key, _ in module.named_parameters(recurse=False)]
            if lone and not inside and not experts_of(module) and place != "":
                found.append(f"its plan does not name {place} ({', '.join(lone)})")
    return found


def prove(packed: PackedModel, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Compares a twin of a packed model split over a mesh with the whole twin. Collective.

    Args:
        packed: A whole model, which is not changed.
        mesh: One-dimensional.
        sequence: As of `parallelize`.

    Raises:
        ValueError: On all ranks, if the twin cannot be split or differs.
    """
    pack = functools.partial(pack_twin, packed.family)
    split = functools.partial(parallelize, mesh=mesh, sequence=sequence)
    prove_split(packed.causal, pack, split, mesh.get_group())


def parallelize(packed: Any, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Splits a packed model over a mesh, in place.

    Every rank must hold the same whole parameters, or such without memory
    (`packgraph.parallel.deferred`); nothing is sent. Make the optimizer afterwards.

    Args:
        packed: A PackedModel, or some layers of one.
        mesh: One-dimensional.
        sequence: Norms and residuals work on this rank's rows only; the tokens of every capacity
            must then be a multiple of the ranks. Hidden states between stages have T / ranks rows.

    Raises:
        ValueError: With all reasons why it cannot be split.
    """
    if problems := tensor_problems(packed, mesh.size(), sequence):
        raise ValueError("; ".join(problems))
    causal, rows = packed.causal, Shard(1) if sequence else Replicate()
    words = tensor_plan(causal)
    plan = dict[str, ParallelStyle]()
    for name, word in words.items():
        plan |= _styles(name, causal.get_submodule(name), word, rows)
    for name in _common_owners(causal, words):
        plan[name] = _common_input(causal.get_submodule(name), rows)
    if sequence:
        norms = {id(child) for layer in packed.layers for child in layer.children()}
        norms |= {id(getattr(packed.decoder, packed.family.norm))}
        own = SequenceParallel(sequence_dim=1, use_local_output=True)
        plan |= {
            name: own
            for name, module in causal.named_modules()
            if id(module) in norms and _is_norm(module)
        }
        packed.split_rows = True
    set_consensus(packed, consensus_over(mesh.get_group()))
    trained = {name: value.requires_grad for name, value in causal.named_parameters()}
    parallelize_module(causal, mesh, plan, src_data_rank=None)
    for name, value in causal.named_parameters():
        value.requires_grad_(trained[name])  # SequenceParallel trains all that it replicates
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    ties = isinstance(head, nn.Linear) and head.weight is getattr(embedding, "weight", None)
    for module in (embedding, head):
        if not isinstance(module, nn.Identity):
            distribute(module, "weight", mesh, Shard(0))
    if ties:
        head.weight = embedding.weight
