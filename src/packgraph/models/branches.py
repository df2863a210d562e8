"""The kinds of branches that a decoder layer can have, and all that is counted of one without its
weights.

A kind is one class and one entry in `KINDS`: its letter in patterns, its sizes, its floating point
operations, and how it can be spread over ranks. The module that computes it stands in
`models/layers`; for a mixer, `models/layers/decoder.py` has it under the same name.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from packgraph.mamba.heads import ScanShape, ranks_problem
from packgraph.models.branch_kind import BranchKind
from packgraph.models.sizes import head_sizes, routed_width
from packgraph.models.work import SCAN_WEIGHTS, BranchWork

if TYPE_CHECKING:
    from packgraph.models.config import DecoderConfig


class AttentionBranch(BranchKind):
    """Grouped-query or multi-head latent attention."""

    name, letter, title = "attn", "*", "attention"
    is_mixer = has_tensor_plan = True

    def weights(self, config: "DecoderConfig") -> int:
        hidden, heads, latent = config.hidden_size, config.num_heads, config.latent
        if not latent.enabled:
            return hidden * config.head_dim * (2 * heads + 2 * config.num_kv_heads)
        queries, rank = heads * latent.query_dim, latent.query_rank
        return (
            (hidden * rank + rank * queries if rank else hidden * queries)
            + hidden * (latent.kv_rank + latent.rope_dim)
            + latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
            + heads * latent.value_dim * hidden
        )

    def saved_columns(self, config: "DecoderConfig") -> float:
        """Grouped queries: 4 vectors of the queries' and 4 of the keys' size (before and after norm
        and rotation). Latent: queries and keys before and after rotation, values and outputs before
        and after what follows them, and the small vectors before and after their norms."""
        latent = config.latent
        if not latent.enabled:
            return 4 * (config.num_heads + config.num_kv_heads) * config.head_dim
        return config.num_heads * (4 * latent.query_dim + 4 * latent.value_dim) + 2 * (
            latent.kv_rank + latent.query_rank
        )

    def exchanged_columns(self, config: "DecoderConfig") -> int:
        """Queries, keys, values and outputs; latent attention has keys and values of all heads."""
        keys = config.num_heads if config.latent.enabled else config.num_kv_heads
        return (config.num_heads + keys) * sum(head_sizes(config))

    def operations(self, config: "DecoderConfig", lengths: Sequence[int]) -> int:
        """Causal attention has L (L + 1) / 2 pairs in a document of L tokens."""
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return config.num_heads * 2 * sum(head_sizes(config)) * pairs


class MambaBranch(BranchKind):
    """Mamba-2."""

    name, letter, title, section = "mamba", "M", "Mamba-2", "mamba.num_heads"
    is_mixer = is_sequential = True

    def weights(self, config: "DecoderConfig") -> int:
        """The convolution has no matrix."""
        mamba = config.mamba
        return config.hidden_size * (2 * mamba.inner + mamba.channels + mamba.num_heads)

    def work(self, config: "DecoderConfig") -> BranchWork:
        weights = self.weights(config)
        return BranchWork(weights, weights, SCAN_WEIGHTS * config.mamba.inner * config.mamba.state)

    def saved_columns(self, config: "DecoderConfig") -> float:
        """What goes into the convolution and comes out of it, the gate, the result before and after
        its norm, and the state after every chunk, in float32."""
        mamba = config.mamba
        return (
            2 * mamba.channels
            + 3 * mamba.inner
            + 2 * mamba.num_heads
            + 2 * mamba.inner * mamba.state / mamba.chunk
        )

    def exchanged_columns(self, config: "DecoderConfig") -> int:
        """What goes into the convolution, the time steps, and the outputs."""
        return config.mamba.channels + config.mamba.num_heads + config.mamba.inner

    def operations(self, config: "DecoderConfig", lengths: Sequence[int]) -> int:
        """A head adds an outer product of P columns and S of state for each token and multiplies
        the state by S columns to read it, 4 P S together: what the recurrence asks for."""
        return config.mamba.inner * 4 * config.mamba.state * sum(lengths)

    def context_problem(self, config: "DecoderConfig", ranks: int) -> str | None:
        mamba = config.mamba
        shape = ScanShape(mamba.num_heads, mamba.head_dim, mamba.groups, mamba.state)
        return ranks_problem(shape, ranks)


class FeedForwardBranch(BranchKind):
    """A feed-forward block."""

    name, letter, title = "mlp", "-", "feed-forward"
    has_tensor_plan = True

    def weights(self, config: "DecoderConfig") -> int:
        return _matrices(config) * config.hidden_size * config.intermediate_size

    def saved_columns(self, config: "DecoderConfig") -> float:
        """4 vectors of the block's width."""
        return 4 * config.intermediate_size


class ExpertsBranch(BranchKind):
    """Experts with a router."""

    name, letter, title, section = "moe", "E", "experts", "experts.count"
    has_tensor_plan = True

    def weights(self, config: "DecoderConfig") -> int:
        """The router's matrix and those of the experts that a token is routed to."""
        return self._weights(config, config.experts.per_token)

    def work(self, config: "DecoderConfig") -> BranchWork:
        return BranchWork(self.weights(config), self._weights(config, config.experts.count))

    def saved_columns(self, config: "DecoderConfig") -> float:
        """4 vectors of every block's width, and 2 of their rows' width for each copy of a token."""
        experts = config.experts
        blocks = 4 * (experts.per_token + experts.shared) * experts.intermediate_size
        return blocks + 2 * experts.per_token * routed_width(config)

    def _weights(self, config: "DecoderConfig", experts: int) -> int:
        """Elements of the router's matrix, and of those of so many experts and the shared ones."""
        settings, columns = config.experts, _matrices(config) * config.experts.intermediate_size
        always = settings.count + columns * settings.shared + 2 * settings.latent_size
        return config.hidden_size * always + routed_width(config) * columns * experts


KINDS: Mapping[str, BranchKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            MambaBranch(),
            AttentionBranch(),
            FeedForwardBranch(),
            ExpertsBranch(),
        )
    }
)


def layer_cost(config: "DecoderConfig", index: int, tokens: int) -> int:
    """Cost of layer `index` as models/work.py has it. tokens: that meet one copy of its weights in
    a microbatch."""
    return sum(KINDS[name].work(config).cost(tokens) for name in config.branches(index))


def head_cost(config: "DecoderConfig", tokens: int) -> int:
    """The same of the head."""
    weights = config.hidden_size * config.vocab_size
    return BranchWork(weights, weights).cost(tokens)


def token_weights(config: "DecoderConfig") -> int:
    """Elements of the matrices that a token passes in all layers."""
    return sum(config.count(name) * kind.weights(config) for name, kind in config.kinds().items())


def _matrices(config: "DecoderConfig") -> int:
    """Matrices of a feed-forward block or an expert: without a gate there is one less."""
    return 2 if config.activation == "relu2" else 3
