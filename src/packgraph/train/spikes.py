"""Steps that went wrong: loss or gradient norm far outside of what the steps before had.

    limit = median + WIDTH x spread        spread: 1.4826 x median absolute deviation, at least a
                                           share of the median

Median and median absolute deviation (Hampel 1974) of the last `WINDOW` good steps are not moved by
a few that went wrong. The limit of step n is a function of the steps up to n - 2 alone, because the
host reads the numbers of a step after it has launched the next one: so a resumed run decides as one
that never stopped, and all ranks decide alike. On the device the same limits say, before the
update, whether a step is to change nothing (`Optimizer.guard`).
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from packgraph.train.config.reading import true_of

WINDOW = 64  # good steps that are looked at
LEAST = 16  # fewer say nothing about what is usual
LAG = 2  # the limits of a step know the steps up to that many before it
WIDTH = 10.0
LOSS_SPREAD, NORM_SPREAD = 0.05, 0.3  # least spread, as a share of the median
DEAD = 1e-6  # a gradient norm below that share of the median is none: the model has died
MOST_IN_A_ROW = 10  # steps left out one after another before the run stops
MOST_RETURNS = 5  # ways back to one checkpoint before it does
BEST_WINDOW = 10  # steps whose mean loss makes a checkpoint the best


class NonFiniteLossError(RuntimeError):
    """Loss, gradients or weights became NaN or infinite; the run stops and the last checkpoint
    stays."""


class SpikeError(RuntimeError):
    """Loss or gradient norm was far outside of the usual, and that is to end the run."""


class GoBack(Exception):
    """A step went wrong, and the run is to go back to its newest checkpoint."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(what)
        self.step = step


class Limits(NamedTuple):
    """Usual range: loss and gradient norm up to these, the norm at least `least_norm`."""

    loss: float = math.inf
    norm: float = math.inf
    least_norm: float = 0.0


@dataclass
class Spikes:
    """The last good steps, what was found and done about others, and which checkpoint was the best.

    Attributes:
        window: Step, loss and gradient norm of the last good steps.
        seen: Steps that went wrong. skipped: those whose update was left out. rolled_back: ways
            back to a checkpoint.
        in_a_row: Steps left out one after another. returns: Ways back to the newest checkpoint.
        best_step: The step of the best checkpoint. best_loss: The mean loss up to it.
    """

    window: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    seen: int = 0
    skipped: int = 0
    rolled_back: int = 0
    in_a_row: int = 0
    returns: int = 0
    best_step: int | None = None
    best_loss: float | None = None

    def limits(self, step: int) -> Limits:
        """Limits of loss and gradient norm at `step`."""
        known = [entry for entry in self.window if entry[0] <= step - LAG]
        if len(known) < LEAST:
            return Limits()
        losses, norms = [entry[1] for entry in known], [entry[2] for entry in known]
        return Limits(
            _limit(losses, LOSS_SPREAD), _limit(norms, NORM_SPREAD), DEAD * statistics.median(norms)
        )

    def problem(self, step: int, loss: float, norm: float) -> str | None:
        """Message on what is wrong with a step; None if it is no spike."""
        limits = self.limits(step)
        return next(
            iter(
                true_of(
                    {
                        f"loss {loss}, gradient norm {norm}": not math.isfinite(loss + norm),
                        f"loss {loss:.5g} is far above the usual (limit {limits.loss:.5g})": loss
                        > limits.loss,
                        f"gradient norm {norm:.5g} is far above the usual (limit "
                        f"{limits.norm:.5g})": norm > limits.norm,
                        f"gradient norm {norm:.5g} is next to nothing: the model has stopped to "
                        "learn": norm < limits.least_norm,
                    }
                )
            ),
            None,
        )

    def judge(
        self,
        step: int,
        loss: float,
        norm: float,
        *,
        left_out: bool,
        policy: str,
        note: Callable[[str], None],
        advise: Callable[[int, str], str],
    ) -> bool:
        """Hold a step against those before it. Returns whether its update was left out.

        left_out: the device has done so. policy: `run.on_spike`. note: tells people. advise: the
        message of an error at a step, with how to go on. Raises NonFiniteLossError, SpikeError and
        GoBack.
        """
        problem = self.problem(step, loss, norm)
        if problem is None and not left_out:
            self.add(step, loss, norm)
            return False
        problem = (
            problem or f"loss {loss:.5g}, gradient norm {norm:.5g} are at the limit of the usual"
        )
        if policy == "rollback":
            self.must_go_back(step, problem, advise)
        self.seen += 1
        if left_out:
            self.skipped += 1
            self.in_a_row += 1
            if self.in_a_row >= MOST_IN_A_ROW:
                told = f"{problem}; the updates of {MOST_IN_A_ROW} steps in a row were left out"
                raise SpikeError(advise(step, told))
            note(f"step {step}: {problem}. Its update is left out")
            return True
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteLossError(advise(step, problem))
        if policy == "stop":
            raise SpikeError(advise(step, problem))
        self.add(step, loss, norm)
        note(f"step {step}: {problem}")
        return False

    def must_go_back(self, step: int, problem: str, advise: Callable[[int, str], str]) -> NoReturn:
        """Raise GoBack, or SpikeError where that has not helped."""
        if self.returns >= MOST_RETURNS:
            told = (
                f"{problem}; the run has gone back to one checkpoint {MOST_RETURNS} times already"
            )
            raise SpikeError(advise(step, told))
        raise GoBack(step, problem)

    def add(self, step: int, loss: float, norm: float) -> None:
        """A good step."""
        self.window.append((step, loss, norm))
        self.in_a_row = 0

    def is_best(self, step: int) -> bool:
        """Tells whether the last steps up to `step` had the lowest mean loss of all that were asked
        about; notes it then."""
        losses = [entry[1] for entry in self.window][-BEST_WINDOW:]
        if len(losses) < BEST_WINDOW or self.in_a_row:
            return False
        mean = math.fsum(losses) / len(losses)
        if self.best_loss is not None and mean >= self.best_loss:
            return False
        self.best_step, self.best_loss = step, mean
        return True

    def counts(self) -> dict[str, Any]:
        """Counts for summary.json."""
        return {
            "seen": self.seen,
            "skipped": self.skipped,
            "rolled_back": self.rolled_back,
            "best_step": self.best_step,
            "best_loss": self.best_loss,
        }

    def state(self) -> dict[str, Any]:
        """JSON-able, for `restored`."""
        return {
            **self.counts(),
            "in_a_row": self.in_a_row,
            "returns": self.returns,
            "window": [list(entry) for entry in self.window],
        }

    @staticmethod
    def restored(state: Mapping[str, Any]) -> "Spikes":
        """Restores the object of `state`; a new one where it is empty."""
        made = Spikes(**{key: value for key, value in state.items() if key != "window"})
        made.window.extend(
            (int(step), float(loss), float(norm)) for step, loss, norm in state.get("window", ())
        )
        return made


def _limit(values: Sequence[float], least_share: float) -> float:
    median = statistics.median(values)
    deviation = statistics.median(abs(value - median) for value in values)
    return median + WIDTH * max(1.4826 * deviation, least_share * abs(median))
