"""Facts about a microbatch that attention needs, and options of scores that families of models add.

    scores = softcap * tanh(q k^T * scale / softcap)      0 <= row - column < window
    probabilities = exp(scores) / (exp(sink) + sum exp(scores))

Metadata is computed once and shared by all layers. Everything in it that changes from microbatch to
microbatch is a device tensor; the two host values (`longest`, `backend`) are fixed by the capacity
and the model, so a captured graph may bake them. A sink is one number for each query head, a key
that takes probability and gives no value.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from packgraph.ops.attention.context import ContextGroup
from packgraph.ops.attention.zigzag import PrefixRows, ZigzagTables, zigzag_tables
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import places


class AttentionMetadata(NamedTuple):
    """Boundaries of the documents in one microbatch, as attention backends want them.

    cu_seqlens: int32 [N+1], the tail repeats the last value. padding_mask: bool [T], True =
    padding. mask: bool [T, T], True where row may look at column, only for the backend `sdpa`.
    longest: bound on the tokens of one document. backend: name of the backend that this was built
    for. finite_padding: the caller vouches that rows of padding in q, k, v and in the gradient of
    the output are finite numbers, so that nobody needs to clear them. context: the ranks that the
    row is spread over, each with T / size rows of q, k and v; None = this one has all. The other
    entries describe the whole row on every rank. keys: where keys and values are other rows than
    queries (zigzag): their boundaries `keys.cu_keys` beside `cu_seqlens` of the queries. Both have
    as many documents; a query sees the keys of its document up to its own place, counted from the
    document's end. padding_mask is then bool [R] of the queries' rows, mask bool [R, Kx].
    longest_keys: bound on the keys of one document.
    """

    cu_seqlens: Tensor
    padding_mask: Tensor
    mask: Tensor | None
    longest: int
    backend: str
    finite_padding: bool = False
    context: ContextGroup | None = None
    keys: PrefixRows | None = None
    longest_keys: int = 0

    @property
    def cu_keys(self) -> Tensor:
        """Boundaries of keys and values: int32, as many as of queries."""
        return self.cu_seqlens if self.keys is None else self.keys.cu_keys

    @property
    def key_tail(self) -> Tensor:
        """bool, True in rows of keys and values that belong to no document."""
        return self.padding_mask if self.keys is None else self.keys.tail

    @property
    def most_keys(self) -> int:
        """Bound on the keys of one document."""
        return self.longest if self.keys is None else self.longest_keys


def attention_metadata(
    batch: PackedBatch,
    backend: str,
    *,
    finite_padding: bool = False,
    context: ContextGroup | None = None,
    tables: ZigzagTables | None = None,
) -> AttentionMetadata:
    """Build the metadata of one microbatch for `backend` (see
    `packgraph.ops.attention.api.BACKENDS`).

    tables: of the row, where it is cut in zigzag and they are there already.
    """
    if context is not None and context.kind == "zigzag":
        tables = zigzag_tables(batch, context) if tables is None else tables
        return _zigzag_metadata(batch, backend, finite_padding, context, tables)
    longest = batch.capacity.longest
    return AttentionMetadata(
        cu_seqlens=batch.cu_seqlens,
        padding_mask=batch.padding_mask,
        mask=document_mask(batch.document_ids) if backend == "sdpa" else None,
        longest=batch.capacity.tokens if longest is None else longest,
        backend=backend,
        finite_padding=finite_padding,
        context=context,
    )


def document_mask(document_ids: Tensor) -> Tensor:
    """Causal-within-document mask, bool [T, T], from int [T] document ids (padding has an id of its
    own)."""
    index = torch.arange(document_ids.shape[0], device=document_ids.device)
    same_document = document_ids[:, None] == document_ids[None, :]
    return same_document & (index[:, None] >= index[None, :])


def _zigzag_metadata(
    batch: PackedBatch,
    backend: str,
    finite_padding: bool,
    context: ContextGroup,
    tables: ZigzagTables,
) -> AttentionMetadata:
    rows, keys = tables
    longest = min(places(batch.capacity.bound, 2 * context.size), batch.capacity.tokens)
    return AttentionMetadata(
        cu_seqlens=keys.cu_queries,
        padding_mask=rows.padding,
        mask=prefix_mask(keys, rows.padding.shape[0]) if backend == "sdpa" else None,
        longest=longest // (2 * context.size),
        backend=backend,
        finite_padding=finite_padding,
        context=context,
        keys=keys,
        longest_keys=longest,
    )


def prefix_mask(keys: PrefixRows, rows: int) -> Tensor:
    """bool [rows, Kx]: whether a query may look at a key. Tails look at each other, so that softmax
    is defined."""
    document, before = _within(keys.cu_queries, rows)
    key_document, key = _within(keys.cu_keys, keys.tail.shape[0])
    ahead = torch.cat(
        (keys.cu_keys.diff() - keys.cu_queries.diff(), keys.cu_keys.new_zeros(1))
    )  # keys before a part
    return (document[:, None] == key_document) & (key <= (before + ahead[document])[:, None])


def _within(boundaries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the document of each of `count` places (the tail is the last) and the place in it."""
    place = torch.arange(count, device=boundaries.device)
    document = torch.searchsorted(boundaries[1:].contiguous(), place, right=True)
    return document, place - boundaries[document]


class ScoreOptions(NamedTuple):
    """Options of one call.

    window: how many of the last tokens of its document a token sees, itself included; None = all.
    softcap: bound on scores, approached as a tanh; 0 = none. dropout: probability that a
    probability is dropped. sinks: [Hq], or None.
    """

    window: int | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    sinks: Tensor | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the options that are in use: what a backend must know."""
        used = {
            "window": self.window is not None,
            "softcap": bool(self.softcap),
            "dropout": bool(self.dropout),
            "sinks": self.sinks is not None,
        }
        return tuple(name for name, is_used in used.items() if is_used)


PLAIN = ScoreOptions()


def lacking(needs: tuple[str, ...], known: frozenset[str]) -> list[str]:
    """Returns why a backend that knows the options `known` cannot serve `needs`; empty = it can."""
    missing = [name for name in needs if name not in known]
    return [f"it has no {', '.join(missing)}"] if missing else []


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with one more key for each head, from attention without it.

    out: [T, Hq, D]; lse: float32 [Hq, T]; sinks: [Hq]. Returns both as if the key had been there.
    Rows whose lse is undefined give undefined rows.
    """
    with_key = torch.logaddexp(lse, sinks.float()[:, None])
    share = torch.exp(lse - with_key).t()[:, :, None]
    return (out.float() * share).to(out.dtype), with_key


def gradient_of_sinks(
    grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, padding: Tensor
) -> Tensor:
    """Gradient of sinks [Hq], in their dtype, from `with_sinks`' results and the gradient of out.

    The sink's value is zero, so its score gets -p * sum(grad * out), p being its probability.
    """
    probability = torch.exp(sinks.float()[:, None] - lse)
    delta = (grad.float() * out.float()).sum(-1).t()
    return (-probability * delta).masked_fill(padding[None], 0.0).sum(1).to(sinks.dtype)
