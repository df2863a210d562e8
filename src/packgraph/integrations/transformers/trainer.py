"""`PackedTrainer`: transformers' Trainer, and trainers made of it, over packed batches and graphs.

    class SFT(PackedTrainer, SFTTrainer): ...

    examples -- PackingCollator --> packs -- graphed(packed(model)) --> loss -- the trainer -->

`trainer.model` stays the model itself: the trainer's optimizer, checkpoints, adapters and
evaluation know nothing of packs. Only what reads a batch is replaced: columns, collator, counts of
tokens, and the loss. A microbatch that takes several packs runs forward and backward of one after
the other.

Over several processes calls go through `packgraph.replicate`, and the trainer's accelerator makes
no wrapper of DistributedDataParallel. The trainer itself gives each process its own examples and
as many microbatches as all others.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from packgraph.graphs.fallback import Stats
from packgraph.graphs.graphed import GraphedModule, control, graph
from packgraph.integrations.transformers.collator import (
    PACKS,
    REPORT,
    PackingCollator,
    document_lengths,
    is_table,
    microbatch_capacities,
)
from packgraph.integrations.transformers.model import PackedModel, packed
from packgraph.packing.capacity import Capacity
from packgraph.packing.document import COLUMNS
from packgraph.packing.pack import Overlong, PackReport
from packgraph.parallel.replicate import ReplicatedModule, replicate

LOGGED = "packgraph"  # before every name in logs
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
    the last log.

    Args:
        capacities: The static shape or shapes of packs. None derives them from the lengths of the
            training data, so that a microbatch fits in one row.
        overlong: What becomes of a document longer than every capacity: `error`, `split` or `drop`.
        graph_options: Further arguments of `packgraph.graph`, such as `{"compile": True}`.

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
        >>> trainer.stats.replayed
        2
    """

    _signature_columns: Any

    def __init__(
        self,
        *args: Any,
        capacities: Capacity | Iterable[Capacity] | None = None,
        overlong: Overlong = "error",
        graph_options: Mapping[str, Any] | None = None,
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
            examples = self.args.per_device_train_batch_size
            capacities = microbatch_capacities(train, examples, others)
        else:
            for dataset in [train, *others]:
                if isinstance(dataset, list) or is_table(dataset):
                    document_lengths(dataset)  # its rows are checked
        self.data_collator = PackingCollator(capacities, overlong=overlong)
        self.model_accepts_loss_kwargs = True  # the loss is divided by the tokens of a step
        self.loss_is_scaled_for_ga = True
        self._graph_options = dict(graph_options or {})
        self._packed: PackedModel = packed(self.model)
        self._packed_of = self.model
        self._graphed: GraphedModule | None = None
        self._replicated: ReplicatedModule | None = None
        if self.accelerator.num_processes > 1:
            self.accelerator.prepare_model = functools.partial(
                self.accelerator.prepare_model, evaluation_mode=True
            )
        self._seen, self._total = PackReport(), PackReport()
        self._logged: tuple[int, Counter[str]] = (0, Counter())

    @property
    def graphed(self) -> GraphedModule:
        """The graphed module of the trainer's model; a new one where that was replaced."""
        if self._packed_of is not self.model:
            if self._graphed is not None:
                control(self._graphed).close()
            self._packed, self._packed_of = packed(self.model), self.model
            self._graphed = self._replicated = None
        if self._graphed is None:
            options = self._graph_options
            self._graphed = graph(self._packed, self.data_collator.capacities, **options)
            self._logged = (0, Counter())
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
        more = inputs[REPORT].state_dict()
        for counts in (self._seen, self._total):
            known = counts.state_dict()
            counts.load_state_dict({name: known[name] + more[name] for name in known})
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
        packs = inputs[PACKS]
        if num_items_in_batch is None:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        num_items_in_batch = torch.as_tensor(num_items_in_batch, device=self.args.device)
        self._packed.training = self.model.training  # the trainer switches its model alone
        replicas = self._replicas() if torch.is_grad_enabled() else None
        call: torch.nn.Module = replicas or self.graphed
        with self.accelerator.autocast():
            device = self.args.device
            placed = [pack if pack.data.device == device else pack.to(device) for pack in packs]
            losses = [call(pack, num_items_in_batch) for pack in placed]
        loss = sum(losses, torch.zeros((), device=self.args.device)) if losses[1:] else losses[0]
        return loss * self._scale if self._scale > 1 and torch.is_grad_enabled() else loss

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, None, None]:
        """The mean loss of a microbatch, without gradients; NaN without labels, which the trainer
        leaves out of its mean."""
        if not inputs[PACKS]:
            return None, None, None
        with torch.no_grad():
            loss = self.compute_loss(model, inputs).detach()
        labelled = any(pack.num_loss_tokens for pack in inputs[PACKS])
        return loss if labelled else torch.full_like(loss, torch.nan), None, None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, in training with what graphs and packing did since the last time."""
        if "loss" in logs:
            logs.update(self._counts())
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
        "compute_metrics needs logits, which never exist": trainer.compute_metrics,
        "include_for_metrics needs logits, which never exist": args.include_for_metrics,
        f"loss_type={getattr(args, 'loss_type', None)!r} is not nll": (
            getattr(args, "loss_type", None) not in (None, "nll")
        ),
        "activation_offloading runs around the model; call packgraph.offload on trainer.graphed": (
            getattr(args, "activation_offloading", False)
        ),
        "neftune_noise_alpha scales noise by the length of a row": args.neftune_noise_alpha,
        'torch_compile compiles what is not called; write graph_options={"compile": True}': (
            args.torch_compile
        ),
        "one process drives several GPUs; start one for each, with torchrun": args.n_gpu > 1,
        "one process reads a stream for all; set accelerator_config['dispatch_batches'] = False": (
            accelerator.num_processes > 1
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
