"""Numbers equal to transformers' Qwen3ForCausalLM, and checkpoints exchanged with it in both
directions."""

import json

import pytest
import torch
from hfkit import assert_close, compare_with_transformers, randomised, saved_and_loaded
from model_batches import hand_batch, random_documents
from safetensors.torch import load_file, save_file

from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.models.hf import WeightsError, fill_pretrained, load_pretrained, save_pretrained

transformers = pytest.importorskip("transformers")

SMALL = DecoderConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=36,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    initializer_range=0.2,
)
SHAPES = {
    "untied, groups of two": SMALL,
    "tied, one key head, wide heads": DecoderConfig(
        vocab_size=33,
        hidden_size=20,
        intermediate_size=48,
        num_layers=3,
        num_heads=3,
        num_kv_heads=1,
        head_dim=16,
        tie_embeddings=True,
        rope_theta=1e4,
        initializer_range=0.2,
    ),
    "no groups, biases, narrow heads": DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=4,
        attention_bias=True,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
    ),
    "tied, groups of four": DecoderConfig(
        vocab_size=70,
        hidden_size=40,
        intermediate_size=64,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=10,
        tie_embeddings=True,
        initializer_range=0.1,
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("lengths", "rows", "implementation"),
    [
        ([13], 13, "eager"),  # unpacked: one document, no padding
        ([7, 1, 12, 4], 32, "sdpa"),  # packed, padded
    ],
)
def test_logits_and_gradients_equal_those_of_transformers(
    shape, lengths, rows, implementation, tmp_path
):
    compare_with_transformers(
        randomised(SHAPES[shape], seed=len(lengths)), tmp_path, lengths, rows, implementation
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shard_bytes", [None, 4096])
def test_saved_and_loaded_again_is_the_same_model(shape, shard_bytes, tmp_path):
    folder = tmp_path / "new" / "folder"
    assert saved_and_loaded(SHAPES[shape], folder, shard_bytes) == SHAPES[shape]


@pytest.mark.parametrize(
    "shape", [name for name, config in SHAPES.items() if config.num_layers > 1]
)
def test_stages_are_filled_with_their_parts_in_their_dtype(shape, tmp_path):
    """Of a tied embedding both stages have a copy; a checkpoint must be whole, whatever part of it
    is asked for."""
    model = randomised(SHAPES[shape], seed=1)
    save_pretrained(model, tmp_path, max_shard_bytes=4096)
    stages = [
        DecoderModel(model.config, stage=stage, stages=2, dtype=torch.bfloat16, seed=5)
        for stage in range(2)
    ]
    fill_pretrained(stages[1:], tmp_path)
    alone = {name: value.clone() for name, value in stages[1].state_dict().items()}
    fill_pretrained(stages, tmp_path)
    whole = model.state_dict()
    for stage in stages:
        for name, value in stage.state_dict().items():
            assert value.dtype is torch.bfloat16 and torch.equal(value, whole[name].bfloat16()), (
                name
            )
    assert all(torch.equal(value, alone[name]) for name, value in stages[1].state_dict().items())
    next(tmp_path.glob("model-00001-of-*.safetensors")).unlink()
    with pytest.raises(WeightsError, match="does not exist"):
        fill_pretrained(stages[1:], tmp_path)


@pytest.mark.parametrize("shard_size", ["5GB", "8KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_reads_what_transformers_writes(shard_size, tied, tmp_path):
    described = transformers.Qwen3Config(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        rope_theta=5e5,
        max_position_embeddings=64,
    )
    theirs = transformers.Qwen3ForCausalLM(described)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "8KB")
    ours, config = load_pretrained(tmp_path)
    assert config.rope_theta == 5e5 and config.tie_embeddings == tied
    assert config.max_position_embeddings == 64
    document = random_documents([9], 50, 0)[0]
    expected = theirs(input_ids=torch.tensor([document])).logits[0]
    assert_close(ours.logits(hand_batch([document], 9, 1)), expected, "logits")


def test_a_tied_checkpoint_may_store_the_head_twice_but_not_differently(tmp_path):
    save_pretrained(DecoderModel(SHAPES["tied, groups of four"]), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    load_pretrained(tmp_path)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"model\.safetensors: lm_head\.weight differs"):
        load_pretrained(tmp_path)


def edit_tensors(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **values) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **values}))


def test_tensors_that_do_not_fit_are_named_with_their_file(tmp_path):
    save_pretrained(DecoderModel(SMALL), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update(extra=torch.zeros(1)))
    with pytest.raises(WeightsError, match=r"extra in model\.safetensors.*no place"):
        load_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: [tensors.pop("extra"), tensors.pop("model.norm.weight")])
    with pytest.raises(WeightsError, match=r"lacks model\.norm\.weight"):
        load_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(
        WeightsError, match=r"model\.safetensors: model\.norm\.weight has shape \[3\].*\[24\]"
    ):
        load_pretrained(tmp_path)
    edit_tensors(
        tmp_path,
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(24, dtype=torch.int8)}),
    )
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is I8"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture is .*Llama"),
        ({"architectures": None, "model_type": "qwen2"}, "architecture is .*qwen2"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "unscaled"),
        ({"rope_parameters": [1]}, "unscaled"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "unscaled"),
        (
            {"use_sliding_window": True, "hidden_act": "gelu"},
            "hidden_act is 'gelu'.*sliding_window",
        ),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        (
            {"vocab_size": "fifty", "num_hidden_layers": None},
            "vocab_size is 'fifty', not int.*num_hidden_layers is missing",
        ),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads 3"),
        ({"torch_dtype": "int4"}, "dtype is 'int4'"),
    ],
)
def test_configs_of_other_models_are_refused_with_all_reasons(values, message, tmp_path):
    save_pretrained(DecoderModel(SMALL), tmp_path)
    edit_config(tmp_path, **values)
    with pytest.raises(WeightsError, match=message) as caught:
        load_pretrained(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_damaged_and_foreign_files_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_pretrained(tmp_path)
    save_pretrained(DecoderModel(SMALL), tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for damaged in (whole[:-10], b"", b"not safetensors at all"):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(WeightsError, match=r"model\.safetensors: is damaged"):
            load_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is a pickle"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json: not valid JSON"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"model.norm.weight": "../model.safetensors"}, "no safetensors file of this folder"),
        ({"model.norm.weight": "weights.bin"}, "no safetensors file of this folder"),
        ({"model.norm.weight": "absent.safetensors"}, "does not exist"),
        ([], "no weight_map"),
    ],
)
def test_an_index_may_only_name_files_of_its_folder(weight_map, message, tmp_path):
    save_pretrained(DecoderModel(SMALL), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError, match=message):
        load_pretrained(tmp_path)


def test_a_shard_without_a_promised_tensor_is_named(tmp_path):
    save_pretrained(DecoderModel(SMALL), tmp_path, max_shard_bytes=4096)
    shard = next(iter(sorted(tmp_path.glob("model-*.safetensors"))))
    tensors = load_file(shard)
    name = next(iter(tensors))
    save_file({key: value for key, value in tensors.items() if key != name}, shard)
    with pytest.raises(WeightsError, match=rf"{shard.name} lacks {name}"):
        load_pretrained(tmp_path)


def test_saving_never_replaces_a_checkpoint_and_leaves_no_half_one(tmp_path, monkeypatch):
    model = DecoderModel(SMALL)
    save_pretrained(model, tmp_path / "a")
    with pytest.raises(FileExistsError, match="already holds a checkpoint"):
        save_pretrained(model, tmp_path / "a")

    def disk_is_full(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("packgraph.models.hf.save_file", disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(model, tmp_path / "b")
    assert list((tmp_path / "b").iterdir()) == []


def test_special_tokens_are_what_the_caller_says_and_nothing_else(tmp_path):
    """A default of the class, such as Llama's 2, would end a text at that word."""
    model = DecoderModel(SMALL, seed=1)
    save_pretrained(model, tmp_path / "none")
    told = {"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 0}
    save_pretrained(model, tmp_path / "told", token_ids=told)
    for name, expected in (("none", dict.fromkeys(told)), ("told", told)):
        found = transformers.AutoConfig.from_pretrained(tmp_path / name)
        assert {key: getattr(found, key) for key in told} == expected
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert loaded.generation_config.eos_token_id == expected["eos_token_id"]
    with pytest.raises(ValueError, match="token_ids: unknown sep_token_id"):
        save_pretrained(model, tmp_path / "other", token_ids={"sep_token_id": 1})
    assert not (tmp_path / "other").exists()
