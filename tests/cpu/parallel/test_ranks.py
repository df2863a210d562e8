"""Variables of NCCL that captured collectives need, as the allocator's say."""

import pytest
import torch

from packgraph.parallel.ranks import Launch, set_nccl
from packgraph.train import launch as training
from packgraph.train.config.reading import ConfigError

EXPANDABLE = "max_split_size_mb:256,expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_registration_is_off_with_expandable_segments_and_said_once(name):
    environment = {name: EXPANDABLE}
    note = set_nccl(environment)
    assert note is not None and "NCCL_GRAPH_REGISTER=0 was set" in note and name in note
    assert environment["NCCL_GRAPH_REGISTER"] == environment["NCCL_NVLS_ENABLE"] == "0"
    assert set_nccl(environment) is None


@pytest.mark.parametrize("value", [None, "expandable_segments:False", "max_split_size_mb:256"])
def test_registration_is_left_as_it_is_with_other_segments(value):
    environment = {} if value is None else {"PYTORCH_ALLOC_CONF": value}
    assert set_nccl(environment) is None and "NCCL_GRAPH_REGISTER" not in environment
    asked = environment | {"NCCL_GRAPH_REGISTER": "1"}
    assert set_nccl(asked) is None and asked["NCCL_GRAPH_REGISTER"] == "1"


def test_both_at_once_are_refused_before_the_processes_meet(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # put back afterwards
    cuda, pair = torch.device("cuda"), Launch(0, 2, 0, 2)
    with pytest.raises(ConfigError, match="set NCCL_GRAPH_REGISTER=0 or leave it out"):
        training._nccl_notes(cuda, pair)
    assert not training._nccl_notes(cuda, Launch()), "one process has no NCCL"
    assert not training._nccl_notes(torch.device("cpu"), pair)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert not training._nccl_notes(cuda, pair), "as it is to be"
