"""Small models of every family that packgraph.integrations.transformers knows, and what plain
transformers makes of documents one by one."""

import copy
import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packgraph

VOCAB = 29
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 4}
BOTH = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}


@dataclass(frozen=True)
class Case:
    """One configuration. config: class and arguments. matters: changes of the config that must
    change the loss, each of them: else the comparison would not see what they do."""

    config: str
    arguments: dict[str, Any] = field(default_factory=dict)
    matters: tuple[dict[str, Any], ...] = ()


def case(config: str, *matters: dict[str, Any], **arguments: Any) -> Case:
    return Case(config, {**SMALL, **arguments}, matters)


CASES = {
    "llama": case("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}),
    "mistral": case("MistralConfig", {"sliding_window": None}, **WINDOW),
    "qwen2": case(
        "Qwen2Config",
        {"layer_types": ["full_attention"] * 2},
        use_sliding_window=True,
        tie_word_embeddings=True,
        **BOTH,
    ),
    "qwen3": case("Qwen3Config"),
    "gemma": case("GemmaConfig"),
    "gemma2": case(
        "Gemma2Config",
        {"layer_types": ["full_attention"] * 2},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        attn_logit_softcapping=1.0,
        final_logit_softcapping=2.0,
        query_pre_attn_scalar=8,
        **BOTH,
    ),
    "gemma3_text": case(
        "Gemma3TextConfig",
        {"layer_types": ["full_attention"] * 2},
        {"final_logit_softcapping": None},
        final_logit_softcapping=2.0,
        query_pre_attn_scalar=8,
        **BOTH,
    ),
    "phi3": case("Phi3Config", {"sliding_window": None}, **WINDOW),
    "olmo": case("OlmoConfig"),
    "olmo2": case("Olmo2Config"),
    "olmo3": case("Olmo3Config", {"layer_types": ["full_attention"] * 2}, **BOTH),
    "smollm3": case("SmolLM3Config", {"no_rope_layers": [1, 1]}, no_rope_layers=[1, 0]),
    "granite": case(
        "GraniteConfig",
        {"logits_scaling": 1.0},
        {"embedding_multiplier": 1.0},
        {"residual_multiplier": 1.0},
        {"attention_multiplier": 1.0},
        logits_scaling=3.0,
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
    ),
    "glm4": case("Glm4Config", {"partial_rotary_factor": 1.0}, attention_bias=True),
    "gpt2": Case(
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        ({"scale_attn_weights": False},),
    ),
    "qwen3_moe": case("Qwen3MoeConfig", {"norm_topk_prob": False}, norm_topk_prob=True, **EXPERTS),
    "mixtral": case("MixtralConfig", {"sliding_window": None}, **WINDOW, **EXPERTS),
    "glm4_moe": case(
        "Glm4MoeConfig",
        {"routed_scaling_factor": 1.0},
        first_k_dense_replace=1,
        n_shared_experts=1,
        routed_scaling_factor=2.0,
        **EXPERTS,
    ),
    "gpt_oss": case("GptOssConfig", {"layer_types": ["full_attention"] * 2}, **BOTH, **EXPERTS),
    "deepseek_v3": case(
        "DeepseekV3Config",
        {"rope_interleave": False},
        first_k_dense_replace=1,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=12,
        **{**EXPERTS, "head_dim": 4, "num_key_value_heads": 4},
    ),
}
CASES |= {
    "bamba": case(
        "BambaConfig",
        {"mamba_n_groups": 2, "time_step_limit": (0.5, 0.7)},
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=16,
        mamba_n_groups=2,
        mamba_chunk_size=4,
        z_loss_coefficient=0.0,
    ),
    "falcon_h1": case(
        "FalconH1Config",
        {"embedding_multiplier": 1.0},
        {"lm_head_multiplier": 1.0},
        {"ssm_in_multiplier": 1.0},
        {"ssm_multipliers": [1.0] * 5},
        {"attention_in_multiplier": 1.0},
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_ssm=32,
        mamba_d_state=16,
        mamba_n_groups=2,
        mamba_chunk_size=4,
        embedding_multiplier=2.0,
        lm_head_multiplier=0.5,
        ssm_in_multiplier=1.5,
        ssm_multipliers=[0.5, 2.0, 1.5, 0.7, 3.0],
        attention_in_multiplier=1.7,
    ),
    "nemotron_h": case(
        "NemotronHConfig",
        {"routed_scaling_factor": 1.0},
        layers_block_type=["mamba", "attention", "moe", "mamba"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=4,
        moe_shared_expert_intermediate_size=12,
        routed_scaling_factor=2.0,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        **{**EXPERTS, "num_hidden_layers": 4},
    ),
    "qwen3_next": case(
        "Qwen3NextConfig",
        {"partial_rotary_factor": 1.0},
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        linear_conv_kernel_dim=4,
        shared_expert_intermediate_size=12,
        partial_rotary_factor=0.5,
        **EXPERTS,
    ),
}
_EYE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_QWEN_EYE = {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 14}
_SMALL_BART = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()
}
# Models with an encoder, of text or of images: class, and arguments of its config.
WITH_ENCODERS = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"text_config": SMALL, "vision_config": _EYE, "mm_tokens_per_image": 4},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **SMALL},
            "vision_config": {"model_type": "clip_vision_model", **_EYE, "projection_dim": 8},
            "image_token_index": 3,
        },
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {"text_config": {**SMALL, **_AXES}, "vision_config": {**_QWEN_EYE, "embed_dim": 16}},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**SMALL, **_AXES},
            "vision_config": {
                **_QWEN_EYE,
                "intermediate_size": 16,
                "out_hidden_size": 16,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 16,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 16, "max_position_embeddings": 64, **_SMALL_BART},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**SMALL, **_AXES},
            "vision_config": {**_QWEN_EYE, "intermediate_size": 16, "out_hidden_size": 16},
        },
    ),
    "marian": (
        "MarianMTModel",
        {
            "vocab_size": VOCAB,
            "d_model": 16,
            "pad_token_id": 1,
            "max_position_embeddings": 64,
            **_SMALL_BART,
        },
    ),
}
DOCUMENTS = ([5, 3, 8, 2, 9, 4, 4, 7, 6], [11], [3, 1, 4, 1, 5, 9], [2, 7, 1, 8])
CAPACITY = packgraph.Capacity(tokens=26, documents=6)


def build(family: str, **changes: Any) -> nn.Module:
    """A model of transformers with weights that make every part of it matter. changes: of its
    config."""
    transformers = importlib.import_module("transformers")
    known = CASES[family]
    config = getattr(transformers, known.config)(**copy.deepcopy({**known.arguments, **changes}))
    torch.manual_seed(0)
    return draw_weights(transformers.AutoModelForCausalLM.from_config(config))


def draw_weights(model: nn.Module) -> nn.Module:
    """The same model with weights that make every part of it matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, tensor in sorted(model.named_parameters()):
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(0.3 * noise if tensor.dim() > 1 else tensor.nan_to_num() + 0.3 * noise)
    return model


def build_with_encoder(name: str) -> Any:
    """A model of `WITH_ENCODERS`."""
    transformers = importlib.import_module("transformers")
    kind, arguments = WITH_ENCODERS[name]
    made = getattr(transformers, kind)
    torch.manual_seed(0)
    return made(made.config_class(**copy.deepcopy(arguments)))


def plain(model: nn.Module) -> nn.Module:
    """A copy of a model that runs transformers' own textbook code."""
    found: Any = copy.deepcopy(model)
    found.set_attn_implementation("eager")
    if any(hasattr(module, "is_concatenated") for module in found.modules()):
        found.set_experts_implementation("eager")
    return found


def document_loss(model: nn.Module, documents=DOCUMENTS) -> Tensor:
    """The mean loss of all next tokens, each document alone."""
    total, count = torch.zeros(()), 0
    for document in documents:
        if len(document) > 1:
            tokens = torch.tensor([document])
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
            total = total + F.cross_entropy(logits, tokens[0, 1:], reduction="sum")
            count += len(document) - 1
    return total / count


def batch_of(documents=DOCUMENTS, capacity=CAPACITY) -> packgraph.PackedBatch:
    return packgraph.PackedBatch.build([list(document) for document in documents], capacity)


def random_batches(count: int, seed: int = 0) -> list[packgraph.PackedBatch]:
    """Batches of one capacity with other documents each."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        lengths = torch.randint(1, 9, (3,), generator=generator).tolist()
        batches.append(
            batch_of([torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths])
        )
    return batches


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor | None]:
    """Of every parameter of `model`, by name."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def axes(family: str) -> str:
    """The axes of parallelism that the small model of a family can have beside replicas."""
    live = importlib.import_module("packgraph.integrations.transformers").packed(build(family))
    split = importlib.import_module("packgraph.integrations.transformers.tensor")
    found = ["pp"] + ["tp"] * (not split.tensor_problems(live, 2))
    shared = importlib.import_module("packgraph.integrations.transformers.experts")
    found += ["ep"] * (not shared.expert_split_problems(live.causal, 2))
    by = "cp (ulysses)" if live.only_by_heads else "cp"
    return ", ".join(found + [by] * (not live.scan_problems(2)))


def family_table() -> str:
    """The table of docs/guides/huggingface.md: every family with a case, and those refused."""
    families = importlib.import_module("packgraph.integrations.transformers.families")
    lines = ["| family | `model_type` | layers | in parallel | notes |", "|---|---|---|---|---|"]
    for name in CASES:
        known = families.FAMILIES[name]
        lines.append(f"| {known.title} | `{name}` | {known.kind} | {axes(name)} | {known.note} |")
    for name, refused in families.NOT_PACKED.items():
        lines.append(f"| {refused.title} | `{name}` | refused | | {refused.reason} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(family_table())


# Entries that configs of transformers have for sizes, whatever the family.
ANY_SIZES = {
    **SMALL,
    **EXPERTS,
    **WINDOW,
    **dict.fromkeys(("n_embd", "d_model", "embed_dim"), 16),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("n_inner", "ffn_dim", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_topk", "moe_k"), 2),
    "moe_num_experts": 4,
    "first_k_dense_replace": 1,
}


# Of families whose layers need more than small sizes.
DELTA = {
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    "linear_num_key_heads": 2,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}
OF_KINDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), DELTA),
    "kimi_linear": {
        **DELTA,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "num_key_value_heads": 4,
    },
    "deepseek_v2": {"num_key_value_heads": 4},
    "gemma4_text": {  # heads of two sizes, keys that are values, experts beside a dense layer
        **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), 0),
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "final_logit_softcapping": 2.0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def any_decoder(kind: str, **changes: Any) -> nn.Module:
    """A small decoder of any `model_type`, by the entries that its config has. changes: of its
    config."""
    transformers = importlib.import_module("transformers")
    made, sizes = transformers.CONFIG_MAPPING[kind], {}
    usual = made().to_dict()  # an attribute of each layer cannot be asked for
    usual |= {name: usual.get(of) for name, of in made.attribute_map.items()}
    for name, value in ANY_SIZES.items():
        if isinstance(usual.get(name, ""), int | float | None):
            sizes[name] = value
    for name in ("layer_types", "mlp_layer_types"):
        if usual.get(name):
            sizes[name] = usual[name][:2]
    torch.manual_seed(0)
    sizes |= OF_KINDS.get(kind, {}) | changes
    return transformers.AutoModelForCausalLM.from_config(made(**sizes)).float()
