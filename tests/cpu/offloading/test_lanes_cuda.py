"""The order that copy streams on CUDA ask for, read off streams and events that only note what
waits for what."""

import contextlib

import pytest
import torch

from packgraph.graphs.copy_streams import HostMemories
from packgraph.graphs.cuda.copy_streams import CudaCopyStreams
from packgraph.graphs.recorder.copy_streams import plain


class Device:
    """Streams by name; `after(a, b)`: whether everything on stream b so far comes before the next
    thing on stream a."""

    def __init__(self):
        self.current, self.done = "main", {}
        self.begun = {"main": 0, "out": 0, "back": 0}
        self.illegal: list[tuple[int, int]] = []
        self.scope = 0

    def launch(self):
        """Something runs on the current stream."""
        self.begun[self.current] += 1
        self.known(self.current)[self.current] = self.begun[self.current]

    def known(self, stream):
        return self.done.setdefault(stream, {})

    def seen(self, stream, other):
        """How many things of `other` are over before the next one on `stream` begins."""
        return self.known(stream).get(other, 0)


class Event:
    device: Device

    def __init__(self, enable_timing=False):
        self.seen: dict[str, int] = {}

    def record(self, stream):
        self.seen, self.scope = dict(self.device.known(stream.name)), self.device.scope


class Stream:
    def __init__(self, device, name):
        self.on, self.name = device, name

    def wait_event(self, event):
        if event.scope != self.on.scope:
            self.on.illegal.append((event.scope, self.on.scope))
        known = self.on.known(self.name)
        for other, count in event.seen.items():
            known[other] = max(known.get(other, 0), count)


class Noted(torch.Tensor):
    """Bytes whose copies are noted on the device."""

    device_of: Device

    def copy_(self, source, non_blocking=False):
        assert non_blocking
        self.device_of.launch()
        return self


@pytest.fixture
def made(monkeypatch):
    device = Device()
    streams = {name: Stream(device, name) for name in ("main", "out", "back")}
    monkeypatch.setattr(Event, "device", device, raising=False)
    monkeypatch.setattr(Noted, "device_of", device, raising=False)

    @contextlib.contextmanager
    def on(stream):
        before, device.current = device.current, stream.name
        yield
        device.current = before

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where=None: streams[device.current])
    monkeypatch.setattr(torch.cuda, "stream", on)
    memories = HostMemories(lambda nbytes: plain(nbytes).as_subclass(Noted))
    return device, CudaCopyStreams(
        torch.device("cuda", 0), streams["out"], streams["back"], memories
    )


def numbers():
    return torch.zeros(64, dtype=torch.uint8).as_subclass(Noted)


def test_every_copy_waits_for_main_and_for_the_last_copy_of_its_host_memory(made):
    device, copy_streams = made
    host = copy_streams.host(1024)
    device.launch()
    out = copy_streams.out([numbers(), numbers()], host)
    assert device.seen("out", "main") == 1 and device.begun["out"] == 2
    device.launch()
    back = copy_streams.back(host, [numbers(), numbers()])
    assert device.seen("back", "out") == 2 and device.seen("back", "main") == 2
    copy_streams.give_back(host)
    again = copy_streams.host(1024)
    assert again is host
    copy_streams.out([numbers()], again)
    assert device.seen("out", "back") == 2
    assert device.seen("main", "out") == device.seen("main", "back") == 0, (
        "main has waited for nothing yet"
    )
    assert len(out.held) == 2
    copy_streams.wait(out)
    assert device.seen("main", "out") == 2 and not out.held
    copy_streams.wait(back)
    assert device.seen("main", "back") == 2
    copy_streams.join()
    assert device.seen("main", "out") == device.begun["out"] == 3


def test_a_copy_from_an_earlier_point_does_not_wait_for_what_came_after(made):
    device, copy_streams = made
    device.launch()
    since, host = copy_streams.point(), copy_streams.host(64)
    device.launch()
    queued = []
    copy_streams.postpone(lambda: queued.append(copy_streams.out([numbers()], host, since)))
    assert not queued and not device.begun["out"]
    copy_streams.launched()
    assert device.seen("out", "main") == 1 and len(queued) == 1


def test_no_event_of_one_capture_is_waited_for_in_another(made):
    device, copy_streams = made
    host = copy_streams.host(64)

    def next_capture():
        copy_streams.next_capture()
        device.scope += 1

    next_capture()
    out = copy_streams.out([numbers()], host)
    copy_streams.join()
    assert device.seen("main", "out") == 1
    next_capture()
    copy_streams.wait(out)
    back = copy_streams.back(host, [numbers()])
    copy_streams.wait(back)
    copy_streams.join()
    next_capture()
    copy_streams.out([numbers()], host)
    copy_streams.join()
    assert not device.illegal
    host.last.scope = 1  # as if it were of another capture: the check sees what is not legal
    device.scope += 1
    copy_streams.wait(copy_streams.back(host, [numbers()]))
    copy_streams.scope, host.last.scope, host.last.done = device.scope, device.scope, False
    device.scope += 1
    copy_streams.wait(host.last)
    assert device.illegal
