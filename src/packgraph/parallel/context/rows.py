"""Context parallelism: every row of tokens spread over the ranks of one mesh axis.

    one replica, cp = 2    rank 0   rows 0 .. T/2 - 1     everything but attention works on these
                                                          alone
                           rank 1   rows T/2 .. T - 1     attention: ops/attention/context.py;
                                                          Mamba-2: mamba/heads.py

    or, in zigzag          rank 0   quarters 0 and 3 of every document     ops/attention/zigzag.py
                           rank 1   quarters 1 and 2                       attention: ops/attention/api.py

All ranks of the axis get the same whole batch (boundaries, tokens, labels: a few bytes per token)
and take their rows on the device, so nothing depends on lengths on the host. Parameters are copies;
a rank's gradients are those of its tokens, and are summed over `copies` of the mesh, once per step,
with the gradients of other replicas.

The invariant: the place of a rank in its group of a certain size never changes, so this size, a
constant of the call, says all that a graph bakes.
"""  # noqa: E501

from typing import Any

import torch

from packgraph.graphs.agreement import set_consensus
from packgraph.ops.attention.context import ContextGroup, swap_parts
from packgraph.ops.attention.kind import ContextChoice, ContextWish, choose_context_kind
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import stage_consensus


def context_choice(
    config: Any, ranks: int, heads_split: int = 1, wish: ContextWish = "auto"
) -> ContextChoice:
    """Chooses how `ranks` ranks share attention in a decoder of `config`. Arguments are those of
    `context_problems`.

    Raises ValueError where they cannot share it as wished.
    """
    if titles := _sequential(config):
        return ContextChoice("ulysses", f"{titles} layers scan rows in their order")
    return choose_context_kind(ranks, config.num_heads // heads_split, wish)


def context_problems(
    config: Any, ranks: int, heads_split: int = 1, wish: ContextWish = "auto"
) -> list[str]:
    """All reasons why rows of a decoder of `config` cannot be spread over `ranks`.

    heads_split: tensor parallel ranks, each of which has that part of the heads. wish: the kind
    that is asked for.
    """
    heads, share = (
        config.num_heads // heads_split,
        f" / tp {heads_split}" if heads_split > 1 else "",
    )
    scans, found = _sequential(config), []
    if heads % ranks and config.count("attn") and (scans or wish == "ulysses"):
        found.append(
            f"context parallelism over {ranks} ranks by ulysses shares the heads among them in "
            "attention, so "
            f"num_heads ({config.num_heads}{share}) must be a multiple of {ranks}"
        )
    if scans and wish == "zigzag":
        found.append(
            f"rows cannot be cut in zigzag for {scans} layers, which scan them in their order; use "
            "ulysses"
        )
    problems = {kind: kind.context_problem(config, ranks) for kind in config.kinds().values()}
    return found + [
        f"context parallelism in {kind.title} layers (model.{kind.name}): {problem}"
        for kind, problem in problems.items()
        if problem
    ]


def _sequential(config: Any) -> str:
    """The kinds of layers that scan rows in their order, for messages; empty = there are none."""
    return " and ".join(kind.title for kind in config.kinds().values() if kind.is_sequential)


def spread_context(
    model: Any,
    mesh: Mesh,
    rank_tokens: int | None = None,
    wish: ContextWish = "auto",
    config: Any = None,
) -> None:
    """Let `model`, a decoder or some layers of one, spread its rows over the `cp` ranks of `mesh`,
    in place.

    rank_tokens: tokens of any row that a rank works on, where rows are spread over changing numbers
    of ranks, those of `mesh.layout.contexts`: a row of c times as many tokens is one of c ranks.
    Collective: every group is used once, largest first, so that no communicator is made in the
    middle of a step. The tokens of every capacity must be a multiple of the ranks (with sequence
    parallelism: times tp), and of twice the ranks where rows are cut in zigzag. wish: how ranks
    share attention; auto decides for every number of ranks by itself (ops/attention/kind.py).
    config: of the decoder, None = `model.config`. To be called after `parallel.tensor.parallelize`
    and before graphs are captured. Raises ValueError with all reasons.
    """
    ranks, group = mesh.size("cp"), mesh.group("cp")
    config = model.config if config is None else config
    problems = context_problems(config, ranks, mesh.size("tp"), wish)
    if problems:
        raise ValueError("; ".join(problems))
    if group is None:
        return
    model.context, model.rank_tokens = ranks, rank_tokens
    device = next(model.parameters()).device
    for size in sorted({ranks, *mesh.layout.contexts} - {1}, reverse=True):
        name = mesh.context_group(size).group_name
        kind = context_choice(config, size, mesh.size("tp"), wish).kind
        model.contexts[size] = ContextGroup(size, mesh.place["cp"] % size, name, kind)
        swap_parts(torch.zeros(size, device=device), name)
    set_consensus(model, stage_consensus(mesh))
