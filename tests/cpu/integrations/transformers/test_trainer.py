"""`PackedTrainer` with transformers' Trainer: what it trains is what the plain one trains, and
graphs change no bit of it."""

import json
import math
import re

import pytest
import torch

import packgraph

pytest.importorskip("transformers", reason="the integration is of this library")
pytest.importorskip("accelerate", reason="Trainer needs it")

from trainer_runs import documents, logged, model, options, same, trained
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from packgraph.integrations.transformers import PackedTrainer, PackingCollator, packed
from packgraph.integrations.transformers.collator import read_examples

pytestmark = pytest.mark.usefixtures("one_process")
TRAIN, TEST = documents(60), documents(13, seed=1)
ONE = packgraph.Capacity(tokens=192, documents=9)  # one capture, where several prove no more


class Packing(PackedTrainer, Trainer):
    """The trainer of these tests."""


def packing(folder, made=None, *, data=TRAIN, capacities=None, overlong="error", **changes):
    arguments = TrainingArguments(**options(folder, **changes))
    return Packing(
        model() if made is None else made,
        arguments,
        train_dataset=data,
        eval_dataset=TEST,
        capacities=capacities,
        overlong=overlong,
    )


class Stream(torch.utils.data.IterableDataset):
    """Documents of unknown number."""

    def __iter__(self):
        return iter(TRAIN)


class Stop(TrainerCallback):
    """Ends a run after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **others):
        control.should_training_stop = state.global_step == self.step


def padded(examples):
    """Rows of documents as people without packing have them."""
    most = max(len(example["input_ids"]) for example in examples)
    fill = [most - len(example["input_ids"]) for example in examples]
    tokens = [example["input_ids"] + [0] * n for example, n in zip(examples, fill, strict=True)]
    found = {"input_ids": torch.tensor(tokens)}
    found["attention_mask"] = torch.tensor([[1] * (most - n) + [0] * n for n in fill])
    labels = [example.get("labels", example["input_ids"]) for example in examples]
    found["labels"] = torch.tensor([row + [-100] * n for row, n in zip(labels, fill, strict=True)])
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bf16": True},
        {"gradient_checkpointing": True},
        pytest.param(
            {"max_grad_norm": 0.1, "lr_scheduler_type": "cosine", "weight_decay": 0.1},
            marks=pytest.mark.slow,
        ),
        {"eval_strategy": "steps", "eval_steps": 2, "dataloader_num_workers": 1},
        {"save_strategy": "steps", "save_steps": 2},
    ],
    ids=["plain", "bf16", "checkpointing", "optimizer", "evaluation", "checkpoints"],
)
@pytest.mark.few(3)
def test_graphs_change_no_bit(changes, tmp_path):
    with_graphs = trained(packing(tmp_path / "graphs", **changes))
    without = trained(packing(tmp_path / "eager", **changes), eager=True)
    assert same(with_graphs.model, without.model)
    for name in ("loss", "grad_norm", "eval_loss"):
        assert logged(with_graphs, name) == logged(without, name)
    evaluated = 4 if "eval_steps" in changes else 0  # microbatches of each of three evaluations
    packs = with_graphs.packing.packs
    assert 6 <= packs < 12, "fewer than microbatches"
    assert with_graphs.stats.replayed == packs - 2 + 3 * evaluated
    assert dict(with_graphs.stats.fallbacks) == {"warm-up": 2} and not with_graphs.stats.recaptures
    assert dict(without.stats.fallbacks) == {"comparison": packs + 3 * evaluated}
    assert sum(logged(with_graphs, "packgraph/replayed")) == packs - 2 + 2 * evaluated
    assert logged(with_graphs, "packgraph/fallbacks") == [2, 0, 0]
    assert not same(with_graphs.model, model()), "it was trained"


def test_training_is_that_of_the_plain_trainer(tmp_path):
    """Labels are shifted once, and a step is divided by all its labels: float32, sums in another
    order."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 3, "optim": "sgd", "learning_rate": 0.3}
    ours = trained(packing(tmp_path / "ours", capacities=ONE, **evaluated))
    arguments = TrainingArguments(**options(tmp_path / "theirs", **evaluated))
    theirs = trained(
        Trainer(model(), arguments, padded, train_dataset=TRAIN, eval_dataset=TEST), eager=True
    )
    start = dict(model().named_parameters())
    for name, parameter in theirs.model.named_parameters():
        found = dict(ours.model.named_parameters())[name]
        torch.testing.assert_close(found, parameter, rtol=1e-4, atol=1e-5)
        assert (parameter - start[name]).abs().max() > 1e-3
    for name in ("loss", "grad_norm", "eval_loss"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=1e-5)


@pytest.mark.parametrize(("stop", "eager"), [(3, False), (1, True), (4, True), (5, True)])
@pytest.mark.few(4)
def test_a_run_that_was_stopped_goes_on_bit_by_bit(stop, eager, tmp_path):
    """Within an epoch of four steps, at its end and behind it; its last step has one microbatch."""
    saving = {"save_strategy": "steps", "save_steps": 1, "data": TRAIN[:28], "capacities": ONE}
    whole = trained(packing(tmp_path / "whole", **saving), eager)
    half = packing(tmp_path / "half", **saving, max_steps=6)
    half.add_callback(Stop(stop))
    trained(half, eager)
    assert half.state.global_step == stop and not same(half.model, whole.model)
    again = packing(tmp_path / "half", **saving)
    trained(again, eager, resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert eager or again.stats.replayed == again.packing.packs - 2 > 0
    assert half.packing.documents + again.packing.documents == whole.packing.documents
    assert same(again.model, whole.model)


def test_checkpoints_are_those_of_the_model(tmp_path):
    trainer = trained(packing(tmp_path, save_strategy="steps", save_steps=6))
    folder = tmp_path / "checkpoint-6"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "packgraph" not in (folder / "config.json").read_text()
    assert same(AutoModelForCausalLM.from_pretrained(folder), trainer.model)
    trainer.save_model(str(tmp_path / "last"))
    assert same(LlamaForCausalLM.from_pretrained(tmp_path / "last"), trainer.model)


@pytest.mark.slow
def test_a_microbatch_may_take_several_packs(tmp_path):
    rows = [packgraph.Capacity(tokens=48, documents=4)]
    ours = trained(packing(tmp_path / "several", optim="sgd", capacities=rows))
    assert ours.packing.packs > 24 and ours.packing.documents == 48
    assert sum(ours.stats.fallbacks.values()) == 2, "warm-up"
    assert ours.stats.replayed == ours.packing.packs - 2
    twin = trained(packing(tmp_path / "twin", optim="sgd", capacities=rows), eager=True)
    assert same(ours.model, twin.model)
    whole = trained(packing(tmp_path / "whole", optim="sgd"))
    assert whole.packing.packs < 12
    assert logged(ours, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-5)
    assert logged(ours, "packgraph/padding")[0] > 0


def test_documents_that_are_too_long(tmp_path):
    rows = [packgraph.Capacity(tokens=20, documents=4)]
    with pytest.raises(ValueError, match="the largest capacity takes documents of 20"):
        trained(packing(tmp_path, capacities=rows))
    dropped = trained(packing(tmp_path, capacities=rows, overlong="drop"))
    assert dropped.packing.dropped_documents > 0
    nothing = [{"input_ids": [1] * 30}] * 60
    trainer = trained(packing(tmp_path, capacities=rows, overlong="drop", data=nothing))
    assert same(trainer.model, model()) and logged(trainer, "loss") == [0.0, 0.0, 0.0]


def test_capacities_come_from_the_lengths_of_the_data(tmp_path):
    chosen = packing(tmp_path).data_collator.capacities
    totals = [sum(len(d["input_ids"]) for d in TRAIN[i : i + 4]) for i in range(0, 60, 4)]
    assert max(totals) > chosen[-1].tokens - 64 and len(chosen) <= 4
    assert all(capacity.tokens % 64 == 0 and capacity.documents <= 8 for capacity in chosen)
    long = TRAIN[:4] + [{"input_ids": [1] * 500}]
    assert packing(tmp_path, data=long).data_collator.capacities[-1].tokens == 512
    own = {"accelerator_config": {"dispatch_batches": False}}
    with pytest.raises(ValueError, match="capacities must be given"):
        packing(tmp_path, data=iter(TRAIN), **own)


@pytest.mark.slow
def test_the_documents_of_a_step_fill_its_rows(tmp_path):
    """Each capacity is captured once, the largest first: others fit into its memory."""
    many = {"gradient_accumulation_steps": 12, "data": documents(400, longest=200), "max_steps": 4}
    trainer = trained(packing(tmp_path / "whole", **many))
    assert trainer.packing.padding_fraction < 0.03
    assert trainer.packing.packs < 4 * 12 and trainer.packing.documents == 4 * 48
    assert 1 < trainer.stats.captured <= len(trainer.data_collator.capacities)
    assert not trainer.stats.recaptures and trainer.stats.fallbacks == {"warm-up": 2}


@pytest.mark.parametrize("columns", [("input_ids",), ("input_ids", "seq_lengths")])
@pytest.mark.few(2)
def test_data_sets_of_rows(columns, tmp_path):
    datasets = pytest.importorskip("datasets", reason="the data set is of this library")
    rows = [
        {"input_ids": a["input_ids"] + b["input_ids"], "more": "text"}
        for a, b in zip(TRAIN[::2], TRAIN[1::2], strict=True)
    ]
    lengths = [[len(d["input_ids"]) for d in TRAIN[i : i + 2]] for i in range(0, 60, 2)]
    data = datasets.Dataset.from_list(rows).add_column("seq_lengths", lengths)
    data = data.select_columns([*columns, "more"])
    small = {"per_device_train_batch_size": 2, "optim": "sgd"}
    trainer = trained(packing(tmp_path, data=data, **small), eager=True)
    assert trainer.packing.documents == (48 if "seq_lengths" in columns else 24)
    listed = [{"input_ids": row["input_ids"], "seq_lengths": n} for row, n in zip(rows, lengths)]
    if "seq_lengths" not in columns:
        listed = [{"input_ids": row["input_ids"]} for row in rows]
    twin = trained(packing(tmp_path, data=listed, **small), eager=True)
    assert same(trainer.model, twin.model)
    assert trainer.data_collator.capacities == twin.data_collator.capacities


@pytest.mark.parametrize("table", [False, True], ids=["list", "data set"])
@pytest.mark.parametrize("sized", [False, True], ids=["", "capacities"])
@pytest.mark.few(3)
def test_rows_that_cannot_be_packed_are_refused_when_the_trainer_is_made(table, sized, tmp_path):
    datasets = pytest.importorskip("datasets", reason="the data set is of this library")
    whole = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in TRAIN]
    rows = {"capacities": packgraph.Capacity(256, 8)} if sized else {}
    for wrong, told in (
        ({"input_ids": [], "attention_mask": []}, "row 60 of the data set is empty"),
        ({"input_ids": [5, 0], "attention_mask": [1, 0]}, "row 60 .* attention_mask has zeros"),
    ):
        data = [*whole, wrong]
        with pytest.raises(ValueError, match=told):
            packing(tmp_path, data=datasets.Dataset.from_list(data) if table else data, **rows)
    nothing = {**whole[0], "labels": [-100] * len(whole[0]["input_ids"])}
    data = datasets.Dataset.from_list([nothing] * 60) if table else [nothing] * 60
    assert logged(trained(packing(tmp_path, data=data, **rows)), "loss") == [0.0, 0.0, 0.0]


@pytest.mark.slow
def test_evaluation_replays_and_leaves_training_alone(tmp_path):
    trainer = packing(tmp_path)
    before = trainer.evaluate()["eval_loss"]
    trained(trainer)
    assert trainer.evaluate()["eval_loss"] < before
    assert trainer.predict(TEST).metrics["test_loss"] < before
    assert dict(trainer.stats.fallbacks) == {"warm-up": 4}, "two of either kind"


@pytest.mark.slow
def test_compiled_code(tmp_path):
    torch._dynamo.reset()
    arguments = TrainingArguments(**options(tmp_path, max_steps=3))
    trainer = Packing(
        model(), arguments, train_dataset=TRAIN, graph_options={"compile": "aot_eager"}
    )
    trained(trainer)
    assert trainer.stats.compiled > 0
    assert trainer.stats.replayed == trainer.packing.packs - 2 > 0


def accuracy(found, compute_result=True):
    """The share of labels that are predicted one token before, of what was seen until now."""
    predictions, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
    accuracy.seen += [(predictions == labels)[labels != -100]]
    every = torch.cat([torch.as_tensor(one) for one in accuracy.seen])
    return {"accuracy": every.double().mean().item()} if compute_result else {}


@pytest.mark.parametrize(
    ("changes", "reduced"),
    [({}, True), ({}, False), ({"batch_eval_metrics": True}, True)],
    ids=["predictions", "logits", "batches"],
)
@pytest.mark.few(3)
def test_metrics_see_what_those_of_the_plain_trainer_see(changes, reduced, tmp_path):
    """Prompts are masked, one row has several documents, and microbatches take several packs."""
    rows = [{**row, "labels": [-100, -100, *row["input_ids"][2:]]} for row in TEST]
    best = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    given = {"train_dataset": TRAIN, "eval_dataset": rows, **(best if reduced else {})}
    if reduced:
        given["compute_metrics"] = accuracy
    arguments = TrainingArguments(**options(tmp_path, **changes))
    small = packgraph.Capacity(tokens=64, documents=4)
    ours = Packing(model(), arguments, capacities=small, token_accuracy=True, **given)
    theirs = Trainer(model(), arguments, padded, **given)
    found = []
    for trainer in (ours, theirs):
        accuracy.seen = []
        found.append((trainer.predict(rows), trainer.evaluate()))
    (mine, evaluated), (plain, plainly) = found
    labelled = plain.label_ids != -100
    assert (mine.label_ids == plain.label_ids).all() and mine.label_ids.shape == (13, 38)
    ones, others = mine.predictions[labelled], plain.predictions[labelled]
    if reduced:
        assert (ones == others).all()
        assert evaluated["eval_accuracy"] == plainly["eval_accuracy"] > 0
        assert "batch_eval_metrics" in changes or (
            evaluated["eval_mean_token_accuracy"] == pytest.approx(plainly["eval_accuracy"])
        )
    else:
        torch.testing.assert_close(torch.tensor(ones), torch.tensor(others), rtol=1e-4, atol=1e-5)
        with packgraph.eager("comparison"):
            assert (ours.predict(rows).predictions == mine.predictions).all(), "bit by bit"
    assert evaluated["eval_loss"] == pytest.approx(plainly["eval_loss"], rel=1e-5)
    assert ours.stats.replayed > 0 and not ours.stats.recaptures


@pytest.mark.slow
def test_noise_on_embeddings(tmp_path):
    """As NEFTune draws it for a document alone: new at every step, none in evaluation."""
    noisy = {"neftune_noise_alpha": 9.0, "eval_strategy": "steps", "eval_steps": 2}
    with_graphs = trained(packing(tmp_path / "graphs", **noisy))
    without = trained(packing(tmp_path / "eager", **noisy), eager=True)
    assert same(with_graphs.model, without.model) and with_graphs.stats.replayed > 0
    assert logged(with_graphs, "loss") == logged(without, "loss")
    assert logged(with_graphs, "eval_loss") == logged(without, "eval_loss")
    quiet = trained(packing(tmp_path / "quiet", **{**noisy, "neftune_noise_alpha": None}), True)
    assert not same(quiet.model, without.model)
    assert with_graphs.evaluate()["eval_loss"] == with_graphs.evaluate()["eval_loss"]
    made = packed(model(tie_word_embeddings=False))
    made.noise, found = 9.0, []
    torch.nn.init.zeros_(made.causal.get_input_embeddings().weight)
    lengths = (4, 100)
    (batch,) = packgraph.pack([[1] * n for n in lengths], packgraph.Capacity(128, 3))
    for made.training in (True, True, False):
        found.append(made.run_embed(made.begin(batch))["hidden"])
    assert not torch.equal(found[0], found[1]) and not found[2].any()
    assert not found[0][104:].any()
    for length, rows in zip(lengths, found[0][:104].split(lengths), strict=True):
        bound = 9.0 / math.sqrt(length * rows.shape[1])
        assert 0.8 * bound < rows.abs().max() <= bound


def test_a_run_ends_with_a_line_about_it(tmp_path, capsys):
    trainer = trained(packing(tmp_path))
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "packgraph: " in one]
    assert re.fullmatch(
        rf"packgraph: [\d,]+ tokens/s after \d+\.\d s of captures, [\d.]+% padding, "
        rf"{trainer.stats.captured} captures \(0 again\), {trainer.stats.replayed} replays, "
        r"2 eager calls \(2 warm-up\)",
        line,
    )
    assert logged(trainer, "packgraph/tokens_per_second")[0] > 0
    assert not logged(trainer, "mean_token_accuracy"), "TRL has it"


def test_what_cannot_be_followed_is_refused_with_all_reasons(tmp_path):
    with pytest.raises(ValueError, match=r"label_smoothing_factor needs logits.*padded") as raised:
        packing(
            tmp_path,
            label_smoothing_factor=0.1,
            include_for_metrics=["inputs"],
            torch_compile=True,
        )
    assert 'write graph_options={"compile": True}' in str(raised.value)
    arguments = TrainingArguments(**options(tmp_path))
    with pytest.raises(ValueError, match="data_collator= would not be called"):
        Packing(model(), arguments, padded, train_dataset=TRAIN)
    with pytest.raises(ValueError, match="compute_loss_func needs logits"):
        Packing(model(), arguments, train_dataset=TRAIN, compute_loss_func=len)
    trainer = packing(tmp_path)
    with pytest.raises(ValueError, match="returns its loss only"):
        trainer.compute_loss(trainer.model, trainer.data_collator(TRAIN[:2]), return_outputs=True)


def test_another_loss_is_refused(tmp_path):
    class Own(Trainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    class Mixed(PackedTrainer, Own):
        pass

    class After(Packing):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    arguments = TrainingArguments(**options(tmp_path, optim="sgd", max_steps=2))
    with pytest.raises(ValueError, match=r"Own\.compute_loss would not be called"):
        Mixed(model(), arguments, train_dataset=TRAIN)
    twice = trained(After(model(), arguments, train_dataset=TRAIN), eager=True)
    assert logged(twice, "loss")[0] == pytest.approx(
        2 * logged(trained(packing(tmp_path, max_steps=2), eager=True), "loss")[0], rel=0.05
    )
    other = model()
    other.loss_function = lambda **facts: torch.zeros(())
    with pytest.raises(ValueError, match="its loss_function is not the mean of next tokens"):
        Packing(other, arguments, train_dataset=TRAIN)


def test_what_several_processes_cannot_follow_is_refused(tmp_path, monkeypatch):
    rows = [packgraph.Capacity(64, 8)]
    with pytest.raises(ValueError, match=r"set accelerator_config\['dispatch_batches'\] = False"):
        packing(tmp_path, data=Stream(), capacities=rows)  # on one process, too
    trainer = packing(tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ValueError, match="may leave a process nothing to evaluate"):
        packing(tmp_path, overlong="drop", capacities=rows)


def test_the_collator_shifts_labels_once():
    rows = packgraph.Capacity(tokens=8, documents=3)
    example = {"input_ids": [5, 6, 7], "labels": [-100, -100, 7], "text": "seven"}
    (batch,) = PackingCollator(rows)([example, {"input_ids": [8, 9]}])["packs"]
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert batch.labels.tolist() == [-100, 7, -100, 9, *[-100] * 4]
    with pytest.raises(ValueError, match="overlong must be one of"):
        PackingCollator(rows, overlong="cut")


def test_rows_of_several_documents_are_packed_again_where_that_takes_no_more_rows():
    collator = PackingCollator(packgraph.Capacity(tokens=10, documents=8))
    for rows, packed_as in (
        ([(5, 3, 2), (4, 3, 3)], [(5, 3, 2), (4, 3, 3)]),  # best fit takes three
        ([(2, 1), (3, 1), (8,)], [(2, 8), (1, 3, 1)]),
    ):
        given = [{"input_ids": [1] * sum(row), "seq_lengths": row} for row in rows]
        packs, report = collator.pack_step(read_examples(given)["examples"])
        assert [pack.lengths for pack in packs] == packed_as
        assert report.packs == 2 and report.tokens == sum(map(sum, rows))


def test_an_evaluation_without_labels_is_no_loss_of_zero(tmp_path):
    """Transformers leaves NaN out of the mean, which 0 would pull down; 5.17 has NaN then."""
    nothing = [{**row, "labels": [-100] * len(row["input_ids"])} for row in TEST[:4]]
    ours = packing(tmp_path, capacities=ONE)
    expected = ours.evaluate(TEST)["eval_loss"]
    found = ours.evaluate(nothing + TEST)["eval_loss"]
    assert math.isnan(found) or found == pytest.approx(expected, rel=1e-6)
    assert math.isnan(ours.evaluate(nothing)["eval_loss"])


def test_dropout_is_off_in_evaluation(tmp_path):
    trainer = packing(tmp_path, model(attention_dropout=0.5), capacities=ONE)
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
    replayed = trainer.stats.replayed
    trained(trainer)
    assert trainer.stats.replayed == replayed + trainer.packing.packs - 2
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
