"""The architectures of transformers that a DecoderConfig can be: what each of its fields is called
in a config.json.

qwen3         grouped queries, one feed-forward block a layer
qwen3_moe     grouped queries, experts chosen by softmax
deepseek_v3   latent attention, experts chosen by sigmoid with a bias, the first layers without
              (Moonlight, too)
mamba2, nemotron_h, bamba   hybrids of Mamba-2 and attention, see hf_hybrids.py
"""

from types import MappingProxyType

from packgraph.models.config import DecoderConfig
from packgraph.models.hf_family import Family, Key
from packgraph.models.hf_hybrids import HYBRIDS, hybrid_family

_COMMON = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "intermediate_size": Key("intermediate_size"),
    "num_layers": Key("num_hidden_layers"),
    "num_heads": Key("num_attention_heads"),
    "rms_norm_eps": Key("rms_norm_eps", 1e-6),
    "tie_embeddings": Key("tie_word_embeddings", False),
    "attention_bias": Key("attention_bias", False),
    "initializer_range": Key("initializer_range", 0.02),
    "max_position_embeddings": Key("max_position_embeddings", 32768),
}
_GROUPED = {**_COMMON, "num_kv_heads": Key("num_key_value_heads")}
_EVERYWHERE = {"hidden_act": "silu", "attention_dropout": 0.0}
_NO_WINDOW = {"use_sliding_window": False}
_PLAIN = {"pattern": "", "activation": "swiglu", "rotary_share": 1.0}

QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    MappingProxyType({**_GROUPED, "head_dim": Key("head_dim", 128)}),
    MappingProxyType({**_EVERYWHERE, **_NO_WINDOW}),
    MappingProxyType({**_PLAIN, "qk_norm": True}),
)

QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    MappingProxyType(
        {
            **_GROUPED,
            "head_dim": Key("head_dim"),
            "experts.count": Key("num_experts", other="num_local_experts"),
            "experts.per_token": Key("num_experts_per_tok", 8),
            "experts.intermediate_size": Key("moe_intermediate_size", 768),
            "experts.normalise": Key("norm_topk_prob", False),
        }
    ),
    MappingProxyType(
        {**_EVERYWHERE, **_NO_WINDOW, "decoder_sparse_step": 1, "mlp_only_layers": ()}
    ),
    MappingProxyType(
        {
            **_PLAIN,
            "qk_norm": True,
            "experts.score": "softmax",
            "experts.score_bias": False,
            "experts.shared": 0,
            "experts.first_dense": 0,
            "experts.scaling": 1.0,
            "experts.groups": 1,
            "experts.groups_kept": 1,
            "experts.latent_size": 0,
        }
    ),
)

DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    MappingProxyType(
        {
            **_COMMON,
            "max_position_embeddings": Key("max_position_embeddings", 4096),
            "latent.kv_rank": Key("kv_lora_rank", 512),
            "latent.query_rank": Key("q_lora_rank", 1536, null=0),
            "latent.nope_dim": Key("qk_nope_head_dim", 128),
            "latent.rope_dim": Key("qk_rope_head_dim", 64),
            "latent.value_dim": Key("v_head_dim", 128),
            "latent.interleaved": Key("rope_interleave", True),
            "experts.count": Key("n_routed_experts", 256, null=0),
            "experts.per_token": Key("num_experts_per_tok", 8),
            "experts.intermediate_size": Key("moe_intermediate_size", 2048),
            "experts.shared": Key("n_shared_experts", 1, null=0),
            "experts.first_dense": Key("first_k_dense_replace", 3),
            "experts.normalise": Key("norm_topk_prob", True),
            "experts.scaling": Key("routed_scaling_factor", 2.5),
            "experts.groups": Key("n_group", 8, null=1),
            "experts.groups_kept": Key("topk_group", 4, null=1),
        }
    ),
    MappingProxyType(
        {**_EVERYWHERE, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    ),
    MappingProxyType(
        {**_PLAIN, "experts.score": "sigmoid", "experts.score_bias": True, "experts.latent_size": 0}
    ),
)

FAMILIES = (QWEN3, QWEN3_MOE, DEEPSEEK_V3, *HYBRIDS)
RECORDED = (
    "initializer_range",
    "max_position_embeddings",
)  # in a config.json, but no part of what weights compute


def family_of(config: DecoderConfig) -> Family:
    """The only family that may have such a model."""
    if config.pattern:
        return hybrid_family(config)
    if config.latent.enabled:
        return DEEPSEEK_V3
    return QWEN3_MOE if config.experts.enabled else QWEN3
