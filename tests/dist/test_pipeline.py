"""Pipelines by replay equal eager ones bit by bit for any number of microbatches, and the whole
model in rounding."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distkit import RankFailed, run_ranks

import packgraph
from packgraph.graphs.build import VariantBuild
from packgraph.graphs.graphed import graph
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.parallel.layout import Layout
from packgraph.parallel.pipeline.executor import InFlight, Pipeline, PipelineError
from packgraph.parallel.pipeline.links import Links, make_links
from packgraph.parallel.pipeline.schedule import slot_counts

CAPACITIES = [packgraph.Capacity(24, 4), packgraph.Capacity(48, 8)]
COUNTS = (4, 6, 8, 2, 5, 12, 1, 3, 7, 4, 6, 8, 2, 5, 9, 1, 3, 7, 10, 2, 6)
WIDTH = 16


def config(**options):
    shape = {
        "vocab_size": 50,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_layers": 4,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "tie_embeddings": False,
        "dropout": 0.1,
    }
    return DecoderConfig(**(shape | options))


def microbatches(order, count):
    """`count` packs of random lengths and capacities."""
    packs = []
    for _ in range(count):
        capacity = order.choice(CAPACITIES)
        lengths = [order.randint(2, 10) for _ in range(order.randint(1, 4))]
        while sum(lengths) > capacity.tokens:
            lengths.pop()
        documents = [[order.randrange(50) for _ in range(length)] for length in lengths]
        packs.append(packgraph.PackedBatch.build(documents, capacity))
    return packs


class SlowLinks(Links):
    """Sends begin some time after they were asked for, in order: what they send must stay untouched
    until then."""

    def delay(self, direction):
        return 0.002

    def send(self, tensor, stage, direction):
        workers = self.__dict__.setdefault("workers", {})
        worker = workers.setdefault(
            (stage % self.size, direction), ThreadPoolExecutor(max_workers=1)
        )
        start = super().send

        def later():
            time.sleep(self.delay(direction))
            return start(tensor, stage, direction)

        future = worker.submit(later)
        transfer = SimpleNamespace(wait=lambda: future.result().wait())
        transfer.is_completed = lambda: future.done() and future.result().is_completed()
        return transfer


class SlowGradients(SlowLinks):
    """Rank 1 sends gradients when it has run another forward and backward."""

    def delay(self, direction):
        return 0.3 if self.rank == 1 and direction == "backward" else 0.0


class SerialLinks(Links):
    """A process group serves its transfers strictly one after another, as NCCL's communicators
    do."""

    def send(self, tensor, stage, direction):
        return self._queue(self.group(stage, direction), super().send, tensor, stage, direction)

    def receive(self, tensor, stage, direction):
        source = stage - (1 if direction == "forward" else -1)
        return self._queue(self.group(source, direction), super().receive, tensor, stage, direction)

    def _queue(self, group, start, *arguments):
        worker = self.__dict__.setdefault("workers", {}).setdefault(
            id(group), ThreadPoolExecutor(max_workers=1)
        )
        future = worker.submit(lambda: start(*arguments).wait())
        return SimpleNamespace(wait=future.result, is_completed=future.done)


class OneGroup(SerialLinks):
    """All edges of a direction share one process group, which serves its transfers in order."""

    def group(self, stage, direction):
        return self._everyone if direction == "forward" else self.control


class BlockingLinks(Links):
    """A transfer holds its rank until it is done, as on a device that is drained after each."""

    early = False

    def send(self, tensor, stage, direction):
        super().send(tensor, stage, direction).wait()
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def receive(self, tensor, stage, direction):
        super().receive(tensor, stage, direction).wait()
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


class EarlyBlockingLinks(BlockingLinks):
    """Negative control: receives start one action ahead."""

    early = True


def one_action_ahead(row):
    """The same ops, but activations are received before the run that stood before their receive."""
    row = list(row)
    for at, op in enumerate(row):
        runs = [i for i in range(at) if row[i].what == "RUN"]
        if (op.what, op.action.kind) == ("RECV", "F") and runs:
            row.insert(runs[-1], row.pop(at))
    return tuple(row)


def train(mesh, way, chunks, counts, options=None, slow=False, poison=False, overflow=False):
    """Losses, gradients and random states of every step on this rank, and the chunks' stats."""
    ranks = mesh.size("pp")
    links = make_links(mesh)
    if slow:
        links.__class__ = {True: SlowLinks}.get(slow, slow)
    stages = [chunk * ranks + links.rank for chunk in range(chunks)]
    modules = [
        DecoderModel(config(**(options or {})), seed=1, stage=s, stages=ranks * chunks)
        for s in stages
    ]
    slots = (
        slot_counts(ranks, chunks)[links.rank]
        if not getattr(links, "early", False)
        else [9] * chunks
    )
    granularity = way if way in ("layer", "chunk") else "chunk"
    graphed = [
        graph(
            module,
            capacities=CAPACITIES,
            warmup=0,
            slots=count,
            granularity=granularity,
            strict=not overflow,
        )
        for module, count in zip(modules, slots, strict=True)
    ]
    pipeline = Pipeline(
        graphed, links, WIDTH, torch.float32, torch.device("cpu"), whole_steps=way == "step"
    )
    if getattr(links, "early", False):
        plain = pipeline._row
        pipeline._row = lambda count: one_action_ahead(plain(count))
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    torch.manual_seed(links.rank)
    order, trace = random.Random(0), []
    for step, count in enumerate(counts):
        batches = microbatches(order, count)
        if overflow and step % 3 == 2:
            batches[0] = packgraph.PackedBatch.build([[1, 2]] * 9, packgraph.Capacity(24, 12))
        tokens = torch.tensor(sum(batch.num_loss_tokens for batch in batches))
        if step == 1 and way != "eager":
            samples = [packgraph.PackedBatch.build([[1] * c.tokens], c) for c in CAPACITIES]
            assert pipeline.build(samples, slots)
        if step == 0 or way == "eager":
            with packgraph.eager("warm-up"):
                loss = pipeline.step(batches, tokens)
        else:
            loss = pipeline.step(batches, tokens)
        for chunk in graphed if poison else ():
            for slot in chunk.slots._free:
                slot.poison()
        trace += [
            loss.clone(),
            *(p.grad.clone() for m in modules for p in m.parameters()),
            torch.get_rng_state(),
        ]
        optimizer.step()
        optimizer.zero_grad()
    stats = [
        (c.stats.captured, c.stats.replayed, dict(c.stats.fallbacks), c.slots.in_flight())
        for c in graphed
    ]
    step_stats = pipeline.step_stats
    for chunk in graphed:
        chunk.close()
    return trace, stats, step_stats.replayed if step_stats else 0


def run(way, ranks, chunks, counts=COUNTS, **more):
    rest = [more.get(name) for name in ("options", "slow", "poison", "overflow")]
    return run_ranks(
        train,
        ranks,
        way,
        chunks,
        counts,
        *rest,
        layout=Layout(pp=ranks),
        seconds=more.get("seconds", 200.0),
    )


def assert_equal(eager, graphs):
    for rank, (a, b) in enumerate(zip(eager, graphs, strict=True)):
        wrong = [
            i for i, (x, y) in enumerate(zip(a[0], b[0], strict=True)) if not torch.equal(x, y)
        ]
        assert not wrong, f"rank {rank} differs at {wrong[:5]}"


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (2, 2)], ids=["PP2", "PP2xVPP2"])
def test_replayed_pipelines_equal_eager_ones_bitwise(ranks, chunks):
    eager = run("eager", ranks, chunks)
    for way in ("layer", "chunk", "step"):
        counts = COUNTS[:8] if way == "step" else COUNTS
        graphs = run(way, ranks, chunks, counts, slow=way == "chunk", poison=True)
        expected = eager if way != "step" else run("eager", ranks, chunks, counts)
        assert_equal(expected, graphs)
        for _, stats, steps in graphs:
            for captured, replayed, fallbacks, in_flight in stats:
                assert in_flight == 0 and fallbacks == {"warm-up": COUNTS[0]} and captured > 0
                assert (
                    steps == len(counts) - 1
                    if way == "step"
                    else replayed == sum(counts) - COUNTS[0]
                )


def test_a_slot_freed_before_its_sends_are_done_is_wrong_and_the_test_sees_it(monkeypatch):
    """Negative control of R3: the same comparison must fail when slots do not wait for slow
    sends."""
    under_way = []  # a transfer that is let go of may never be done

    def finish(self):
        under_way.append(self.sending)
        self.lease.release()

    eager = run("eager", 2, 1, COUNTS[:4])
    monkeypatch.setattr(InFlight, "finish", finish)
    monkeypatch.setattr(InFlight, "delivered", lambda self: True)
    graphs = run("chunk", 2, 1, COUNTS[:4], slow=SlowGradients, poison=True)
    with pytest.raises(AssertionError, match="differs at"):
        assert_equal(eager, graphs)


def test_gradients_left_in_the_memory_of_all_backwards_are_wrong_and_the_test_sees_it(monkeypatch):
    """Negative control: what is sent must be in the slot, since the next backward writes over what
    is brief."""
    eager = run("eager", 4, 1, COUNTS[:4])
    monkeypatch.setattr(VariantBuild, "_grad_outputs", lambda self, forward: [])
    graphs = run("chunk", 4, 1, COUNTS[:4], slow=SlowGradients, poison=True)
    with pytest.raises(AssertionError, match="differs at"):
        assert_equal(eager, graphs)


@pytest.mark.parametrize("links", [SerialLinks, OneGroup, BlockingLinks])
def test_an_interleaved_pipeline_goes_on_whatever_waits_for_whom(links):
    eager = run("eager", 4, 2, (4, 6), options={"num_layers": 8})
    assert_equal(eager, run("chunk", 4, 2, (4, 6), options={"num_layers": 8}, slow=links))


def test_receives_started_early_would_stop_it_and_the_test_sees_it():
    with pytest.raises(RankFailed, match="did not finish in time"):
        run("eager", 2, 1, (4,), slow=EarlyBlockingLinks, seconds=8.0)


def test_four_ranks():
    eager = run("eager", 4, 1, COUNTS[:6])
    assert_equal(eager, run("chunk", 4, 1, COUNTS[:6], slow=True))


def test_a_microbatch_beyond_the_capacities_falls_back_on_all_ranks_alike():
    eager = run("eager", 2, 1, COUNTS[:9], overflow=True)
    graphs = run("chunk", 2, 1, COUNTS[:9], overflow=True)
    assert_equal(eager, graphs)
    for _, stats, _ in graphs:
        assert stats[0][2]["more documents than any capacity"] == 3


def test_a_pipeline_computes_what_the_whole_model_computes():
    """Gradients differ by the order of sums over microbatches only in rounding; dropout is off."""
    options = {"dropout": 0.0}
    trace = run("chunk", 2, 1, COUNTS[:1], options=options)
    whole = DecoderModel(config(**options), seed=1)
    batches = microbatches(random.Random(0), COUNTS[0])
    tokens = torch.tensor(sum(batch.num_loss_tokens for batch in batches))
    loss = torch.zeros(())
    for batch in batches:
        part = whole(batch, tokens)
        part.backward()
        loss += part.detach()
    gradients = dict(whole.named_parameters())
    for rank, (facts, _, _) in enumerate(trace):
        torch.testing.assert_close(facts[0], loss, rtol=1e-6, atol=1e-6)
        names = [
            n
            for n, _ in DecoderModel(
                config(**options), seed=1, stage=rank, stages=2
            ).named_parameters()
        ]
        for name, gradient in zip(names, facts[1:], strict=False):
            torch.testing.assert_close(
                gradient, gradients[name].grad, rtol=1e-5, atol=1e-7, msg=name
            )


def disagree(mesh):
    pipeline = Pipeline(
        [graph(DecoderModel(config(), stage=mesh.rank, stages=2), warmup=0)],
        make_links(mesh),
        WIDTH,
        torch.float32,
        torch.device("cpu"),
    )
    batches = microbatches(random.Random(0), 2 + mesh.rank)
    with pytest.raises(PipelineError, match="different microbatches in one step"):
        pipeline.step(batches, torch.tensor(1))


def test_ranks_with_different_microbatches_say_so_on_all_ranks():
    run_ranks(disagree, 2, layout=Layout(pp=2))


def fails(mesh):
    module = DecoderModel(config(), stage=mesh.rank, stages=2)
    pipeline = Pipeline(
        [graph(module, warmup=0)], make_links(mesh), WIDTH, torch.float32, torch.device("cpu")
    )
    if mesh.rank == 1:
        module.run_head = None
        raise ValueError("rank 1 breaks on purpose")
    pipeline.step(microbatches(random.Random(0), 2), torch.tensor(1))


def test_a_rank_that_raises_ends_all_ranks_with_its_error():
    started = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 breaks on purpose"):
        run_ranks(fails, 2, layout=Layout(pp=2))
    assert time.monotonic() - started < 30
    assert not dist.is_initialized()
