"""Hybrids held against transformers' Mamba2ForCausalLM, NemotronHForCausalLM and BambaForCausalLM,
and checkpoints."""

import dataclasses
import json
import re

import pytest
import torch
from hfkit import assert_close, compare_with_transformers, randomised, saved_and_loaded, theirs_from
from mambakit import MAMBA, hybrid
from model_batches import hand_batch, random_documents
from safetensors.torch import load_file, save_file

from packgraph.models.config import ExpertConfig
from packgraph.models.decoder import DecoderModel
from packgraph.models.hf import load_pretrained, save_pretrained
from packgraph.models.hf_config import config_from_json, config_to_json
from packgraph.train.build import shape_layer
from packgraph.train.config.presets import preset
from packgraph.train.config.reading import read_config

transformers = pytest.importorskip("transformers")

# Gradients of D and of decays are sums over all tokens and columns of a head of which little is
# left: 1.9e-4 between kernels of two makers of CPUs.
CANCELLED = 4e-4
WIDE = dataclasses.replace(MAMBA, num_heads=4, head_dim=8)  # 32 columns, 2 x hidden_size
MAMBA2 = hybrid(
    "M",
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=1,
    mamba=WIDE,
    qk_norm=False,
    rope_theta=10_000.0,
)
NEMOTRON = hybrid(
    "M-M*-",
    num_layers=5,
    rope_theta=10_000.0,
    activation="relu2",
    rotary_share=0.0,
    qk_norm=False,
    mamba=dataclasses.replace(MAMBA, smallest_step=0.001),
)
ALL_MAMBA = dataclasses.replace(
    NEMOTRON, pattern="M", num_layers=2
)  # 24 columns of heads: no multiple of hidden_size
NEMOTRON3 = dataclasses.replace(
    NEMOTRON,
    num_layers=4,
    pattern="MEE*",
    experts=ExpertConfig(
        count=8,
        per_token=3,
        intermediate_size=6,
        shared=2,
        score="sigmoid",
        scaling=2.5,
        score_bias=True,
    ),
)
BAMBA = hybrid("(M-)(*-)(M-)", num_layers=3, rotary_share=0.5, mamba=WIDE, qk_norm=False)
SHAPES = {
    "mamba2": MAMBA2,
    "mamba2, biases, one group, tied": dataclasses.replace(
        MAMBA2,
        tie_embeddings=True,
        mamba=dataclasses.replace(WIDE, groups=1, bias=True, conv_bias=False, smallest_step=0.3),
    ),
    "nemotron_h": NEMOTRON,
    "nemotron_h, clamped steps, long convolution": dataclasses.replace(
        NEMOTRON,
        pattern="*M-",
        mamba=dataclasses.replace(MAMBA, smallest_step=0.5, conv_width=5, groups=4),
    ),
    "nemotron_h, Mamba-2 layers only": ALL_MAMBA,
    "nemotron_h, experts": NEMOTRON3,
    "nemotron_h, experts in groups, weights not normalised, blocks of all "
    "kinds": dataclasses.replace(
        NEMOTRON3,
        pattern="M*E-",
        experts=dataclasses.replace(
            NEMOTRON3.experts, groups=4, groups_kept=2, per_token=2, shared=1, normalise=False
        ),
    ),
    "nemotron_h, experts of another width": dataclasses.replace(
        NEMOTRON3, experts=dataclasses.replace(NEMOTRON3.experts, latent_size=10)
    ),
    "bamba": BAMBA,
    "bamba, biases": dataclasses.replace(
        BAMBA, attention_bias=True, mamba=dataclasses.replace(WIDE, bias=True, conv_bias=False)
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("lengths", "rows", "implementation"),
    [
        ([21], 21, "eager"),  # unpacked: one document of three chunks, no padding
        (
            [7, 1, 12, 4, 2],
            48,
            "sdpa",
        ),  # packed, the shortest below the convolution's width, half of it padding
    ],
)
def test_logits_and_gradients_equal_those_of_transformers(
    shape, lengths, rows, implementation, tmp_path
):
    config = SHAPES[shape]
    if not config.count("attn"):
        implementation = "eager"
    compare_with_transformers(
        randomised(config, seed=len(lengths)),
        tmp_path,
        lengths,
        rows,
        implementation,
        relative=CANCELLED,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shard_bytes", [None, 4096])
def test_saved_and_loaded_again_is_the_same_model(shape, shard_bytes, tmp_path):
    config = SHAPES[shape]
    found = saved_and_loaded(config, tmp_path, shard_bytes)
    layers = range(found.num_layers)
    assert [found.branches(layer) for layer in layers] == [
        config.branches(layer) for layer in layers
    ]
    assert dataclasses.replace(found, pattern=config.pattern) == config


def theirs(family):
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
    }
    if family == "mamba2":
        return transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(
                vocab_size=40,
                hidden_size=16,
                num_hidden_layers=2,
                num_heads=4,
                head_dim=8,
                state_size=5,
                n_groups=2,
                chunk_size=8,
            )
        )
    if family == "nemotron_h":
        return transformers.NemotronHForCausalLM(
            transformers.NemotronHConfig(
                **sizes,
                head_dim=8,
                layers_block_type=["mamba", "mlp", "full_attention"],
                mamba_num_heads=4,
                mamba_head_dim=6,
                ssm_state_size=5,
                n_groups=2,
                chunk_size=8,
            )
        )
    if family == "nemotron_h with experts":
        return transformers.NemotronHForCausalLM(
            transformers.NemotronHConfig(
                **sizes,
                head_dim=8,
                layers_block_type=["moe", "mamba", "full_attention"],
                mamba_num_heads=4,
                mamba_head_dim=6,
                ssm_state_size=5,
                n_groups=2,
                chunk_size=8,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=8,
                moe_shared_expert_intermediate_size=24,
                routed_scaling_factor=2.5,
            )
        )
    return transformers.BambaForCausalLM(
        transformers.BambaConfig(
            **sizes,
            num_hidden_layers=3,
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_state=5,
            mamba_n_groups=2,
            mamba_chunk_size=8,
        )
    )


@pytest.mark.parametrize("mamba", [WIDE, MAMBA], ids=["expansion of 2", "no whole expansion"])
def test_nemotron_h_of_mamba_layers_only_stays_nemotron_h(mamba, tmp_path):
    """Mamba2ForCausalLM has no attention sizes, other names of tensors and only whole
    expansions."""
    config = dataclasses.replace(ALL_MAMBA, mamba=dataclasses.replace(mamba, smallest_step=0.001))
    save_pretrained(randomised(config, seed=1), tmp_path / "first")
    model, found = load_pretrained(tmp_path / "first")
    save_pretrained(model, tmp_path / "second")
    described = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second")
    ]
    assert described[0] == described[1] and found.num_heads == config.num_heads
    assert described[0]["architectures"] == ["NemotronHForCausalLM"]
    assert (
        described[0]["model_type"] == "nemotron_h"
        and described[0]["layers_block_type"] == ["linear_attention"] * 2
    )


@pytest.mark.parametrize("family", ["mamba2", "nemotron_h", "nemotron_h with experts", "bamba"])
def test_reads_what_transformers_writes(family, tmp_path):
    theirs(family).save_pretrained(tmp_path, max_shard_size="8KB")
    model = theirs_from(tmp_path, "eager")
    ours, found = load_pretrained(tmp_path)
    patterns = {"nemotron_h": "M-*", "nemotron_h with experts": "EM*"}
    assert found.pattern == patterns[family] if family in patterns else found.count("mamba") == 2
    assert found.experts.shared == (3 if "experts" in family else 0)
    document = random_documents([30], 40, 0)[0]
    assert_close(
        ours.logits(hand_batch([document], 30, 1)),
        model(input_ids=torch.tensor([document])).logits[0],
        "logits",
    )


def test_older_names_of_layers_and_tensors_are_read(tmp_path):
    """hybrid_override_pattern instead of a list; names that begin with `model.`."""
    model = randomised(NEMOTRON, seed=1)
    save_pretrained(model, tmp_path)
    file, described = (
        tmp_path / "model.safetensors",
        json.loads((tmp_path / "config.json").read_text()),
    )
    assert "backbone.layers.0.mixer.A_log" in load_file(file)
    save_file(
        {re.sub("^backbone", "model", name): tensor for name, tensor in load_file(file).items()},
        file,
    )
    del described["layers_block_type"]
    (tmp_path / "config.json").write_text(
        json.dumps({**described, "hybrid_override_pattern": "M-M*-"})
    )
    loaded, found = load_pretrained(tmp_path)
    assert found == NEMOTRON
    assert all(
        torch.equal(tensor, loaded.state_dict()[name])
        for name, tensor in model.state_dict().items()
    )


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (MAMBA2, {"expand": 3}, "expand x hidden_size is 48, num_heads x head_dim 32"),
        (MAMBA2, {"time_step_limit": [0.0, 1.0]}, "time_step_limit is up to 1.0"),
        (BAMBA, {"time_step_limit": [0.0]}, r"time_step_limit is \[0.0\], not two numbers"),
        (
            MAMBA2,
            {"hidden_act": "gelu", "state_size": "5"},
            "state_size is '5', not int; hidden_act is 'gelu'",
        ),
        (
            NEMOTRON,
            {"layers_block_type": ["moe"]},
            "no Mamba-2 layers; moe_shared_expert.* is 0, no multiple of",
        ),
        (NEMOTRON3, {"moe_latent_size": 4.5}, "moe_latent_size is 4.5, not int"),
        (
            NEMOTRON3,
            {"moe_shared_expert_intermediate_size": 7},
            "_size is 7, no multiple of moe_intermediate_size 6",
        ),
        (
            NEMOTRON,
            {"layers_block_type": ["gdn", "mlp"]},
            "layers_block_type has gdn; known are linear_attention",
        ),
        (
            NEMOTRON,
            {"layers_block_type": None, "hybrid_override_pattern": "MX"},
            "makes no sense from layer 1",
        ),
        (NEMOTRON, {"layers_block_type": None}, "layers_block_type is missing"),
        (
            NEMOTRON,
            {"mlp_hidden_act": "silu", "num_nextn_predict_layers": 1},
            "mlp_hidden_act is 'silu'.*predict_layers",
        ),
        (
            BAMBA,
            {"mamba_d_head": 7},
            "mamba_d_head x mamba_n_heads is not mamba_expand x hidden_size",
        ),
        (BAMBA, {"mlp_bias": True}, "mlp_bias is True"),
    ],
)
def test_what_cannot_be_read_is_refused_with_reasons(config, values, message):
    described = {**config_to_json(config, torch.float32), **values}
    with pytest.raises(ValueError, match=message):
        config_from_json({key: value for key, value in described.items() if value is not None})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            dataclasses.replace(
                NEMOTRON3, experts=ExpertConfig(count=4, per_token=2, intermediate_size=6)
            ),
            "NemotronHForCausalLM has no model with experts.score='softmax', "
            "experts.score_bias=False, experts.shared=0",
        ),
        (hybrid("M*-"), "qk_norm=True, activation='swiglu', rotary_share=1.0"),
        (hybrid("*-", mamba=dataclasses.replace(MAMBA, num_heads=0)), "no Mamba-2 layers"),
        (
            hybrid("(M-)*", qk_norm=False, mamba=WIDE),
            "BambaForCausalLM has no model with layers of attn",
        ),
        (
            hybrid("M", mamba=dataclasses.replace(WIDE, head_dim=5)),
            "20 columns of all heads, which is no multiple of",
        ),
    ],
)
def test_what_transformers_does_not_have_is_not_written(config, message):
    with pytest.raises(ValueError, match=message):
        config_to_json(config, torch.float32)


def test_a_run_takes_its_shape_from_a_checkpoint(tmp_path):
    """Every value that decides what weights compute comes along, whatever the preset said."""
    for number, config in enumerate((MAMBA2, NEMOTRON, NEMOTRON3, BAMBA)):
        save_pretrained(DecoderModel(config), tmp_path / str(number))
        shape = read_config(preset("qwen3-tiny"), [shape_layer(str(tmp_path / str(number)))]).model
        layers = range(config.num_layers)
        assert [shape.branches(layer) for layer in layers] == [
            config.branches(layer) for layer in layers
        ]
        assert (shape.mamba, shape.activation, shape.experts) == (
            config.mamba,
            config.activation,
            config.experts,
        )
        assert (shape.rotary_share, shape.qk_norm) == (config.rotary_share, config.qk_norm)
