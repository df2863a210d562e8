"""Sharded weights: each rank makes, or reads, its own part alone, with the bits of the whole."""

import contextlib
import dataclasses
import functools
from unittest import mock

import packed_families
import pytest
import torch
from distkit import CPU, run_ranks
from memorykit import counting
from shardedkit import settings

from packgraph.graphs.errors import PackgraphWarning
from packgraph.models import values
from packgraph.models.config import ExpertConfig
from packgraph.models.decoder import DecoderModel
from packgraph.models.hf import save_pretrained
from packgraph.parallel.data import FlatParameters
from packgraph.parallel.layout import Layout
from packgraph.parallel.sharded_layers import layers_of
from packgraph.train import build
from packgraph.train.build import build_chunks, make_optimizer
from packgraph.train.features.live import build_live

EXPERTS = ExpertConfig(count=4, per_token=2, intermediate_size=48)
LAYOUTS = [
    (Layout(dp=2), {}),
    (Layout(dp=2), {"tie_embeddings": False, "vocab_size": 211}),
    (Layout(dp=2, tp=2), {}),
    (Layout(dp=2, pp=2), {}),
    (Layout(dp=4, ep=2), {"experts": EXPERTS}),
]


def config_of(layout, model, **run):
    config = settings("parameters", model=dict(model), run=run)
    sizes = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **sizes))


def built(config, mesh, deferred):
    """The optimizer of a model whose matrices were made as parts, or whole."""
    make = functools.partial(_decoder, deferred)
    with mock.patch.object(build, "DecoderModel", make):
        model = build_chunks(config, CPU, mesh)
    return model, make_optimizer(model, config, mesh)


def _decoder(parts, *args, **kwargs):
    return DecoderModel(*args, **{**kwargs, "deferred": parts and kwargs["deferred"]})


def both(mesh, layout, model, folder):
    """Everything that a rank keeps of a model made whole, and of one made in parts."""
    run = {} if folder is None else {"init_from": folder}
    config, found = config_of(layout, model, **run), []
    for deferred in (False, True):
        chunks, optimizer = built(config, mesh, deferred)
        kept = optimizer.flat.kept(chunks.parameters())
        buffers = [buffer for chunk in chunks.chunks for buffer in chunk.buffers()]
        found.append([value.detach().clone() for value in (*kept, *buffers)])
    return found


@pytest.mark.parametrize(("layout", "model"), LAYOUTS, ids=str)
@pytest.mark.parametrize("stored", [False, True], ids=["drawn", "read"])
def test_parts_have_the_bits_of_the_whole(layout, model, stored, tmp_path):
    folder = None
    if stored:  # other values than the seed of the run gives
        config = config_of(layout, model)
        folder = str(tmp_path / "weights")
        save_pretrained(DecoderModel(config.model, seed=5), folder, max_shard_bytes=2**17)
    world = layout.dp * layout.inner
    for whole, parts in run_ranks(both, world, layout, model, folder, layout=layout):
        assert len(whole) == len(parts) > 4
        assert all(torch.equal(*two) for two in zip(whole, parts, strict=True))


def live(folder, change):
    config = settings("parameters")
    hf = dataclasses.replace(config.hf, path=str(folder), **change.get("hf", {}))
    return dataclasses.replace(config, hf=hf)


def both_live(mesh, folder, change):
    """The same of a model of transformers; change: of sections."""
    config, found = live(folder, change), []
    for deferred in (False, True):
        make = functools.partial(_live, deferred)
        with mock.patch.object(build, "build_live", make), counting() as held:
            chunks = build_chunks(config, CPU, mesh)
            built_at = held.peak
        flat = make_optimizer(chunks, config, mesh).flat
        buffers = [buffer for chunk in chunks.chunks for buffer in chunk.buffers()]
        kept = [*flat.kept(chunks.parameters()), *buffers]
        whole = sum(parameter.numel() for parameter in chunks.parameters()) * 4
        found.append(([value.detach().clone() for value in kept], built_at, whole))
    return found


def _live(parts, config, device, weights, deferred):
    return build_live(config, device, weights, parts and deferred)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt2"])
def test_live_models_read_their_parts_alone(family, tmp_path):
    packed_families.build(family).save_pretrained(tmp_path)
    for whole, parts in run_ranks(both_live, 2, str(tmp_path), {}):
        assert len(whole[0]) == len(parts[0]) > 3
        assert all(torch.equal(*two) for two in zip(whole[0], parts[0], strict=True))
        assert parts[1] < parts[2] / 2 and whole[2] == parts[2]


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_live_values_that_cannot_be_had_by_parts_are_made_on_the_host(family, tmp_path):
    """Drawn ones, and what transformers converts, which is told."""
    packed_families.build(family).save_pretrained(tmp_path)
    change = {} if family == "mixtral" else {"hf": {"random": True}}
    warns = pytest.warns(PackgraphWarning, match="host memory")
    with warns if family == "mixtral" else contextlib.nullcontext():
        build_live(live(tmp_path, change), CPU, True, True)
    for whole, parts in run_ranks(both_live, 2, str(tmp_path), change):
        assert all(torch.equal(*two) for two in zip(whole[0], parts[0], strict=True))


DEEP = {"num_layers": 10, "hidden_size": 64, "intermediate_size": 192}


def peak(mesh, folder, deferred):
    """Bytes: the most while a model is built, and what is made beside what stays while it gets its
    parts; what stays of parameters; of all parameters; of one layer."""
    config = config_of(Layout(dp=2), DEEP, **({} if folder is None else {"init_from": folder}))
    make = functools.partial(_decoder, deferred)
    with counting() as held, mock.patch.object(build, "DecoderModel", make):
        chunks = build_chunks(config, CPU, mesh)
        built_at = held.peak
        layers = layers_of(chunks.chunks[0])
        flat = FlatParameters(
            chunks.named_parameters(), mesh.group("copies"), layers=layers, shard="parameters"
        )
        beside = held.peak - held.now
    spans = flat.spans
    kept = [t for span in spans for t in (span.parameters, span.own_parameters)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    whole = sum(parameter.numel() for parameter in chunks.parameters()) * 4
    layer = sum(parameter.numel() for parameter in chunks.chunks[0].layers["0"].parameters()) * 4
    return built_at, beside, sum(storages.values()), whole, layer


@pytest.mark.parametrize("stored", [False, True], ids=["drawn", "read"])
def test_no_rank_ever_holds_the_whole_model(stored, tmp_path):
    folder = None
    if stored:
        folder = str(tmp_path / "weights")
        save_pretrained(DecoderModel(config_of(Layout(dp=2), DEEP).model, seed=5), folder)
    for built_at, beside, kept, whole, layer in run_ranks(peak, 2, folder, True):
        # No memory at first; then half of it, two buffers and what is no layer's; a matrix on its
        # way.
        assert built_at < layer / 10 and beside < layer
        assert kept + beside < whole / 2 + 3.5 * layer < whole
    for built_at, *_, whole, _ in run_ranks(peak, 2, folder, False):
        assert built_at >= whole  # what the count must find


def misread(mesh, folder):
    """Whether parts differ from the whole where a box is read from its beginning."""

    def wrong(start, sizes, origin):
        return right(start, sizes, start)

    right = values.region
    with mock.patch.object(values, "region", wrong):
        whole, parts = both(mesh, Layout(dp=2), DEEP, folder)
    return not all(torch.equal(*two) for two in zip(whole, parts, strict=True))


def test_a_part_that_is_read_from_another_place_is_found(tmp_path):
    folder = str(tmp_path / "weights")
    save_pretrained(DecoderModel(config_of(Layout(dp=2), DEEP).model, seed=5), folder)
    assert any(run_ranks(misread, 2, folder))
