"""Outputs that get gradients, and their memory layouts: what a backward is captured for.

An output that gets no gradient is not an output with a gradient of zeros: parameters behind it keep
`.grad` as it is (None stays None), and 0 * inf is never computed. Kernels choose by the layout of
what they read. So both are facts that a captured backward bakes, its *pattern*. Warm-up calls show
what to expect. A pattern that was not expected runs once eagerly (`recompute.py`), is learned, and
is captured at the next call.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from packgraph.graphs import fallback
from packgraph.graphs.key import Layout, Pattern, layout_of
from packgraph.torch_internals import hooks_of

MAX_PATTERNS = 8  # per segment and key; beyond them such a backward runs eagerly
FellBack = Callable[[str], None]


@dataclass
class _Shared:
    """Knowledge that all keys share. latest: by the number of outputs what the last call did.
    twice: gradients of the module were differentiated themselves (`create_graph=True`).
    seen_inside: an output that others were computed from had a hook, or kept its gradient."""

    latest: dict[int, dict[int, Layout]] = field(default_factory=dict)
    twice: bool = False
    seen_inside: bool = False


class KeyGradients:
    """Knowledge of which outputs get gradients in the calls of one key.

    Attributes:
        version: Grows when a pattern is learned: graphs captured before do not have it.
        seen: The outputs that got gradients in the last call that was watched, and their layouts.
        shared: What all keys know.
        fell_back: Told of backwards that captured ones do not stand for.
    """

    def __init__(self, fell_back: FellBack, shared: _Shared) -> None:
        self.version = 0
        self.fell_back, self.shared = fell_back, shared
        self._guessed = False
        self.seen: dict[int, Layout] | None = None
        self.patterns: dict[int, dict[Pattern, None]] = {}

    def expected(self, leaves: Sequence[Any]) -> dict[int, Layout]:
        """The outputs of a call that will get gradients, by number, and the layouts of those."""
        able = [
            n
            for n, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        seen = self.seen
        if seen is None:  # strides hold for one shape only
            seen = dict.fromkeys(self.shared.latest.get(len(leaves), {}), ())
        found = {number: seen[number] for number in able if number in seen}
        self._guessed = not found
        return found or dict.fromkeys(able, ())

    def known(self, segment: int) -> list[Pattern]:
        """The patterns that were learned for a segment, oldest first; empty = what is expected will
        do."""
        return list(self.patterns.get(segment, ()))

    def learn(self, segment: int, captured: Sequence[Pattern], pattern: Pattern) -> None:
        """Note a pattern for which a segment has no backward. captured: those for which it has
        one."""
        first = self._guessed and segment not in self.patterns
        self.fell_back(fallback.FIRST_BACKWARD if first else fallback.NEW_PATTERN)
        known = self.patterns.setdefault(segment, {} if first else dict.fromkeys(captured))
        if pattern not in known and len(known) < MAX_PATTERNS:
            known[pattern] = None
            self.version += 1


class OutputGradients:
    """Knowledge of which outputs get gradients in all calls of one module.

    fell_back: told of backwards that run eagerly; it holds no graphs. shared: what all keys know.
    """

    def __init__(self, fell_back: FellBack) -> None:
        self._fell_back, self.shared = fell_back, _Shared()
        self._keys: dict[Hashable, KeyGradients] = {}

    def of(self, key: Hashable) -> KeyGradients:
        """Returns the knowledge of the calls of `key`, which is made if missing."""
        if key not in self._keys:
            self._keys[key] = KeyGradients(self._fell_back, self.shared)
        return self._keys[key]

    def forget(self) -> None:
        """Forget the patterns that were learned for segments: the module has changed, and they with
        it."""
        for known in self._keys.values():
            known.patterns.clear()

    def watch(self, key: Hashable, result: Any) -> None:
        """Watch which outputs of an eager call get gradients from its caller. key: None = the call
        has none.

        An output that others were computed from (logits, beside a loss) gets a gradient through
        them, too: what it gets from the caller is what it gets beyond that.
        """
        leaves = tree_leaves(result)
        able = {
            number: leaf
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf
        }
        numbers = list(able)
        through: dict[int, list[torch.Tensor]] = defaultdict(list)
        inner = dict[int, weakref.ref[torch.Tensor]]()
        for node, read in readers_of_results(list(able.values())):
            places = [(place, numbers[index]) for place, index in read]
            inner.update((number, weakref.ref(able[number])) for _, number in places)
            node.register_hook(partial(_keep, through, places))
        seen: dict[int, Layout] = {}
        count, shared, known = len(leaves), self.shared, None if key is None else self.of(key)

        def note(gradient: torch.Tensor | None, number: int) -> None:
            leaf = inner[number]() if number in inner else None
            shared.seen_inside = shared.seen_inside or (leaf is not None and is_seen(leaf, own=1))
            if gradient is None or _is_sum(gradient, through.pop(number, [])):
                return
            seen[number] = layout_of(gradient)
            shared.latest[count] = seen
            if known is not None:
                known.seen = seen
            shared.twice = shared.twice or torch.is_grad_enabled()

        for number, leaf in able.items():
            leaf.register_hook(lambda gradient, number=number: note(gradient, number))


def _keep(
    found: dict[int, list[torch.Tensor]],
    read: list[tuple[int, int]],
    passed_on: Sequence[torch.Tensor | None],
    arrived: object,
) -> None:
    """A hook of an autograd node: keep what it passes on to outputs. Autograd adds to none of that
    while it is kept."""
    for place, number in read:
        gradient = passed_on[place]
        if gradient is not None:
            found[number].append(gradient)


@torch.no_grad()
def _is_sum(gradient: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    """Returns whether a gradient is the sum of these, in this order, and of nothing else."""
    if len(parts) < 2:
        return bool(parts) and parts[0].data_ptr() == gradient.data_ptr()
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return bool(((total == gradient) | ((total != total) & (gradient != gradient))).all())


_OURS = __name__.split(".")[0]


_SELECT = "SelectBackward0"


def leaves_behind(tensors: Iterable[Any], walked: set[Any] | None = None) -> list[torch.Tensor]:
    """The leaf tensors that need a gradient and that `tensors` were computed from, each once, in
    walking order.

    walked: nodes to leave out, with what is behind them; those that are walked over are added.
    """
    wanted = [
        tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    ]
    found = {id(tensor): tensor for tensor in wanted if tensor.grad_fn is None}
    for node in _nodes_behind(wanted, walked):
        if _is_leaf(node):
            found[id(node.variable)] = node.variable
    return list(found.values())


def readers_of_leaves(tensors: Iterable[torch.Tensor]) -> Counter[int]:
    """Counts the gradients of each leaf behind `tensors`, by identity, that a backward from all of
    them sums up."""
    return Counter(
        id(parent.variable)
        for node in _nodes_behind(tensors)
        for parent, _ in node.next_functions
        if parent is not None and _is_leaf(parent)
    )


def summed_gradients(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Counts, for each leaf behind `tensors` by identity, the gradients that meet in one of its
    elements in a backward from all of them, at the most.

    Nodes that read one index of a dimension (`x[i]`) meet only those that read the same: elsewhere
    they add zeros, which changes no bit.
    """
    found: dict[int, Counter[tuple[int, int] | None]] = {}
    for node in _nodes_behind(tensors):
        for parent, _ in node.next_functions:
            if parent is not None and _is_leaf(parent):
                part = (node._saved_dim, node._saved_index) if node.name() == _SELECT else None
                found.setdefault(id(parent.variable), Counter())[part] += 1
    return {leaf: _most(parts) for leaf, parts in found.items()}


def _most(parts: "Counter[tuple[int, int] | None]") -> int:
    """Gradients that meet in one element: of the whole (None), and of one index of a dimension."""
    whole = parts.pop(None, 0)
    several = len({part[0] for part in parts if part is not None}) > 1  # dimensions, which cross
    return whole + (sum(parts.values()) if several else max(parts.values(), default=0))


def readers_of_results(results: Sequence[torch.Tensor]) -> list[tuple[Any, list[tuple[int, int]]]]:
    """The nodes behind `results` that read some of them, with pairs: the place among a node's
    inputs, and which one.

    They pass gradients of other results on to these; results that nobody reads stand nowhere.
    """
    edges = {(result.grad_fn, result.output_nr): number for number, result in enumerate(results)}
    readers = []
    for node in _nodes_behind(results) if len(edges) > 1 else ():
        read = [
            (place, edges[edge]) for place, edge in enumerate(node.next_functions) if edge in edges
        ]
        if read:
            readers.append((node, read))
    return readers


_OWN_OPERATION = "GeneratedBackwardFor_packgraph_"  # what torch calls a custom operation's
_TRACED = "torch._functorch.autograd_function"  # a custom function, of which a trace has graphs


def runs_python(results: Iterable[torch.Tensor]) -> bool:
    """Returns whether a backward from `results` runs Python code that is not packgraph's (a custom
    function)."""
    return any(
        isinstance(node, torch.autograd.function.BackwardCFunction)
        and (of := type(node)._forward_cls.__module__).split(".")[0] != _OURS  # type: ignore[attr-defined]
        and of != _TRACED
        and not type(node).__name__.startswith(_OWN_OPERATION)
        for node in _nodes_behind([result for result in results if result.requires_grad])
    )


def is_seen(tensor: torch.Tensor, own: int = 0) -> bool:
    """Returns whether anybody sees, or keeps, a result's gradient. own: hooks that do not count."""
    return tensor.retains_grad or len(hooks_of(tensor) or ()) > own


def _nodes_behind(tensors: Iterable[torch.Tensor], walked: set[Any] | None = None) -> Iterator[Any]:
    """Every node of the autograd graph behind `tensors`, once. walked: see `leaves_behind`."""
    seen: set[Any] = set() if walked is None else walked
    stack: list[Any] = [tensor.grad_fn for tensor in tensors]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(parent for parent, _ in node.next_functions)


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"
