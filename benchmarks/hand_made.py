"""packgraph's compiled chunk graphs beside a graph made by hand, in one process by turns.

    PYTHONPATH=src python3 benchmarks/hand_made.py [--models qwen3-0.6b] [--tokens 1024 4096] [--out FILE]

The graph by hand is what somebody makes who knows the shape: torch's operations, compiled layer by
layer, attention by flash-attn-4 (or torch's varlen kernel where it is not installed), forward and
backward in one CUDA graph each, gradients added by `torch._foreach_add_`. It checks nothing, takes
one shape, and its inputs are there already. Both have the same weights and the same documents, and
what they compute is compared first. A row has medians of a call with a wait behind each
(`waiting`) and of calls in a row (`row`), and the ratios: above 1 packgraph is the faster one.
Needs CUDA.
"""  # noqa: E501

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_models import TimedPart, build_part, draw_lengths, shape, zero_gradients
from bench_ways import Graphed, Setting
from moe_experts import Row, Session, distance
from step_figures import model_flops, peak_share
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from packgraph.bench.comparison import rounds_in_turn, start_anew
from packgraph.models.stack import DecoderStack
from packgraph.ops.attention.flash import library
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

MODELS = {"qwen3-0.6b": (28, (1024, 2048, 4096, 8192)), "qwen3-4b": (8, (4096, 16384))}
ROUNDS, CALLS = 7, 16
RELATIVE = 0.05  # bfloat16: every layer rounds anew, in another order
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    """Causal attention within documents. q [T, Hq, D], k and v [T, Hkv, D], boundaries [N + 1]."""
    if library().kernels is None:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return varlen_attn(q, k, v, boundaries, boundaries, longest, longest, window_size=(-1, 0))
    return _flash(q, k, v, boundaries, longest)


@torch._dynamo.disable
def _flash(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    from flash_attn.cute.interface import flash_attn_varlen_func

    found = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=boundaries,
        cu_seqlens_k=boundaries,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
    )
    return found[0] if isinstance(found, tuple) else found


class HandLayer(nn.Module):
    """A layer of Qwen3 in torch's operations, over the parameters of a layer of packgraph."""

    def __init__(self, layer: nn.Module, longest: int) -> None:
        super().__init__()
        self.of, self.longest = layer, longest

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, boundaries: Tensor) -> Tensor:
        """x: [T, H]; cos, sin: [T, 1, D]."""
        of, mixer, mlp = self.of, self.of.self_attn, self.of.mlp
        normed = _norm(x, of.input_layernorm)
        heads = [
            F.linear(normed, part.weight).unflatten(-1, (-1, mixer.head_dim))
            for part in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
        ]
        q, k = (
            _turn(_norm(part, norm), cos, sin)
            for part, norm in zip(heads[:2], (mixer.q_norm, mixer.k_norm), strict=True)
        )
        out = attend(q, k, heads[2], boundaries, self.longest).flatten(1)
        x = x + F.linear(out, mixer.o_proj.weight)
        normed = _norm(x, of.post_attention_layernorm)
        gate, up = (F.linear(normed, part.weight) for part in (mlp.gate_proj, mlp.up_proj))
        return x + F.linear(F.silu(gate) * up, mlp.down_proj.weight)


def _norm(x: Tensor, norm: nn.Module) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class ByHand:
    """Forward and backward of layers as two graphs, for one microbatch's shape."""

    def __init__(self, model: DecoderStack, batch: PackedBatch, x: Tensor, up: Tensor) -> None:
        layers = [HandLayer(layer, max(batch.lengths)) for layer in model.layers.values()]
        for layer in layers:
            layer.compile(dynamic=False)
        cos, sin = model.rotary(batch.position_ids, x.dtype)
        given = cos[:, None], sin[:, None], batch.cu_seqlens
        parameters = list(model.parameters())
        self._stream, self._graphs = torch.cuda.Stream(), []
        pool = torch.cuda.graph_pool_handle()
        x = x.detach().requires_grad_()
        self._read = x, up, given  # by graphs, at these addresses

        def forward() -> None:
            hidden = x
            for layer in layers:
                hidden = layer(hidden, *given)
            self.out = hidden

        def backward() -> None:
            gradients = torch.autograd.grad(self.out, [x, *parameters], up)
            totals = [parameter.grad for parameter in parameters]
            torch._foreach_add_(totals, list(gradients[1:]))

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                forward()
                backward()
            for work in (forward, backward):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                    work()
                self._graphs.append(graph)
        torch.cuda.synchronize()

    def __call__(self) -> Tensor:
        """Run the microbatch; the output."""
        for graph in self._graphs:
            graph.replay()
        return self.out


def milliseconds(call: Callable[[], object], waits: bool) -> float:
    """Of a call: the median of calls that are waited for, or the mean of calls in a row."""
    call()
    torch.cuda.synchronize()
    times = []
    begin = time.perf_counter()
    for _ in range(CALLS):
        if waits:
            begin = time.perf_counter()
        call()
        if waits:
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return 1000 * (statistics.median(times) if waits else (time.perf_counter() - begin) / CALLS)


def documents_of(tokens: int, words: int) -> PackedBatch:
    """A row of exactly so many tokens, of documents with lognormal lengths."""
    drawn = draw_lengths(tokens, tokens, mean=1024, sigma=1.5, seed=1)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(drawn[len(lengths)], tokens - sum(lengths)))
    documents = [torch.arange(length) % words for length in lengths]
    return PackedBatch.build(documents, Capacity(tokens, len(lengths), max(lengths)))


def compare(session: Session, name: str, layers: int, tokens: int) -> Row:
    """Both ways at one shape: what they compute, then the time of each by turns."""
    config = shape(name, layers)
    model = build_part("layers", config, session.device, session.dtype)
    zero_gradients([model])
    batch = documents_of(tokens, config.vocab_size).to(session.device)
    capacity, lengths = batch.capacity, list(batch.lengths)
    work = TimedPart(model, capacity.tokens, batch.num_tokens)
    setting = Setting(work, model, capacity, (capacity,))
    twin_work = work.by(setting.model_of("chunk"))
    ours = Graphed("chunk+compile", twin_work, (capacity,), "chunk", compile=True)
    ours.prepare([batch])
    by_hand = ByHand(model, batch, work.hidden[: capacity.tokens], work.incoming(batch))
    found = {}
    for way, call in (("ours", partial(ours.run, batch)), ("by hand", by_hand)):
        zero_gradients([model])
        found[way] = [call().clone(), *(value.grad.clone() for value in model.parameters())]
    far = [distance(*pair) for pair in zip(*found.values(), strict=True)]
    del found
    times: dict[str, list[float]] = {}

    def turn(way: str, call: Callable[[], object], number: int) -> None:
        with ours.frozen():
            for kind in ("waiting", "row"):
                taken = milliseconds(call, waits=kind == "waiting")
                times.setdefault(f"{way}_{kind}_ms", []).append(taken)

    runs = {"ours": partial(ours.run, batch), "by_hand": by_hand}
    rounds_in_turn(
        {way: partial(turn, way, call) for way, call in runs.items()}, ROUNDS, lambda: False
    )
    median = {key: round(statistics.median(taken), 3) for key, taken in times.items()}
    complaint = ours.complaint()
    ours.close()
    flops = model_flops(config, lengths, head=False)
    return {
        "real_tokens": batch.num_tokens,
        "documents": len(lengths),
        "attention": model.attention_choice().name,
        **median,
        "waiting": round(median["by_hand_waiting_ms"] / median["ours_waiting_ms"], 3),
        "row": round(median["by_hand_row_ms"] / median["ours_row_ms"], 3),
        "mfu": round(peak_share(flops, median["ours_row_ms"]), 4),
        "output_distance": far[0],
        "gradient_distance": max(far[1:]),
        "ok": max(far) <= RELATIVE and complaint is None,
        "complaint": complaint,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Print rows; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, help="only these (default: all)")
    parser.add_argument("--commit", help="what rows say, where there is no checkout")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("hand_made: needs CUDA, whose graphs are made by hand here", file=sys.stderr)
        return 2
    session = Session(torch.device("cuda", 0), options.out, options.seconds)
    if options.commit is not None:
        session.shared["commit"] = options.commit
    for name in options.models:
        layers, sizes = MODELS[name]
        for tokens in sizes:
            if options.tokens is None or tokens in options.tokens:
                start_anew(session.device)
                what = {"benchmark": "hand_made", "model": name, "layers": layers, "tokens": tokens}
                session.attempt(partial(compare, session, name, layers, tokens), **what)
    return 1 if session.bad else 0


if __name__ == "__main__":
    sys.exit(main())
