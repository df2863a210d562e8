"""The layers of the graph made by hand do the work of packgraph's; the graph itself needs CUDA."""

import hand_made
import torch
import torch.nn.functional as F

from packgraph.bench.models import TimedPart, build_part, shape


def by_documents(q, k, v, boundaries, longest):
    """Attention of one document after the other."""
    found = []
    for begin, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        parts = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        found.append(F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True))
    return torch.cat(found, 2)[0].transpose(0, 1)


def test_layers_by_hand_compute_what_packgraph_computes(monkeypatch):
    monkeypatch.setattr(hand_made, "attend", by_documents)
    batch, cpu = hand_made.documents_of(96, 50), torch.device("cpu")
    model = build_part("layers", shape("tiny", 2), cpu, torch.float32)
    work = TimedPart(model, 96, batch.num_tokens)
    expected = model(*work.arguments(batch))
    cos, sin = model.rotary(batch.position_ids, torch.float32)
    hidden = work.hidden
    for layer in model.layers.values():
        by_hand = hand_made.HandLayer(layer, max(batch.lengths))
        hidden = by_hand(hidden, cos[:, None], sin[:, None], batch.cu_seqlens)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_without_cuda_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hand_made.main([]) == 2
    assert "needs CUDA" in capsys.readouterr().err
