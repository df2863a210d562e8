"""Whoever starts the allocator's statistics again forgets no peak."""

from collections import Counter

import pytest
import torch

from packgraph.graphs.memory import allocator as peak_memory

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def peaks(monkeypatch):
    """What torch would say of a device: its present peaks."""
    said = {"allocated": 0, "reserved": 0}
    nested = {kind: f"{kind}_bytes" for kind in said}
    monkeypatch.setattr(peak_memory, "_MOST", Counter())
    monkeypatch.setattr(
        torch.cuda.memory,
        "memory_stats_as_nested_dict",
        lambda device: {
            nested[kind]: {"all": {"current": 1, "peak": peak}} for kind, peak in said.items()
        },
    )
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: said.update(dict.fromkeys(said, 1))
    )
    for kind in said:
        monkeypatch.setattr(torch.cuda, f"max_memory_{kind}", lambda device, kind=kind: said[kind])
    return said


def test_the_most_of_all_stretches_is_known(peaks):
    peaks.update(allocated=5, reserved=8)
    assert peak_memory.look(DEVICE)["allocated_bytes"]["all"]["peak"] == 5 and peaks == {
        "allocated": 1,
        "reserved": 1,
    }
    assert (peak_memory.most_allocated(DEVICE), peak_memory.most_reserved(DEVICE)) == (5, 8)
    peaks.update(allocated=3, reserved=9)
    peak_memory.look(DEVICE)
    assert (peak_memory.most_allocated(DEVICE), peak_memory.most_reserved(DEVICE)) == (5, 9)
    peaks.update(allocated=7)
    assert peak_memory.most_allocated(DEVICE) == 7, "of the stretch that has not ended, too"


def test_devices_have_their_own(peaks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    peaks.update(allocated=5)
    peak_memory.look(torch.device("cuda"))
    assert [peak_memory.most_allocated(torch.device("cuda", number)) for number in (0, 1)] == [1, 5]


def test_a_stretch_knows_its_most_whoever_looks_meanwhile(peaks):
    peaks.update(allocated=9)
    outer = peak_memory.Stretch(DEVICE)
    peaks.update(allocated=5)
    inner = peak_memory.Stretch(DEVICE)
    peaks.update(allocated=4)
    peak_memory.look(DEVICE)
    peaks.update(allocated=3)
    other = peak_memory.Stretch(torch.device("cuda", 1))
    assert [stretch.most_allocated() for stretch in (outer, inner)] == [5, 4]
    assert other.ended == 0, "another device's"
    peaks.update(allocated=7)
    assert [stretch.most_allocated() for stretch in (outer, inner)] == [7, 7]
