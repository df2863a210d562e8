"""The pipeline executor: runs one rank's actions of a schedule, by replay or eagerly, for any
number of microbatches.

    RECV_F: lease a slot, receive into it       F: replay       SEND_F: send from it
    RECV_B: receive the gradient                B: replay       SEND_B: send; the slot is free when
                                                                its sends are done

Slots come from a free list in the order of the schedule, never from the microbatch's number, so the
count of microbatches and the bucket of each may differ in every step without a recapture. Sends and
receives are started where `parallel/pipeline/schedule.py` puts them, so ranks cannot stop each
other, whatever makes a host or a device wait. The ranks agree once per step, on host facts, about
what they are going to run.
"""

import contextlib
import functools
import itertools
import warnings
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packgraph.graphs import fallback
from packgraph.graphs.backend import profiler_range
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.fallback import Stats
from packgraph.graphs.graphed import GraphedModule, control
from packgraph.graphs.replay import ReplayHandle
from packgraph.graphs.stages import Staged
from packgraph.graphs.step import Agreement, GraphedStep, Standing
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.pipeline.links import Links, Transfer
from packgraph.parallel.pipeline.schedule import (
    Action,
    Kind,
    Op,
    make_rows,
    make_schedule,
    slot_counts,
)
from packgraph.parallel.ranks import everywhere, gather_numbers, unanimous

Place = tuple[int, int]
BeforeLast = Callable[[int, torch.Tensor], None]
Around = Callable[[PackedBatch], contextlib.AbstractContextManager[None]]
CONTIGUOUS = torch.contiguous_format
DIRECTIONS: dict[Kind, str] = {"F": "forward", "B": "backward"}
HIDDEN = 2  # a chunk's tensors: the batch, the tokens in the step, hidden states


class InFlight:
    """A microbatch in a chunk. Replayed flights use the slot's static memory, eager ones memory of
    their own.

    received: activations of the stage before ("F"), and the gradient of `out` ("B"). out: what the
        chunk made.
    input_gradient: gradient of those activations, to be sent. direct: the handle, if it is replayed
        without autograd.
    """

    def __init__(self, handle: ReplayHandle | None, lease: Any, direct: bool = False) -> None:
        self.handle, self.lease = handle, lease
        self.direct = handle if handle is not None and direct and handle.is_direct else None
        self.received: dict[Kind, torch.Tensor] = {}
        self.out: torch.Tensor | None = None
        self.input_gradient: torch.Tensor | None = None
        self.receiving: dict[Kind, Transfer] = {}
        self.sending: list[tuple[Transfer, torch.Tensor]] = []  # kept until they are done

    def buffer(self, kind: Kind, like: torch.Tensor) -> torch.Tensor:
        """Buffer for receiving what an action of this kind needs, of `like`'s shape: the slot's own
        memory when a graph reads it there."""
        found: torch.Tensor | None = None
        if self.handle is not None:
            found = self.handle.buffer("hidden") if kind == "F" else self.handle.gradient_buffer()
        if found is None:
            found = torch.empty_like(like, memory_format=CONTIGUOUS)
        self.received[kind] = found
        return found

    def delivered(self) -> bool:
        """Tells whether all sends are done."""
        return all(transfer.is_completed() for transfer, _ in self.sending)

    def finish(self) -> None:
        """Wait for the sends (on CUDA: make the stream wait) and give the slot back."""
        for transfer, _ in self.sending:
            transfer.wait()
        self.sending = []
        if self.lease is not None:
            self.lease.release()
        self.out = self.input_gradient = None
        self.received.clear()


class Arrival(torch.autograd.Function):
    """Starts a chunk's autograd graph at received activations, and catches the gradient that goes
    back."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, flight: InFlight, received: torch.Tensor
    ) -> torch.Tensor:
        ctx.flight = flight
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.flight.input_gradient = gradient
        return None, None, None


@dataclass(frozen=True)
class StepUpdate:
    """Contents of a whole step's graph beside its microbatches.

    begin: comes before the first of them. before_last: as of `Pipeline.step`, in captures. finish:
    makes the result of a step of its loss, by collectives of all ranks.
    """

    begin: Callable[[], None]
    before_last: BeforeLast | None
    finish: Callable[[torch.Tensor], torch.Tensor]


def reason_against(
    whole: GraphedStep, parts: str, *arguments: torch.Tensor | PackedBatch, strict: bool
) -> str | None:
    """Reason why a whole step with these arguments cannot be a replay, or None; captures it if it
    is new. parts: what has the graphs that run it then. Raises CaptureError with `strict`."""
    try:
        return whole.reason_against(*arguments)
    except CaptureError as error:
        if strict:
            raise
        warnings.warn(
            f"this step runs by its {parts}' graphs, because it cannot be one graph: {error}",
            PackgraphWarning,
            stacklevel=4,
        )
        return fallback.CAPTURE_FAILED


class PipelineError(RuntimeError):
    """The ranks of a pipeline do not agree, or a schedule does not fit its slots."""


class Pipeline:
    """One rank's part of a pipeline.

    chunks: the graphed modules of this rank, by chunk; chunk c is virtual stage c * ranks + rank.
    Called as module(batch, tokens_in_step) in the first stage and module(batch, tokens_in_step,
    hidden [T, width]) in the others; returns hidden states, or the loss in the last stage. width,
    dtype: of the hidden states. row_parts: ranks that share the rows of the hidden states (context
    parallel, and tensor parallel with sequence); each has T // row_parts of them. rank_rows: how
    many each has of any row, where the ranks that share it change. whole_steps: capture the rank's
    whole schedule, with its sends and receives, as one graph per combination of microbatch shapes
    (granularity `step`); a combination that does not fit into the bank, or cannot be captured on
    every rank, runs by the chunks' graphs, counted in `step_stats`. updates: those graphs hold the
    update of the weights, too, and are those of `update_step`. agreement: of all ranks that replay
    a whole step together, None = the ranks of this pipeline.

    Attributes:
        whole: Graphs of whole steps; None where there are none.
    """

    def __init__(
        self,
        chunks: Sequence[GraphedModule],
        links: Links,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        whole_steps: bool = False,
        row_parts: int = 1,
        rank_rows: int | None = None,
        updates: bool = False,
        agreement: Agreement | None = None,
    ) -> None:
        self.chunks, self.links = [control(chunk) for chunk in chunks], links
        self.width, self.dtype, self.device = width, dtype, device
        self.row_parts, self.rank_rows = row_parts, rank_rows
        self.num_stages = len(self.chunks) * links.size
        for chunk in self.chunks:
            chunk.capturer.lends = True
        # Chunks that share no parameter with another: others may put `.grad` of a shared one into
        # their own buffer.
        owned = [
            {id(parameter) for parameter in chunk.module.parameters()} for chunk in self.chunks
        ]
        users = Counter(itertools.chain(*owned))
        self._alone = [
            chunk
            for chunk, parameters in zip(self.chunks, owned, strict=True)
            if all(users[parameter] == 1 for parameter in parameters)
        ]
        self._plain = False
        self._watched: int | None = (
            None  # the microbatch whose outputs are looked at: they need autograd's graph
        )
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._likes: dict[Capacity, torch.Tensor] = {}
        ranks, rank = links.size, links.rank
        slots = slot_counts(ranks, len(chunks))
        # This rank's row for a number of microbatches.
        self._row: Callable[[int], tuple[Op, ...]] = functools.cache(
            lambda count: make_rows(make_schedule(ranks, len(chunks), count), slots)[rank]
        )
        self._flights: dict[Place, InFlight] = {}
        self._leaving: list[deque[InFlight]] = [deque() for _ in self.chunks]
        self._reason: str | None = None
        self._update: StepUpdate | None = None
        self._updates = updates
        self.whole: GraphedStep | None = None
        if not whole_steps:
            return
        this = weakref.proxy(self)  # which has the step: else a cycle, with all chunks in it
        self.whole = GraphedStep(
            [chunk.module for chunk in self.chunks],
            lambda *arguments, is_dry_run: this.run_plainly(*arguments, is_dry_run=is_dry_run),
            self.chunks[0].capture_backend,
            self.device,
            compiled=any(chunk.compiles for chunk in self.chunks),
            copy_streams=[chunk.capture_backend.copy_streams for chunk in self.chunks],
            finish=lambda loss: this.finish(loss),
        )
        self.whole.agreement = agreement or unanimous(links.control)
        self.whole.all_agree = agreement is not None or links.connects_all

    @property
    def step_stats(self) -> Stats | None:
        """Counts of the graphs of whole steps, if they are in use."""
        return self.whole.stats if self.whole is not None else None

    def build(
        self,
        samples: Sequence[PackedBatch],
        slots: Sequence[int],
        watch: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    ) -> bool:
        """Capture a variant for every sample in the planned number of slots of each chunk;
        collective.

        samples: one batch on the device per capacity. slots: per chunk. watch: as in
        `GraphedModule.build`. When a capture fails on any
        rank, all ranks run eagerly from here on (the reason is counted); returns whether all
        captures succeeded everywhere.
        """
        for index, (chunk, count) in enumerate(zip(self.chunks, slots, strict=True)):
            chunk.build(
                [self.sample_arguments(index, batch) for batch in samples], count, watch=watch
            )
        if not everywhere(self.links.control, not any(chunk.failures for chunk in self.chunks)):
            self._reason = fallback.CAPTURE_FAILED
        return self._reason is None

    def sample_arguments(self, chunk: int, batch: PackedBatch) -> tuple[object, ...]:
        """The arguments of a call of this rank's chunk number `chunk`, to capture it with: shapes,
        no values."""
        return self._arguments(
            self._stage(chunk), batch, torch.ones((), dtype=torch.int64, device=self.device)
        )

    def step(
        self,
        batches: Sequence[PackedBatch],
        tokens_in_step: torch.Tensor,
        before_last: BeforeLast | None = None,
    ) -> torch.Tensor:
        """Forward and backward of all microbatches; gradients are added to `.grad`.

        batches: the same microbatches on every rank, on the device. tokens_in_step: 0-d, labels of
        the whole step. before_last: called as before_last(chunk, output) right before the last
        backward of each chunk, the one after which its gradients are final; not called where a
        whole step is one graph. Returns the loss of the step on every rank, float32 []. Raises
        PipelineError when the ranks disagree, and what the first chunk's `begin` raises of any
        microbatch, before anything is launched.
        """
        self._agree(batches, tokens_in_step)
        whole = self.whole if not self._updates else None
        if whole is not None and self._is_ready(whole, batches, tokens_in_step):
            return whole.replay(tokens_in_step, *batches)
        with contextlib.ExitStack() as frozen:
            for chunk in self._alone:
                frozen.enter_context(chunk.frozen())
            loss = self._run(batches, tokens_in_step, before_last)
        self.links.sum(loss)
        return loss

    def update_step(
        self,
        batches: Sequence[PackedBatch],
        tokens_in_step: torch.Tensor,
        update: StepUpdate,
        reason: str | None = None,
        strict: bool = False,
    ) -> torch.Tensor | None:
        """The step and its update by one graph. Collective over all ranks that update together.

        Args:
            batches: As of `step`.
            tokens_in_step: 0-d int64.
            update: The same in every step.
            reason: Why the step must not be a graph; None = nothing is known.
            strict: Whether a step that cannot be captured is an error.

        Returns:
            What `update.finish` has made; None where the step cannot be one graph on all ranks.
            Nothing was changed then.

        Raises:
            CaptureError: With `strict`, if the step cannot be captured.
            PipelineError: When the ranks disagree.
        """
        assert self.whole is not None and self._updates
        self._update = update
        self._agree(batches, tokens_in_step)
        if not self._is_ready(self.whole, batches, tokens_in_step, reason, strict):
            return None
        return self.whole.replay(tokens_in_step, *batches)

    def evaluate(
        self, batches: Sequence[PackedBatch], tokens_in_step: torch.Tensor, around: Around
    ) -> torch.Tensor:
        """Forwards alone, where gradients are off. Collective.

        As many microbatches as there are ranks go through a chunk before the next chunk's turn, so
        all ranks work. No slot is held beyond a call.

        Args:
            batches: As of `step`.
            tokens_in_step: 0-d int64.
            around: Opened around the forward of a microbatch in a chunk.

        Returns:
            The sum of the losses on every rank, float64 [].

        Raises:
            PipelineError: When the ranks disagree.
        """
        self._agree(batches, tokens_in_step)
        ranks, total = self.links.size, torch.zeros((), dtype=torch.float64, device=self.device)
        sent: deque[tuple[Transfer, torch.Tensor]] = deque()
        turns = (
            (stage, batch)
            for first in range(0, len(batches), ranks)
            for stage in map(self._stage, range(len(self.chunks)))
            for batch in batches[first : first + ranks]
        )
        for stage, batch in turns:
            arguments: tuple[object, ...] = (batch, tokens_in_step)
            if stage > 0:
                hidden = torch.empty_like(self._like(batch), memory_format=CONTIGUOUS)
                self.links.receive(hidden, stage, "forward").wait()
                arguments = (*arguments, hidden)
            with around(batch):
                out = self._forward_alone(stage // ranks, arguments)
            if stage == self.num_stages - 1:
                total += out
                continue
            self._check_sent(out, batch)
            if len(sent) == ranks:  # more are never waited for at the same time
                sent.popleft()[0].wait()
            sent.append((self.links.send(out, stage, "forward"), out))
        for transfer, _ in sent:
            transfer.wait()
        self.links.sum(total)
        return total

    def _forward_alone(self, index: int, arguments: tuple[object, ...]) -> torch.Tensor:
        """The output of a chunk, contiguous memory of its own."""
        chunk = self.chunks[index]
        handle = self._reason or chunk.acquire(arguments, {})
        if isinstance(handle, str):
            chunk.stats.fell_back(handle)
            found: torch.Tensor = chunk.run_eagerly(*arguments)
            return found.contiguous()
        try:
            made: torch.Tensor = handle.run(arguments, {})
            return made.clone(memory_format=CONTIGUOUS)
        finally:
            handle.lease.release()

    def _is_ready(
        self,
        whole: GraphedStep,
        batches: Sequence[PackedBatch],
        tokens: torch.Tensor,
        reason: str | None = None,
        strict: bool = False,
    ) -> bool:
        """Tells whether every rank has captured this step; collective."""
        asked = fallback.bypass_reason()
        reason = asked or self._reason or reason
        if reason is not None:  # the others hear of it, and capture nothing without this rank
            whole.agreement(Standing.EAGER)
        else:
            reason = reason_against(whole, "chunks", tokens, *batches, strict=strict)
        if reason is not None and asked is None:
            whole.stats.fallbacks[reason] += 1
        return reason is None

    def run_plainly(
        self, tokens: torch.Tensor, *batches: PackedBatch, is_dry_run: bool
    ) -> torch.Tensor:
        """The rank's schedule without graphs of its own: what a graph of the whole step is captured
        from. is_dry_run: without transfers, since other ranks may fail before theirs."""
        before_last = None
        if self._update is not None:
            self._update.begin()
            before_last = None if is_dry_run else self._update.before_last
        self._plain = True
        try:
            with self.links.silenced() if is_dry_run else contextlib.nullcontext():
                return self._run(batches, tokens, before_last)
        finally:
            self._plain = False

    def finish(self, loss: torch.Tensor) -> torch.Tensor:
        """The result of a whole step on every rank, from the loss that this one has added up."""
        self.links.sum(loss)
        return loss if self._update is None else self._update.finish(loss)

    def _run(
        self,
        batches: Sequence[PackedBatch],
        tokens_in_step: torch.Tensor,
        before_last: BeforeLast | None = None,
    ) -> torch.Tensor:
        """All actions of a step; the loss as far as this rank knows it, float32 []."""
        loss = torch.zeros((), dtype=torch.float32, device=self.device)
        last = len(batches) - 1
        self._watched = None if before_last is None else last
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._crash)
            for op in self._row(len(batches)):
                stage, batch = op.action.stage, batches[op.action.microbatch]
                if op.what == "RECV":
                    self._receive(op.action, batch, tokens_in_step)
                elif op.what == "SEND":
                    self._send(op.action)
                elif op.action.kind == "F":
                    with self._range(op.action, batch):
                        self._forward(op.action, batch, tokens_in_step, loss)
                else:
                    if before_last is not None and op.action.microbatch == last:
                        out = self._flights[stage, last].out
                        assert out is not None
                        before_last(stage // self.links.size, out)
                    with self._range(op.action, batch):
                        self._backward(op.action)
            for leaving in self._leaving:
                while leaving:
                    leaving.popleft().finish()
            on_error.pop_all()
        return loss

    def _range(
        self, action: Action, batch: PackedBatch
    ) -> contextlib.AbstractContextManager[object]:
        """The range of an action in profiles; none where the whole step is being captured."""
        if self._plain:
            return contextlib.nullcontext()
        words = "microbatch", action.microbatch, "stage", action.stage, DIRECTIONS[action.kind]
        return profiler_range(*words, batch.capacity)

    def close(self) -> None:
        """Free all graphs; to be called before the process groups go."""
        if self.whole is not None:
            self.whole.close()
        for chunk in self.chunks:
            chunk.close()

    def _agree(self, batches: Sequence[PackedBatch], tokens: torch.Tensor) -> None:
        """Check that all ranks have the same microbatches, and let the first chunk refuse them: in
        the middle of a step an error would leave other stages waiting, and graphs of whole steps
        hear of no host facts at all."""
        text = ",".join(str(batch.capacity) + str(batch.num_tokens) for batch in batches)
        mine = [len(batches), zlib.crc32(text.encode())]
        facts = gather_numbers(self.links.control, mine)
        if any(other != facts[0] for other in facts):
            pairs = zip(self.links.ranks, facts, strict=True)
            counts = ", ".join(f"rank {rank}: {other[0]:.0f}" for rank, other in pairs)
            raise PipelineError(
                "the ranks of this pipeline were given different microbatches in one step (counts: "
                f"{counts}; or other lengths or capacities). Every rank must pack the same "
                "documents "
                "in the same order"
            )

        module, stage = self.chunks[0].module, self._stage(0)
        if isinstance(module, Staged):
            for batch in batches:
                module.begin(*self._arguments(stage, batch, tokens))

    def _stage(self, chunk: int) -> int:
        return chunk * self.links.size + self.links.rank

    def _check_sent(self, out: torch.Tensor, batch: PackedBatch) -> None:
        """Raises PipelineError for hidden states that the next stage has no buffer for."""
        like = self._like(batch)
        if (out.shape, out.dtype) != (like.shape, like.dtype):
            raise PipelineError(
                f"a stage passes on {list(out.shape)} in {out.dtype}, and the next one receives "
                f"{list(like.shape)} in {like.dtype}: hidden states keep the dtype of the run"
            )

    def _like(self, batch: PackedBatch) -> torch.Tensor:
        """Hidden states of `batch`'s shape, without memory."""
        if batch.capacity not in self._likes:
            scalar = torch.zeros((), dtype=self.dtype, device=self.device)
            rows = self.rank_rows or batch.capacity.tokens // self.row_parts
            self._likes[batch.capacity] = scalar.expand(rows, self.width)
        return self._likes[batch.capacity]

    def _arguments(
        self, stage: int, batch: PackedBatch, tokens: torch.Tensor
    ) -> tuple[object, ...]:
        """A call's arguments, with a stand-in for received activations."""
        hidden = () if stage == 0 else (self._like(batch).detach().requires_grad_(),)
        return batch, tokens, *hidden

    def _take_off(self, action: Action, batch: PackedBatch, tokens: torch.Tensor) -> InFlight:
        """A flight with its slot, for which older flights have to leave if all slots are in use."""
        if self._plain:
            return InFlight(None, None)
        index = action.stage // self.links.size
        chunk, leaving = self.chunks[index], self._leaving[index]
        while leaving and (leaving[0].delivered() or not chunk.slots.has_free()):
            leaving.popleft().finish()
        if not chunk.slots.has_free():
            raise PipelineError(
                f"stage {action.stage} has no free slot: the schedule needs more than were planned"
            )
        handle = (
            chunk.acquire(self._arguments(action.stage, batch, tokens), {})
            if self._reason is None
            else self._reason
        )
        if isinstance(handle, ReplayHandle):
            handle.lease.kept = True
            return InFlight(handle, handle.lease, direct=action.microbatch != self._watched)
        chunk.stats.fell_back(handle)
        (lease,) = chunk.slots.reserve(1)  # slots are counted as in a replay
        return InFlight(None, lease)

    def _receive(self, action: Action, batch: PackedBatch, tokens: torch.Tensor) -> None:
        """Start to receive what `action` needs; a forward gets its slot here."""
        place = action.stage, action.microbatch
        if action.kind == "F":
            self._flights[place] = self._take_off(action, batch, tokens)
        flight, direction = self._flights[place], DIRECTIONS[action.kind]
        buffer = flight.buffer(action.kind, self._like(batch))
        flight.receiving[action.kind] = self.links.receive(buffer, action.stage, direction)

    def _send(self, action: Action) -> None:
        """Start to send what `action` made. A flight leaves with its last send."""
        flight = self._flights[action.stage, action.microbatch]
        made = flight.out if action.kind == "F" else flight.input_gradient
        assert made is not None
        tensor = made.detach().contiguous()
        transfer = self.links.send(tensor, action.stage, DIRECTIONS[action.kind])
        flight.sending.append((transfer, tensor))
        if action.kind == "B":
            self._leave(action)

    def _forward(
        self, action: Action, batch: PackedBatch, tokens: torch.Tensor, loss: torch.Tensor
    ) -> None:
        place, chunk = (
            (action.stage, action.microbatch),
            self.chunks[action.stage // self.links.size],
        )
        arguments: tuple[object, ...] = (batch, tokens)
        if action.stage == 0:
            flight = self._flights[place] = self._take_off(action, batch, tokens)
        else:
            flight = self._flights[place]
            flight.receiving.pop("F").wait()
            hidden = flight.received["F"]
            if flight.direct is None:
                hidden = Arrival.apply(self._anchor, flight, hidden)
            arguments = (batch, tokens, hidden)
        if flight.handle is None:
            flight.out = chunk.run_eagerly(*arguments)
        elif flight.direct is not None:
            flight.out = flight.direct.forward(arguments, {})
        else:
            flight.out = flight.handle.run(arguments, {})
        assert flight.out is not None
        if action.stage == self.num_stages - 1:
            loss += flight.out.detach()
        else:
            self._check_sent(flight.out, batch)

    def _backward(self, action: Action) -> None:
        flight = self._flights[action.stage, action.microbatch]
        assert flight.out is not None
        if action.stage < self.num_stages - 1:
            flight.receiving.pop("B").wait()
        gradient = flight.received.get("B")
        if flight.direct is not None:
            flight.direct.backward(gradient)
            flight.input_gradient = flight.direct.input_gradient(HIDDEN)
        else:
            torch.autograd.backward(flight.out, gradient)
        flight.out = None
        if action.stage == 0:
            self._leave(action)

    def _leave(self, action: Action) -> None:
        flight = self._flights.pop((action.stage, action.microbatch))
        self._leaving[action.stage // self.links.size].append(flight)

    def _crash(self) -> None:
        """An error has ended the step: forget its flights and give their slots back, for the next
        step needs them."""
        for flight in itertools.chain(self._flights.values(), *self._leaving):
            if flight.lease is not None:
                flight.lease.release()
        self._flights.clear()
        self._leaving = [deque() for _ in self.chunks]
