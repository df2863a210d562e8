"""Microbatches built by hand, independent of the packing code: the attributes that ops and models
read."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HandCapacity:
    tokens: int
    documents: int
    longest: int | None = None


@dataclass(frozen=True)
class HandBatch:
    """The fields of a PackedBatch, dtypes and padding rules included, as plain tensors."""

    capacity: HandCapacity
    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    padding_mask: Tensor
    document_ids: Tensor
    cu_seqlens: Tensor


def hand_batch(
    documents: list[list[int]], tokens: int, slots: int, padding_token: int = 0
) -> HandBatch:
    """Pack `documents` in order into `tokens` rows and `slots` documents; zero-length documents are
    allowed."""
    batch_tokens = torch.full((tokens,), padding_token, dtype=torch.int64)
    labels = torch.full((tokens,), -100, dtype=torch.int64)
    positions = torch.zeros(tokens, dtype=torch.int64)
    document_ids = torch.full((tokens,), slots, dtype=torch.int32)
    boundaries = [0]
    for number, document in enumerate(documents):
        start, stop = boundaries[-1], boundaries[-1] + len(document)
        batch_tokens[start:stop] = torch.tensor(document, dtype=torch.int64)
        labels[start : max(stop - 1, start)] = torch.tensor(document[1:], dtype=torch.int64)
        positions[start:stop] = torch.arange(len(document))
        document_ids[start:stop] = number
        boundaries.append(stop)
    assert boundaries[-1] <= tokens and len(documents) <= slots
    cu_seqlens = torch.tensor(
        boundaries + [boundaries[-1]] * (slots - len(documents)), dtype=torch.int32
    )
    return HandBatch(
        capacity=HandCapacity(tokens, slots, tokens),
        tokens=batch_tokens,
        labels=labels,
        position_ids=positions,
        loss_mask=labels != -100,
        padding_mask=torch.arange(tokens) >= boundaries[-1],
        document_ids=document_ids,
        cu_seqlens=cu_seqlens,
    )


def random_documents(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Documents of the given lengths; token 0 is left out, so that it can serve as padding."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def gradients(model: torch.nn.Module, batch: object) -> dict[str, Tensor]:
    model.zero_grad()
    model(batch).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
