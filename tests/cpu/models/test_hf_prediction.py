"""Layers of multi-token prediction in checkpoints: written and read as DeepSeek-V3's, left out or
fresh where one side has none, and told."""

import dataclasses
import json

import pytest
import torch
from hfkit import EXPERTS as EXPERTS_OPTION
from hfkit import randomised
from safetensors.torch import load_file, save_file

from packgraph.graphs.errors import PackgraphWarning
from packgraph.models.config import DecoderConfig, ExpertConfig, LatentConfig
from packgraph.models.decoder import DecoderModel
from packgraph.models.hf import WeightsError, fill_pretrained, load_pretrained, save_pretrained
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.train.build import load_weights, shape_layer

DEEPSEEK = DecoderConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=36,
    num_layers=2,
    num_heads=3,
    num_kv_heads=3,
    head_dim=10,
    qk_norm=False,
    initializer_range=0.2,
    latent=LatentConfig(kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5),
    experts=ExpertConfig(
        count=4,
        per_token=2,
        intermediate_size=10,
        shared=1,
        first_dense=1,
        score="sigmoid",
        score_bias=True,
    ),
    mtp_layers=1,
)
WITHOUT = dataclasses.replace(DEEPSEEK, mtp_layers=0)
QWEN = dataclasses.replace(
    WITHOUT,
    head_dim=8,
    qk_norm=True,
    latent=LatentConfig(),
    experts=ExpertConfig(),
    mtp_layers=2,
)
# As in DeepSeek-V3's model.safetensors.index.json, for its layer 61.
NAMES = (
    "embed_tokens.weight",
    "enorm.weight",
    "hnorm.weight",
    "eh_proj.weight",
    "shared_head.norm.weight",
    "shared_head.head.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.o_proj.weight",
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    "mlp.experts.3.down_proj.weight",
    "mlp.shared_experts.up_proj.weight",
)


def same(left, right):
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_has_the_layer_under_the_names_of_deepseek_v3(tied, tmp_path):
    ours = randomised(dataclasses.replace(DEEPSEEK, tie_embeddings=tied), seed=1)
    save_pretrained(ours, tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    assert not [name for name in NAMES if f"model.layers.2.{name}" not in stored]
    assert not any(name.startswith("model.layers.3") for name in stored)
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 1
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(stored["model.layers.2.shared_head.head.weight"], stored[head])
    read, config = load_pretrained(tmp_path / "out")
    assert config.mtp_layers == 1
    same(read, ours)
    batch = PackedBatch.build([[1, 2, 3, 4, 5], [6, 7, 8]], Capacity(10, 2))
    assert torch.equal(read(batch), ours(batch))
    assert torch.equal(read.mtp_sums.take(), ours.mtp_sums.take())


def test_pipeline_stages_read_their_parts(tmp_path):
    whole = randomised(DEEPSEEK, seed=1)
    save_pretrained(whole, tmp_path / "out")
    parts = [DecoderModel(DEEPSEEK, stage=stage, stages=2) for stage in range(2)]
    fill_pretrained(parts, tmp_path / "out")
    for part in parts:
        for name, value in part.state_dict().items():
            assert torch.equal(value, whole.state_dict()[name]), name


def test_transformers_reads_the_decoder(tmp_path):
    """It knows nothing of the layer: it leaves it out, and computes the same logits."""
    transformers = pytest.importorskip("transformers")
    ours = randomised(DEEPSEEK, seed=1)
    save_pretrained(ours, tmp_path / "out")
    one_by_one = {"experts_implementation": "eager"}  # where versions have a choice
    options = one_by_one if hasattr(transformers.PreTrainedModel, EXPERTS_OPTION) else {}
    theirs, told = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, **options
    )
    assert not told["missing_keys"]
    assert all(".layers.2." in name for name in told["unexpected_keys"])
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    found = ours.logits(PackedBatch.build([tokens], Capacity(8, 1)))
    torch.testing.assert_close(
        found, theirs(torch.tensor([tokens])).logits[0], rtol=1e-4, atol=1e-4
    )

    theirs.save_pretrained(tmp_path / "again")  # without the layer
    description = json.loads((tmp_path / "again/config.json").read_text())
    description["num_nextn_predict_layers"] = 1
    (tmp_path / "again/config.json").write_text(json.dumps(description))
    read, config = load_pretrained(tmp_path / "again")
    assert config.mtp_layers == 0 and torch.equal(
        read.logits(PackedBatch.build([tokens], Capacity(8, 1))), found
    )


def test_a_family_without_such_layers_is_written_without_them(tmp_path):
    ours = randomised(QWEN, seed=1)
    with pytest.warns(PackgraphWarning, match=r"without \d+ tensors of multi-token prediction"):
        save_pretrained(ours, tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    assert not [name for name in stored if "layers.2." in name or "layers.3." in name]
    read, config = load_pretrained(tmp_path / "out")
    batch = PackedBatch.build([[1, 2, 3, 4, 5]], Capacity(5, 1))
    assert config.mtp_layers == 0 and torch.equal(read.logits(batch), ours.logits(batch))


@pytest.mark.parametrize("wanted", [QWEN, DEEPSEEK], ids=["qwen3", "deepseek"])
def test_a_run_may_add_the_layers_fresh(wanted, tmp_path):
    without = randomised(dataclasses.replace(wanted, mtp_layers=0), seed=1)
    save_pretrained(without, tmp_path / "out")
    model, fresh = DecoderModel(wanted, seed=7), DecoderModel(wanted, seed=7)
    with pytest.warns(PackgraphWarning, match="those of this model stay fresh"):
        load_weights([model], str(tmp_path / "out"))
    for name, value in model.state_dict().items():
        source = fresh if name.startswith(("layers.2.", "layers.3.")) else without
        assert torch.equal(value, source.state_dict()[name]), name


def test_a_run_may_leave_the_layers_out(tmp_path):
    ours = randomised(DEEPSEEK, seed=1)
    save_pretrained(ours, tmp_path / "out")
    assert shape_layer(str(tmp_path / "out")).values["model.mtp_layers"] == 1
    model = DecoderModel(WITHOUT)
    with pytest.warns(PackgraphWarning, match="which this model leaves out"):
        load_weights([model], str(tmp_path / "out"))
    batch = PackedBatch.build([[1, 2, 3, 4, 5]], Capacity(5, 1))
    assert torch.equal(model.logits(batch), ours.logits(batch))


def changed(folder, change):
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def test_copies_that_differ_and_parts_that_are_missing_are_refused(tmp_path):
    for name in ("differs", "missing", "more"):
        save_pretrained(randomised(DEEPSEEK, seed=1), tmp_path / name)
    changed(tmp_path / "differs", lambda s: s["model.layers.2.shared_head.head.weight"].add_(1))
    with pytest.raises(WeightsError, match=r"head\.weight differs from lm_head\.weight"):
        load_pretrained(tmp_path / "differs")
    changed(tmp_path / "missing", lambda s: s.pop("model.layers.2.eh_proj.weight"))
    with pytest.raises(WeightsError, match=r"lacks model\.layers\.2\.eh_proj\.weight"):
        load_pretrained(tmp_path / "missing")
    more = "model.layers.3.enorm.weight"
    changed(tmp_path / "more", lambda s: s.update({more: torch.zeros(24)}))
    with pytest.raises(WeightsError, match=r"holds model\.layers\.3\.enorm\.weight"):
        load_pretrained(tmp_path / "more")
