"""`PackedTrainer`: transformers' Trainer, and trainers made of it, over packed batches and graphs.

    class SFT(PackedTrainer, SFTTrainer): ...

    examples of a step -- collator --> packs -- graphed(packed(model)) --> loss -- the trainer -->

`trainer.model` stays the model itself: the trainer's optimizer, checkpoints, adapters and
evaluation know nothing of packs. Only what reads a batch is replaced: columns, collator, counts of
tokens, and the loss. The documents of all microbatches of a step are packed together, and the packs
dealt out to the microbatches; those of one run forward and backward one after the other.

Over several processes calls go through `packgraph.replicate`, and the trainer's accelerator makes
no wrapper of DistributedDataParallel. The trainer itself gives each process its own examples and
as many microbatches as all others.
"""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from packgraph.graphs.fallback import Stats, bypass_reason
from packgraph.graphs.graphed import GraphedModule, control, graph
from packgraph.integrations.transformers.collator import (
    CONTENTS,
    EXAMPLES,
    PACKS,
    PackingCollator,
    add_report,
    document_lengths,
    is_table,
    read_examples,
    step_capacities,
)
from packgraph.integrations.transformers.model import PackedModel, packed
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.document import COLUMNS, IGNORED, Document
from packgraph.packing.pack import Overlong, PackReport
from packgraph.parallel.replicate import ReplicatedModule, replicate

LOGGED = "packgraph"  # before every name in logs
SPEED = f"{LOGGED}/tokens_per_second"
WARM_UP_CALLS = 2  # as `packgraph.graph` has it
# What `compute_loss` of this file stands for; that of another trainer is another loss.
LOSSES = (
    ("transformers.trainer", "Trainer.compute_loss"),
    ("trl.trainer.sft_trainer", "SFTTrainer.compute_loss"),
)
_Trainer: Any = object  # what the class is mixed into


class PackedTrainer(_Trainer):
    """Mixin for transformers' `Trainer` and TRL's `SFTTrainer`: calls of the model are replays.

    Name it before the trainer's class. All arguments and options of the trainer stay; those that
    packed batches cannot follow are refused. Logs get `packgraph/replayed`, `packgraph/fallbacks`
    (and one entry for each reason), `packgraph/tokens` and `packgraph/padding`, of what ran since
    the last log; a run ends with a line about all of it. The documents of an optimizer step are
    packed together, and its loss is the trainer's.

    Args:
        capacities: The static shape or shapes of packs. None derives them from the lengths of the
            training data, four at most, so that the rows of a step are full.
        overlong: What becomes of a document longer than every capacity: `error`, `split` or `drop`.
        graph_options: Further arguments of `packgraph.graph`, such as `{"compile": True}`.
        token_accuracy: Whether logs get `mean_token_accuracy`, the share of labels that the model
            finds most probable. None asks the trainer: TRL's has it.

    Raises:
        ValueError: If the model or an option of the trainer cannot be followed, with all reasons.

    Examples:
        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        >>> from packgraph.integrations.transformers import PackedTrainer
        >>> class Packed(PackedTrainer, Trainer): ...
        >>> config = LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> trainer = Packed(
        ...     LlamaForCausalLM(config),
        ...     TrainingArguments(
        ...         tempfile.mkdtemp(), max_steps=4, report_to="none", save_strategy="no",
        ...         disable_tqdm=True, logging_strategy="no",
        ...     ),
        ...     train_dataset=[{"input_ids": [1, 2, 3, 4]}] * 32,
        ... )
        >>> _ = trainer.train()
        {'train_runtime': ...}
        packgraph: ... tokens/s ...
        >>> trainer.stats.replayed
        2
    """

    _signature_columns: Any
    data_collator: Any
    preprocess_logits_for_metrics: Any

    def __init__(
        self,
        *args: Any,
        capacities: Capacity | Iterable[Capacity] | None = None,
        overlong: Overlong = "error",
        graph_options: Mapping[str, Any] | None = None,
        token_accuracy: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        theirs = super().compute_loss.__func__
        problems = _problems(self, kwargs.get("data_collator", args[2] if len(args) > 2 else None))
        if (theirs.__module__, theirs.__qualname__) not in LOSSES:
            problems.append(
                f"{theirs.__qualname__} would not be called; override compute_loss in a class "
                f"derived from {type(self).__name__}"
            )
        if overlong == "drop" and self.accelerator.num_processes > 1 and _evaluated(self):
            problems.append(
                'overlong="drop" may leave a process nothing to evaluate, which others wait for'
            )
        if problems:
            raise ValueError(f"{type(self).__name__} cannot pack: {'; '.join(problems)}")
        train, *others = map(self._read, [self.train_dataset, *_evaluated(self)])
        if capacities is None:
            sizes = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps
            capacities = step_capacities(train, *sizes, others)
        else:
            for dataset in [train, *others]:
                if isinstance(dataset, list) or is_table(dataset):
                    document_lengths(dataset)  # its rows are checked
        self.data_collator = PackingCollator(capacities, overlong=overlong)
        self.model_accepts_loss_kwargs = True  # the loss is divided by the tokens of a step
        self.loss_is_scaled_for_ga = True
        self._graph_options = dict(graph_options or {})
        of_trl = theirs.__qualname__.startswith("SFTTrainer")
        self._counts_hits = of_trl if token_accuracy is None else token_accuracy
        self.neftune_noise_alpha = None  # its hook knows no documents
        self._prepare_packed()
        if self.accelerator.num_processes > 1:
            self.accelerator.prepare_model = functools.partial(
                self.accelerator.prepare_model, evaluation_mode=True
            )
        self._seen, self._total = PackReport(), PackReport()
        # Labels that were most probable, and all, while training (True) and evaluating.
        zeros = functools.partial(torch.zeros, 2, dtype=torch.float64, device=self.args.device)
        self._hits = {True: zeros(), False: zeros()}
        self._before = 0, 0.0  # tokens, and seconds of captures, before training
        self._preprocess: Any = None
        self._states: list[Tensor] | None = None  # that the head reads, where metrics want them

    def _prepare_packed(self) -> None:
        """Packs the trainer's model, which has no graphs then."""
        self._packed: PackedModel = packed(self.model)
        self._packed.counts_hits, self._packed_of = self._counts_hits, self.model
        self._packed.noise = self.args.neftune_noise_alpha
        self._graphed: GraphedModule | None = None
        self._replicated: ReplicatedModule | None = None
        self._logged: tuple[int, Counter[str]] = (0, Counter())
        self._trained = self._ahead = 0  # calls; largest captured for: 1 evaluation, 2 training

    @property
    def graphed(self) -> GraphedModule:
        """The graphed module of the trainer's model; a new one where that was replaced."""
        if self._packed_of is not self.model:
            if self._graphed is not None:
                control(self._graphed).close()
            self._prepare_packed()
        if self._graphed is None:
            options = self._graph_options
            self._graphed = graph(self._packed, self.data_collator.capacities, **options)
        return self._graphed

    def _replicas(self) -> ReplicatedModule | None:
        """The replica of this process, None where it is the only process."""
        graphed = self.graphed
        if self._replicated is None and self.accelerator.num_processes > 1:
            self._replicated = replicate(graphed)
        return self._replicated

    @property
    def stats(self) -> Stats:
        """Replays and fallbacks."""
        return control(self.graphed).stats

    @property
    def packing(self) -> PackReport:
        """Counts of all packs that were trained on."""
        return self._total

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and say in a line what graphs and packing did."""
        found = super().train(*args, **kwargs)
        if self.is_world_process_zero():
            print(self._in_short(found.metrics[SPEED]))
        return found

    def get_train_dataloader(self) -> Any:
        """The trainer's loader, of documents that are not packed yet."""
        self._before = self._total.tokens, self._preparing
        packing, self.data_collator = self.data_collator, read_examples
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = packing

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[dict[str, Any]], Tensor]:
        """The microbatches of a step, to which the packs of all their documents are dealt out, and
        the labels of the step."""
        given = list(itertools.islice(epoch_iterator, num_batches))
        examples = [example for microbatch in given for example in microbatch[EXAMPLES]]
        packs, report = self.data_collator.pack_step(examples)
        add_report(self._seen, report)
        add_report(self._total, report)
        # The last one has packs if there are any: gradients are reduced while it runs.
        ends = [number * len(packs) // max(len(given), 1) for number in range(len(given) + 1)]
        samples = [{PACKS: packs[start:end]} for start, end in itertools.pairwise(ends)]
        return samples, self._get_num_items_in_batch(samples, device)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward of a microbatch, one pack after the other; the sum of the losses."""
        total, packs = torch.zeros((), device=self.args.device), inputs[PACKS]
        replicated, is_last = self._replicas(), self.accelerator.sync_gradients
        for number, pack in enumerate(packs, 1):
            waits = replicated is not None and not (is_last and number == len(packs))
            with replicated.no_sync() if waits and replicated is not None else nullcontext():
                total += super().training_step(model, {PACKS: [pack]}, num_items_in_batch)
        if replicated is not None and is_last and not packs:
            replicated.reduce_gradients()
        return total

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of a microbatch: token losses divided by the labels of the whole step, or by its
        own."""
        if return_outputs:
            raise ValueError("a packed model returns its loss only; leave return_outputs out")
        if num_items_in_batch is None:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        count = torch.as_tensor(num_items_in_batch, device=self.args.device)
        self._packed.training = self.model.training  # the trainer switches its model alone
        replicas = self._replicas() if torch.is_grad_enabled() else None
        call: torch.nn.Module = replicas or self.graphed
        losses, hits = list[Tensor](), self._hits[self.model.training]
        states: list[Tensor] | None = None if self._states is None else []
        with self.accelerator.autocast():
            self._capture_largest(count, *([] if states is None else ["hidden"]))
            for pack in inputs[PACKS]:
                placed = pack if pack.data.device == self.args.device else pack.to(self.args.device)
                if states is None:
                    found = call(placed, count)
                else:
                    states.append(call(placed, count, "hidden"))
                    found = self._packed.read_head(states[-1], placed.labels, "loss", count)
                if self._counts_hits:
                    hits[0] += found[1].detach()
                    hits[1] += pack.num_loss_tokens
                    found = found[0]
                losses.append(found)
        self._states = states
        loss = sum(losses, torch.zeros((), device=self.args.device)) if losses[1:] else losses[0]
        return loss * self._scale if self._scale > 1 and torch.is_grad_enabled() else loss

    def _capture_largest(self, count: Tensor, *output: str) -> None:
        """Captures the largest capacity before others, which then fit into its memory."""
        if bypass_reason() is not None:
            return
        if torch.is_grad_enabled():
            self._trained += 1
            if self._trained <= self._graph_options.get("warmup", WARM_UP_CALLS):
                return
        # Graphs of training are larger, and evaluation may come first.
        training = self.is_in_train or torch.is_grad_enabled()
        if self._ahead >= 1 + training:
            return
        self._ahead = 1 + training
        largest = PackedBatch.build([[0, 0]], self.data_collator.capacities[-1])
        sample = largest.to(self.args.device), count, *([] if training else output)
        control(self.graphed).build([sample], training=training)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's, in which `preprocess_logits_for_metrics` is called where logits are made,
        of a document at a time."""
        self._preprocess = self.preprocess_logits_for_metrics
        self.preprocess_logits_for_metrics = None
        self._hits[False].zero_()
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics = self._preprocess

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """The mean loss of a microbatch, without gradients, and predictions and labels of each
        example; a loss of NaN without labels, which the trainer leaves out of its mean."""
        if not inputs[PACKS]:
            return None, None, None
        self._states = None if prediction_loss_only else []
        with torch.no_grad():
            loss = self.compute_loss(model, inputs).detach()
            states, self._states = self._states, None
            if not any(pack.num_loss_tokens for pack in inputs[PACKS]):
                loss = torch.full_like(loss, torch.nan)
            if states is None:
                return loss, None, None
            with self.accelerator.autocast():
                return loss, *self._predictions(states, inputs[CONTENTS])

    def _predictions(
        self, states: list[Tensor], contents: list[list[tuple[int, Document]]]
    ) -> tuple[Any, Any]:
        """Predictions and labels of each example, from the logits of one document at a time."""
        found: dict[int, list[Any]] = defaultdict(list)
        for hidden, documents in zip(states, contents, strict=True):
            start = 0
            for number, document in documents:
                rows = hidden[start : start + len(document)]
                start += len(document)
                given = document.tokens if document.targets is None else document.targets
                labels = torch.from_numpy(given).to(hidden.device)[None]
                logits = self._packed.logits(rows).float()[None]
                if self._preprocess is not None:
                    logits = self._preprocess(logits, labels)
                found[number].append((logits, labels))
        predictions, labels = _padded([found[number] for number in sorted(found)])
        return predictions, labels

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, in training with what graphs and packing did since the last time."""
        ends, mode = "train_loss" in logs, "loss" in logs
        # What the trainer itself logs, on all processes: of a step, or of an evaluation.
        own = next((name for name in logs if name == "loss" or name.endswith("_runtime")), None)
        if self._counts_hits and own is not None and not ends:
            right, labels = self.accelerator.gather(self._hits[mode][None]).sum(0).tolist()
            name = own.removesuffix("loss").removesuffix("runtime") + "mean_token_accuracy"
            logs.update({name: right / labels} if labels else {})
            self._hits[mode].zero_()
        if mode:
            logs.update(self._counts())
        if ends:
            tokens, prepared = self._before
            mine = torch.tensor([self._total.tokens - tokens], device=self.args.device)
            seconds = logs["train_runtime"] - (self._preparing - prepared)
            speed = int(self.accelerator.gather(mine).sum()) / max(seconds, 1e-3)
            logs[SPEED] = round(speed, 1)
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Operations as the trainer estimates them: six for each parameter and place of a row."""
        rows = sum(pack.capacity.tokens for pack in inputs[PACKS])
        return int(6 * rows * self.model.num_parameters(exclude_embeddings=True))

    def _counts(self) -> dict[str, float]:
        stats, (replayed, before) = self.stats, self._logged
        fallbacks = stats.fallbacks - before
        self._logged = (stats.replayed, stats.fallbacks.copy())
        found = {
            "replayed": stats.replayed - replayed,
            "fallbacks": sum(fallbacks.values()),
            "tokens": self._seen.tokens,
            "padding": self._seen.padding_fraction,
        }
        self._seen = PackReport()
        found |= {f"fallbacks/{reason}": count for reason, count in fallbacks.items()}
        return {f"{LOGGED}/{name}": value for name, value in found.items()}

    @property
    def _preparing(self) -> float:
        """Seconds of captures and of compilation."""
        if self._graphed is None:
            return 0.0
        return self.stats.capture_seconds + self.stats.compile_seconds

    def _in_short(self, speed: float) -> str:
        """A line about the run."""
        stats, reasons = self.stats, self.stats.fallbacks
        told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        again = sum(stats.recaptures.values())
        return (
            f"packgraph: {speed:,.0f} tokens/s after {self._preparing:.1f} s of captures, "
            f"{self._total.padding_fraction:.1%} padding, {stats.captured} captures "
            f"({again} again), {stats.replayed:,} replays, {sum(reasons.values()):,} eager calls"
            + (f" ({told})" if told else "")
        )

    def _read(self, dataset: Any) -> Any:
        """A data set with the columns that are read, and the one that tells padding."""
        if not (is_table(dataset) and self.args.remove_unused_columns):
            return dataset
        self._set_signature_columns_if_needed()
        read = {*self._signature_columns, "attention_mask"}
        return dataset.select_columns([name for name in dataset.column_names if name in read])

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        # TRL has finished labels by then, and cuts no column but those that it reads.
        if "seq_lengths" not in self._signature_columns:
            self._signature_columns = list(COLUMNS)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Tensor:
        labels = sum(pack.num_loss_tokens for sample in batch_samples for pack in sample[PACKS])
        found = torch.tensor(labels, device=device)
        if self._scale > 1 and torch.is_grad_enabled():
            found = self.accelerator.gather(found[None]).sum()
        return found

    @property
    def _scale(self) -> int:
        """Losses are divided by the labels of all processes, and gradients by their number, which
        the trainer therefore multiplies losses by; 1 where each process counts its own."""
        found: int = self.accelerator.num_processes
        return found if self.args.average_tokens_across_devices else 1

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        if (counted := self.args.include_num_input_tokens_seen) != "no":
            real = counted == "non_padding"
            self.state.num_input_tokens_seen += sum(
                pack.num_tokens if real else pack.capacity.tokens for pack in inputs[PACKS]
            )


def _problems(trainer: Any, collator: Any) -> list[str]:
    """Returns the options of a trainer that packed batches cannot follow."""
    args, accelerator = trainer.args, trainer.accelerator
    found = {
        "data_collator= would not be called; examples are packed as they come": (
            collator is not None
        ),
        "label_smoothing_factor needs logits, which never exist": args.label_smoothing_factor,
        "compute_loss_func needs logits, which never exist": trainer.compute_loss_func,
        "include_for_metrics: inputs are padded rows, which never exist": (
            "inputs" in args.include_for_metrics
        ),
        f"loss_type={getattr(args, 'loss_type', None)!r} is not nll": (
            getattr(args, "loss_type", None) not in (None, "nll")
        ),
        "activation_offloading runs around the model; call packgraph.offload on trainer.graphed": (
            getattr(args, "activation_offloading", False)
        ),
        'torch_compile compiles what is not called; write graph_options={"compile": True}': (
            args.torch_compile
        ),
        "one process drives several GPUs; start one for each, with torchrun": args.n_gpu > 1,
        "one process reads a stream for all; set accelerator_config['dispatch_batches'] = False": (
            trainer.train_dataset is not None
            and not hasattr(trainer.train_dataset, "__len__")
            and accelerator.dispatch_batches is not False
        ),
        "DeepSpeed and FSDP take parameters apart": (
            trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        ),
    }
    return [problem for problem, there in found.items() if there]


def _evaluated(trainer: Any) -> list[Any]:
    """The data sets for evaluation."""
    if (found := trainer.eval_dataset) is None:
        return []
    return list(found.values()) if isinstance(found, dict) else [found]


def _padded(examples: list[list[Any]]) -> Any:
    """Joins tensors [1, n, ...] of each example, and stacks examples with -100 at their ends."""

    def joined(*documents: Tensor) -> Tensor:
        return torch.cat(documents, dim=1) if len(documents) > 1 else documents[0]

    def stacked(*rows: Tensor) -> Tensor:
        if rows[0].ndim < 2:
            return torch.cat(rows)
        most = max(row.shape[1] for row in rows)
        found = rows[0].new_full((len(rows), most, *rows[0].shape[2:]), IGNORED)
        for place, row in zip(found, rows, strict=True):
            place[: row.shape[1]] = row[0]
        return found

    return tree_map(stacked, *(tree_map(joined, *documents) for documents in examples))
