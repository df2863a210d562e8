"""Captures of a module whose ranks exchange data while it runs: made together, or not at all.

A capture runs the collectives of a call more often than the call does. A rank that captured by
itself would wait in them for ranks that replay, or take what they send for something else. So a
rank that is to capture in a call first looks whether all others are to capture in the same call,
and before it begins, whether they still can:

    rank 0   call 7   changed ─▶ meets ─▶ vote ─▶ capture ─▶ vote
    rank 1   call 7   changed ─▶ meets ─▶ vote ─▶ capture ─▶ vote

    rank 0   call 7   replays ─────────────────────▶ its collectives are those of an eager call
    rank 1   call 7   changed ─▶ nobody comes ─▶ runs eagerly, and says so

Calls are counted, so a meeting has a place, and a rank that replays asks nobody. Who comes decides
at once and for all (`parallel/ranks.py`): all capture, or all run that call eagerly. A rank
that waited in vain runs eagerly without waiting again, until all ranks have waited in vain; then
they meet in calls of certain numbers, ever more rarely.
"""

import weakref
from collections.abc import Sequence

from torch import nn

from packgraph.graphs.errors import CaptureError

CAPTURE, START_OVER, EAGER = "capture", "start over", "run eagerly"
MEETING_CALLS = 16  # from one meeting of ranks that have waited in vain to the next, at first
_MOST_DOUBLED = 10


class Consensus:
    """Communication between ranks that capture together; this class is that of a lone process."""

    def __call__(self, what: str, error: CaptureError | None) -> CaptureError | None:
        """Returns the error of a capture that failed on any rank, or None. what: the capture in
        words. error: why it failed here, or None. All ranks must ask."""
        return error

    def join(self) -> str:
        """A name for the meetings of one more module, the same on all ranks."""
        return ""

    def meet(self, place: str, wish: tuple[str, str]) -> str:
        """Waits for all ranks at `place`, but not for ever; `verdict` of their wishes, or EAGER on
        all ranks if any has not come."""
        return wish[0]

    def note(self, fact: str) -> None:
        """Lets other ranks know `fact` of this one."""

    def all_noted(self, fact: str) -> bool:
        """Returns whether all ranks have noted `fact`; waits for nobody."""
        return True


alone = Consensus()
# By identity of the module, which need not be hashable; an attribute of it would be watched.
_CONSENSUS_OF: dict[int, Consensus] = {}


def set_consensus(module: nn.Module, consensus: Consensus) -> None:
    """Lets graphs that are made of `module` from now on be captured by `consensus`."""
    _CONSENSUS_OF[id(module)] = consensus
    weakref.finalize(module, _CONSENSUS_OF.pop, id(module), None)


def consensus_of(module: nn.Module) -> Consensus:
    """Returns the consensus of `module` or of the first module in it that has one, else `alone`."""
    known = (_CONSENSUS_OF.get(id(each)) for each in module.modules())
    return next((consensus for consensus in known if consensus is not None), alone)


def verdict(wishes: Sequence[tuple[str, str]]) -> str:
    """Combines the ranks' requests into one decision.

    Args:
        wishes: Of every rank, CAPTURE or START_OVER, and the call in words.

    Returns:
        START_OVER if any wishes it, else CAPTURE; EAGER where their calls are different ones.
    """
    kinds, calls = zip(*wishes, strict=True)
    if len(set(calls)) > 1:
        return EAGER
    return START_OVER if START_OVER in kinds else CAPTURE


class JointCaptures:
    """Decides whether this rank captures one module in a call, together with all others.

    Attributes:
        calls: Calls of the module so far; equally many on all ranks.
        consensus: Communication with the other ranks.
        is_alone: Whether this rank captures as it likes.
        owed: The call that all capture, until they have confirmed it.
    """

    def __init__(self, consensus: Consensus = alone) -> None:
        self.calls, self.consensus, self._name = 0, consensus, consensus.join()
        self.is_alone = consensus is alone
        self._in_vain, self._agreed = 0, 0
        self._last = -1, "", EAGER
        self.owed: str | None = None

    def decide(self, wish: str, what: str) -> str:
        """CAPTURE, START_OVER or EAGER in the present call; asks the other ranks once per call.

        Args:
            wish: CAPTURE, or START_OVER where graphs do not hold any more on this rank.
            what: The call in words, the same on all ranks.
        """
        if self.is_alone:
            return wish
        call, told, found = self._last
        if call == self.calls:
            # Who has started over by now captures. Another call at the same time is of another
            # thread.
            return CAPTURE if found != EAGER and told == what else EAGER
        found, doubled = EAGER, min(max(self._in_vain - 1, 0), _MOST_DOUBLED)
        is_time = not self.calls % (MEETING_CALLS << doubled)
        if not self._in_vain or (is_time and self.consensus.all_noted(self._fact)):
            found = self.consensus.meet(f"{self._name}/{self.calls}", (wish, what))
            if found == EAGER:
                self._part()
            else:
                self._in_vain, self._agreed = 0, self._agreed + 1
        self._last, self.owed = (self.calls, what, found), None if found == EAGER else what
        return found

    def confirm(self, error: CaptureError | None = None) -> CaptureError | None:
        """Votes on the capture that all ranks agreed on in the present call, once, before it
        begins.

        Args:
            error: Why this rank cannot capture after all, or None.

        Returns:
            Why some rank cannot, or None; None where nothing was agreed on.
        """
        what, self.owed = self.owed, None
        if what is None:
            return None
        failed = self.consensus(what, error)
        if failed is not None:
            self._last = self.calls, what, EAGER
            self._part()
        return failed

    def _part(self) -> None:
        self.consensus.note(self._fact)
        self._in_vain += 1

    @property
    def _fact(self) -> str:
        """That a rank has waited in vain since all captured together."""
        return f"{self._name}/apart after {self._agreed}"
