"""Random generators during a capture: nothing is drawn twice, and nothing that other threads draw
is taken back.

A capture must leave random generators as they were, but default generators belong to the whole
process: whoever saves and restores their state hands out again what a data loader has drawn
meanwhile. So a capture draws from generators of its own wherever it can: operations get a private
copy of the generator that they name or default to. What cannot be given another generator (a fused
dropout, compiled code, an operation of somebody else, Python's and numpy's generators in an eager
stage) moves the real one. That is undone only if nobody else has drawn: the state is compared
before each of these moves with what the last one left, and at the end. Where others have drawn, the
capture's numbers stay drawn: an order of draws between threads that no program could rely on has
then skipped a few. Forwards that are run again for their gradients draw in the same way (`Redraw`).

PyTorch's tracer refuses code that draws from Python's and numpy's global generators, or seeds one
(graphs/front.py).
"""

import contextlib
import functools
import inspect
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from packgraph.graphs.checks.operations import Operation
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.torch_internals import below_modes, identity, schema_of

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_PATIENCE = 0.03  # seconds, in which a thread that waits for the interpreter gets it
# Names of threads that draw from no global generator begin so: they read data or write checkpoints.
QUIET_THREAD = "packgraph-quiet"
_QUIET = (
    "torch/_inductor/",
    "torch/utils/data/_utils/pin_memory.py",
    "tqdm/_monitor.py",
    "event_file_writer.py",
    "huggingface_hub/utils/_telemetry.py",
)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Within the block no mode sees what is done to tensors."""
    with below_modes(), torch._C.DisableTorchFunction():
        yield


class _State:
    """The state of one generator, as far as the capture knows it. others: whether somebody else has
    drawn."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """read: gives what `==` compares."""
        self._read, self._write = read, write
        self._first = self._expected = read()
        self.others = False

    def look(self) -> bool:
        """Checks, before the capture moves it, that the generator is where the capture left it."""
        same: bool = self._expected == self._read()
        self.others = self.others or not same
        return same

    def note(self) -> None:
        """The capture itself has moved the generator."""
        self._expected = self._read()

    def is_moved(self, alone: bool) -> bool:
        """Returns whether there is something to take back, which nobody else has drawn from. alone:
        there is nobody else."""
        if alone:
            return bool(self._first != self._read())
        # What the capture has not moved is never written: somebody may draw between a look and a
        # write.
        return self._first != self._expected and self.look() and not self.others

    def undo(self) -> None:
        """Take back what was drawn."""
        self._write(self._first)


def _read(generator: torch.Generator) -> bytes:
    with _unwatched():
        return generator.get_state().numpy().tobytes()


def _torch_state(generator: torch.Generator) -> _State:
    def write(state: bytes) -> None:
        with _unwatched():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return _State(partial(_read, generator), write)


def _numpy_state() -> _State | None:
    """State of numpy's global generator, or None if numpy is not in use."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None

    def read() -> Any:
        kind, keys, *rest = numpy.get_state()
        return kind, keys.tobytes(), keys.dtype, *rest

    def write(state: Any) -> None:
        kind, keys, dtype, *rest = state
        numpy.set_state((kind, sys.modules["numpy"].frombuffer(keys, dtype=dtype), *rest))

    return _State(read, write)


class _Listening(threading.local):
    """Holds who makes a thread's calls: a list of one, of none when its block has ended."""

    entry: Sequence[Any] = ()


_LISTENING = _Listening()


@contextlib.contextmanager
def state_calls(listener: Any) -> Iterator[Callable[[object], None]]:
    """Within the block `listener` makes this thread's calls of `torch.get_rng_state`,
    `torch.cuda.set_rng_state` and their kin, as a checkpoint calls them: by its method
    `state_call(function, generator, state)`. The function has no arguments; the state is None
    where it is read.

    Yields:
        A function by which another thread, autograd's on CUDA, listens until the block ends. The
        thread calls it itself; it may be a hook of a tensor.
    """
    for home in (torch.random, torch.cuda.random):
        for name in ("get_rng_state", "set_rng_state"):
            function = getattr(home, name)
            if not hasattr(function, "tells"):
                telling = _telling(function, home is torch.random, name.startswith("set"))
                setattr(home, name, telling)
                setattr(torch if home is torch.random else torch.cuda, name, telling)
    before, entry = _LISTENING.entry, [listener]

    def listen(_: object = None) -> None:
        _LISTENING.entry = entry

    listen()
    try:
        yield listen
    finally:
        entry.clear()
        _LISTENING.entry = before


def _telling(function: Any, of_host: bool, sets: bool) -> Any:
    """A function of torch's that asks who listens."""

    @functools.wraps(function)
    def telling(*args: Any, **kwargs: Any) -> Any:
        listener = next(iter(_LISTENING.entry), None)
        if listener is None:
            return function(*args, **kwargs)
        given = inspect.signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        device = torch.device("cpu" if of_host else given.arguments["device"])
        generator = _default_generator(device)
        assert generator is not None, "default generators are the host's or CUDA's"
        state = given.arguments["new_state"] if sets else None
        return listener.state_call(partial(function, *args, **kwargs), generator, state)

    telling.tells = telling._torchdynamo_disable = True  # type: ignore[attr-defined]
    return telling


class Draws:
    """Effects of one capture on random generators. generators: torch's, which captured code may
    draw from.

    Attributes:
        bakes: Whether graphs hold numbers by their distance from where a replay begins, and no
            calls of the host, as those of CUDA do.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = list(generators)
        self._torch = [_torch_state(generator) for generator in self._generators]
        self._python = _State(random.getstate, random.setstate)
        self._numpy = _numpy_state()
        self._alone = is_alone()
        self._captured = True
        self._private: dict[int, tuple[torch.Generator, torch.Generator]] = {}
        self.bakes = any(generator.device.type == "cuda" for generator in self._generators)
        self._rewound: dict[int, torch.Generator] = {}
        self.listen: Callable[[object], None] = lambda _: None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block states of generators are set by this, where graphs hold distances.
        Other threads join by `listen`."""
        with state_calls(self) if self.bakes else contextlib.nullcontext(self.listen) as listen:
            self.listen = listen
            yield

    # ---- operations

    def call(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the capture's code that may draw, with private random numbers."""
        if self._rewound and self._captured and operation.draws:
            raise _drawn_again()
        privately = _with_generator(operation, args, kwargs, self._private_for)
        if privately is not None:
            return privately()
        with self._moving(self._torch):
            before = [_read(generator) for generator in self._rewound.values()]
            result = operation.function(*args, **kwargs)
            if before != [_read(generator) for generator in self._rewound.values()]:
                raise _drawn_again()
        return result

    def _private_for(self, generator: torch.Generator) -> torch.Generator:
        """The capture's own copy of a generator."""
        key = identity(generator)  # the dispatcher makes a new object for the same one
        if key not in self._private:
            self._private[key] = (generator, generator.clone_state())
        return self._private[key][1]

    @contextlib.contextmanager
    def _moving(self, states: Sequence[_State | None]) -> Iterator[None]:
        """The capture itself may move these generators in the block."""
        there = [state for state in states if state is not None]
        for state in there:
            state.look()
        try:
            yield
        finally:
            for state in there:
                state.note()

    def moving(self) -> contextlib.AbstractContextManager[None]:
        """The capture itself moves whatever generators it likes in the block."""
        return self._moving([*self._torch, self._python, self._numpy])

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Eager code runs in the block, at every replay too: it may draw, seed and set states."""
        self._captured = False
        try:
            with self._moving([self._python, self._numpy]):
                yield
        finally:
            self._captured = True

    def undo(self) -> None:
        """Put all generators back, but for those that others have drawn from."""
        alone = self._alone and is_alone()
        states = [state for state in (*self._torch, self._python, self._numpy) if state is not None]
        moved = [state for state in states if state.is_moved(alone)]
        if (
            moved and not alone
        ):  # whoever draws again and again has to show: a quick capture may have left him no time
            time.sleep(_PATIENCE)
            moved = [state for state in moved if state.is_moved(alone)]
        for state in moved:
            state.undo()

    def state_call(self, function: Any, generator: torch.Generator, state: Any) -> Any:
        """See state_calls."""
        known = [
            own
            for own, each in zip(self._torch, self._generators, strict=True)
            if identity(each) == identity(generator)
        ]
        if state is None or not known:
            return function()
        if self._captured:
            if not _puts_back(sys._getframe(2)):
                raise CaptureError(
                    "captured code sets the state of a random generator: a replay would not",
                    user_line(),
                    "set it outside of the call, or use torch.random.fork_rng",
                )
            self._rewound[identity(generator)] = generator
        with self._moving(known):
            return function()


class PastDraws:
    """States of generators before a replay, and of those that have moved in it, after it.

    Attributes:
        moved: Generators with their states before and after the replay; set by `end`.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._before = [(generator, generator.get_state()) for generator in generators]
        self.moved: list[tuple[torch.Generator, torch.Tensor, torch.Tensor]] = []

    def end(self) -> None:
        """The replay is done."""
        found = [(own, before, own.get_state()) for own, before in self._before]
        self.moved = [each for each in found if not torch.equal(*each[1:])]

    @contextlib.contextmanager
    def again(self) -> Iterator[Callable[[], bool]]:
        """Within the block, one forward, the generators are where they were before the replay.

        Yields:
            Whether what was drawn in the block by now is what the replay has drawn. It is not where
            another thread has drawn meanwhile, or in the replay.
        """
        now = [(own, own.get_state()) for own, _, _ in self.moved]
        try:
            for own, before, _ in self.moved:
                own.set_state(before)
            yield lambda: all(
                any(torch.equal(own.get_state(), known) for known in states)
                for own, *states in self.moved
            )
        finally:
            for own, state in now:
                own.set_state(state)


def _puts_back(frame: FrameType | None) -> bool:
    """Returns whether code of torch sets a generator's state and puts back in the end what it has
    found (a checkpoint, `fork_rng`). frame: where it is set."""
    while frame is not None and frame.f_code.co_name.startswith(
        ("set_rng_state", "set_device_states")
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def is_alone() -> bool:
    """No other thread could draw. Some threads of libraries run nobody's code but their
    own, and a thread that Python did not begin (autograd's) runs none while it has no frame."""
    others = [thread for thread in threading.enumerate() if thread.ident != threading.get_ident()]
    frames = sys._current_frames() if others else {}
    frames.pop(threading.get_ident(), None)  # this function's own frame has `frames`
    return all(is_quiet(thread, frames.get(thread.ident or 0)) for thread in others)


def is_quiet(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Returns whether a thread runs no code that could draw from a global generator. frame: what it
    runs now, None = no Python."""
    if frame is None:
        return isinstance(thread, threading._DummyThread)
    return thread.name.startswith(QUIET_THREAD) or any(
        name in _first_file(frame) for name in _QUIET
    )


def _first_file(frame: FrameType | None) -> str:
    """The file of the function that a thread was begun with."""
    first = ""
    while frame is not None:
        if frame.f_code.co_filename != threading.__file__:
            first = frame.f_code.co_filename
        frame = frame.f_back
    return first


def _drawn_again() -> CaptureError:
    return CaptureError(
        "random numbers are drawn after captured code has set the state of a generator, as a "
        "checkpoint does to compute dropout again: a replay would draw other ones",
        user_line(),
        "leave dropout outside of the checkpoint, or the checkpoint outside of the captured stages",
    )


def _default_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return None


def _with_generator(
    operation: Operation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    private: Callable[[torch.Generator], torch.Generator | None],
) -> Callable[[], Any] | None:
    """The call with a private generator in place of the one that it names or defaults to; None if
    the operation takes none, or there is none."""
    taking = None if operation.moves else _taking_generator(operation.function)
    if taking is None:
        return None
    given = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)), None)
    tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
    device = kwargs.get("device") or (tensor.device if tensor is not None else torch.device("cpu"))
    real = _default_generator(torch.device(device)) if given is None else given
    generator = None if real is None else private(real)
    if generator is None:
        return None
    # None may have been given by position.
    place = next((i for i, value in enumerate(args) if given is not None and value is given), None)
    if place is None:
        place = _names(taking).index("generator")
    if place < len(args):
        return partial(taking, *args[:place], generator, *args[place + 1 :], **kwargs)
    return partial(taking, *args, **{**kwargs, "generator": generator})


_TAKING: dict[Any, Any] = {}


def _taking_generator(function: Any) -> Any:
    """The operation itself if it takes a generator, or its overload that does; None if there is
    none."""
    if function not in _TAKING:
        names, packet = _names(function), function.overloadpacket
        overloads = [getattr(packet, name) for name in packet.overloads()]
        _TAKING[function] = (
            function
            if "generator" in names
            else next(
                (
                    other
                    for other in overloads
                    if sorted(_names(other)) == sorted([*names, "generator"])
                    and [n for n in _names(other) if n != "generator"] == names
                ),
                None,
            )
        )
    return _TAKING[function]


def _names(function: Any) -> list[str]:
    return [argument.name for argument in schema_of(function).arguments]
