"""The kinds of branches that a decoder layer can have, and all that is counted of one without its
weights.

A kind is one class and one entry in `KINDS`: its letter in patterns, its sizes, its floating point
operations, and how it can be spread over ranks. The module that computes it stands in
`models/layers`; for a mixer, `models/layers/decoder.py` has it under the same name.

    M  Mamba-2    *  attention    -  feed-forward    E  experts

    M-M*-E            six layers of one branch each, as in Nemotron-H
    (M-)(M-)(*-)      three layers of two branches, as in Bamba; a decoder of attention and
                      feed-forward alone is (*-)

A pattern is repeated until there are as many layers as the decoder has, and what is beyond them is
left out.

`BranchWork` is what branches cost compared with each other, before anything has been measured:

    cost of a branch = max(tokens x weights of a token, BALANCE x weights that are there) + tokens x
    other work

The unit is one weight times one token: 2 operations in the forward, 4 in the backward. With few
tokens a product takes as long as its weights take to be read, which matters where a token passes
some of many experts. What every branch has much alike (norms, residuals) is left out, and so is
attention proper, which depends on how long documents are.

The constants are those of one H200 in bfloat16 and only ratios count (docs/benchmarks.md):
products reach two thirds of 797 TFLOP/s, memory is read and written at 4.3 TB/s.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from packgraph.mamba.shape import ScanShape, ranks_problem

if TYPE_CHECKING:
    from packgraph.models.config import DecoderConfig

# A weight is read in the forward and in the backward, its gradient is read and written: 8 bytes, as
# long as the 6 operations for each of so many tokens take.
BALANCE = 165
# State space and convolution of Mamba-2 take 950 us, forward and backward, for 4096 tokens, 4096
# columns of heads and a state of 128: as long as so many weights for each column and number of its
# state.
SCAN_WEIGHTS = 40


@dataclass(frozen=True)
class BranchWork:
    """Work of one branch. weights: that a token is multiplied by. stored: weights that are read
    whatever the tokens need. other: further work for a token, in weights."""

    weights: int
    stored: int
    other: int = 0

    def cost(self, tokens: int) -> int:
        """Cost of a row of so many tokens, forward and backward."""
        return max(tokens * self.weights, BALANCE * self.stored) + tokens * self.other


class BranchKind:
    """One kind of branch. Subclasses override what differs.

    Attributes:
        name: Of its stage and in `DecoderConfig.branches`.
        letter: In `DecoderConfig.pattern`.
        title: In messages.
        section: The section of the configuration that has its shape, and in it the field that is 0
            where there is none; empty = its shape stands in the configuration itself.
        is_mixer: Whether it exchanges information between tokens.
        is_sequential: Whether it reads the tokens of a row in order: rows cannot be cut in zigzag.
        has_tensor_plan: Whether `parallel/tensor.py` can split it.
    """

    name: ClassVar[str]
    letter: ClassVar[str]
    title: ClassVar[str]
    section: ClassVar[str] = ""
    is_mixer: ClassVar[bool] = False
    is_sequential: ClassVar[bool] = False
    has_tensor_plan: ClassVar[bool] = False

    def weights(self, config: "DecoderConfig") -> int:
        """Elements of the matrices that a token passes in one such branch."""
        raise NotImplementedError

    def work(self, config: "DecoderConfig") -> BranchWork:
        """Returns the work of one branch for a token, for cutting pipeline stages."""
        return BranchWork(self.weights(config), self.weights(config))

    def saved_columns(self, config: "DecoderConfig") -> float:
        """Numbers per token that autograd saves for the backward."""
        raise NotImplementedError

    def product_columns(self, config: "DecoderConfig") -> float:
        """Numbers per token that selective recomputation keeps: results of products, attention and
        scans; see `graphs/checkpointed.py`."""
        raise NotImplementedError

    def exchanged_columns(self, config: "DecoderConfig") -> int:
        """Numbers per token that ranks exchange which share a row by heads (Ulysses)."""
        return 0

    def operations(self, config: "DecoderConfig", tokens: int, pairs: int) -> int:
        """Floating point operations of the forward beside products with weights, for documents of
        so many tokens and pairs of them; L tokens have L (L + 1) / 2 pairs under a causal mask."""
        return 0

    def context_problem(self, config: "DecoderConfig", ranks: int) -> str | None:
        """Returns why `ranks` ranks cannot share a row by heads in this branch, or None."""
        return None


def head_sizes(config: "DecoderConfig") -> tuple[int, int]:
    """Columns of a head's queries and keys, and of its values."""
    latent = config.latent
    return (
        (latent.query_dim, latent.value_dim)
        if latent.enabled
        else (config.head_dim, config.head_dim)
    )


def routed_width(config: "DecoderConfig") -> int:
    """Columns of a row that is sent to experts."""
    return config.experts.latent_size or config.hidden_size


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

    def product_columns(self, config: "DecoderConfig") -> float:
        """Queries, keys, values, what attention makes of them, and the output; of latent attention
        also the small vectors that they come from."""
        latent, heads = config.latent, config.num_heads
        if not latent.enabled:
            return (2 * heads + 2 * config.num_kv_heads) * config.head_dim + config.hidden_size
        small = latent.kv_rank + latent.rope_dim + latent.query_rank
        each = latent.query_dim + latent.nope_dim + 2 * latent.value_dim
        return heads * each + small + config.hidden_size

    def exchanged_columns(self, config: "DecoderConfig") -> int:
        """Queries, keys, values and outputs; latent attention has keys and values of all heads."""
        keys = config.num_heads if config.latent.enabled else config.num_kv_heads
        return (config.num_heads + keys) * sum(head_sizes(config))

    def operations(self, config: "DecoderConfig", tokens: int, pairs: int) -> int:
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
        """Numbers per token of the convolution's input and output, the gate, the result before and
        after its norm, and the state after every chunk, in float32."""
        mamba = config.mamba
        return (
            2 * mamba.channels
            + 3 * mamba.inner
            + 2 * mamba.num_heads
            + 2 * mamba.inner * mamba.state / mamba.chunk
        )

    def product_columns(self, config: "DecoderConfig") -> float:
        """Numbers per token of the first product, the scan's result and states, and the output."""
        mamba = config.mamba
        states = 2 * mamba.inner * mamba.state / mamba.chunk
        return 2 * mamba.inner + mamba.channels + mamba.num_heads + states + config.hidden_size

    def exchanged_columns(self, config: "DecoderConfig") -> int:
        """Numbers per token of the convolution's input, the time steps, and the outputs."""
        return config.mamba.channels + config.mamba.num_heads + config.mamba.inner

    def operations(self, config: "DecoderConfig", tokens: int, pairs: int) -> int:
        """A head adds an outer product of P columns and S of state for each token and multiplies
        the state by S columns to read it, 4 P S together: what the recurrence asks for."""
        return config.mamba.inner * 4 * config.mamba.state * tokens

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

    def product_columns(self, config: "DecoderConfig") -> float:
        """Numbers per token of the products' results."""
        return (_matrices(config) - 1) * config.intermediate_size + config.hidden_size


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

    def product_columns(self, config: "DecoderConfig") -> float:
        """Logits in float32, what the products of experts make of every copy of a token, and what
        shared experts make."""
        experts, width = config.experts, (_matrices(config) - 1) * config.experts.intermediate_size
        routed = experts.per_token * (width + routed_width(config))
        shared = experts.shared * width + (config.hidden_size if experts.shared else 0)
        return 2 * experts.count + routed + shared

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
    """Cost of layer `index` as `BranchWork` has it. tokens: that meet one copy of its weights in a
    microbatch."""
    return sum(KINDS[name].work(config).cost(tokens) for name in config.branches(index))


def head_cost(config: "DecoderConfig", tokens: int) -> int:
    """The same of the head, and of multi-token prediction, which stands behind the last layer."""
    weights = config.hidden_size * config.vocab_size
    head = BranchWork(weights, weights).cost(tokens)
    project = BranchWork(2 * config.hidden_size**2, 2 * config.hidden_size**2).cost(tokens)
    further = [
        layer_cost(config, index, tokens) for index in range(config.num_layers, config.depth)
    ]
    return head + sum(cost + project + head for cost in further)


def token_weights(config: "DecoderConfig") -> int:
    """Elements of the matrices that a token passes in all layers, those of multi-token prediction
    with their projections too."""
    branches = sum(
        config.count(name) * kind.weights(config) for name, kind in config.kinds().items()
    )
    return branches + 2 * config.hidden_size**2 * config.mtp_layers


def head_weights(config: "DecoderConfig") -> int:
    """Elements of the head for each time that a token passes it: once for every token that is
    predicted."""
    return config.vocab_size * config.hidden_size * (1 + config.mtp_layers)


def forward_operations(config: "DecoderConfig", tokens: int, pairs: int, head: bool = True) -> int:
    """Floating point operations that a decoder asks for in the forward; the backward takes twice
    as many.

    Counted are products of matrices for real tokens: padding, recomputation, norms and activation
    functions are none of the model's work. A weight costs 2 operations a token; of experts, those
    that a token is routed to count. A pair of tokens costs 2 D for its score and 2 D for its value
    in each query head of D columns.

    Args:
        config: Shape of the decoder.
        tokens: Of all documents.
        pairs: Of tokens within documents, as `PackedBatch.num_pairs`.
        head: Whether the head runs, too; the embedding is a lookup.
    """
    weights = token_weights(config) + (head_weights(config) if head else 0)
    return 2 * weights * tokens + sum(
        config.count(name) * kind.operations(config, tokens, pairs)
        for name, kind in config.kinds().items()
    )


def _matrices(config: "DecoderConfig") -> int:
    """Matrices of a feed-forward block or an expert: without a gate there is one less."""
    return 2 if config.activation == "relu2" else 3


BRANCHES = {kind.letter: name for name, kind in KINDS.items()}
MIXERS = tuple(kind.letter for kind in KINDS.values() if kind.is_mixer)


@cache
def read_pattern(text: str) -> tuple[tuple[str, ...], ...]:
    """The branches of each layer, by the names of their stages (`moe` for experts).

    A layer is one letter, or a mixer and a feed-forward branch (- or E) in parentheses.
    Raises ValueError.
    """
    layers: list[tuple[str, ...]] = []
    rest = text
    while rest:
        letters, rest = (
            (rest[1:3], rest[4:]) if rest[0] == "(" and rest[3:4] == ")" else (rest[0], rest[1:])
        )
        if any(letter not in BRANCHES for letter in letters) or (
            len(letters) == 2 and (letters[0] in MIXERS, letters[1] in MIXERS) != (True, False)
        ):
            raise ValueError(
                f"pattern {text!r} makes no sense from layer {len(layers)} on: a layer is one of "
                f"{' '.join(BRANCHES)}, or {' or '.join(MIXERS)} followed by - or E in "
                "parentheses, as in (M-)(*E)"
            )
        layers.append(tuple(BRANCHES[letter] for letter in letters))
    return tuple(layers)


def write_pattern(layers: list[tuple[str, ...]]) -> str:
    """The pattern of these layers: what `read_pattern` reads."""
    letters = {branch: letter for letter, branch in BRANCHES.items()}
    words = ["".join(letters[branch] for branch in layer) for layer in layers]
    return "".join(f"({word})" if len(word) > 1 else word for word in words)
