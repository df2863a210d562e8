"""Messages of a graphed module to its user: each once, at the user's line, with what to do.

a call ran eagerly though nobody asked for that     once per reason, after warm-up; in strict mode
                                                    an error
a number among the arguments takes ever new values  once per argument: each is captured by itself
no call was ever replayed                           when the module is closed, deleted, or the
                                                    process ends
"""

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from packgraph.graphs import fallback
from packgraph.graphs.errors import CaptureError, forget_frames, user_line, user_place, warn
from packgraph.graphs.key import packed_batches, unfit
from packgraph.packing.capacity import Capacity

MOST_FLOATS, MOST_OTHERS = (
    3,
    8,
)  # values of an argument when its user is told; integers are often a few sizes
_SHOWN = 4


class Notices:
    """Messages given about one graphed module. It holds nothing of the module, so that it can
    outlive it.

    name: of the module's class. warmup: calls that are still expected to run eagerly.
    """

    def __init__(self, name: str, strict: bool, warmup: int) -> None:
        self._name, self.strict, self._quiet = name, strict, warmup
        self._made = user_place()
        self._told: dict[str, str] = {}  # reasons, and what to do about them
        self.lines: dict[str, str] = {}  # and where they were met
        self._unasked: Counter[str] = Counter()
        self._values: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._ended = False
        self.replays = False

    def fell_back(self, reason: str, detail: Callable[[], str] = str) -> None:
        """A call runs eagerly. Raises CaptureError in strict mode if nobody asked for that, after
        warm-up."""
        # Of code that is traced nobody can tell what `eager` block it will run in.
        found = (
            fallback.REASONS[reason] if reason == fallback.TRACED else fallback.reason_of(reason)
        )
        if self._quiet and (reason == fallback.WARM_UP or not found.asked):
            self._quiet -= 1
            return
        if found.asked:
            return
        if self.strict:
            raise CaptureError(
                f"{self._name} would run eagerly: {_with(reason, detail)}",
                user_line(),
                found.remedy,
            )
        self._unasked[reason] += 1
        if reason not in self._told:
            self._told[reason] = found.remedy
            what = f"{self._name} runs eagerly: {_with(reason, detail)}"
            self.lines[reason] = _tell(what, found.remedy)

    def complain(
        self,
        error: CaptureError,
        reason: str = fallback.CAPTURE_FAILED,
        so: str = "running eagerly from here on, because a capture failed",
    ) -> None:
        """Raises `error` in strict mode; otherwise warns, and calls run eagerly for `reason`."""
        forget_frames(error)
        if self.strict:
            raise error
        self._told[reason], self.lines[reason] = error.remedy, error.where
        warn(f"{so}: {error}")

    def new_key(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> None:
        """A call of `forward` is going to be captured whose like has not been: do its numbers
        change at every call?"""
        for name, leaf in named_leaves(forward, args, kwargs):
            if type(leaf) not in (float, complex, int, str, bytes):
                continue
            values = self._values[name]
            values[repr(leaf)] = None
            if len(values) == (MOST_FLOATS if type(leaf) in (float, complex) else MOST_OTHERS):
                shown = ", ".join([*values][:_SHOWN]) + (", ..." if len(values) > _SHOWN else "")
                is_number = type(leaf) in (float, complex, int)
                _tell(
                    f"{name} of {self._name} has had {len(values)} values ({shown}): graphs hold "
                    f"{'Python numbers' if is_number else 'strings'} as constants, so calls are "
                    "captured again for "
                    "every new value, and run eagerly when there are too many",
                    f"pass a 0-d tensor, torch.tensor(value, device={str(device)!r})"
                    + (
                        ""
                        if type(leaf) in (float, complex)
                        else "; if it is one of a few sizes, nothing"
                    )
                    if is_number
                    else "pass what changes as a tensor; if it is one of a few words, nothing",
                )

    def end(self) -> None:
        """No call will come any more: say so if none was ever replayed though that was wanted."""
        if self._ended or self.replays or not self._unasked:
            return
        self._ended = True
        counts = ", ".join(f"{reason}: {count}" for reason, count in self._unasked.most_common())
        remedy = self._told[self._unasked.most_common(1)[0][0]]
        warn(
            f"{self._name} was graphed, but none of its calls was replayed: all ran eagerly after "
            f"warm-up ({counts})"
            f"\n  where: {self._made or 'packgraph.graph'}\n  to do: {remedy}",
            self._made,
        )


def _with(reason: str, detail: Callable[[], str]) -> str:
    more = detail()
    return f"{reason} ({more})" if more else reason


def _tell(what: str, remedy: str) -> str:
    """Warns; returns the user's line."""
    line = user_line()
    warn(f"{what}\n  where: {line}\n  to do: {remedy}")
    return line


# To torch.compile a call whose result is known: made while it traces, and no part of what is
# traced.
_tell._dynamo_marked_constant = True  # type: ignore[attr-defined]


def named_leaves(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The leaves of a call's arguments, each with the name or position of its argument of
    `forward`."""
    try:
        names = [
            parameter.name
            for parameter in inspect.signature(forward).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (ValueError, TypeError):  # of code that is not Python's
        names = []
    named = [(repr(names[i]) if i < len(names) else str(i), arg) for i, arg in enumerate(args)]
    for name, arg in [*named, *((repr(name), arg) for name, arg in kwargs.items())]:
        for number, leaf in enumerate(tree_leaves(arg)):
            yield (
                (f"argument {name}" if leaf is arg else f"entry {number} of argument {name}"),
                leaf,
            )


def detail(
    reason: str,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    capacities: Sequence[Capacity],
) -> str:
    """Describes what about these arguments makes the call run eagerly for `reason`; empty where it
    is not about them."""
    declared = f"declared: {', '.join(map(str, capacities)) or 'none'}"
    if reason == fallback.NO_KEY:
        found = ((name, unfit(leaf, device)) for name, leaf in named_leaves(forward, args, kwargs))
        return next((f"{name} is {problem}" for name, problem in found if problem is not None), "")
    if reason in (fallback.UNDECLARED, fallback.DOCUMENTS):
        other = [
            str(batch.capacity)
            for batch in packed_batches((args, kwargs))
            if batch.capacity not in capacities
        ]
        return f"{', '.join(other)}; {declared}"
    if reason == fallback.UNKNOWN_SHAPE:
        shapes = [
            str(tuple(leaf.shape))
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        ]
        return f"tensors of shapes {', '.join(shapes) or '(none)'}; {declared}"
    return ""
