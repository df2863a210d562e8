"""Weights of others that are damaged, foreign or hostile end with the file's name and the
way out."""

import json
import shutil
import struct
from pathlib import Path

import pytest
from malformedkit import (
    DATA,
    DEEP,
    DIGITS,
    GOOD,
    LONG,
    Case,
    bound,
    cases,
    dead,
    folder,
    loop,
    nowhere,
    pipe,
    refuse,
    write_weights,
)


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "hf")


def hf(name: str, says: str, *, values=None, files=None) -> Case:
    """Weights whose config.json has other values, or other files."""
    words = [
        "train",
        "qwen3-tiny",
        "--run.folder",
        "{dir}/runs",
        "--run.init-from",
        "{dir}/hf",
        "--run.device",
        "cpu",
        "--run.steps",
        "1",
        "--graph.enabled",
        "false",
        "--graph.capacities",
        "32x4",
        *DATA,
    ]
    return Case(
        name,
        words,
        says,
        {"values": json.dumps(values)}
        if values is not None
        else {f"hf/{file}": content for file, content in files.items()},
    )


def value(key: str, *given) -> list[Case]:
    return [
        hf(f"{key} {str(one)[:20]}", r"config\.json: |memory: ", values={key: one}) for one in given
    ]


INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def tensors(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    """A safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def whole_tensor(**changes) -> bytes:
    return tensors(
        {
            "model.embed_tokens.weight": {
                "dtype": "F32",
                "shape": [264, 16],
                "data_offsets": [0, 16896],
            }
            | changes
        },
        b"\0" * 16896,
    )


@cases(
    *value("dtype", ["x"], {"a": 1}, 3, "float8", "float64", True, "x" * 9999, "\x1b[31m", "\0"),
    *value("torch_dtype", ["x"], {}, 5, "int8")[2:],
    *value("torch_dtype", ["bfloat16"]),
    *value("hidden_size", "16", 16.0, None, [16], {}, True, -1, 0, 2**31, 2**62, 2**64, 10**400),
    *value("vocab_size", "264", 0, -5, 2**40, 2**64, [1]),
    *value("num_hidden_layers", 0, -1, "1", 2**40, 10**400, 1.5),
    *value("num_attention_heads", 0, -2, "2", 2**40, [], 3.5),
    *value("num_key_value_heads", 0, 3, "1", {}, 2**40),
    *value("head_dim", 0, 7, "8", -8, 2**40),
    *value("intermediate_size", 0, "32", None, 2**62, 1e30),
    *value("rms_norm_eps", "tiny", -1, 0, [1e-6], {}),
    *value(
        "rope_parameters",
        *({"rope_type": "default", "rope_theta": wrong} for wrong in ("big", 0, -1, [1])),
    ),
    *value("tie_word_embeddings", "yes", 1, [True]),
    *value("attention_bias", "no", 1, {}),
    *value(
        "rope_scaling",
        "yarn",
        3,
        {"rope_type": "nope"},
        {"rope_type": ["yarn"]},
        {"type": {}},
        {"rope_type": "yarn", "factor": 2.0},
    ),
    *value(
        "architectures",
        "Qwen3ForCausalLM",
        ["LlamaForCausalLM"],
        3,
        [["Qwen3ForCausalLM"]],
        {"a": 1},
        ["x" * 9999],
    )[1:],
    *value("hidden_act", "gelu", 3, ["silu"]),
    *value("use_sliding_window", True, "yes"),
    *value("layer_types", "full", 3),
    *value("quantization_config", {"bits": 4}, "int8"),
    hf("no config", "config.json", files={"config.json": nowhere}),
    hf("empty config", "not valid JSON", files={"config.json": ""}),
    hf("half a config", "not valid JSON", files={"config.json": "{"}),
    hf("a list", "holds a list", files={"config.json": "[]"}),
    hf("null", "holds a NoneType", files={"config.json": "null"}),
    hf("empty object", "architecture", files={"config.json": "{}"}),
    hf("deep config", "nested too deeply", files={"config.json": DEEP}),
    hf("bytes", "cannot be read", files={"config.json": b"\xff\xfe"}),
    hf("digits", "not valid JSON", files={"config.json": '{"a": ' + DIGITS + "}"}),
    hf("NUL", "not valid JSON", files={"config.json": b"\0" * 9}),
    hf("a pipe for a config", "config.json", files={"config.json": pipe}),
    hf("a folder for a config", "config.json", files={"config.json": folder}),
    hf("a loop for a config", "config.json|cannot", files={"config.json": loop}),
    hf("no weights", "neither model.safetensors", files={WEIGHTS: nowhere}),
    hf("empty weights", "is damaged", files={WEIGHTS: b""}),
    hf("a pipe for weights", "neither model.safetensors", files={WEIGHTS: pipe}),
    hf("a folder for weights", "neither", files={WEIGHTS: folder}),
    hf("a socket for weights", "neither", files={WEIGHTS: bound}),
    hf("text for weights", "is damaged", files={WEIGHTS: "hello" * 100}),
    hf("zeros for weights", "lacks|is damaged", files={WEIGHTS: b"\0" * 1000}),
    hf("ones for weights", "is damaged", files={WEIGHTS: b"\xff" * 1000}),
    hf("a huge header", "is damaged", files={WEIGHTS: tensors({}, size=2**63)}),
    hf("a header beyond the end", "is damaged", files={WEIGHTS: tensors({}, size=10**6)}),
    hf("a header of a list", "is damaged", files={WEIGHTS: tensors([])}),
    hf("a deep header", "is damaged", files={WEIGHTS: tensors(DEEP.encode())}),
    hf("a header of bytes", "is damaged", files={WEIGHTS: tensors(b"\xff" * 64)}),
    hf("no tensors", "lacks model.embed_tokens", files={WEIGHTS: tensors({})}),
    hf("one tensor", "lacks", files={WEIGHTS: whole_tensor()}),
    hf("a huge shape", "is damaged", files={WEIGHTS: whole_tensor(shape=[2**62, 2**62])}),
    hf("a negative shape", "is damaged", files={WEIGHTS: whole_tensor(shape=[-1, 16])}),
    hf("offsets beyond", "is damaged", files={WEIGHTS: whole_tensor(data_offsets=[0, 10**12])}),
    hf("offsets back", "is damaged", files={WEIGHTS: whole_tensor(data_offsets=[100, 0])}),
    hf("an unknown dtype", "is damaged", files={WEIGHTS: whole_tensor(dtype="X9")}),
    hf("a pickle", "is a pickle", files={WEIGHTS: nowhere, "pytorch_model.bin": b"\x80\x04N."}),
    hf("an index of nothing", "weight_map", files={WEIGHTS: nowhere, INDEX: "{}"}),
    hf("an index of a list", "holds a list", files={WEIGHTS: nowhere, INDEX: "[]"}),
    hf("a deep index", "nested too deeply", files={WEIGHTS: nowhere, INDEX: DEEP}),
    hf("an empty index", "not valid JSON", files={WEIGHTS: nowhere, INDEX: ""}),
    hf(
        "an index outside",
        "no safetensors file of this folder",
        files={WEIGHTS: nowhere, INDEX: json.dumps({"weight_map": {"a": "../b.safetensors"}})},
    ),
    hf(
        "an index of numbers",
        "no safetensors file",
        files={WEIGHTS: nowhere, INDEX: json.dumps({"weight_map": {"a": 3}})},
    ),
    hf(
        "an index of NUL",
        "no safetensors file|does not exist",
        files={WEIGHTS: nowhere, INDEX: json.dumps({"weight_map": {"a": "b\0.safetensors"}})},
    ),
    hf(
        "an index of a long name",
        "no safetensors file|does not exist|name",
        files={WEIGHTS: nowhere, INDEX: json.dumps({"weight_map": {"a": LONG + ".safetensors"}})},
    ),
    hf(
        "an index of what is missing",
        "does not exist",
        files={WEIGHTS: nowhere, INDEX: json.dumps({"weight_map": {"a": "b.safetensors"}})},
    ),
    hf(
        "an index of a pipe",
        "does not exist",
        files={
            WEIGHTS: nowhere,
            "b.safetensors": pipe,
            INDEX: json.dumps({"weight_map": {"a": "b.safetensors"}}),
        },
    ),
)
def test_weights_that_make_no_sense_are_named(case, tmp_path, capsys, weights, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(weights, tmp_path / "hf")
    (tmp_path / "d.jsonl").write_text(GOOD)
    if "values" in case.files:
        config = json.loads((weights / "config.json").read_text()) | json.loads(
            case.files["values"]
        )
        case = case._replace(files={"hf/config.json": json.dumps(config)})
    refuse(case, tmp_path, capsys)


LIVE = {
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "model_type": "qwen3",
}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"head_dim": None}, "head_dim"),
        ({"head_dim": 15}, "even rotary dimension"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": -32}, "negative dimension"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"vocab_size": 10**30}, "Overflow"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"hidden_act": "evil"}, "KeyError: 'evil'"),
        ({"pad_token_id": 10**9}, "Padding_idx"),
        ({"attention_dropout": 2.0}, "dropout probability"),
        ({"attention_dropout": float("nan")}, "NaN"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"dtype": "evil"}, "evil"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": -256}, "complex"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 0}, "must be at least 1"),
        ({"num_hidden_layers": 10**9}, "more than 10,000"),
        ({"model_type": "evil"}, "evil"),
        ("[]", "holds a list"),
        ("{", "not valid JSON"),
        (dead, "Input/output error"),
    ],
)
def test_a_config_of_transformers_that_makes_no_sense_is_named(
    values, says, tmp_path, capsys, monkeypatch
):
    content = json.dumps(LIVE | values) if isinstance(values, dict) else values
    words = ["train", "hf:{dir}", "--hf.random", "true", "--run.folder", "{dir}/runs", *DATA]
    files = {"config.json": content, "d.jsonl": GOOD}
    logging = pytest.importorskip("transformers").utils.logging
    monkeypatch.setattr(
        logging.get_logger("transformers.configuration_utils"), "disabled", True
    )  # it warns as well
    refuse(Case("", words, rf"config\.json: .*{says}", files), tmp_path, capsys, at_once=True)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("generation_config.json", "[]", "generation_config.json: holds a list"),
        ("generation_config.json", pipe, "generation_config.json: cannot be read: it is no file"),
        (INDEX, '{"weight_map": {"a": "gone.safetensors"}}', "cannot load its weights"),
        (WEIGHTS, b"no such thing", "cannot load its weights"),
        (WEIGHTS, dead, "cannot load its weights"),
        (WEIGHTS, pipe, "model.safetensors: this is no file"),
        ("model-00001-of-00002.safetensors", pipe, "of-00002.safetensors: this is no file"),
        ("tokenizer.json", nowhere, "tokenizer.json: no such file"),
        ("README.md", "no tokenizer", "tokenizer.json: no such file; data.tokenizer must be"),
    ],
)
def test_files_beside_a_config_that_make_no_sense_are_named(name, content, says, tmp_path, capsys):
    words = ["train", "hf:{dir}", "--run.folder", "{dir}/runs", *DATA, "--run.device", "cpu"]
    words += [] if "tokenizer" in says else ["--data.tokenizer", "bytes"]
    files = {"config.json": json.dumps(LIVE), name: content, "d.jsonl": GOOD}
    refuse(Case("", words, says, files), tmp_path, capsys)
