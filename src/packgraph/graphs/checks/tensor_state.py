"""What graphs bake of tensors: identity is watched where they are held, everything else here."""

import operator
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from packgraph.graphs.checks.state_kinds import Mark
from packgraph.graphs.checks.state_tables import Place
from packgraph.graphs.parameters import has_hooks, local_tensor

guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # no public interface
# What torch.compile notes on tensors for itself.
OF_TORCH = frozenset(
    {
        "_dynamo_static_input_type",
        "_dynamo_dynamic_indices",
        "_dynamo_weak_dynamic_indices",
        "_dynamo_unbacked_indices",
        "_dynamo_static_indices",
        "_is_param",
    }
)
_MOST_GUARDS = 4
_requires_grad = operator.attrgetter("requires_grad")
_backward_hooks = operator.attrgetter("_backward_hooks")
_post_hooks = operator.attrgetter("_post_accumulate_grad_hooks")


class Problem(NamedTuple):
    """What changed of a tensor, in words. in_place: a change in place would have been none."""

    what: str
    in_place: bool


class TensorFact(NamedTuple):
    """A tensor as it was. local: its memory on this rank; None for a sparse tensor, which is a
    value."""

    tensor: torch.Tensor
    local: torch.Tensor | None
    pointer: int
    form: tuple[Any, ...]
    trains: bool
    hooked: bool
    bare: bool
    place: Place
    mark: Mark


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.stride(), tensor.shape, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _is_bare(tensor: torch.Tensor) -> bool:
    """Whether nobody has given `tensor` a Python attribute."""
    return OF_TORCH.issuperset(vars(tensor))


def _make_guards(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """A fast test of type, dtype, shape, strides, requires_grad and dispatch keys of all
    `tensors`, by torch's own guards. What they take for requires_grad depends on the mode, so
    they are made and used with gradients on."""
    with torch.enable_grad():
        made = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return made.check  # type: ignore[no-any-return]


def _guards_work() -> bool:
    """Whether torch's guards (no public interface) see what they are used for."""
    changes: list[Callable[[torch.Tensor], Any]] = [
        lambda t: setattr(t, "data", t.data.t()),
        lambda t: setattr(t, "data", torch.zeros(3, 3)),
        lambda t: setattr(t, "data", t.data.double()),
        lambda t: t.requires_grad_(not t.requires_grad),
    ]
    try:
        for change in changes:
            tensor = torch.zeros(2, 3)
            with torch.enable_grad():
                check = _make_guards([tensor])
                if not check(tensor):
                    return False
                change(tensor)
                if check(tensor):
                    return False
    except (AttributeError, TypeError, RuntimeError):
        return False
    return True


def _hooks_made() -> int | None:
    """How many hooks this process has registered, on whatever; None where torch does not count
    them."""
    return getattr(RemovableHandle, "next_id", None)


def _hooks_are_counted() -> bool:
    counts = [_hooks_made()]
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        getattr(torch.zeros(1, requires_grad=True), register)(lambda _: None)
        counts.append(_hooks_made())
    return None not in counts and len(set(counts)) == len(counts)


USE_GUARDS = _guards_work()
COUNT_HOOKS = _hooks_are_counted()


class TensorState:
    """The facts about all tensors that were noted."""

    def __init__(self) -> None:
        self._facts: dict[int, TensorFact] = {}

    def is_bare(self, tensor: torch.Tensor) -> bool:
        """Whether nobody had given the noted `tensor` a Python attribute."""
        return self._facts[id(tensor)].bare

    def note(self, tensor: torch.Tensor, place: Place, mark: Mark) -> bool:
        """Remember `tensor` as it is now; False if that was done."""
        if id(tensor) in self._facts:
            return False
        local = local_tensor(tensor) if tensor.layout is torch.strided else None
        pointer = 0 if local is None else local.data_ptr()
        form = () if local is None else _form(local)
        self._facts[id(tensor)] = TensorFact(
            tensor,
            local,
            pointer,
            form,
            tensor.requires_grad,
            has_hooks(tensor),
            _is_bare(tensor),
            place,
            mark,
        )
        return True

    def seal(self, skip: Set[Mark]) -> None:
        """Make the fast test, of all tensors but those of attributes in `skip`."""
        facts = [fact for fact in self._facts.values() if fact.mark not in skip]
        self._tensors = [fact.tensor for fact in facts]
        self._trains = [fact.trains for fact in facts]
        self._locals = [fact.local for fact in facts if fact.local is not None]
        self._pointers = [fact.pointer for fact in facts if fact.local is not None]
        self._forms = [fact.form for fact in facts if fact.local is not None]
        # The guards see requires_grad of what they are made of: of a parameter, but of a DTensor
        # that of its local part.
        self._others = [fact for fact in facts if fact.local is not fact.tensor]
        self._free = [fact.tensor for fact in facts if not fact.hooked]
        self._hooked = [fact.tensor for fact in facts if fact.hooked]
        self._hooks_made = _hooks_made()
        self._checks = [_make_guards(self._locals)] if USE_GUARDS and self._locals else []
        self._empty = [fact.tensor for fact in facts if not vars(fact.tensor)]
        self._bare = [fact.tensor for fact in facts if fact.bare and vars(fact.tensor)]

    def widen(self) -> bool:
        """Nothing has changed. Whether torch's guards thought so, since autocast and the like
        count for them: then what they see now is fine, too."""
        if not self._checks or len(self._checks) == _MOST_GUARDS or self._forms_hold():
            return False
        self._checks.append(_make_guards(self._locals))
        return True

    def _forms_hold(self) -> bool:
        if self._checks and torch.is_grad_enabled():
            return any(check(*self._locals) for check in self._checks)
        return (
            list(map(_form, self._locals)) == self._forms
            and list(map(_requires_grad, self._tensors)) == self._trains
        )

    def _hooks_hold(self) -> bool:
        if COUNT_HOOKS and self._hooks_made == _hooks_made():  # there are no more than there were
            return not self._hooked or all(map(has_hooks, self._hooked))
        made = _hooks_made()
        holds = (
            not any(map(_backward_hooks, self._free))
            and not any(map(_post_hooks, self._free))
            and all(map(has_hooks, self._hooked))
        )
        if holds:
            self._hooks_made = made
        return holds

    def holds(self) -> bool:
        """Whether nothing has changed for sure."""
        return (
            list(map(torch.Tensor.data_ptr, self._locals)) == self._pointers
            and self._forms_hold()
            and self._hooks_hold()
            and not any(map(vars, self._empty))
            and (not self._bare or all(map(_is_bare, self._bare)))
            and all(
                fact.tensor.requires_grad == fact.trains
                and (fact.local is None or local_tensor(fact.tensor) is fact.local)
                for fact in self._others
            )
        )

    def problem(self, skip: Set[Mark]) -> Problem | None:
        """What has changed, or None."""
        for tensor, local, pointer, form, trains, hooked, bare, place, mark in self._facts.values():
            if mark in skip:
                continue
            if local is not None and (
                local.data_ptr() != pointer or local_tensor(tensor) is not local
            ):
                return Problem(f"the storage of {place} was replaced", True)
            if local is not None and _form(local) != form:
                return Problem(f"shape, strides or dtype of {place} changed", True)
            if tensor.requires_grad != trains:
                return Problem(f"requires_grad of {place} changed", False)
            if has_hooks(tensor) != hooked:
                return Problem(f"{place} got its first hook or lost its last", False)
            if bare and not _is_bare(tensor):
                return Problem(f"an attribute of {place} was added", False)
        return None
