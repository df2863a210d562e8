"""The most tokens that run: a search by few trials, since each runs at the limit of the device and
may take minutes.

What smaller rows took says where to begin: memory of the device grows with the tokens, and pinned
memory of the host does. So the usual search is two trials: the guess runs, and one step more does
not.
"""

from collections.abc import Callable
from typing import NamedTuple

from packgraph.bench.timing import Deadline

# of the tokens that fit by what a smaller row took: holes in pools do not grow with it alone
SURE = 0.95


class HeldBytes(NamedTuple):
    """Bytes on the device and pinned ones on the host: that there are, or that a token takes; 0
    where nobody knows."""

    device: float = 0.0
    host: float = 0.0


def most_tokens(
    runs: Callable[[int], bool],
    step: int,
    deadline: Deadline,
    known: int,
    takes: HeldBytes,
    there: HeldBytes,
) -> tuple[int, str | None]:
    """The most tokens, in steps of `step`, for which `runs`, and what kept from trying more; None
    where more do not run.

    known: tokens that run. takes: by a token. A host that has no more pinned memory ends the
    process, so nothing is tried that would take more than is `there`.
    """
    stopped: str | None = None

    def on_host(steps: int) -> float:
        return steps * step * takes.host

    def fits(steps: int) -> bool | None:
        nonlocal stopped
        if deadline.passed():
            stopped = deadline.reason
            return None
        return on_host(steps) <= there.host and runs(steps * step)

    steps = search(fits, known // step, _guess(takes, there) // step)
    if stopped is None and on_host(steps + 1) > there.host:
        stopped = (
            f"{(steps + 1) * step} would take {on_host(steps + 1) / 2**30:.0f} GiB of pinned host "
            "memory, more "
            f"than the {there.host / 2**30:.0f} GiB of --host-gib"
        )
    return step * steps, stopped


def _guess(takes: HeldBytes, there: HeldBytes) -> int:
    """Tokens that should fit; 0 where the device's memory is not known."""
    if not takes.device or not there.device:
        return 0
    most = SURE * there.device / takes.device
    return int(min(most, there.host / takes.host) if takes.host else most)


def search(fits: Callable[[int], bool | None], good: int = 0, guess: int = 0) -> int:
    """The largest number for which `fits`, 0 if it does not fit 1; what fits a number fits all
    smaller ones.

    fits: None where there is no time to find out, which ends the search with the largest that is
    known to fit. good: a number that fits. guess: what is tried first (at least one more than
    `good`); what follows is one more or less, then two, four and so on, up to where it does not fit
    or down to where it does. Without a guess twice what fits is tried. Then what is between is
    halved.
    """
    ahead, bad = 1, max(guess, good + 1) if guess else max(1, 2 * good)
    while found := fits(bad):
        good, bad, ahead = bad, bad + ahead if guess else 2 * bad, 2 * ahead
    less = 1 if guess and ahead == 1 else bad - good  # below a guess that did not fit
    while found is not None and bad - good > 1:
        tried = bad - less if less < bad - good else (good + bad) // 2
        found = fits(tried)
        if found:
            good, less = tried, bad - good
        elif found is not None:
            bad, less = tried, 2 * less
    return good
