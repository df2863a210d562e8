"""The pipeline executor: runs one rank's actions of a schedule, by replay or eagerly, for any number of microbatches.

    F: claim a slot, receive into it, replay, send from it
    B: receive the gradient, replay, send; the slot is free when its sends are done

Slots come from a free list in the order of the schedule, never from the microbatch's number, so the count of
microbatches and the bucket of each may differ in every step without a recapture. Activations are received one action
ahead where a slot is free, gradients as soon as their forward has run. The ranks agree once per step, on host facts,
about what they are going to run.
"""
import warnings
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from packgraph.graphs import fallback
from packgraph.graphs.claim import Claim
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.fallback import Stats
from packgraph.graphs.graphed import GraphedModule
from packgraph.graphs.step import GraphedStep
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.flight import Arrival, Flight
from packgraph.parallel.links import Links
from packgraph.plan.schedule import Action, Schedule, make_schedule

Place = tuple[int, int]


class PipelineError(RuntimeError):
    """The ranks of a pipeline do not agree, or a schedule does not fit its slots."""


class Pipeline:
    """One rank's part of a pipeline.

    chunks: the graphed modules of this rank, by chunk; chunk c is virtual stage c * ranks + rank. Called as
    module(batch, tokens_in_step) in the first stage and module(batch, tokens_in_step, hidden [T, width]) in the others;
    returns hidden states, or the loss in the last stage. width, dtype: of the hidden states. group: microbatch group
    size of the interleaved schedule. whole_steps: capture the rank's whole schedule, with its sends and receives, as
    one graph per combination of microbatch shapes (granularity `step`); a combination that does not fit into the
    bank, or cannot be captured on every rank, runs by the chunks' graphs, counted in `step_stats`.
    """

    def __init__(self, chunks: Sequence[GraphedModule], links: Links, width: int, dtype: torch.dtype,
                 device: torch.device, group: int | None = None, whole_steps: bool = False) -> None:
        self.chunks, self.links, self.width, self.dtype, self.device = list(chunks), links, width, dtype, device
        self.group = group
        self.num_stages = len(self.chunks) * links.size
        for chunk in self.chunks:
            chunk.lends = True
        self._plain = False
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._likes: dict[Capacity, torch.Tensor] = {}
        self._schedules: dict[int, Schedule] = {}
        self._flights: dict[Place, Flight] = {}
        self._leaving: dict[int, deque[Flight]] = {index: deque() for index in range(len(self.chunks))}
        self._reason: str | None = None
        modules = [chunk.module for chunk in self.chunks]
        self._whole: GraphedStep | None = None
        if whole_steps:
            self._whole = GraphedStep(modules, self._run_plainly, self.chunks[0].capture_backend, device)

    @property
    def step_stats(self) -> Stats | None:
        """What the graphs of whole steps have done, if they are in use."""
        return self._whole.stats if self._whole is not None else None

    def build(self, samples: Sequence[PackedBatch], slots: Sequence[int]) -> bool:
        """Capture a variant for every sample in the planned number of slots of each chunk; collective.

        samples: one batch on the device per capacity. slots: per chunk. When a capture fails on any rank, all ranks
        run eagerly from here on (the reason is counted); returns whether all captures succeeded everywhere.
        """
        tokens = torch.ones((), dtype=torch.int64, device=self.device)
        failed = 0
        for index, (chunk, count) in enumerate(zip(self.chunks, slots, strict=True)):
            chunk.build([self._arguments(self._stage(index), batch, tokens) for batch in samples], count)
            failed += chunk.failures
        if any(facts[0] for facts in self.links.gather_facts([failed])):
            self._reason = fallback.CAPTURE_FAILED
        return self._reason is None

    def step(self, batches: Sequence[PackedBatch], tokens_in_step: torch.Tensor) -> torch.Tensor:
        """Forward and backward of all microbatches; gradients are added to `.grad`.

        batches: the same microbatches on every rank, on the device. tokens_in_step: 0-d, labels of the whole step.
        Returns the loss of the step on every rank, float32 []. Raises PipelineError when the ranks disagree.
        """
        self._agree(batches)
        whole = self._whole if fallback.bypass_reason() is None else None
        if whole is not None and self._whole_step_is_ready(batches, tokens_in_step):
            return whole(tokens_in_step, *batches)
        return self._run(batches, tokens_in_step)

    def _whole_step_is_ready(self, batches: Sequence[PackedBatch], tokens: torch.Tensor) -> bool:
        """Whether every rank has captured this step; collective."""
        assert self._whole is not None
        try:
            ready, reason = self._whole.ready(tokens, *batches), fallback.TOO_MANY_KEYS
        except CaptureError as error:
            warnings.warn(f"this step runs by its chunks' graphs, because it cannot be one graph: {error}",
                          PackgraphWarning, stacklevel=4)
            ready, reason = False, fallback.CAPTURE_FAILED
        if all(facts[0] for facts in self.links.gather_facts([int(ready)])):
            return True
        self._whole.stats.fallbacks[reason] += 1
        return False

    def _run_plainly(self, tokens: torch.Tensor, *batches: PackedBatch) -> torch.Tensor:
        """The rank's schedule without graphs of its own: what a graph of the whole step is captured from."""
        self._plain = True
        try:
            return self._run(batches, tokens)
        finally:
            self._plain = False

    def _run(self, batches: Sequence[PackedBatch], tokens_in_step: torch.Tensor) -> torch.Tensor:
        row = self._schedule(len(batches)).rows[self.links.rank]
        loss = torch.zeros((), dtype=torch.float32, device=self.device)
        expected = self._expected_gradients(row)
        for position, action in enumerate(row):
            self._post_forward(action, batches, tokens_in_step, wait_for_slot=True)
            if position + 1 < len(row):
                self._post_forward(row[position + 1], batches, tokens_in_step, wait_for_slot=False)
            self._post_gradients(expected, batches)
            if action.kind == "F":
                self._forward(action, batches[action.microbatch], tokens_in_step, loss)
            else:
                self._backward(action)
        self._drain()
        self.links.sum(loss)
        return loss

    def close(self) -> None:
        """Free all graphs; to be called before the process groups go."""
        if self._whole is not None:
            self._whole.close()
        for chunk in self.chunks:
            chunk.close()

    def _agree(self, batches: Sequence[PackedBatch]) -> None:
        text = ",".join(str(batch.capacity) + str(batch.num_tokens) for batch in batches)
        facts = self.links.gather_facts([len(batches), zlib.crc32(text.encode())])
        if any(other != facts[0] for other in facts):
            pairs = zip(self.links.ranks, facts, strict=True)
            counts = ", ".join(f"rank {rank}: {other[0]}" for rank, other in pairs)
            raise PipelineError("the ranks of this pipeline were given different microbatches in one step (counts: "
                                f"{counts}; or other lengths or capacities). Every rank must pack the same documents "
                                "in the same order")

    def _schedule(self, microbatches: int) -> Schedule:
        if microbatches not in self._schedules:
            made = make_schedule(self.links.size, len(self.chunks), microbatches, self.group)
            self._schedules[microbatches] = made
        return self._schedules[microbatches]

    def _stage(self, chunk: int) -> int:
        return chunk * self.links.size + self.links.rank

    def _like(self, batch: PackedBatch) -> torch.Tensor:
        """Hidden states of `batch`'s shape, without memory."""
        if batch.capacity not in self._likes:
            scalar = torch.zeros((), dtype=self.dtype, device=self.device)
            self._likes[batch.capacity] = scalar.expand(batch.capacity.tokens, self.width)
        return self._likes[batch.capacity]

    def _arguments(self, stage: int, batch: PackedBatch, tokens: torch.Tensor) -> tuple[object, ...]:
        """A call's arguments, with a stand-in for received activations."""
        if stage == 0:
            return batch, tokens
        return batch, tokens, self._like(batch).detach().requires_grad_()

    def _post_forward(self, action: Action, batches: Sequence[PackedBatch], tokens: torch.Tensor, *,
                      wait_for_slot: bool) -> None:
        """Claim the slot of a forward and start the receive it waits for, unless that is done already."""
        place, batch = (action.stage, action.microbatch), batches[action.microbatch]
        if action.kind != "F" or place in self._flights:
            return
        flight = self._take_off(action.stage, batch, tokens, wait_for_slot)
        if flight is None:
            return
        self._flights[place] = flight
        if action.stage > 0:
            buffer = flight.activation_buffer(self._like(batch))
            flight.receiving["F"] = self.links.receive(buffer, action.stage, "forward")

    def _post_gradients(self, expected: dict[str, deque[Action]], batches: Sequence[PackedBatch]) -> None:
        """Start the receives of all gradients whose forward has run, per edge in the order in which they are sent.

        A sender frees its slot only when a gradient is taken; receives posted late could keep both sides waiting.
        """
        for queue in expected.values():
            while queue:
                flight = self._flights.get((queue[0].stage, queue[0].microbatch))
                if flight is None or flight.out is None:
                    break
                action = queue.popleft()
                buffer = flight.gradient_buffer(self._like(batches[action.microbatch]))
                flight.receiving["B"] = self.links.receive(buffer, action.stage, "backward")

    def _expected_gradients(self, row: Sequence[Action]) -> dict[str, deque[Action]]:
        expected: dict[str, deque[Action]] = defaultdict(deque)
        for action in row:
            if action.kind == "B" and action.stage < self.num_stages - 1:
                expected[self.links.edge(action.stage + 1, "backward")].append(action)
        return expected

    def _take_off(self, stage: int, batch: PackedBatch, tokens: torch.Tensor, wait_for_slot: bool) -> Flight | None:
        """A flight with its slot; None when no slot is free yet and `wait_for_slot` is False."""
        if self._plain:
            return Flight(None, None)
        chunk, leaving = self.chunks[stage // self.links.size], self._leaving[stage // self.links.size]
        while leaving and (leaving[0].delivered() or (wait_for_slot and not chunk.has_free_slot())):
            leaving.popleft().finish()
        if not chunk.has_free_slot():
            if wait_for_slot:
                raise PipelineError(f"stage {stage} has no free slot: the schedule needs more than were planned")
            return None
        claim = chunk.claim(self._arguments(stage, batch, tokens), {}) if self._reason is None else self._reason
        if isinstance(claim, Claim):
            claim.ticket.kept = True
            return Flight(claim, claim.ticket)
        chunk.stats.fallbacks[claim] += 1
        ticket = chunk.hold_slot()
        return Flight(None, ticket)

    def _forward(self, action: Action, batch: PackedBatch, tokens: torch.Tensor, loss: torch.Tensor) -> None:
        flight = self._flights[(action.stage, action.microbatch)]
        chunk = self.chunks[action.stage // self.links.size]
        arguments: tuple[object, ...] = (batch, tokens)
        if action.stage > 0:
            flight.receiving.pop("F").wait()
            arguments = (batch, tokens, Arrival.apply(self._anchor, flight, flight.hidden))
        flight.out = chunk.module(*arguments) if flight.claim is None else flight.claim.run(arguments, {})
        assert flight.out is not None
        if action.stage == self.num_stages - 1:
            loss += flight.out.detach()
        else:
            activations = flight.out.detach().contiguous()
            flight.sent(self.links.send(activations, action.stage, "forward"), activations)

    def _backward(self, action: Action) -> None:
        flight = self._flights.pop((action.stage, action.microbatch))
        assert flight.out is not None
        if action.stage == self.num_stages - 1:
            flight.out.backward()
        else:
            flight.receiving.pop("B").wait()
            torch.autograd.backward(flight.out, flight.gradient)
        flight.out = None
        if action.stage > 0:
            assert flight.input_gradient is not None
            gradient = flight.input_gradient.contiguous()
            flight.sent(self.links.send(gradient, action.stage, "backward"), gradient)
        self._leaving[action.stage // self.links.size].append(flight)

    def _drain(self) -> None:
        for leaving in self._leaving.values():
            while leaving:
                leaving.popleft().finish()
