"""Shape of a decoder: everything that its parameters and numbers depend on."""
from dataclasses import dataclass, field

from packgraph.models.expert_config import ExpertConfig
from packgraph.models.latent_config import LatentConfig
from packgraph.ops.attention import BACKENDS


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of the Qwen3 or DeepSeek-V3 family.

    num_kv_heads: key and value heads, a divisor of num_heads. head_dim: need not be hidden_size / num_heads.
    tie_embeddings: the head uses the embedding matrix. qk_norm: RMSNorm on queries and keys. attention_bias:
    biases of the attention projections. dropout: on both residual branches, in training mode. initializer_range:
    standard deviation of fresh matrices. attention_backend: a name of `packgraph.ops.attention.BACKENDS` or
    `auto`.
    max_position_embeddings: only recorded in checkpoints; rotary positions have no limit here.
    merge_projections: form the products with the matrices of queries, keys and values as one, and those of gate
    and up (ops/merged_linear.py); parameters and their names stay as they are.
    latent: multi-head latent attention instead of grouped queries; num_kv_heads and head_dim then mean nothing.
    experts: which layers have experts instead of one feed-forward block, and how tokens are routed to them.
    Raises ValueError that names every illegal value at once.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qk_norm: bool = True
    attention_bias: bool = False
    dropout: float = 0.0
    initializer_range: float = 0.02
    attention_backend: str = "auto"
    max_position_embeddings: int = 32768
    merge_projections: bool = False
    latent: LatentConfig = field(default_factory=LatentConfig)
    experts: ExpertConfig = field(default_factory=ExpertConfig)

    def __post_init__(self) -> None:
        reasons = _illegal(self)
        if reasons:
            raise ValueError("DecoderConfig cannot be built: " + "; ".join(reasons))


def _illegal(config: DecoderConfig) -> list[str]:
    """Every reason why `config` describes no model."""
    positive = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                "head_dim", "rope_theta", "rms_norm_eps", "max_position_embeddings")
    reasons = [f"{name} is {getattr(config, name)}, must be positive" for name in positive
               if getattr(config, name) <= 0]
    if config.num_kv_heads > 0 and config.num_heads % config.num_kv_heads:
        reasons.append(f"num_heads {config.num_heads} is no multiple of num_kv_heads {config.num_kv_heads}")
    if config.head_dim % 2 and not config.latent.enabled:
        reasons.append(f"head_dim {config.head_dim} is odd; rotary embedding turns pairs of columns")
    if not 0.0 <= config.dropout < 1.0:
        reasons.append(f"dropout is {config.dropout}, must be in [0, 1)")
    if config.initializer_range < 0.0:
        reasons.append(f"initializer_range is {config.initializer_range}, must not be negative")
    if config.merge_projections and config.attention_bias:
        reasons.append("merge_projections needs projections without biases, but attention_bias is set")
    if config.attention_backend != "auto" and config.attention_backend not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        reasons.append(f"attention_backend {config.attention_backend!r} is unknown; known are {known}")
    return reasons
