"""Which layers have experts, and how tokens are routed to them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ExpertConfig:
    """Experts of a decoder; count 0 = none, every layer has one feed-forward block.

    count: experts of a layer.
    per_token: experts that each token is routed to (top-k).
    intermediate_size: width of one expert.
    latent_size: width of the experts' rows, which tokens are brought to before they are sent and
        from which they come back (Nemotron 3); 0 = the hidden size, and no such projections.
    shared: experts that every token passes, as one block of shared * intermediate_size.
    first_dense: layers before the first one with experts.
    score: what makes scores of the router's logits.
    normalise: chosen scores are divided by their sum.
    scaling: factor on the weights after that.
    groups: equal groups that experts are in.
    groups_kept: groups that a token may choose from, those with the highest sum of their two best
        (biased) scores.
    score_bias: a bias per expert is added to scores for the choice alone (arXiv 2408.15664).
    bias_rate: how far a step moves the bias against the load.
    load_loss: factor of the auxiliary loss over a microbatch (Switch, arXiv 2101.03961).
    document_loss: factor of the same for every document by itself, averaged over documents
        (DeepSeek-V3's sequence-wise loss, arXiv 2412.19437).
    z_loss: factor of the mean squared logsumexp of the logits (ST-MoE, arXiv 2202.08906).
    drop_factor: each expert takes at most drop_factor * T * per_token / count tokens and drops the
        rest, those with the lowest weights first; 0 = nothing is dropped.

    Raises ValueError that names every illegal value at once.
    """

    count: int = 0
    per_token: int = 0
    intermediate_size: int = 0
    latent_size: int = 0
    shared: int = 0
    first_dense: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    score_bias: bool = False
    bias_rate: float = 0.001
    load_loss: float = 0.0
    document_loss: float = 0.0
    z_loss: float = 0.0
    drop_factor: float = 0.0

    def __post_init__(self) -> None:
        if reasons := _illegal(self):
            raise ValueError("ExpertConfig cannot be built: " + "; ".join(reasons))

    @property
    def enabled(self) -> bool:
        """Whether any layer has experts."""
        return self.count > 0

    def has_layer(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        return self.enabled and index >= self.first_dense


def _illegal(config: ExpertConfig) -> list[str]:
    """Every reason why `config` describes no experts."""
    reasons = [
        f"{name} is {getattr(config, name)}, must not be negative"
        for name in (
            "count",
            "latent_size",
            "shared",
            "first_dense",
            "bias_rate",
            "load_loss",
            "document_loss",
            "z_loss",
            "drop_factor",
        )
        if getattr(config, name) < 0
    ]
    if config.count <= 0:
        return reasons
    reasons += [
        f"{name} is {getattr(config, name)}, must be positive"
        for name in ("per_token", "intermediate_size", "groups", "groups_kept", "scaling")
        if getattr(config, name) <= 0
    ]
    if reasons:
        return reasons
    if config.count % config.groups:
        reasons.append(f"count {config.count} is no multiple of groups {config.groups}")
    elif config.groups_kept > config.groups:
        reasons.append(f"groups_kept {config.groups_kept} is more than groups {config.groups}")
    elif config.per_token > config.count // config.groups * config.groups_kept:
        reasons.append(
            f"per_token {config.per_token} is more than the experts a token can choose from "
            f"({config.count // config.groups * config.groups_kept})"
        )
    return reasons
