"""Preferences through the trainer: losses and gradients of TRL and of the papers, graphs bit by
bit, going on, and what is refused."""

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from trainkit import traced
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig
from tuningkit import VOCAB, logits, preferences, tiny_model, word_tokenizer

from packgraph import cli
from packgraph.graphs.graphed import graph
from packgraph.integrations.transformers.model import packed
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.document import Document
from packgraph.train.checkpoint.reader import tensor_entries
from packgraph.train.checkpoint.writer import latest_checkpoint, load_tensors
from packgraph.train.config.contradictions import preference_problems
from packgraph.train.config.presets import PRESETS
from packgraph.train.config.sections import DataConfig, LossConfig, TrainConfig
from packgraph.train.data import DataError, PairedMicrobatches, build_tokenizer, open_documents
from packgraph.train.data.pairs import Pair
from packgraph.train.features.preference import FIGURES, PreferenceModel, frozen_copy
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.run_files import read_json

NAMES = ("dpo", "simpo", "orpo")
CAPACITY = Capacity(128, 10)
# Packed and one by one, float32 sums are made in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
TRL = {"rtol": 1e-5, "atol": 1e-5}
LORA = ("--lora.rank", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of signs."""
    return word_tokenizer(tiny_model(tmp_path_factory.mktemp("base") / "model"), None)


def words(folder: Path, model: str, *more: str, steps: int = 6) -> list[str]:
    """Options of a run `mine` in `folder`."""
    folder.mkdir(exist_ok=True)
    data = folder / "pairs.jsonl"
    if not data.exists():
        preferences(data)
    return [
        "train", model, "--run.name", "mine", "--run.folder", str(folder / "runs"),
        "--run.steps", str(steps), "--run.dtype", "float32", "--run.tokens-per-step", "300",
        "--data.path", str(data), "--graph.capacities", "128x6,192x12", "--graph.strict",
        "--data.tokenizer", "bytes", "--optimizer.learning-rate", "1e-2",
        "--optimizer.decay-steps", "8", *more,
    ]  # fmt: skip


def train(folder: Path, model: str, *more: str, steps: int = 6) -> Path:
    assert cli.main(words(folder, model, *more, steps=steps)) == 0
    return folder / "runs" / "mine"


def told(run: Path) -> list[Any]:
    """What the rows of a run say of learning."""
    names = ("loss", "gradient_norm", *FIGURES)
    return [tuple(row[name] for name in names) for row in read_metrics(run / METRICS)]


def assert_same(one: Path, other: Path) -> None:
    left, right = stored(one), stored(other)
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]
    assert told(one) == told(other)


def stored(run: Path) -> dict[str, Tensor]:
    path = latest_checkpoint(run / "checkpoints")
    assert path is not None
    found = {
        name: torch.zeros(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in tensor_entries(path / ".metadata").items()
    }
    load_tensors(path, found)
    return found


def changed(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with other values of what is trained."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.randn(value.shape, generator=made) * 0.05)
    return model


def random_pairs(draw: random.Random, count: int, words: int = VOCAB) -> list[Document]:
    """Documents of so many pairs, each with a prompt that is not learned."""
    found = []
    for _ in range(count):
        prompt = [draw.randrange(words) for _ in range(draw.randint(1, 5))]
        for _ in range(2):
            answer = [draw.randrange(words) for _ in range(draw.randint(1, 6))]
            tokens = np.array(prompt + answer)
            found.append(
                Document(tokens, np.where(np.arange(len(tokens)) < len(prompt), -100, tokens))
            )
    return found


def naive_scores(model: Any, documents: Sequence[Document]) -> tuple[Tensor, Tensor]:
    """Sums of log-probabilities of the answers [P, 2], one document after the other by the model's
    own forward, and numbers of tokens."""
    sums, counts = [], []
    for document in documents:
        found = model(input_ids=torch.tensor(document.tokens)[None]).logits[0, :-1].log_softmax(-1)
        labels = torch.tensor(document.targets)[1:]
        rows = found.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        sums.append(rows[labels >= 0].sum())
        counts.append((labels >= 0).sum())
    return torch.stack(sums).view(-1, 2), torch.stack(counts).view(-1, 2)


def naive_losses(name: str, policy: Any, reference: Any, documents: Sequence[Document]) -> Tensor:
    """Losses [P] as the papers write them: arXiv:2305.18290, 2405.14734 and 2403.07691."""
    sums, counts = naive_scores(policy, documents)
    if name == "dpo":
        with torch.no_grad():
            before, _ = naive_scores(reference, documents)
        ratios = 0.1 * (sums - before)
        return -torch.log(torch.sigmoid(ratios[:, 0] - ratios[:, 1]))
    means = sums / counts
    if name == "simpo":
        return -torch.log(torch.sigmoid(2.0 * means[:, 0] - 2.0 * means[:, 1] - 1.0))
    odds = means.exp() / (1 - means.exp())
    return -means[:, 0] - 0.1 * torch.log(torch.sigmoid(torch.log(odds[:, 0] / odds[:, 1])))


def causal(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapted(folder: Path) -> Any:
    model = causal(folder)
    torch.manual_seed(0)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "up_proj"]), model)
    return model


@pytest.mark.parametrize("make", [causal, adapted], ids=["full", "lora"])
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_all_gradients_are_those_of_a_plain_loop(
    name: str, make: Callable[[Path], Any], folder: Path
) -> None:
    ours, theirs = make(folder), make(folder)
    model = PreferenceModel(packed(ours), LossConfig(name=name))  # type: ignore[arg-type]
    changed(ours), changed(theirs)
    draw = random.Random(NAMES.index(name))
    for count in (1, 3, 5):
        documents = random_pairs(draw, count)
        batch = PackedBatch.build(documents, CAPACITY)
        loss = model(batch, torch.tensor(7))
        expected = naive_losses(name, theirs, causal(folder), documents).sum() / 7
        torch.testing.assert_close(loss, expected, **TRL)
        loss.backward(), expected.backward()
        for (where, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), where
            if other.grad is not None:
                assert other.grad.abs().max() > 0, where
                torch.testing.assert_close(one.grad, other.grad, **CLOSE, msg=where)
        ours.zero_grad(), theirs.zero_grad()


def test_a_run_of_trl_says_the_same_of_the_same_rows(folder: Path, tmp_path: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    path = preferences(tmp_path / "rows.jsonl", 5)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    policy, reference = changed(causal(folder)), causal(folder)
    options = DPOConfig(
        output_dir=str(tmp_path), beta=0.1, use_cpu=True, bf16=False, report_to=[], max_length=None,
        per_device_train_batch_size=5, gradient_checkpointing=False,
    )  # fmt: skip
    theirs = DPOTrainer(
        model=policy, ref_model=reference, args=options, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    inputs = theirs.data_collator([theirs.train_dataset[n] for n in range(5)])
    policy.train()
    expected = theirs.compute_loss(policy, inputs)
    logged = {name: theirs._metrics["train"][name][0] for name in FIGURES}

    data = DataConfig(source="jsonl", path=str(path), tokenizer=str(folder))
    source = open_documents(data, paired=True)
    stream = PairedMicrobatches(data, source, build_tokenizer(data), [Capacity(512, 10)])
    documents = [
        document
        for index in range(5)
        for pair in stream._parts(lambda: read(source, index, data))  # noqa: B023 (called at once)
        for document in pair.answers()
    ]
    chosen_then_rejected = [*documents[::2], *documents[1::2]]
    for row, document in enumerate(chosen_then_rejected):
        length = int(inputs["attention_mask"][row].sum())
        assert inputs["input_ids"][row, :length].tolist() == document.tokens.tolist()
        learned = inputs["completion_mask"][row, :length].bool().tolist()
        assert learned == (document.targets != -100).tolist()
    ours = changed(causal(folder))
    model = PreferenceModel(packed(ours), LossConfig(name="dpo"))
    model.reference = packed(causal(folder))
    loss = model(PackedBatch.build(documents, Capacity(512, 10)))
    torch.testing.assert_close(loss, expected, **TRL)
    found = dict(zip(FIGURES, model.sums.take().tolist(), strict=True))
    assert found == pytest.approx(logged, rel=1e-4, abs=1e-5)


def read(source: Any, index: int, data: DataConfig) -> Any:
    from packgraph.train.data.tokenizer import read_tokenized

    return read_tokenized(source, index, build_tokenizer(data))


def test_losses_of_means_are_those_of_trl() -> None:
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    from packgraph.train.features.preference import orpo, simpo

    means = -torch.rand(20, 2, dtype=torch.float32) * 4 - 1e-3
    device = SimpleNamespace(device=torch.device("cpu"))
    options = LossConfig(name="simpo", beta=2.5, margin=0.7)
    stub = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=0.7, beta=2.5, label_smoothing=0.0,
        accelerator=device,
    )  # fmt: skip
    expected, *rewards = CPOTrainer.cpo_loss(stub, *means.unbind(1))
    torch.testing.assert_close(simpo(means, means * options.strength, options), expected, **TRL)
    torch.testing.assert_close(means * options.strength, torch.stack(rewards, 1), **TRL)
    options = LossConfig(name="orpo", beta=0.3)
    stub = SimpleNamespace(beta=0.3, accelerator=device)
    ratios, *rewards, _, _ = ORPOTrainer.odds_ratio_loss(stub, *means.unbind(1))
    found = orpo(means, means * options.strength, options)
    torch.testing.assert_close(found, -means[:, 0] - ratios, **TRL)
    torch.testing.assert_close(means * options.strength, torch.stack(rewards, 1), **TRL)


def test_sure_answers_have_finite_gradients() -> None:
    from packgraph.train.features.preference import orpo

    scores = torch.tensor([[0.0, -1.0], [0.0, 0.0], [-100.0, -1e-9]], requires_grad=True)
    losses = orpo(scores, scores * 0.1, LossConfig(name="orpo"))
    losses.sum().backward()
    assert losses.isfinite().all() and scores.grad is not None and scores.grad.isfinite().all()


OWN = DecoderConfig(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=8,
)  # fmt: skip


@pytest.mark.parametrize("live", [False, True], ids=["own", "live"])
@pytest.mark.parametrize("name", NAMES)
def test_replays_equal_eager_bitwise(name: str, live: bool, folder: Path) -> None:
    def make() -> PreferenceModel:
        policy: Any = packed(causal(folder)) if live else DecoderModel(OWN)
        model = PreferenceModel(policy, LossConfig(name=name))  # type: ignore[arg-type]
        changed(policy)
        return model

    one, other = make(), make()
    replayed = graph(other, capacities=[CAPACITY], warmup=1, strict=True)
    draw = random.Random(5)
    for count in (3, 5, 1, 4, 2):
        batch = PackedBatch.build(random_pairs(draw, count), CAPACITY)
        losses = []
        for model in (one, replayed):
            loss = model(batch, torch.tensor(count + 1))
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert torch.equal(one.sums.take(), other.sums.take())
        for left, right in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
            assert left.grad is not None and right.grad is not None
            assert torch.equal(left.grad, right.grad)
            changed_by = 1e-2 * left.grad
            left.data -= changed_by  # the next replay has other weights, the reference has not
            right.data -= changed_by
        one.zero_grad(), other.zero_grad()
    assert replayed.stats.replayed == 4


def test_what_a_pack_lacks_counts_nothing(folder: Path) -> None:
    model = PreferenceModel(packed(causal(folder)), LossConfig(name="simpo"))
    documents = random_pairs(random.Random(0), 2)
    small = model(PackedBatch.build(documents, Capacity(64, 4)))
    figures = model.sums.take()
    large = model(PackedBatch.build(documents, Capacity(256, 33)))  # an odd place stays empty
    torch.testing.assert_close(large, small)
    torch.testing.assert_close(model.sums.take(), figures)
    assert model(PackedBatch.empty(Capacity(64, 4))) == 0 and not model.sums.take().any()


def test_the_reference_shares_what_is_frozen_and_nothing_else(folder: Path) -> None:
    ours = packed(adapted(folder))
    reference = frozen_copy(ours)
    frozen = {id(value) for value in ours.parameters() if not value.requires_grad}
    mine = {id(value) for value in reference.parameters()}
    assert mine <= frozen and not [
        name for name, _ in reference.named_parameters() if "lora" in name
    ]
    assert not any(value.requires_grad for value in reference.parameters())
    whole = packed(causal(folder))
    assert not {id(value) for value in whole.parameters()} & {
        id(value) for value in frozen_copy(whole).parameters()
    }
    assert all(value.requires_grad for value in whole.parameters())
    dropping = causal(folder)
    dropping.extra = nn.Dropout(0.5)
    PreferenceModel(packed(dropping), LossConfig(name="dpo"))
    assert dropping.extra.p == 0


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("dpo", ()),
        ("dpo", LORA),
        pytest.param("simpo", LORA, marks=pytest.mark.slow),
        pytest.param("orpo", (), marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(
    name: str, more: tuple[str, ...], tmp_path: Path, folder: Path
) -> None:
    options = (f"hf:{folder}", "--loss.name", name, *more)
    straight = train(tmp_path / "a", *options)
    stopped = train(tmp_path / "b", *options, steps=3)
    config = str(stopped / "config.json")
    assert cli.main(["train", "--config", config, "--resume", "--run.steps", "6"]) == 0
    assert_same(straight, stopped)
    summary = read_json(straight / "summary.json")
    assert summary["replayed"] > 0 and set(summary["fallbacks"]) == {"warm-up"}
    rows = read_metrics(straight / METRICS)
    assert max(row["microbatches"] for row in rows) > 1, "gradients are added up"
    eager = words(tmp_path / "c", *options, "--graph.enabled", "false")
    assert cli.main([word for word in eager if word != "--graph.strict"]) == 0
    assert_same(straight, tmp_path / "c" / "runs" / "mine")
    assert told(straight)[0][0] == pytest.approx(np.log(2)) or name != "dpo"
    assert rows[-1]["rewards/margins"] > rows[0]["rewards/margins"]
    if name == "dpo":
        assert cli.main(["export", str(straight), str(tmp_path / "out")]) == 0
        assert not torch.equal(logits(tmp_path / "out"), logits(folder))


SMALL = ("--model.num-layers", "2", "--model.hidden-size", "32", "--loss.name", "dpo")


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--graph.granularity", "step", "--graph.optimizer"),
        ("--graph.granularity", "chunk", "--run.recompute", "full"),
        ("--graph.scope", "attn,mlp", "--data.workers", "1"),
        ("--graph.compile",),
    ],
    ids=" ".join,
)
def test_a_model_of_packgraph_learns_by_every_kind_of_graph(
    more: tuple[str, ...], tmp_path: Path, own: Path
) -> None:
    with traced():  # by operations as they are
        assert told(train(tmp_path, "qwen3-tiny", *SMALL, *more)) == told(own)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without graphs."""
    folder = tmp_path_factory.mktemp("own")
    options = words(folder, "qwen3-tiny", *SMALL, "--graph.enabled", "false")
    assert cli.main([word for word in options if word != "--graph.strict"]) == 0
    return folder / "runs" / "mine"


def test_a_step_is_a_mean_over_its_pairs_however_they_are_packed(tmp_path: Path) -> None:
    all_of = ("--data.epochs", "1", "--run.tokens-per-step", "100000", "--graph.warmup", "1")
    rows = []
    for name, capacities in (("one", "4096x80"), ("many", "128x6")):
        more = (*SMALL[:-1], "simpo", *all_of, "--graph.capacities", capacities)
        run = train(tmp_path / name, "qwen3-tiny", *more, steps=2)
        rows.append(read_metrics(run / METRICS)[0])
    one, many = rows
    assert (one["microbatches"], many["microbatches"] > 10) == (1, True)
    for name in ("loss", "gradient_norm", *FIGURES):
        assert one[name] == pytest.approx(many[name], rel=1e-4, abs=1e-5)


def test_held_out_pairs_are_evaluated_as_one_by_one(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = preferences(tmp_path / "held.jsonl", 7, seed=9)
    more = ("--loss.name", "dpo", "--eval.every", "2", "--eval.path", str(held))
    run = train(tmp_path / "run", f"hf:{folder}", *more, steps=4)
    row = read_metrics(run / METRICS)[-1]
    assert "eval_perplexity" not in row and row["eval_pairs"] == 7
    assert "accuracy" in capsys.readouterr().err
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    data = DataConfig(source="jsonl", path=str(held))
    source, tokenizer = open_documents(data, paired=True), build_tokenizer(data)
    losses = []
    for index in range(7):
        row_of = source[index]
        assert row_of.rejected is not None
        documents = [tokenizer.encode(one)[0] for one in (row_of, row_of.rejected)]
        with torch.no_grad():
            losses.append(naive_losses("dpo", causal(tmp_path / "out"), causal(folder), documents))
    assert row["eval_loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)
    eager = words(tmp_path / "e", f"hf:{folder}", *more[:2], "--graph.enabled", "false", steps=4)
    assert cli.main([word for word in eager if word != "--graph.strict"]) == 0
    without = tmp_path / "e" / "runs" / "mine"
    assert told(run) == told(without), "an evaluation changes nothing"


def test_a_run_does_not_go_on_against_another_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(tmp_path / "model")
    run = train(tmp_path, f"hf:{model}", "--loss.name", "dpo", steps=3)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    resume = ["train", "--config", str(run / "config.json"), "--resume", "--run.steps", "6"]
    capsys.readouterr()
    assert cli.main(resume) == 2
    assert "its loss compares with others" in capsys.readouterr().err
    weights["model.norm.weight"][0] -= 1e-3
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    tiny_model(model)
    assert cli.main(resume) == 0
    assert cli.main([*resume[:-1], "8", "--loss.name", "orpo"]) == 2
    assert "loss.name: the run has 'dpo', now it is 'orpo'" in capsys.readouterr().err


GOOD = {"prompt": "q", "chosen": " yes", "rejected": " no"}
TURNS = [{"role": "user", "content": "q"}]
BAD = {
    "needs `chosen` and `rejected`, but this row is read by `text`": {"text": "alone"},
    "read by `completion`": {"prompt": "q", "completion": "a", "label": True},
    "`rejected` must be a text": {"prompt": "q", "chosen": " yes"},
    "has no answer": {"prompt": "q", "chosen": " yes", "rejected": ""},
    "are the same tokens": {"prompt": "q", "chosen": " no", "rejected": " no"},
    "`rejected` has no token of an answer": {
        "prompt": TURNS,
        "chosen": [{"role": "assistant", "content": "yes"}],
        "rejected": [{"role": "user", "content": "no"}],
    },
}


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def stream_of(path: str, capacities: Sequence[Capacity] = (CAPACITY,), **more: Any) -> Any:
    data = DataConfig(source="jsonl", path=path, **{"epochs": 1, **more})
    source = open_documents(data, paired=True)
    return PairedMicrobatches(data, source, build_tokenizer(data), capacities)


@pytest.mark.parametrize("told", BAD)
def test_rows_that_are_no_pairs_are_refused_or_counted(told: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", GOOD, BAD[told])
    with pytest.raises(DataError, match=told) as found:
        list(stream_of(path))
    assert "rows.jsonl:2" in str(found.value)
    stream = stream_of(path, on_bad="skip")
    assert [batch.num_documents for batch in stream] == [2]
    assert stream.bad.count == 1 and told.split("`")[0] in stream.bad.first[0]
    assert [batch.num_documents for batch in stream_of(lines(tmp_path / "good.jsonl", GOOD))] == [2]


def test_pairs_that_are_too_long_are_refused_or_counted_whole(tmp_path: Path) -> None:
    long = {**GOOD, "rejected": "x" * 100}
    path = lines(tmp_path / "rows.jsonl", GOOD, long)
    small = [Capacity(64, 4)]
    with pytest.raises(DataError, match=r"rows.jsonl:2 with both answers has 1\d\d tokens"):
        list(stream_of(path, small))
    for overlong in ("drop", "split"):
        stream = stream_of(path, small, overlong=overlong)
        assert [batch.num_documents for batch in stream] == [2]
        assert stream.report.dropped_documents == 1 and stream.report.split_documents == 0


def test_pairs_are_never_cut_nor_spread_over_packs(tmp_path: Path) -> None:
    path = str(preferences(tmp_path / "rows.jsonl", 60, seed=3))
    data = DataConfig(source="jsonl", path=path)
    source, tokenizer = open_documents(data, paired=True), build_tokenizer(data)
    wanted = []
    for index in range(60):
        row = source[index]
        assert row.rejected is not None
        wanted.append([tokenizer.encode(one)[0].tokens.tolist() for one in (row, row.rejected)])
    capacities = [Capacity(96, 3), Capacity(160, 5), Capacity(160, 8)]
    planned = stream_of(path, capacities, window=8).plan_step(10**6)
    found = []
    for plan in planned:
        batch = plan.load()
        assert plan.capacity == batch.capacity and batch.capacity in capacities
        facts = ("num_documents", "num_tokens", "num_pairs")
        assert [getattr(plan, one) for one in facts] == [getattr(batch, one) for one in facts]
        assert plan.num_loss_tokens == batch.num_loss_tokens
        assert batch.num_documents % 2 == 0
        ends = batch.cu_seqlens.tolist()
        tokens = [batch.tokens[a:b].tolist() for a, b in itertools.pairwise(ends) if b > a]
        found += [tokens[n : n + 2] for n in range(0, len(tokens), 2)]
    assert sorted(found) == sorted(wanted)
    ahead = stream_of(path, capacities, window=8, workers=1)
    same = [
        torch.equal(one.data, plan.load().data) for one, plan in zip(ahead, planned, strict=True)
    ]
    ahead.close()
    assert all(same)


def test_a_pair_is_its_two_documents() -> None:
    for targets in (None, np.array([-100, 7, 8])):
        chosen, rejected = Document(np.array([6, 7, 8]), targets), Document(np.array([6, 9]))
        pair = Pair.of(chosen, rejected)
        assert (len(pair), pair.predicts, pair.loss_tokens) == (5, True, 3)
        one, other = pair.answers()
        assert one.tokens.tolist() == [6, 7, 8] and other.tokens.tolist() == [6, 9]
        assert (one.loss_tokens, other.loss_tokens) == (2, 1)


def test_an_implicit_prompt_and_chats_are_those_of_explicit_ones(tmp_path: Path) -> None:
    prompt, answers = TURNS, {"chosen": "yes", "rejected": "no"}
    turns = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    rows = (
        {"prompt": prompt, **turns},
        {name: [*prompt, *turn] for name, turn in turns.items()},
        GOOD,
        {name: f"q{GOOD[name]}" for name in answers},
    )
    path = lines(tmp_path / "rows.jsonl", *rows)
    packs = list(stream_of(path, window=1))
    assert [batch.num_documents for batch in packs] == [2] * 4
    labels = {tuple(batch.labels[batch.loss_mask].tolist()) for batch in packs}
    assert len(labels) == 2, "of chats, and of texts"


def test_tables_and_chosen_capacities(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in preferences(tmp_path / "x.jsonl").read_text().splitlines()]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "pairs.parquet"))
    run = train(
        tmp_path, "qwen3-tiny", *SMALL, "--data.path", str(tmp_path / "pairs.parquet"),
        "--graph.capacities", "auto", "--buckets.max-tokens", "256",
    )  # fmt: skip
    chosen = read_json(run / "config.json")["graph"]["capacities"]
    assert all(int(text.split("x")[1]) % 2 == 0 for text in chosen)
    assert read_json(run / "summary.json")["documents"]["packed"] >= 40


def config(**changes: Any) -> TrainConfig:
    """A run of dpo with other sections."""
    base = PRESETS["qwen3-tiny"]()
    base = replace(
        base, loss=LossConfig(name="dpo"), data=DataConfig(source="jsonl", path="x.jsonl")
    )
    for name, values in changes.items():
        base = replace(base, **{name: replace(getattr(base, name), **values)})
    return base


REFUSED: dict[str, dict[str, Any]] = {
    "parallel.pp = 2": {"parallel": {"pp": 2}},
    "parallel.cp = 2": {"parallel": {"cp": 2}},
    "parallel.dynamic_cp": {"parallel": {"dynamic_cp": True}},
    "parallel.tp = 2": {"parallel": {"tp": 2}},
    "parallel.ep = 2": {"parallel": {"ep": 2}},
    "parallel.shard = parameters": {"parallel": {"shard": "parameters"}},
    "model.mtp_layers = 1": {"model": {"mtp_layers": 1}},
    "model.precision = fp8": {"model": {"precision": "fp8"}},
    "model.dropout = 0.1": {"model": {"dropout": 0.1}},
    "run.recompute = auto": {"run": {"recompute": "auto"}},
    "offload.modules": {"offload": {"modules": ("mlp_act",)}},
    "data.source = stdlib": {"data": {"source": "stdlib", "path": None}},
    "graph.granularity = step": {"graph": {"granularity": "step"}},
    "1024x1": {"graph": {"capacities": (Capacity(1024, 1),)}},
    "1024x8x512": {"graph": {"capacities": (Capacity(1024, 8, 512),)}},
}


def test_what_is_not_there_is_refused_with_all_reasons() -> None:
    assert preference_problems(config()) == []
    every: dict[str, Any] = {}
    for told, changes in REFUSED.items():
        (problem,) = preference_problems(config(**changes))
        assert told in problem
        assert preference_problems(config(**changes, loss={"name": "tokens"})) == []
        for name, values in changes.items():
            every[name] = every.get(name, {}) | values
    assert len(preference_problems(config(**every))) == len(REFUSED) - 1, "one list of capacities"


def test_data_that_hold_no_pairs_and_plans_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("no pairs")
    options = words(tmp_path, "qwen3-tiny", *SMALL, "--eval.every", "2")
    assert cli.main([*options, "--eval.path", str(tmp_path / "text.txt")]) == 2
    assert "in .jsonl or .parquet, and this is read as text" in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path / "pairs.jsonl"), "--loss.name", "dpo"]) == 2
    assert "plans are of documents, not of pairs" in capsys.readouterr().err
    data = ["--data.source", "jsonl", "--data.path", str(tmp_path / "pairs.jsonl")]
    assert cli.main(["try", "qwen3-tiny", *SMALL, *data]) == 2
    assert "times token losses, not loss.name = dpo" in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path / "pairs.jsonl")]) == 0


def test_experts_of_models_of_transformers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, moe_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=4, num_experts_per_tok=2, architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(tmp_path / "moe")  # fmt: skip
    options = words(tmp_path, f"hf:{tmp_path / 'moe'}", "--hf.random", "--graph.enabled", "false")
    options = [word for word in options if word != "--graph.strict"]
    assert cli.main([*options, "--loss.name", "simpo", "--run.steps", "1"]) == 2
    assert "loss.name = simpo with experts of hf:PATH" in capsys.readouterr().err
    assert cli.main([*options, "--run.steps", "1"]) == 0


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"name": "dpo", "beta": 0.0}, "beta must be positive"),
        ({"name": "dpo", "beta": float("nan")}, "beta must be positive"),
        ({"beta": 0.1}, "beta is of losses of pairs"),
        ({"name": "dpo", "margin": 1.0}, "margin is of simpo"),
        ({"name": "simpo", "margin": -1.0}, "margin must not be negative"),
    ],
)
def test_constants_that_mean_nothing_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LossConfig(**values)
    assert LossConfig(name="simpo", margin=0.0).strength == 2.0
    assert LossConfig(name="dpo").strength == 0.1
