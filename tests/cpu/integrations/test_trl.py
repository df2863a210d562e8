"""`PackedTrainer` with TRL's SFTTrainer: what it trains is what the plain one trains, and graphs
change no bit of it."""

import contextlib

import pytest
import torch

import packgraph

pytest.importorskip("transformers", reason="the integration is of this library")
pytest.importorskip("trl", reason="the integration is of this library")
pytest.importorskip("peft", reason="adapters are of this library")

import peft
from datasets import Dataset
from trainer_runs import documents, logged, model, options, same, tokenizer, trained
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from packgraph.integrations.trl import PackedTrainer

pytestmark = pytest.mark.usefixtures("one_process")
TEXTS = [bytes(97 + word % 26 for word in row["input_ids"]).decode() for row in documents(60)]
KINDS = {
    "text": [{"text": text} for text in TEXTS],
    "prompts": [{"prompt": text[:5], "completion": text[5:]} for text in TEXTS],
    "tokens": [{**row, "labels": row["input_ids"]} for row in documents(60)],
}
# One capture, where several prove no more.
ONE = {"capacities": packgraph.Capacity(tokens=256, documents=9)}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


class Packing(PackedTrainer, SFTTrainer):
    """The trainer of these tests."""


def run(kind, folder, *, eager=False, rows=KINDS["text"], lora=None, more=None, **changes):
    given = {"max_length": 64, "bf16": False, **options(folder, **changes)}
    data = Dataset.from_list(rows)
    trainer = kind(
        model(),
        SFTConfig(**given),
        train_dataset=data,
        eval_dataset=data.select(range(9)),
        processing_class=tokenizer(),
        peft_config=None if lora is None else peft.LoraConfig(**{**LORA, **lora}),
        **(more or {}),
    )
    return trained(trainer, eager)


CASES = {
    "text": {},
    "prompts": {"rows": KINDS["prompts"]},
    "tokens": {"rows": KINDS["tokens"]},
    "packed": {"packing": True, "per_device_train_batch_size": 2},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "per_device_train_batch_size": 2},
    "without checkpointing": {"gradient_checkpointing": False},
    "bf16": {"bf16": True, "packing": True, "per_device_train_batch_size": 1},
    "LoRA": {"lora": {}},
    "DoRA, bf16": {"lora": {"use_dora": True, "lora_dropout": 0.1}, "bf16": True},
    "LoRA, packed": {"lora": {"use_rslora": True}, "packing": True},
}


SLOW = ("tokens", "packed", "wrapped", "without checkpointing", "DoRA, bf16", "LoRA, packed")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
@pytest.mark.few(2)
def test_graphs_change_no_bit(case, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    with_graphs = run(Packing, tmp_path / "graphs", **CASES[case], **saving)
    without = run(Packing, tmp_path / "eager", eager=True, **CASES[case], **saving)
    assert same(with_graphs.model, without.model)
    for name in ("loss", "grad_norm", "eval_loss"):
        assert logged(with_graphs, name) == logged(without, name)
    assert dict(with_graphs.stats.fallbacks) == {"warm-up": 2}
    assert with_graphs.stats.replayed > with_graphs.packing.packs - 2 >= 4  # evaluation, too
    assert not with_graphs.stats.recaptures


@pytest.mark.parametrize(
    "case",
    [
        "prompts",
        "LoRA",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("text", "tokens")),
    ],
)
def test_training_is_that_of_the_plain_trainer(case, tmp_path):
    """Prompts are masked, labels shifted once, and a step is divided by all its labels: float32,
    sums in another order."""
    changes = {**CASES[case], "optim": "sgd", "learning_rate": 0.3, "eval_strategy": "steps"}
    ours = run(Packing, tmp_path / "ours", **changes, eval_steps=3, more=ONE)
    theirs = run(SFTTrainer, tmp_path / "theirs", **changes, eval_steps=3)
    found, moved = dict(ours.model.named_parameters()), 0.0
    start = run(SFTTrainer, tmp_path / "start", **{**changes, "max_steps": 1, "learning_rate": 0.0})
    for name, before in start.model.named_parameters():
        after = dict(theirs.model.named_parameters())[name]
        torch.testing.assert_close(found[name], after, rtol=1e-4, atol=1e-5)
        moved = max(moved, float((after - before).detach().abs().max()))
    assert moved > 1e-3
    for name in ("loss", "grad_norm", "eval_loss"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=1e-5)
    # TRL takes means over microbatches, whatever labels each has.
    for name in ("mean_token_accuracy", "eval_mean_token_accuracy"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), abs=0.01)


def said(role, text):
    return {"role": role, "content": text}


CHATS = [{"messages": [said("user", text[:4]), said("assistant", text[4:])]} for text in TEXTS]
PAIRS = [
    {"prompt": [said("user", text[:4])], "completion": [said("assistant", text[4:])]}
    for text in TEXTS
]
# Finished labels, and beside them masks and other columns that TRL does not read.
FINISHED = [
    {
        **row,
        "labels": [-100, *row["input_ids"][1:-1], -100],
        "completion_mask": [0] * (len(row["input_ids"]) - 1) + [1],
        "assistant_masks": [1] + [0] * (len(row["input_ids"]) - 1),
        "attention_mask": [1] * len(row["input_ids"]),
        "position_ids": list(range(len(row["input_ids"]))),
    }
    for row in documents(60)
]
MASKED = [
    {**row, "completion_mask": [0] + [1] * (len(row["input_ids"]) - 1)} for row in documents(60)
]
# Rows, and options that decide which of their tokens are trained.
LABELS = {
    "completions, by default": (KINDS["prompts"], {}),
    "completions": (KINDS["prompts"], {"completion_only_loss": True}),
    "prompts, too": (KINDS["prompts"], {"completion_only_loss": False}),
    "cut": (KINDS["prompts"], {"max_length": 12}),
    "prompts, too, cut": (KINDS["prompts"], {"completion_only_loss": False, "max_length": 12}),
    "cut at the start": (
        KINDS["prompts"],
        {"completion_only_loss": False, "max_length": 12, "truncation_mode": "keep_end"},
    ),
    "packed": (KINDS["prompts"], {"completion_only_loss": False, "packing": True}),
    "completions, packed": (KINDS["prompts"], {"packing": True}),
    "chats in pairs": (PAIRS, {}),
    "chats in pairs, prompts, too": (PAIRS, {"completion_only_loss": False, "max_length": 20}),
    "the assistant, in pairs": (PAIRS, {"assistant_only_loss": True}),
    "the assistant, prompts, too": (
        PAIRS,
        {"assistant_only_loss": True, "completion_only_loss": False, "max_length": 24},
    ),
    "chats": (CHATS, {}),
    "the assistant": (CHATS, {"assistant_only_loss": True}),
    "the assistant, packed": (CHATS, {"assistant_only_loss": True, "packing": True}),
    "finished": (FINISHED, {}),
    "finished, cut": (FINISHED, {"max_length": 12}),
    "finished, completions": (FINISHED, {"completion_only_loss": True}),
    "finished, packed": (FINISHED, {"packing": True}),
    "masked": (MASKED, {"completion_only_loss": True}),
    "masked, not read": (MASKED, {"completion_only_loss": False, "max_length": 12}),
}


@pytest.mark.parametrize("case", LABELS)
@pytest.mark.few(5)
def test_which_tokens_are_trained_is_what_trl_says(case, tmp_path):
    rows, changes = LABELS[case]
    given = {"rows": rows, "max_steps": 1, "logging_steps": 1, **changes}
    ours = run(Packing, tmp_path / "ours", **given)
    theirs = run(SFTTrainer, tmp_path / "theirs", **given)
    for name in ("loss", "grad_norm"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=2e-5)
    assert len(logged(ours, "mean_token_accuracy")) == 1


def test_other_tokens_would_make_another_loss(tmp_path):
    """The control of the test above."""
    losses = [
        logged(run(SFTTrainer, tmp_path / case, rows=LABELS[case][0], **LABELS[case][1]), "loss")[0]
        for case in ("completions", "prompts, too", "cut", "prompts, too, cut", "finished")
    ]
    assert min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 1e-3


def test_rows_with_padding_are_refused_when_the_trainer_is_made(tmp_path):
    rows = [*FINISHED, {**FINISHED[0], "attention_mask": [0] * len(FINISHED[0]["input_ids"])}]
    with pytest.raises(ValueError, match=r"row \d+ of the data set: attention_mask has zeros"):
        run(Packing, tmp_path, rows=rows)


def test_the_loss_that_balances_experts_is_refused_with_what_helps(tmp_path):
    """TRL turns it on itself, whatever the config says."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=258, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=8, output_router_logits=False,
    )  # fmt: skip

    def trainer(**changes):
        return Packing(
            transformers.Qwen3MoeForCausalLM(config),
            SFTConfig(**{"bf16": False, **options(tmp_path), **changes}),
            train_dataset=Dataset.from_list(KINDS["text"]),
            processing_class=tokenizer(),
        )

    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.0 in SFTConfig"):
        trainer()
    assert trained(trainer(router_aux_loss_coef=0.0)).stats.replayed > 0


@pytest.mark.slow
def test_checkpoints_are_those_of_the_model(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 6}
    trainer = run(Packing, tmp_path / "whole", **saving)
    folder = tmp_path / "whole" / "checkpoint-6"
    assert same(AutoModelForCausalLM.from_pretrained(folder), trainer.model)
    trainer = run(Packing, tmp_path / "adapter", **saving, lora={"init_lora_weights": True})
    again = peft.PeftModel.from_pretrained(model(), tmp_path / "adapter" / "checkpoint-6")
    adapters = peft.get_peft_model_state_dict(trainer.model)
    assert adapters and all("lora" in name for name in adapters)
    for name, tensor in peft.get_peft_model_state_dict(again).items():
        assert torch.equal(tensor, adapters[name])


def test_what_cannot_be_followed_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="loss_type='dft' is not nll"):
        run(Packing, tmp_path, loss_type="dft")
    made = "trl.trainer.sft_trainer.get_act_offloading_ctx_manager"  # it needs a GPU
    monkeypatch.setattr(made, lambda model: contextlib.nullcontext())
    with pytest.raises(ValueError, match=r"call packgraph\.offload on trainer\.graphed"):
        run(Packing, tmp_path, activation_offloading=True)


@pytest.mark.slow
def test_a_row_of_several_documents_keeps_them_apart(tmp_path):
    """The control of `packed`: one long document of the same tokens makes another loss."""
    rows = KINDS["tokens"]
    options = {"packing": True, "per_device_train_batch_size": 2, "optim": "sgd"}
    apart = run(Packing, tmp_path / "apart", rows=rows, **options)
    joined = run(Packing, tmp_path / "joined", rows=rows, packing_strategy="wrapped", **options)
    assert apart.packing.documents > 2 * apart.packing.packs
    assert logged(apart, "loss") != pytest.approx(logged(joined, "loss"), rel=1e-4)
    sized = {"capacities": packgraph.Capacity(tokens=128, documents=32)}
    again = run(Packing, tmp_path / "again", rows=rows, **options, more=sized)
    assert logged(again, "loss") == pytest.approx(logged(apart, "loss"), rel=1e-5)


def test_only_what_the_assistant_says_is_trained(tmp_path):
    chat = {"rows": CHATS, "assistant_only_loss": True, "optim": "sgd", "learning_rate": 0.3}
    ours = run(Packing, tmp_path / "ours", **chat, more=ONE)
    theirs = run(SFTTrainer, tmp_path / "theirs", **chat)
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=1e-5)
    whole = run(SFTTrainer, tmp_path / "whole", **{**chat, "assistant_only_loss": False})
    assert logged(whole, "loss") != pytest.approx(logged(theirs, "loss"), rel=1e-3)
