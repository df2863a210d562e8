"""Small models of transformers at their default settings, and the switches that people turn while
they train."""

import importlib

import torch
from corpus.entry import Draw, Keywords, add
from torch import nn

GROUP = "transformers"
TEXT = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {
    **GROUPED,
    "num_local_experts": 3,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}

DECODERS = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {
            "vocab_size": 11,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "n_positions": 16,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", TEXT),
    "OPTForCausalLM": (
        "OPTConfig",
        {
            "vocab_size": 11,
            "hidden_size": 16,
            "ffn_dim": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
            "word_embed_proj_dim": 16,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "BloomForCausalLM": (
        "BloomConfig",
        {"vocab_size": 11, "hidden_size": 16, "n_layer": 1, "n_head": 2},
    ),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", GROUPED),
    "GemmaForCausalLM": ("GemmaConfig", GROUPED),
    "Gemma2ForCausalLM": ("Gemma2Config", {**GROUPED, "num_hidden_layers": 2}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**GROUPED, "num_hidden_layers": 2}),
    "PhiForCausalLM": ("PhiConfig", TEXT),
    "Phi3ForCausalLM": ("Phi3Config", GROUPED),
    "CohereForCausalLM": ("CohereConfig", GROUPED),
    "Olmo2ForCausalLM": ("Olmo2Config", GROUPED),
    "GraniteForCausalLM": ("GraniteConfig", GROUPED),
    "MixtralForCausalLM": ("MixtralConfig", EXPERTS),
    "OlmoeForCausalLM": ("OlmoeConfig", EXPERTS),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", EXPERTS),
    "MambaForCausalLM": (
        "MambaConfig",
        {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    ),
}
ENCODERS = {
    "BertForMaskedLM": ("BertConfig", TEXT),
    "RobertaForMaskedLM": ("RobertaConfig", {**TEXT, "pad_token_id": 1}),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        {
            "vocab_size": 11,
            "dim": 16,
            "hidden_dim": 24,
            "n_layers": 1,
            "n_heads": 2,
            "max_position_embeddings": 16,
        },
    ),
    "ElectraForMaskedLM": ("ElectraConfig", {**TEXT, "embedding_size": 16}),
    "AlbertForMaskedLM": ("AlbertConfig", {**TEXT, "embedding_size": 8}),
    "ModernBertForMaskedLM": (
        "ModernBertConfig",
        {**TEXT, "cls_token_id": 0, "sep_token_id": 1, "global_attn_every_n_layers": 2},
    ),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", TEXT),
}
PAIRS = {
    "T5ForConditionalGeneration": (
        "T5Config",
        {
            "vocab_size": 11,
            "d_model": 16,
            "d_ff": 24,
            "d_kv": 8,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
    ),
    "BartForConditionalGeneration": (
        "BartConfig",
        {
            "vocab_size": 11,
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 16,
            "decoder_start_token_id": 0,
            "forced_eos_token_id": 1,
            "eos_token_id": 1,
        },
    ),
}
IMAGES = {
    "ViTForImageClassification": (
        "ViTConfig",
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "num_labels": 3,
        },
    ),
    "ConvNextForImageClassification": (
        "ConvNextConfig",
        {
            "hidden_sizes": [4, 6],
            "depths": [1, 1],
            "num_stages": 2,
            "patch_size": 2,
            "num_labels": 3,
        },
    ),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "num_labels": 3},
    ),
}


def build(architecture, config, options, **further):
    transformers = importlib.import_module("transformers")
    settings = getattr(transformers, config)(**{**options, **further})
    return getattr(transformers, architecture)(settings).train()


def tokens(draw: Draw, step: int):
    ids = draw.ids(2, 6)
    return (Keywords(input_ids=ids, labels=ids.clone()),)


def masked(draw: Draw, step: int):
    ids = draw.ids(2, 6)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return (Keywords(input_ids=ids, attention_mask=mask, labels=torch.where(mask > 0, ids, -100)),)


def pictures(draw: Draw, step: int):
    return (Keywords(pixel_values=draw.rows(2, 3, 8, 8), labels=draw.ids(2, words=3)),)


def total(out):
    """The model's own loss, and a little of its logits, so that their gradient is seen, too."""
    return out["loss"] + 0.01 * out["logits"].float().square().mean()


def call(m, arguments):
    """Outputs without caches, whose classes differ between versions."""
    out = m(**arguments[0])
    return {"loss": out["loss"], "logits": out["logits"]}


def case(name, make, inputs, **options):
    add(GROUP, name, make, inputs, call=options.pop("call", call), loss=total, **options)


FEW = {"loops": ("plain",)}
for group, inputs in ((DECODERS, tokens), (ENCODERS, masked), (PAIRS, masked), (IMAGES, pictures)):
    for architecture, (config, options) in group.items():
        loops = (
            {}
            if architecture in ("GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM")
            else FEW
        )
        case(
            architecture,
            lambda a=architecture, c=config, o=options: build(a, c, o),
            inputs,
            **loops,
        )


def llama(**further):
    return build("LlamaForCausalLM", "LlamaConfig", GROUPED, **further)


case(
    "GPT-2 without a cache",
    lambda: build("GPT2LMHeadModel", *DECODERS["GPT2LMHeadModel"], use_cache=False),
    tokens,
    **FEW,
)
case("Llama without a cache", lambda: llama(use_cache=False), tokens, **FEW)
case(
    "Llama, eager attention",
    lambda: llama(attn_implementation="eager", use_cache=False),
    masked,
    **FEW,
)
case("Llama with a mask", lambda: llama(use_cache=False), masked, **FEW)
case(
    "Llama, lengths change",
    lambda: llama(use_cache=False),
    lambda draw, step: (
        (lambda ids: Keywords(input_ids=ids, labels=ids.clone()))(draw.ids(2, 4 + step % 3)),
    ),
    **FEW,
)
case("Llama, tied", lambda: llama(use_cache=False, tie_word_embeddings=True), tokens, **FEW)
case(
    "Llama, dynamic rotary",
    lambda: llama(use_cache=False, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    tokens,
    **FEW,
)
case(
    "Llama, attention dropout", lambda: llama(use_cache=False, attention_dropout=0.2), tokens, **FEW
)
case(
    "Llama, embeddings given",
    lambda: llama(use_cache=False),
    lambda draw, step: (
        Keywords(inputs_embeds=draw.rows(2, 6, 16, grad=True), labels=draw.ids(2, 6)),
    ),
    **FEW,
)
case(
    "Llama, checkpointed",
    lambda: llama(use_cache=False),
    tokens,
    prepare=lambda m: m.gradient_checkpointing_enable(),
    **FEW,
)
case(
    "Llama, checkpointed later",
    lambda: llama(use_cache=False),
    tokens,
    mutate=lambda m: m.gradient_checkpointing_enable({"use_reentrant": False}),
    **FEW,
)
case(
    "Llama, inputs require gradients",
    lambda: llama(use_cache=False),
    tokens,
    mutate=lambda m: m.enable_input_require_grads(),
    **FEW,
)
case("Llama, half", lambda: llama(use_cache=False).bfloat16(), tokens, **FEW)
case(
    "Llama, hidden states asked",
    lambda: llama(use_cache=False),
    tokens,
    call=lambda m, a: (
        lambda out: {"loss": out["loss"], "logits": out["logits"], "hidden": out["hidden_states"]}
    )(m(**a[0], output_hidden_states=True)),
    **FEW,
)
case(
    "Llama, frozen below",
    lambda: llama(use_cache=False),
    tokens,
    mutate=lambda m: m.model.requires_grad_(False),
    **FEW,
)
case(
    "Llama, vocabulary resized",
    lambda: llama(use_cache=False),
    tokens,
    mutate=lambda m: m.resize_token_embeddings(13),
    **FEW,
)
for label, change in {
    "config dropout": lambda m: setattr(m.config, "attention_dropout", 0.5),
    "attention dropout": lambda m: setattr(m.model.layers[0].self_attn, "attention_dropout", 0.5),
    "attention switched": lambda m: m.set_attn_implementation("eager"),
    "norm's eps": lambda m: setattr(m.model.norm, "variance_epsilon", 0.5),
    "activation": lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.Tanh()),
    "cache on": lambda m: setattr(m.config, "use_cache", True),
    "scaling": lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.1),
    "rotary scaling": lambda m: setattr(m.model.rotary_emb, "attention_scaling", 2.0),
    "layer removed": lambda m: setattr(m.model, "layers", m.model.layers[:0]),
}.items():
    case(f"Llama mutated: {label}", lambda: llama(use_cache=False), masked, mutate=change, **FEW)
case(
    "GPT-2 mutated: dropout",
    lambda: build("GPT2LMHeadModel", *DECODERS["GPT2LMHeadModel"], use_cache=False),
    tokens,
    mutate=lambda m: setattr(m.transformer.drop, "p", 0.9),
    **FEW,
)
case(
    "Mixtral with its router's loss",
    lambda: build(
        "MixtralForCausalLM", "MixtralConfig", EXPERTS, use_cache=False, output_router_logits=True
    ),
    tokens,
    **FEW,
)
case(
    "Mixtral mutated: experts per token",
    lambda: build("MixtralForCausalLM", "MixtralConfig", EXPERTS, use_cache=False),
    tokens,
    mutate=lambda m: setattr(m.config, "num_experts_per_tok", 1),
    **FEW,
)
case(
    "BERT for classification",
    lambda: build("BertForSequenceClassification", "BertConfig", TEXT, num_labels=3),
    lambda draw, step: (Keywords(input_ids=draw.ids(2, 6), labels=draw.ids(2, words=3)),),
    **FEW,
)
case(
    "BERT for classification, kind of problem by labels",
    lambda: build("BertForSequenceClassification", "BertConfig", TEXT, num_labels=3),
    lambda draw, step: (Keywords(input_ids=draw.ids(2, 6), labels=draw.rows(2, 3).sigmoid()),),
    **FEW,
)
case(
    "BERT for spans",
    lambda: build("BertForTokenClassification", "BertConfig", TEXT, num_labels=3),
    lambda draw, step: (Keywords(input_ids=draw.ids(2, 6), labels=draw.ids(2, 6, words=3)),),
    **FEW,
)
