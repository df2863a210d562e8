"""Tensor parallelism: every matrix of a dense decoder split over the ranks of one mesh axis, as
DTensors.

    rows split (sequence=True)      whole rows                heads / channels split          rows split
    norm [T/tp, H]  --all-gather--> [T, H] --q k v / gate up--> [T, H'/tp] --o / down,
                    reduce-scatter--> [T/tp, H]

Megatron's scheme (Shoeybi et al. 2019, arXiv:1909.08053) with sequence parallel norms (Korthikanti
et al. 2022, arXiv:2205.05198); without them an all-reduce stands at the end and norms work on all
rows everywhere. Embedding and head are split along the vocabulary. The invariant: what passes from
stage to stage of the model is a plain tensor, this rank's rows or all of them; DTensors live
between a module's entry and its exit only, so graphs see local tensors.

Layers in float8 are split alike, and multiply local tensors (`ops/float8/linear.py`). They have no
hooks, so layers that read one input go on to cast it once.

Experts are not split: every rank routes all rows, as its router's balance needs, and keeps its own
rows of the result (`whole_rows`, `own_rows`). Their gradients are whole on every rank.
"""  # noqa: E501

import hashlib
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from packgraph.graphs.agreement import set_consensus
from packgraph.ops.float8.linear import Float8Linear, RankSplit, layer_problem
from packgraph.ops.linear import PRODUCTS
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import consensus_over

VOCABULARY = ("embed_tokens", "lm_head")
BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_INPUTS = ("o_proj", "down_proj")


def tensor_problems(config: Any, ranks: int) -> list[str]:
    """All reasons why a decoder of `config` cannot be split over `ranks`."""
    if config.latent.enabled:
        return [
            f"tensor parallelism over {ranks} ranks is not known with latent attention "
            "(model.latent.kv_rank is "
            f"{config.latent.kv_rank}); use pipeline or data parallelism"
        ]
    if not PRODUCTS[config.precision].splits:
        return [
            f"tensor parallelism over {ranks} ranks is not known with model.precision = "
            f"{config.precision}; use pipeline or data parallelism"
        ]
    planned = all(kind.has_tensor_plan for kind in config.kinds().values())
    if not planned or config.activation != "swiglu":
        return [
            f"tensor parallelism over {ranks} ranks is known for layers of attention and SwiGLU "
            "only, not with "
            f"model.pattern {config.pattern!r} and activation {config.activation}; use context, "
            "pipeline or data "
            "parallelism"
        ]
    divided = {
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    found = [
        f"tensor parallelism over {ranks} ranks needs {name} to be a multiple of it; it is {size}"
        for name, size in divided.items()
        if size % ranks
    ]
    if (ranks - 1) * -(-config.vocab_size // ranks) >= config.vocab_size:
        found.append(
            f"a vocabulary of {config.vocab_size} leaves some of {ranks} tensor parallel ranks "
            "without a row"
        )
    return found


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = True) -> None:
    """Split `model`, a dense decoder or some layers of one, over `mesh` in place.

    mesh: one-dimensional, such as `Mesh["tp"]`. Every rank must hold the same whole parameters;
    nothing is sent. sequence: norms and residuals work on this rank's rows only; the number of
    tokens of every capacity must then be a multiple of the ranks. Hidden states between stages have
    T / ranks rows then. Make the optimizer afterwards. Raises ValueError with all reasons when the
    sizes of the model do not divide.
    """
    float8 = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear) and parts_of_layer(name, 2) != (1, 1)
    }
    problems = tensor_problems(model.config, mesh.size()) + [
        f"{name}: {problem}"
        for name, layer in float8.items()
        if (problem := layer_problem(layer, *parts_of_layer(name, mesh.size())))
    ]
    if problems:
        raise ValueError("; ".join(problems))
    styles = _styles(Shard(0) if sequence else Replicate())
    plan = {
        name: styles[name.rpartition(".")[2]]
        for name, _ in model.named_modules()
        if name.rpartition(".")[2] in styles and name not in float8
    }
    parallelize_module(model, mesh, plan, src_data_rank=None)
    by_outputs, by_inputs = RankSplit(mesh, True), RankSplit(mesh, False, sequence)
    for name, layer in float8.items():
        is_by_outputs = name.rpartition(".")[2] in BY_OUTPUTS
        layer.split = by_outputs if is_by_outputs else by_inputs
        distribute(layer, "weight", mesh, Shard(0 if is_by_outputs else 1))
        if layer.bias is not None:
            distribute(layer, "bias", mesh, Shard(0) if is_by_outputs else Replicate())
    for name, module in model.named_children():
        if name in VOCABULARY:
            # `parallel/vocabulary.py` reads these weights, the modules are never called.
            distribute(module, "weight", mesh, Shard(0))
    model.split_rows = sequence  # type: ignore[assignment]
    set_consensus(model, consensus_over(mesh.get_group()))
    for module in model.modules() if sequence else ():
        if hasattr(module, "row_mesh"):
            module.row_mesh = mesh  # type: ignore[assignment]


def parts_of_layer(name: str, ranks: int) -> tuple[int, int]:
    """Over how many of `ranks` inputs and outputs of the linear layer called `name` are split."""
    last = name.rpartition(".")[2]
    return ranks if last in BY_INPUTS else 1, ranks if last in BY_OUTPUTS else 1


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Let the parameter `name` of `module`, equal on all ranks, be a DTensor."""
    whole = module.get_parameter(name)
    split = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(split, requires_grad=whole.requires_grad))


def whole_rows(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """All rows [T, ...] of this rank's x [T / ranks, ...]; x itself without a mesh. Collective.

    For work that all ranks do alike: the gradient of the result is the same on all of them, and
    each takes that of its own rows.
    """
    if mesh is None:
        return x
    split = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    return split.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Replicate()])


def own_rows(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """This rank's rows [T / ranks, ...] of x [T, ...], which all ranks have alike; x itself without
    a mesh. The gradient of x has the rows of all ranks: a collective of the backward."""
    if mesh is None:
        return x
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def _styles(rows: Placement) -> dict[str, ParallelStyle]:
    """Styles of modules by the last part of their names. rows: how hidden states lie between
    modules."""
    whole = Replicate()
    styles: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_layouts=(rows, None, None), desired_input_layouts=(whole, None, None)
        ),
        "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
    }
    styles |= dict.fromkeys(BY_OUTPUTS, ColwiseParallel())
    styles |= dict.fromkeys(BY_INPUTS, RowwiseParallel(output_layouts=rows))
    # Every rank normalises its own heads, so the gradients of these weights are sums over ranks: as
    # DTensors they are.
    styles |= dict.fromkeys(
        ("q_norm", "k_norm"), SequenceParallel(sequence_dim=1, use_local_output=True)
    )
    if rows.is_shard():
        norms = SequenceParallel(sequence_dim=0, use_local_output=True)
        # The projection of multi-token prediction is whole everywhere and works on own rows, too.
        by_rows = ("input_layernorm", "post_attention_layernorm", "norm", "enorm", "hnorm")
        styles |= dict.fromkeys((*by_rows, "eh_proj"), norms)
    return styles


def dropout_seed(seed: int, mesh: Mesh, *, sequence: bool) -> int:
    """The seed of a rank's random generators: dropout is equal where activations are copies, else
    different.

    Replicas and stages always draw their own; tensor parallel ranks do only when each has its own
    rows. The first rank keeps `seed`, so a run on one process draws what it always drew.
    """
    places = mesh.layout.coordinates(mesh.rank) | ({} if sequence else {"tp": 0})
    place = tuple(places.values())
    if not any(place):
        return seed
    return int.from_bytes(hashlib.sha256(repr((seed, place)).encode()).digest()[:7], "big")
