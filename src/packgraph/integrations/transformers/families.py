"""Steps of transformers' families before their first layer and after their last one.

    tokens -- embedding -- * scale -- + positions -- dropout -- layers -- norm -- head -- / divisor
    -- softcap -- loss

Layers are called, never looked into: what they add to attention (windows, soft caps, sinks, layers
without rotary positions) they say to the implementation of attention that they call. So a family
is known by what surrounds its layers, and listed once a test has compared its loss and gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class PackedFamily:
    """One `model_type` of transformers. Names are those of attributes of its decoder, and of
    entries of its config.

    title: for people. kind: of its layers. token_mixers: modules of a layer that read other tokens
    (attention, mixers with a state). embedding, layers, norm: modules. positions: module of
    learned positions. dropout: module that follows. rotary: module of rotary positions. scale:
    entry that embeddings are multiplied by. divisor, factor: entries that logits are divided and
    multiplied by. softcap: entry of the soft cap on logits. differs: what transformers itself adds
    to the loss and `packed` does not, or anything else to be known.
    """

    title: str
    kind: Literal["dense", "experts", "hybrid"] = "dense"
    token_mixers: int = 1
    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    positions: str = ""
    dropout: str = ""
    rotary: str = "rotary_emb"
    scale: str = ""
    divisor: str = ""
    factor: str = ""
    softcap: str = ""
    note: str = ""


_CAP = "final_logit_softcapping"
FAMILIES: Mapping[str, PackedFamily] = MappingProxyType(
    {
        "llama": PackedFamily("Llama"),
        "mistral": PackedFamily("Mistral", note="sliding window"),
        "qwen2": PackedFamily("Qwen2", note="sliding window in some layers"),
        "qwen3": PackedFamily("Qwen3"),
        "gemma": PackedFamily("Gemma"),
        "gemma2": PackedFamily("Gemma 2", softcap=_CAP, note="sliding window, soft caps"),
        "gemma3_text": PackedFamily("Gemma 3 (text)", softcap=_CAP, note="sliding window"),
        "phi3": PackedFamily("Phi-3", note="no `longrope`"),
        "olmo": PackedFamily("OLMo"),
        "olmo2": PackedFamily("OLMo 2"),
        "olmo3": PackedFamily("OLMo 3", note="sliding window"),
        "smollm3": PackedFamily("SmolLM3", note="layers without positions"),
        "granite": PackedFamily(
            "Granite", scale="embedding_multiplier", divisor="logits_scaling", note="scaled logits"
        ),
        "glm4": PackedFamily("GLM-4"),
        "gpt2": PackedFamily(
            "GPT-2",
            embedding="wte",
            layers="h",
            norm="ln_f",
            positions="wpe",
            dropout="drop",
            rotary="",
            note="learned positions, dropout",
        ),
        "qwen3_moe": PackedFamily("Qwen3-MoE", kind="experts"),
        "mixtral": PackedFamily("Mixtral", kind="experts"),
        "glm4_moe": PackedFamily("GLM-4.5-MoE", kind="experts"),
        "gpt_oss": PackedFamily("GPT-OSS", kind="experts", note="sinks, sliding window"),
        "deepseek_v3": PackedFamily("DeepSeek-V3", kind="experts", note="latent attention"),
        "bamba": PackedFamily(
            "Bamba", kind="hybrid", norm="final_layernorm", note="Mamba-2 or attention in a layer"
        ),
        "falcon_h1": PackedFamily(
            "Falcon-H1",
            kind="hybrid",
            token_mixers=2,
            norm="final_layernorm",
            scale="embedding_multiplier",
            factor="lm_head_multiplier",
            note="Mamba-2 and attention in every layer",
        ),
        "nemotron_h": PackedFamily(
            "Nemotron-H",
            kind="hybrid",
            embedding="embeddings",
            norm="norm_f",
            rotary="",
            note="Mamba-2, attention, experts; no positions",
        ),
        "qwen3_next": PackedFamily(
            "Qwen3-Next", kind="hybrid", note="gated delta rule, attention, experts"
        ),
    }
)


class NotPacked(NamedTuple):
    """A family that `packed` refuses. title: for people. reason: why."""

    title: str
    reason: str


_MAMBA_1 = "packgraph has no scan of Mamba-1 that keeps documents apart"
TWO_ROWS = "an encoder and a decoder read two rows, of other lengths, and attend across"
IMAGES = "images are no tokens; for text alone, pack its text model"
_THREE_AXES = "images are no tokens, and positions of its text model have three axes"
NOT_PACKED: Mapping[str, NotPacked] = MappingProxyType(
    {
        "mamba": NotPacked("Mamba", _MAMBA_1),
        "falcon_mamba": NotPacked("Falcon-Mamba", _MAMBA_1),
        "jamba": NotPacked("Jamba", _MAMBA_1),
        "gemma3": NotPacked("Gemma 3 (images)", IMAGES),
        "llava": NotPacked("LLaVA", IMAGES),
        "qwen2_vl": NotPacked("Qwen2-VL", _THREE_AXES),
        "qwen3_vl": NotPacked("Qwen3-VL", _THREE_AXES),
        "t5": NotPacked("T5", TWO_ROWS),
        "bart": NotPacked("BART", TWO_ROWS),
    }
)
