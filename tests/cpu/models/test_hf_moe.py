"""Experts held against transformers' Qwen3MoeForCausalLM and DeepseekV3ForCausalLM, and their
checkpoints."""

import dataclasses

import pytest
import torch
from hfkit import assert_close, compare_with_transformers, randomised, saved_and_loaded, theirs_from
from model_batches import hand_batch, random_documents
from safetensors.torch import load_file, save_file

from packgraph.models.config import DecoderConfig, ExpertConfig, LatentConfig, RopeScaling
from packgraph.models.decoder import DecoderModel
from packgraph.models.hf import (
    WeightsError,
    fill_pretrained,
    load_pretrained,
    save_pretrained,
    split_experts,
)
from packgraph.models.hf_config import config_from_json, config_to_json
from packgraph.parallel.pieces import part_of
from packgraph.train.build import shape_layer
from packgraph.train.config.presets import preset
from packgraph.train.config.reading import read_config

transformers = pytest.importorskip("transformers")

QWEN = DecoderConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=36,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    initializer_range=0.2,
    experts=ExpertConfig(count=6, per_token=2, intermediate_size=10),
)
MOONLIGHT = DecoderConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=36,
    num_layers=3,
    num_heads=3,
    num_kv_heads=3,
    head_dim=10,
    rope_theta=5e4,
    rms_norm_eps=1e-5,
    qk_norm=False,
    initializer_range=0.2,
    latent=LatentConfig(kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5),
    experts=ExpertConfig(
        count=8,
        per_token=3,
        intermediate_size=10,
        shared=2,
        first_dense=1,
        score="sigmoid",
        scaling=2.446,
        score_bias=True,
    ),
)
SHAPES = {
    "qwen3 moe": QWEN,
    "qwen3 moe, weights not normalised, tied": dataclasses.replace(
        QWEN,
        tie_embeddings=True,
        experts=dataclasses.replace(QWEN.experts, normalise=False, per_token=3),
    ),
    "moonlight": MOONLIGHT,
    "deepseek, groups, small queries, yarn": dataclasses.replace(
        MOONLIGHT,
        experts=dataclasses.replace(
            MOONLIGHT.experts, groups=4, groups_kept=2, per_token=2, shared=1
        ),
        latent=dataclasses.replace(
            MOONLIGHT.latent,
            query_rank=6,
            scaling=RopeScaling(4.0, 16, beta_fast=4.0, mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    "deepseek, no dense layer, weights not normalised": dataclasses.replace(
        MOONLIGHT,
        num_layers=1,
        experts=dataclasses.replace(MOONLIGHT.experts, first_dense=0, normalise=False),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("lengths", "rows", "implementation"),
    [
        ([13], 13, "eager"),  # unpacked: one document, no padding
        ([7, 1, 12, 4], 48, "sdpa"),  # packed, half of it padding
    ],
)
def test_logits_and_gradients_equal_those_of_transformers(
    shape, lengths, rows, implementation, tmp_path
):
    compare_with_transformers(
        randomised(SHAPES[shape], seed=len(lengths)), tmp_path, lengths, rows, implementation
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rank_has_room_for_its_experts_alone(shape, tmp_path):
    """Fresh values and those of a checkpoint are the ones that these experts have in the whole."""
    whole = randomised(SHAPES[shape], seed=1)
    save_pretrained(whole, tmp_path)
    count = whole.config.experts.count
    mine = range(count // 2, count)
    fresh, part = (
        DecoderModel(whole.config, seed=3),
        DecoderModel(whole.config, seed=3, experts=mine),
    )
    assert differing(part, fresh, mine) == []
    fill_pretrained([part], tmp_path)
    assert differing(part, whole, mine) == []
    assert differing(part, fresh, mine) != []


def differing(part, whole, mine):
    """Names of parameters that are not what the whole has, of stacks what it has for these
    experts."""
    values, stacks = whole.state_dict(), 0
    wrong = []
    for name, parameter in part.named_parameters():
        found = part_of(parameter)
        stacks += found is not None
        assert found is None or (found.shape == values[name].shape and len(parameter) == len(mine))
        if not torch.equal(
            parameter, values[name] if found is None else values[name][mine.start : mine.stop]
        ):
            wrong.append(name)
    assert stacks
    return wrong


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shard_bytes", [None, 4096])
def test_saved_and_loaded_again_is_the_same_model(shape, shard_bytes, tmp_path):
    assert saved_and_loaded(SHAPES[shape], tmp_path, shard_bytes) == SHAPES[shape]


def test_the_bias_of_scores_stays_float32_in_checkpoints_of_bfloat16(tmp_path):
    model = randomised(MOONLIGHT, seed=1).to(torch.bfloat16)
    save_pretrained(model, tmp_path)
    name = "layers.1.mlp.gate.e_score_correction_bias"
    assert load_file(tmp_path / "model.safetensors")[f"model.{name}"].dtype == torch.float32
    loaded, _ = load_pretrained(tmp_path)
    assert loaded.norm.weight.dtype == torch.bfloat16
    assert (
        torch.equal(loaded.get_buffer(name), model.get_buffer(name))
        and loaded.get_buffer(name).abs().sum() > 0
    )


DEEPSEEK = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 64,
}
YARN = {
    "type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}


@pytest.mark.parametrize("shard_size", ["5GB", "8KB"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v3 with yarn"])
def test_reads_what_transformers_writes(family, shard_size, tmp_path):
    if family == "qwen3_moe":
        theirs = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                vocab_size=50,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=8,
            )
        )
    else:
        rope = {"rope_scaling": dict(YARN)} if "yarn" in family else {}
        theirs = transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(**DEEPSEEK, **rope)
        )
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    theirs = theirs_from(tmp_path)
    ours, found = load_pretrained(tmp_path)
    assert found.experts.count == 4 and found.latent.scaling.factor == (
        4.0 if "yarn" in family else 1.0
    )
    document = random_documents([30], 50, 0)[0]
    expected = theirs(input_ids=torch.tensor([document])).logits[0]
    assert_close(ours.logits(hand_batch([document], 30, 1)), expected, "logits")


def test_every_expert_is_a_view_of_its_place():
    gate_up, down = torch.randn(3, 8, 5), torch.randn(3, 5, 4)
    found = split_experts(
        {
            "a.mlp.gate.weight": gate_up,
            "a.mlp.experts.gate_up_proj": gate_up,
            "a.mlp.experts.down_proj": down,
            "a.mlp.shared_experts.down_proj.weight": down,
        }
    )
    assert list(found)[:3] == [
        "a.mlp.gate.weight",
        "a.mlp.experts.0.gate_proj.weight",
        "a.mlp.experts.0.up_proj.weight",
    ]
    assert len(found) == 2 + 3 * 3 and found["a.mlp.shared_experts.down_proj.weight"] is down
    for expert in range(3):
        gate, up, back = (
            found[f"a.mlp.experts.{expert}.{part}.weight"]
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        assert torch.equal(torch.cat((gate, up)), gate_up[expert]) and torch.equal(
            back, down[expert]
        )
        assert (
            back.data_ptr() == down[expert].data_ptr()
            and gate.data_ptr() == gate_up[expert].data_ptr()
        )
    for shape in ((8, 5), (3, 7, 5)):
        with pytest.raises(ValueError, match=r"experts\.gate_up_proj has shape"):
            split_experts({"experts.gate_up_proj": torch.zeros(shape)})


def test_experts_that_are_missing_or_too_many_are_named(tmp_path):
    save_pretrained(DecoderModel(QWEN), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = tensors.pop("model.layers.1.mlp.experts.5.up_proj.weight")
    save_file(tensors, file)
    with pytest.raises(
        WeightsError, match=r"lacks model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight"
    ):
        load_pretrained(tmp_path)
    tensors["model.layers.1.mlp.experts.5.up_proj.weight"] = lost
    save_file({**tensors, "model.layers.0.mlp.experts.6.up_proj.weight": lost.clone()}, file)
    with pytest.raises(
        WeightsError, match=r"experts\.6\.up_proj\.weight in model\.safetensors.*no place"
    ):
        load_pretrained(tmp_path)
    save_file({**tensors, "model.layers.1.mlp.experts.5.up_proj.weight": lost[1:].clone()}, file)
    with pytest.raises(
        WeightsError, match=r"experts\.5\.up_proj\.weight has shape \[9, 24\].*\[10, 24\]"
    ):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (QWEN, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, only 1"),
        (QWEN, {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        (QWEN, {"num_experts": None}, "num_experts is missing"),
        (QWEN, {"rope_scaling": YARN}, "only unscaled"),
        (
            MOONLIGHT,
            {"scoring_func": "softmax", "topk_method": "greedy"},
            "scoring_func is 'softmax'.*'greedy'",
        ),
        (
            MOONLIGHT,
            {"moe_layer_freq": 2, "hidden_act": "gelu"},
            "hidden_act is 'gelu'.*moe_layer_freq is 2",
        ),
        (
            MOONLIGHT,
            {"num_key_value_heads": 1},
            "num_key_value_heads is 1, not num_attention_heads",
        ),
        (MOONLIGHT, {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        (MOONLIGHT, {"n_routed_experts": None}, "n_routed_experts is 0, but only 1 of 3"),
        (MOONLIGHT, {"n_group": 3}, "count 8 is no multiple of groups 3"),
        (MOONLIGHT, {"quantization_config": {"fmt": "e4m3"}}, "quantised"),
        (
            MOONLIGHT,
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "unscaled rotary positions and yarn",
        ),
        (
            MOONLIGHT,
            {"rope_scaling": {**YARN, "truncate": False}},
            r"rope_scaling\.truncate is False",
        ),
        (MOONLIGHT, {"rope_scaling": {**YARN, "factor": None}}, r"rope_scaling\.factor is None"),
        (
            MOONLIGHT,
            {"rope_scaling": YARN},
            "rope_parameters and rope_scaling scale positions differently",
        ),
    ],
)
def test_configs_that_cannot_be_expressed_are_refused(config, values, message):
    with pytest.raises(ValueError, match=message):
        config_from_json({**config_to_json(config, torch.float32), **values})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            dataclasses.replace(QWEN, qk_norm=False),
            "Qwen3MoeForCausalLM has no model with qk_norm=False",
        ),
        (
            dataclasses.replace(
                QWEN, experts=dataclasses.replace(QWEN.experts, score="sigmoid", shared=1)
            ),
            "experts.score='sigmoid', experts.shared=1",
        ),
        (
            dataclasses.replace(
                MOONLIGHT,
                experts=dataclasses.replace(MOONLIGHT.experts, score_bias=False, shared=0),
            ),
            "DeepseekV3ForCausalLM has no model with experts.score_bias=False, experts.shared=0",
        ),
    ],
)
def test_models_that_transformers_does_not_have_are_not_saved(config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_pretrained(DecoderModel(config, device="meta"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (QWEN, MOONLIGHT),
        (MOONLIGHT, QWEN),
        (MOONLIGHT, dataclasses.replace(QWEN, experts=ExpertConfig())),
    ],
)
def test_weights_decide_the_whole_shape_of_a_run(here, there, tmp_path):
    """Sections of the run's own model that the weights do not have are switched off."""
    save_pretrained(DecoderModel(there, device="meta").to_empty(device="cpu"), tmp_path)
    run = dataclasses.replace(preset("qwen3-tiny"), model=dataclasses.replace(here, dropout=0.1))
    found = read_config(run, [shape_layer(str(tmp_path))]).model
    assert found == dataclasses.replace(there, dropout=0.1)
