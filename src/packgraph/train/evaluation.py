"""Evaluations between the steps of a run: a loss per token, or per pair of answers, of all
documents and of each source.

    documents ─▶ packs of the run's capacities ─▶ shares of ranks ─▶ forwards alone ─▶ sums of
    token losses, float64 ─▶ all ranks' sums ─▶ loss, perplexity ─▶ best checkpoint, early stop

A pack holds documents of one source, so the loss of a source is the sum over its packs. Forwards
run in evaluation mode without gradients: by forward graphs in the slots and pools of training, by
its code where training runs eagerly.

The invariants: an evaluation leaves parameters, buffers, random states, gradients and the position
in the training data as they were; every rank gets the same numbers, bit by bit, so all of them
decide alike; what was found so far is part of a checkpoint, so a resumed run decides as one that
never stopped.
"""

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import from_all
from packgraph.train.config.sections import EvalConfig
from packgraph.train.data import Microbatches
from packgraph.train.features.context import undisturbed
from packgraph.train.features.preference import FIGURES, PreferenceModel
from packgraph.train.feed import StepFeed
from packgraph.train.metrics import finite
from packgraph.train.optimizer import Optimizer
from packgraph.train.strategies import Executor

MOST_AGAIN = 8  # evaluations of one step, each with more room for experts
STOPPED_EARLY = "stopped early"
LARGEST_LOSS = 700.0  # whose perplexity is a float64


@dataclass
class Best:
    """Results of evaluations so far; the state that a checkpoint holds.

    Attributes:
        identity: Of the documents; other ones have losses of their own.
        evaluations: How many there were.
        loss: The lowest loss per token; None before the first finite one.
        step: The step that it is of.
        in_vain: Evaluations since then.
    """

    identity: str
    evaluations: int = 0
    loss: float | None = None
    step: int | None = None
    in_vain: int = 0

    def add(self, step: int, loss: float) -> None:
        """Take up an evaluation; one that is not finite is no better one."""
        self.evaluations += 1
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            self.loss, self.step, self.in_vain = loss, step, 0
        else:
            self.in_vain += 1


class Evaluation:
    """The evaluations of one run. Collective: all ranks make the same ones.

    Attributes:
        best: What they have found so far.
        feeds: By source, at its beginning between evaluations.
        enabled: Whether there is anything to evaluate on.
    """

    def __init__(
        self,
        options: EvalConfig,
        packs: Mapping[str, Microbatches] | None,
        feed: Callable[[Microbatches], StepFeed],
        executor: Executor,
        optimizer: Optimizer,
        mesh: Mesh,
    ) -> None:
        """packs: by source, at their beginning; None = none. feed: gives this rank its share of
        packs. optimizer: knows the budgets of experts."""
        self._options, self._executor, self._modules = options, executor, executor.modules
        self._pairs = [one.sums for one in self._modules if isinstance(one, PreferenceModel)]
        self._mesh, self._overflow = mesh, optimizer.overflow
        self._device = optimizer.learning_rate.device
        self.feeds = {name: feed(stream) for name, stream in (packs or {}).items()}
        self.enabled = bool(self.feeds)
        self._begin = {name: own.state_dict() for name, own in self.feeds.items()}
        identities = [state["identity"] for state in self._begin.values()]
        self.best = Best(hashlib.sha256(repr(identities).encode()).hexdigest()[:16])
        self._last: dict[str, Any] = {}
        self._seconds, self._counts = 0.0, (0, 0)  # replayed and eager forwards of the last one

    def is_due(self, step: int) -> bool:
        """Tells whether an evaluation follows this step."""
        return self.enabled and step % self._options.every == 0

    @property
    def ending(self) -> str | None:
        """Reason why the run is to end, for its summary; None where it goes on."""
        if not self.enabled or not 0 < self._options.patience <= self.best.in_vain:
            return None
        return f"{STOPPED_EARLY}: no better evaluation since step {self.best.step or 0}"

    def run(self, step: int) -> dict[str, Any]:
        """Evaluate the weights as they are after `step`. Nothing may be in flight.

        Returns:
            What a row of metrics.jsonl gets: `eval_loss` and `eval_perplexity` (null where they
            are no numbers), `eval_loss/NAME` of each source where there are several, `eval_tokens`
            (labels that count) and `eval_seconds`. Of pairs `eval_rewards/...` in place of a
            perplexity, and `eval_pairs` in place of tokens.

        Raises:
            DataError: A document cannot be used.
            RuntimeError: The room for experts did not suffice after several attempts.
        """
        began = time.perf_counter()
        sums, tokens = self._sums()
        total = sum(tokens.values())
        loss, *figures = (math.fsum(one) / max(1, total) for one in zip(*sums.values()))
        self.best.add(step, loss)
        means = {name: sums[name][0] / max(1, tokens[name]) for name in sums}
        several = means if len(means) > 1 else {}
        of_pairs = {f"eval_{name}": finite(one) for name, one in zip(FIGURES, figures)}
        perplexity = math.exp(loss) if loss < LARGEST_LOSS else None
        self._last = {
            "eval_loss": finite(loss),
            **(of_pairs or {"eval_perplexity": perplexity}),
            **{f"eval_loss/{name}": finite(mean) for name, mean in several.items()},
            f"eval_{self._unit}": total,
            "eval_seconds": time.perf_counter() - began,
        }
        self._seconds += self._last["eval_seconds"]
        return dict(self._last)

    def in_words(self) -> str:
        """The last evaluation, for people."""
        row, best = self._last, self.best
        if row["eval_loss"] is None:
            return "evaluation: the loss is no number"
        perplexity, accuracy = (row.get(f"eval_{one}") for one in ("perplexity", FIGURES[2]))
        sources = [
            f"{name.partition('/')[2]} {value:.4f}"
            for name, value in row.items()
            if name.startswith("eval_loss/") and value is not None
        ]
        return (
            f"evaluation loss {row['eval_loss']:.4f}"
            + (f", perplexity {perplexity:.4g}" if perplexity is not None else "")
            + (f", accuracy {accuracy:.2%}" if accuracy is not None else "")
            + (f" ({', '.join(sources)})" if sources else "")
            + f", {row[f'eval_{self._unit}']:,} {self._unit} in {row['eval_seconds']:.2f} s"
            + (" (best so far)" if not best.in_vain else f" (best: step {best.step})")
        )

    @property
    def _unit(self) -> str:
        """Unit that losses are means over."""
        return "pairs" if self._pairs else "tokens"

    def state(self) -> dict[str, Any]:
        """JSON-able, for `restore`; empty where nothing is evaluated."""
        return dict(vars(self.best)) if self.enabled else {}

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Go on from what a checkpoint holds. Returns notes for people."""
        identity = self.best.identity
        found = Best(**state) if state else Best(identity)
        self.best = found if found.identity == identity else Best(identity)
        told = "other documents are evaluated on than before: the best loss begins anew"
        return [told] if self.enabled and self.best is not found else []

    def summary(self) -> dict[str, Any]:
        """Entry `evaluation` of summary.json. seconds: of all evaluations of this process.
        replayed, fallbacks: forwards of this rank in the last one, as of training."""
        best = {key: value for key, value in vars(self.best).items() if key != "identity"}
        replayed, fallbacks = self._counts
        counts = {"replayed": replayed, "fallbacks": fallbacks}
        return {**best, "seconds": self._seconds, **counts, "last": self._last}

    def close(self) -> None:
        """End the threads that make steps ahead."""
        for feed in self.feeds.values():
            feed.close()

    def _sums(self) -> tuple[dict[str, Sequence[float]], dict[str, int]]:
        """By source, over all ranks: sums of token losses, or of losses of pairs and their figures;
        labels that count, or pairs."""
        for _ in range(MOST_AGAIN):
            lacking, tokens = 0.0, dict.fromkeys(self.feeds, 0)
            size = len(self.feeds), 1 + sum(len(one.losses) for one in self._pairs)
            totals = torch.zeros(size, dtype=torch.float64, device=self._device)
            with (
                self._executor.uncounted(),
                undisturbed(self._modules, self._device),
                in_evaluation(self._modules),
                torch.no_grad(),
            ):
                self._executor.before_evaluation()
                before = self._executor.totals()
                for name, total in zip(self.feeds, totals, strict=True):
                    tokens[name] = self._add(name, total)
                now = self._executor.totals()
                was, eager = (sum(one["fallbacks"].values()) for one in (before, now))
                self._counts = now["replayed"] - before["replayed"], eager - was
                if self._overflow is not None:
                    lacking = self._overflow.take_demand("evaluation_demand")
            if not lacking:
                mine = totals if self._mesh.tells_loss else torch.zeros_like(totals)
                every = from_all(self._mesh, mine.flatten().tolist())
                sums = [math.fsum(one) for one in zip(*every, strict=True)]
                rows = [sums[n : n + size[1]] for n in range(0, len(sums), size[1])]
                return dict(zip(self.feeds, rows, strict=True)), tokens
            # Rows of experts found no room and were left out: give more, and capture for that.
            assert self._overflow is not None
            with self._executor.rebuilding():
                self._overflow.give(lacking)
        raise RuntimeError(
            f"an evaluation did not fit into the room for experts {MOST_AGAIN} times; give more "
            "with --parallel.expert-room"
        )

    def _add(self, name: str, total: Tensor) -> int:
        """Add the sums of this rank's share of a source to `total`; the labels that count, or the
        pairs, on all ranks."""
        feed, tokens = self.feeds[name], 0
        feed.load_state_dict(self._begin[name])
        try:
            while (step := feed.take()).packs:
                total[0] += self._executor.evaluate(step.share)
                for sums in self._pairs:
                    total[1:] += sums.take()
                tokens += step.loss_tokens
                feed.go_on()
        finally:
            feed.close()
        return tokens


@contextlib.contextmanager
def in_evaluation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """All of these modules are in evaluation mode within, and as they were afterwards."""
    flags = [(owner, owner.training) for module in modules for owner in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for owner, training in flags:
            owner.training = training
