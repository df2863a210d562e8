"""`packgraph.replicate`: a graphed module whose gradients are those of all ranks.

    call      the outputs' nodes of autograd get a hook that says when their backward begins
    begins    nodes that add to gradients are found behind the outputs, and hooked; `.grad` of
              what graphs add to becomes a zeroed view of a flat buffer, if it is None
    nodes     a parameter is final when its last node is done; a span of final ones is reduced
    ends      the other spans are reduced, autograd waits for all, hooks go

What is sent, and in which order, is said in `parallel/data.py`, as for packgraph's trainer.
Captured graphs add to the flat buffers themselves, so nothing is copied.

The invariant: a span is sent early only if every gradient in it is known to be final. Where that is
not known (several calls under way, nodes that the walk cannot see) it is sent when the backward
ends.
"""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from packgraph.graphs.graphed import GraphedModule, control
from packgraph.graphs.program import open_objects
from packgraph.graphs.region import Region
from packgraph.graphs.wrapper import Wrapper
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.data import FlatParameters, accumulating_nodes
from packgraph.parallel.flat_buffers import Member
from packgraph.parallel.ranks import gather
from packgraph.torch_internals import (
    at_end_of_backward,
    backward_task,
    current_node,
    version_of,
    zero_each,
)

Reduce = Literal["mean", "sum"]


def replicate(
    graphed: GraphedModule,
    *,
    reduce: Reduce = "mean",
    group: dist.ProcessGroup | None = None,
) -> "ReplicatedModule":
    """Trains a graphed module on several ranks, one replica each, without
    DistributedDataParallel.

    Parameters and buffers of the first rank are sent to all others now. From then on every backward
    through the result, unless its forward ran within `no_sync()`, leaves the gradients of all ranks
    in `.grad`, on every rank. They are reduced in buckets while the backward is running.

    Every rank must run as many of these backwards; microbatches within `no_sync()` may be of any
    number on each, and a rank without a microbatch calls `reduce_gradients()`. Calls may replay on
    one rank and run eagerly on another. A parameter without a gradient counts as zeros where other
    ranks have one, and keeps None where no rank has.

    Args:
        graphed: Returned by `packgraph.graph`, on every rank with the same parameters. What needs a
            gradient now is reduced; what is frozen later need not be told.
        reduce: `mean` divides the sum over the ranks by their number, as DistributedDataParallel
            does: right for losses that are means on each rank. `sum` is right for losses that are
            divided by what all ranks count, such as `tokens_in_step(...)`; gradients must then be
            zeroed before the next backward.
        group: The process group of the replicas. None is that of all ranks.

    Returns:
        The module to call, with `no_sync`, `reduce_gradients` and `tokens_in_step`; all other names
        are those of `graphed`.

    Raises:
        RuntimeError: If there is no process group.
        TypeError: If `graphed` was not returned by `packgraph.graph`, or has distributed
            parameters.
        ValueError: If `reduce` is unknown, nothing needs a gradient, or ranks have other
            parameters.

    Examples:
        >>> import torch.distributed as dist
        >>> store = dist.HashStore()  # one rank; torchrun and init_process_group("nccl") for more
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> replicated = packgraph.replicate(packgraph.graph(torch.nn.Linear(4, 4), warmup=1))
        >>> with replicated.no_sync():
        ...     replicated(torch.ones(2, 4)).sum().backward()
        >>> replicated(torch.ones(2, 4)).sum().backward()  # reduces both
        >>> replicated.weight.grad[0].tolist()
        [4.0, 4.0, 4.0, 4.0]
        >>> dist.destroy_process_group()
    """
    if not isinstance(graphed, GraphedModule):
        raise TypeError(
            "packgraph.replicate wants the module that packgraph.graph returned, not an object of "
            f"type {type(graphed).__name__}"
        )
    check_ranks("replicate", reduce)
    group = dist.group.WORLD if group is None else group
    assert group is not None
    check_same_parameters(graphed, group, "replicate")
    return ReplicatedModule(graphed, Replicas(graphed, reduce, group))


class ReplicatedModule(Wrapper):
    """Returned by `packgraph.replicate`: behaves as the graphed module; backwards through it reduce
    gradients over the ranks. Its own names are those of `Replicas`."""


class _Call:
    """One call of the module. Only hooks on the nodes of its outputs hold it: when its autograd
    graph is gone, so is the call."""

    def __init__(self, reduces: bool, roots: int) -> None:
        self.reduces, self.roots, self.has_begun = reduces, roots, False


class _Backward:
    """State of a running backward: `task`, autograd's number of it.

    reduces: a call in it does. early: spans may be sent before it ends. waits: nodes that each
    parameter still waits for, by identity. empty: members whose `.grad`
    was None. touched:
    parameters that have got a gradient. later: those that a region has handed to autograd.
    """

    def __init__(self, task: int) -> None:
        self.task, self.calls, self.reduces, self.early = task, 0, False, False
        self.waits: Counter[int] = Counter()
        self.empty: list[Member] = []
        self.touched, self.later = set[int](), set[int]()
        self.handles, self.nodes = list[Any](), list[Any]()

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.nodes.clear()


class Replicas:
    """Implementation of a replicated module: calling it is calling the graphed module."""

    def __init__(self, graphed: GraphedModule, reduce: Reduce, group: dist.ProcessGroup) -> None:
        self._graphed, self._reduce, self._group = graphed, reduce, group
        self._flat = FlatParameters(graphed.named_parameters(), group, result=reduce)
        self._members = list(self._flat.members())
        self._member_of = {id(member.parameter): member for member in self._members}
        control(graphed).capturer.place_gradients(
            {id(member.parameter): member.gradient for member in self._members}
        )
        self._device = control(graphed).device
        self._had = torch.ones(len(self._members), device=self._device)
        self._reduces = True
        self._running: _Backward | None = None
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._versions: list[int] = []  # of spans, when they were reduced
        broadcast_from_first([*graphed.parameters(), *graphed.buffers()], group)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the graphed module; see `replicate`."""
        result = self._graphed(*args, **kwargs)
        if torch.is_grad_enabled():
            self._watch(result)
        return result

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards of calls made within the block add to `.grad` of this rank and send nothing:
        for all microbatches of a step but the last. What decides is where the forward ran."""
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def reduce_gradients(self) -> None:
        """Reduce what is in `.grad`, None as zeros: for a rank that has no microbatch left for the
        step while others have, or after backwards within `no_sync()` alone."""
        self._refuse_twice()
        missing = [number for number, m in enumerate(self._members) if m.parameter.grad is None]
        self._had.fill_(1)
        for number in missing:
            self._had[number] = 0
        self._flat.reduce()
        dist.all_reduce(self._had, group=self._group)
        if missing:  # only then the host waits
            ranks = self._had.tolist()
            for number in missing:
                member = self._members[number]
                member.parameter.grad = member.gradient if ranks[number] else None
        self._versions = [version_of(span.gradients) for span in self._flat.spans]

    def tokens_in_step(self, batches: Iterable[PackedBatch]) -> Tensor:
        """The labels that count in `batches`, the microbatches of this rank's step, and in those of
        all other ranks: int64 [] on the device. All ranks must call it."""
        labels = sum(batch.num_loss_tokens for batch in batches)
        found = torch.tensor(labels, device=self._device)
        dist.all_reduce(found, group=self._group)
        return found

    def _watch(self, result: Any) -> None:
        """Have a word when the backward of a call begins."""
        leaves = tree_leaves(open_objects(result))
        roots = {
            id(node): node
            for leaf in leaves
            if isinstance(leaf, Tensor) and (node := leaf.grad_fn) is not None
        }
        unseen = [leaf for leaf in leaves if not isinstance(leaf, Tensor | str | float | None)]
        unseen = [leaf for leaf in unseen if not isinstance(leaf, int)]
        if unseen and not roots:
            raise TypeError(
                "packgraph.replicate finds no tensor with a gradient in an output of type "
                f"{type(unseen[0]).__name__}: return tensors, or lists, tuples and dicts of them"
            )
        call = _Call(self._reduces, len(roots))
        for node in roots.values():
            node.register_prehook(functools.partial(self._begins, call))
        if roots:
            self._calls.add(call)

    def _begins(self, call: _Call, *_: object) -> None:
        """A hook before the node of an output."""
        run = self._run_of(backward_task())
        others = any(not other.has_begun for other in self._calls if other is not call)
        call.has_begun = True
        run.calls += 1
        run.reduces = run.reduces or call.reduces
        early = call.reduces and run.calls == 1 and call.roots == 1 and not others
        if run.early and self._flat.launched:
            raise RuntimeError(
                "two calls of a replicated module were differentiated together after one of them "
                "had been alone: run that backward within no_sync()"
            )
        run.early = early
        if run.reduces or any(member.parameter.grad is None for member in self._members):
            self._follow(run, current_node())

    def _run_of(self, task: int) -> _Backward:
        """The running backward, from its first call on."""
        run = self._running
        if run is not None and run.task == task:
            return run
        if run is not None:
            self._give_up(run)
        self._refuse_twice()
        run = self._running = _Backward(task)
        at_end_of_backward(functools.partial(self._ends, run))
        return run

    def _give_up(self, run: _Backward) -> None:
        """Ends a backward that has raised."""
        run.close()
        if self._flat.launched:
            raise RuntimeError(
                "a backward failed after some of its gradients had been sent to other ranks, so "
                "ranks do not agree any more: begin again from a checkpoint"
            )
        self._flat.forget()
        self._running = None

    def _refuse_twice(self) -> None:
        """Sums over ranks must not be summed over ranks again."""
        now = [version_of(span.gradients) for span in self._flat.spans]
        if (
            self._reduce == "sum"
            and now == self._versions
            and any(member.parameter.grad is member.gradient for member in self._members)
        ):
            raise RuntimeError(
                "gradients are sums over all ranks already, and another backward would sum them "
                "again: zero them first (zero_grad), or run all microbatches of a step but the "
                "last within no_sync()"
            )

    def _follow(self, run: _Backward, root: Any) -> None:
        """Hook the nodes behind `root` that add to gradients, and give memory to those that have
        none."""
        homes: list[Tensor] = []
        walked: set[Any] = set()
        for node, parameters in accumulating_nodes([root], walked):
            known = self._known(parameters)
            run.waits.update(id(member.parameter) for member in known)
            empty = [member for member in known if member.parameter.grad is None]
            run.empty += empty
            region = getattr(node, "region", None)
            if isinstance(region, Region):
                for member in empty:
                    member.parameter.grad = member.gradient
                homes += [member.gradient for member in empty]
                self._follow_region(run, node, region, known)
            else:
                hook = functools.partial(self._accumulated, run, known)
                run.handles.append(node.register_hook(hook))
        if homes:
            with torch.no_grad():
                zero_each(homes)
        # The backward within a reentrant checkpoint adds to gradients of which the walk sees none.
        hidden = any(type(node).__name__.startswith("CheckpointFunction") for node in walked)
        run.early = run.early and not hidden
        if run.early:
            self._expect(run)

    def _expect(self, run: _Backward) -> None:
        """Let spans be sent as soon as the gradients that were found are final."""
        found = [m.parameter for m in self._members if run.waits[id(m.parameter)]]
        self._flat.expect(found)
        for member in self._members:
            parameter = member.parameter
            if run.waits[id(parameter)]:
                continue
            if parameter.grad is None:  # zeros are sent
                run.empty.append(member)
            if parameter.requires_grad:
                # Not a hook of the parameter: graphs watch those.
                node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
                hook = functools.partial(self._accumulated_later, run, member)
                run.handles.append(node.register_hook(hook))
                run.nodes.append(node)  # a parameter does not hold it

    def _follow_region(
        self, run: _Backward, node: Any, region: Region, known: Sequence[Member]
    ) -> None:
        """A captured region adds to gradients itself, unless autograd is to do it: then, and if
        something else adds to the same gradients (a term of the loss), that comes later."""
        hook = functools.partial(self._replayed, run, region, known)
        run.handles.append(node.register_hook(hook))
        edge: Any = region.parameters.tensor.grad_fn
        for (later, _), parameter in zip(
            () if edge is None else edge.next_functions, region.parameters.parameters, strict=False
        ):
            for member in self._known([parameter]):
                hook = functools.partial(self._accumulated_later, run, member)
                run.handles.append(later.register_hook(hook))

    def _known(self, parameters: Iterable[Tensor]) -> list[Member]:
        """The members of tensors that a backward reaches; those that are none are no
        parameters."""
        for tensor in parameters:
            if (
                isinstance(tensor, nn.Parameter)
                and tensor.requires_grad
                and id(tensor) not in self._member_of
            ):
                raise RuntimeError(
                    f"a parameter of shape {tuple(tensor.shape)} gets a gradient that no other "
                    "rank hears of: it was added, or needed no gradient, when packgraph.replicate "
                    "was called. Call packgraph.replicate(graphed) again, on all ranks"
                )
        found = (self._member_of.get(id(tensor)) for tensor in parameters)
        return [member for member in found if member is not None]

    def _accumulated(self, run: _Backward, members: Sequence[Member], *_: Any) -> None:
        """A hook after an accumulator of autograd. Compiled code may have added before it."""
        run.touched.update(id(m.parameter) for m in members if m.parameter.grad is not None)
        self._done(run, members)

    def _replayed(
        self, run: _Backward, region: Region, members: Sequence[Member], _: Any, given: Any
    ) -> None:
        """A hook after a captured region."""
        run.touched.update(map(id, region.added_to(given)))
        if region.parameters.delivers():
            run.later.update(id(member.parameter) for member in members)
        else:
            self._done(run, members)

    def _accumulated_later(self, run: _Backward, member: Member, _: Any, given: Any) -> None:
        """A hook after the accumulator of a parameter whose gradient a region has made."""
        parameter = member.parameter
        if given[0] is not None:
            run.touched.add(id(parameter))
            if id(parameter) not in run.later and self._flat.launched:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} gets a gradient from outside "
                    "of the replicated module after its own may have been sent: run the backward "
                    "of such a loss within no_sync(), and then reduce_gradients()"
                )
        if id(parameter) in run.later:
            run.later.discard(id(parameter))
            self._done(run, [member])

    def _done(self, run: _Backward, members: Sequence[Member]) -> None:
        """One of the nodes that add to the gradients of `members` is done."""
        if run.early:
            run.waits.subtract(id(member.parameter) for member in members)
            self._flat.ready([m.parameter for m in members if run.waits[id(m.parameter)] <= 0])

    def _ends(self, run: _Backward) -> None:
        """After all nodes of a backward."""
        if run is not self._running:
            raise RuntimeError(
                "a backward through a replicated module ran within another one; run calls that "
                "are recomputed in a backward within no_sync()"
            )
        self._running = None
        run.close()
        for member in run.empty:
            if id(member.parameter) not in run.touched:
                member.parameter.grad = None
        if run.reduces:
            self.reduce_gradients()


def check_ranks(name: str, reduce: str) -> None:
    """Raise, for the function `name`, for an unknown way to reduce, and without a process group."""
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce must be 'mean' or 'sum', not {reduce!r}")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"packgraph.{name} needs a process group: start the ranks with torchrun, and call "
            "torch.distributed.init_process_group('nccl') ('gloo' on CPUs) first"
        )


def check_same_parameters(module: nn.Module, group: dist.ProcessGroup, name: str) -> None:
    """Raise, for the function `name`, where ranks could not add up their gradients."""
    named = dict(module.named_parameters())
    spread = [name for name, parameter in named.items() if isinstance(parameter, DTensor)]
    if spread:
        raise TypeError(
            f"packgraph.{name} takes whole parameters, not distributed ones like {spread[0]}"
        )
    ours = [
        (name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
        for name, parameter in named.items()
    ]
    every: list[Any] = gather(group, ours)
    for rank, theirs in enumerate(every):
        if theirs != every[0]:
            pairs = zip([*every[0], None], [*theirs, None], strict=False)
            first, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"all ranks must have the same parameters, but rank 0 has {first}, rank {rank} "
                f"has {other}"
            )


@torch.no_grad()
def broadcast_from_first(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank the values of the first one, in place."""
    first = dist.get_global_rank(group, 0)
    for tensor in tensors:
        sent = tensor.detach().contiguous()
        dist.broadcast(sent, src=first, group=group)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)
