"""Tensor parallelism of models of transformers, by the plan of their own config.

    hidden [1, T, H], whole --colwise--> this rank's heads or channels --rowwise, all-reduce--> whole

`base_model_tp_plan` says of each linear layer how its matrix is split (Megatron's scheme, Shoeybi
et al. 2019, arXiv:1909.08053). Between modules hidden states are whole plain tensors, equal on all
ranks; DTensors live within a module only. Embedding and head are split by the vocabulary, as those
of `packgraph.parallel.tensor`. Experts, and what no plan names, stay whole and compute alike.

The invariant: a whole parameter has the same gradient on all ranks. It would have a part of it
where it reads some of the heads, so a module with split layers must name all its parameters.
"""  # noqa: E501

import functools
import re
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from packgraph.integrations.transformers.families import is_plain
from packgraph.integrations.transformers.mixers import experts_of
from packgraph.integrations.transformers.model import PackedModel, pack_twin
from packgraph.integrations.transformers.proof import prove_split
from packgraph.ops.float8.linear import Float8Linear
from packgraph.parallel.tensor import distribute

STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    # Its input [1, T, heads, D] is this rank's heads; the gradient of its weight is summed.
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=1, use_local_output=True),
}
HIDDEN = "hidden_states"  # how decoder layers of transformers pass them
BY_OUTPUTS, BY_INPUTS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")


class CommonInput(ParallelStyle):
    """Makes the hidden states of a module one DTensor for all layers split by outputs in it.

    The gradients that these layers give them are then added on this rank and reduced over ranks
    once, not once a layer.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = args[0] if args else kwargs[HIDDEN]
            hidden = DTensor.from_local(hidden, device_mesh, [Replicate()], run_check=False)
            return ((hidden, *args[1:]), kwargs) if args else ((), kwargs | {HIDDEN: hidden})

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


def _common_owners(causal: Any, plan: dict[str, str]) -> list[str]:
    """Modules with several layers split by outputs that all read the module's own input: every
    linear layer in them is in the plan, and these layers have inputs of the hidden size."""
    found, hidden = list[str](), causal.config.hidden_size
    for name, module in causal.named_modules():
        linear = {
            f"{name}.{key}": child
            for key, child in module.named_children()
            if isinstance(child, nn.Linear)
        }
        inputs = [child.in_features for key, child in linear.items() if plan.get(key) == "colwise"]
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


def tensor_problems(packed: PackedModel, ranks: int) -> list[str]:
    """Every reason why a packed model cannot be split over `ranks` tensor parallel ranks."""
    causal = packed.causal
    plan, modules = tensor_plan(causal), dict(causal.named_modules())
    split = {name: word for name, word in plan.items() if word in (*BY_OUTPUTS, *BY_INPUTS)}
    if not split:
        return ["its config has no plan that splits layers (base_model_tp_plan)"]
    unknown = sorted({*plan.values()} - {*STYLES})
    problems = [f"its plan has {', '.join(unknown)}, which packgraph does not know"] * bool(unknown)
    for name, word in split.items():
        layer = modules[name]
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
            "its logits have a soft cap": packed.logit_scaling[1] > 0,
            f"a vocabulary of {vocabulary} leaves some of {ranks} ranks without a row": (
                (ranks - 1) * -(-vocabulary // ranks) >= vocabulary
            ),
            "layers in float8 are not split yet": Float8Linear in kinds,
        }.items()
        if is_there
    ]
    return list(dict.fromkeys(problems))


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


def prove(packed: PackedModel, mesh: DeviceMesh) -> None:
    """Compares a twin of a packed model split over a mesh with the whole twin. Collective.

    Args:
        packed: A whole model, which is not changed.
        mesh: One-dimensional.

    Raises:
        ValueError: On all ranks, if the twin cannot be split or differs.
    """
    pack = functools.partial(pack_twin, packed.family)
    prove_split(packed.causal, pack, lambda twin: parallelize(twin, mesh), mesh.get_group())


def parallelize(packed: Any, mesh: DeviceMesh) -> None:
    """Splits a packed model over a mesh, in place.

    Every rank must hold the same whole parameters, or such without memory
    (`packgraph.parallel.deferred`); nothing is sent. Make the optimizer afterwards.

    Args:
        packed: A PackedModel, or some layers of one.
        mesh: One-dimensional.

    Raises:
        ValueError: With all reasons why it cannot be split.
    """
    if problems := tensor_problems(packed, mesh.size()):
        raise ValueError("; ".join(problems))
    causal = packed.causal
    words = tensor_plan(causal)
    plan = {name: STYLES[word] for name, word in words.items()}
    plan |= dict.fromkeys(_common_owners(causal, words), CommonInput())
    parallelize_module(causal, mesh, plan, src_data_rank=None)
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    ties = isinstance(head, nn.Linear) and head.weight is getattr(embedding, "weight", None)
    for module in (embedding, head):
        if not isinstance(module, nn.Identity):
            distribute(module, "weight", mesh, Shard(0))
    if ties:
        head.weight = embedding.weight
