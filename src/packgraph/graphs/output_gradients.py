"""Which outputs get gradients, and in which memory layout: what a backward is captured for.

An output that gets no gradient is not an output with a gradient of zeros: parameters behind it keep `.grad` as it is
(None stays None), and 0 * inf is never computed. Kernels choose by the layout of what they read. So both are facts that
a captured backward bakes, its *pattern*. Warm-up calls show what to expect. A pattern that was not expected runs once
eagerly (`recompute.py`), is learned, and is captured at the next call.
"""
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from packgraph.graphs import fallback
from packgraph.graphs.strides import Layout, layout_of

MAX_PATTERNS = 8  # per segment and key; beyond them such a backward runs eagerly
FellBack = Callable[[str], None]
Pattern = tuple[Layout | None, ...]  # for each output of a segment the layout of its gradient, None = it gets none


def pattern_of(gradients: Sequence[torch.Tensor | None]) -> Pattern:
    """The pattern of the gradients that a segment's outputs got."""
    return tuple([None if gradient is None else layout_of(gradient) for gradient in gradients])


@dataclass
class _Seen:
    """Gradients of the outputs of one call. inner: of those that other outputs were computed from, so that they get
    gradients whether the caller uses them or not."""

    outer: dict[int, Layout] = field(default_factory=dict)
    inner: dict[int, Layout] = field(default_factory=dict)


@dataclass
class _Shared:
    """What all keys know. latest: by the number of outputs what the last call did. twice: see OutputGradients."""

    latest: dict[int, _Seen] = field(default_factory=dict)
    twice: bool = False


class KeyGradients:
    """What is known of the calls of one key.

    Attributes:
        version: Grows when a pattern is learned: graphs captured before do not have it.
    """

    def __init__(self, fell_back: FellBack, shared: _Shared) -> None:
        self.version = 0
        self._fell_back, self._shared = fell_back, shared
        self._guessed = self._may_be_right = False
        self.seen: _Seen | None = None
        self._patterns: dict[int, dict[Pattern, None]] = {}

    def expected(self, leaves: Sequence[Any]) -> dict[int, Layout]:
        """The outputs of a call that will get gradients, by number, and the layouts of those.

        An output that others were computed from is expected to get none of its own where those others get some: a
        caller who uses the loss seldom uses the logits, too.
        """
        able = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        seen = self.seen
        if seen is None:  # strides hold for one shape only
            latest = self._shared.latest.get(len(leaves), _Seen())
            seen = _Seen(dict.fromkeys(latest.outer, ()), dict.fromkeys(latest.inner, ()))
        likely = seen.outer or seen.inner
        found = {number: likely[number] for number in able if number in likely}
        self._may_be_right = bool(found)
        self._guessed = not found or bool(seen.inner)
        return found or dict.fromkeys(able, ())

    def known(self, segment: int) -> list[Pattern]:
        """The patterns that were learned for a segment, oldest first; empty = what is expected will do."""
        return list(self._patterns.get(segment, ()))

    def learn(self, segment: int, captured: Sequence[Pattern], pattern: Pattern) -> None:
        """Note a pattern for which a segment has no backward. captured: those for which it has one."""
        first = self._guessed and segment not in self._patterns
        self._fell_back(fallback.FIRST_BACKWARD if first else fallback.NEW_PATTERN)
        wrong = first and not self._may_be_right
        known = self._patterns.setdefault(segment, {} if wrong else dict.fromkeys(captured))
        if pattern not in known and len(known) < MAX_PATTERNS:
            known[pattern] = None
            self.version += 1

    def forget(self) -> None:
        """Forget the patterns that were learned."""
        self._patterns.clear()

    def refuse_twice(self) -> None:
        """Note that the gradients of a call are to be differentiated, which graphs cannot do."""
        self._shared.twice = True


class OutputGradients:
    """What is known of all calls of one module. fell_back: told of backwards that run eagerly; it holds no graphs."""

    def __init__(self, fell_back: FellBack) -> None:
        self._fell_back, self._shared = fell_back, _Shared()
        self._keys: dict[Hashable, KeyGradients] = {}

    @property
    def twice(self) -> bool:
        """Whether gradients of the module were differentiated themselves (`create_graph=True`)."""
        return self._shared.twice

    def of(self, key: Hashable) -> KeyGradients:
        """What is known of the calls of `key`."""
        if key not in self._keys:
            self._keys[key] = KeyGradients(self._fell_back, self._shared)
        return self._keys[key]

    def forget(self) -> None:
        """Forget the patterns that were learned for segments: the module has changed, and they with it."""
        for known in self._keys.values():
            known.forget()

    def watch(self, key: Hashable, result: Any) -> None:
        """Watch which outputs of an eager call get gradients. key: of the call, None = it can have none."""
        leaves = tree_leaves(result)
        able = {number: leaf for number, leaf in enumerate(leaves)
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf}
        inner, seen = _inner(able), _Seen()
        count, shared, known = len(leaves), self._shared, None if key is None else self.of(key)

        def note(gradient: torch.Tensor | None, number: int) -> None:
            if gradient is None:
                return
            (seen.inner if number in inner else seen.outer)[number] = layout_of(gradient)
            shared.latest[count] = seen
            if known is not None:
                known.seen = seen
            shared.twice = shared.twice or torch.is_grad_enabled()

        for number, leaf in able.items():
            leaf.register_hook(lambda gradient, number=number: note(gradient, number))


def _inner(outputs: dict[int, torch.Tensor]) -> set[int]:
    """The outputs that others were computed from."""
    edges = {(output.grad_fn, output.output_nr): number for number, output in outputs.items()}
    if len(edges) < 2:
        return set()
    found, known = set[int](), set[Any]()
    nodes = [output.grad_fn for output in outputs.values()]
    while nodes:
        node = nodes.pop()
        if node in known or node is None:
            continue
        known.add(node)
        for edge in node.next_functions:
            if edge in edges:
                found.add(edges[edge])
            nodes.append(edge[0])
    return found
