"""Observer of the calls that one thread's Python code makes, which replaces no function.

Some effects of captured code pass by torch's dispatcher: seeding a generator, drawing from Python's
`random`, moving the state of a random generator, resizing a storage. All of them end in a C
function, or in one of a few functions of `torch.random`. `sys.setprofile` tells of every such call,
in the thread that asks for it and in no other: what other threads do is neither seen nor slowed
down, and no function has to be replaced for the whole process.

A watcher that raises stops the call before it happens. Python takes the profile function off then,
so code that swallows the error would go on unseen: it is raised again when the block ends.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch.utils._pytree

from packgraph.graphs.errors import PACKAGE, CaptureError, user_line

# Before Python 3.13 a frame that a profile function has seen keeps a copy of its variables as they
# were then, and so tensors that the code has let go of. Looking at a caller's variables makes that
# copy anew.
_SNAPSHOTS = sys.version_info < (3, 13)
# Python 3.12 gives a module's frame that a profile function has seen a copy of its variables after
# a comprehension, so that `vars()[name] = value` of modules (torch._numpy) is lost: imports are not
# looked at.
_BREAKS_IMPORTS = sys.version_info[:2] == (3, 12)
_CHEAP = sys.version_info < (
    3,
    12,
)  # to change the profile function: later, all code is rewritten for it
_MACHINERY = (
    str(PACKAGE / "graphs"),
    str(Path(torch.utils._pytree.__file__)),
    contextlib.__file__,
)
# (calling frame, C function, whether it is done), and (frame of the function, its result, whether
# it is done)
SeesBuiltin = Callable[[FrameType, Any, bool], None]
SeesFunction = Callable[[FrameType, Any, bool], None]


class Watcher:
    """Base class of observers of a thread's calls.

    known: code, by identity, of functions that it need not see again.
    """

    known: Container[int] = range(0)

    def builtins(self) -> Mapping[str, SeesBuiltin]:
        """Returns, by name, functions that are called before and after the C functions so named."""
        return {}

    def functions(self) -> Mapping[CodeType, SeesFunction]:
        """Returns, by code, functions that are called before and after functions with this code."""
        return {}

    def entered(self, frame: FrameType) -> None:
        """A function whose code is not `known` begins."""


class _Thread(threading.local):
    """The profile function of a thread while anybody watches.

    compiles: Whether it does not look at a compiler at work. paused: Whether one is.
    """

    hook: "_Hook | None" = None
    quiet = False
    compiles = False
    paused = False


_THREAD = _Thread()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Within the block nobody watches: the same code was watched before. Watching makes Python
    several times slower."""
    before, _THREAD.quiet = _THREAD.quiet, True
    try:
        yield
    finally:
        _THREAD.quiet = before


@contextlib.contextmanager
def watched_calls(watcher: Watcher) -> Iterator[None]:
    """Within the block `watcher` sees the calls of this thread.

    Raises CaptureError when another profiler has the thread's only place for one and cannot share
    it, or takes it in the block; and again what a watcher has raised, if the code around has
    swallowed it.
    """
    if _THREAD.quiet:
        yield
        return
    before = _THREAD.hook
    known = before.watchers if before is not None else []
    hook = _Hook([*known, watcher], before.other if before is not None else _other_profiler())
    _THREAD.hook = hook
    sys.setprofile(hook.see)
    done = False
    try:
        yield
        done = True
    finally:
        replaced = sys.getprofile() is not (hook.see if hook.told.importing is None else None)
        _THREAD.hook, hook.told.over, hook.told.importing = before, True, None
        _put_back(before.see if before is not None else hook.other)
        if done and hook.told.refused is not None:
            raise hook.told.refused
        if done and replaced:
            raise CaptureError(
                "a profiler begins or ends inside a captured stage: what the stage does to random "
                "generators could not be seen",
                user_line(),
                "profile from outside of the call",
            )


@contextlib.contextmanager
def unwatched_calls() -> Iterator[None]:
    """Within the block this thread's calls are not looked at: a frame that is seen may keep tensors
    for longer."""
    hook = _THREAD.hook
    if hook is not None:
        sys.setprofile(None)
    try:
        yield
    finally:
        if hook is not None:
            sys.setprofile(hook.see)


@contextlib.contextmanager
def unwatched_compiling() -> Iterator[None]:
    """Within the block nobody watches from `compiling_begins` to `compiling_ends`. A profiler of
    somebody else still sees all.

    Raises:
        CaptureError: The end was not told, so that compiled code has run unwatched: the compiler
            tells only the last of all threads that compile at the same time.
    """
    before, _THREAD.compiles = _THREAD.compiles, True
    missed = False
    try:
        yield
        missed = _THREAD.paused
    finally:
        compiling_ends()
        _THREAD.compiles = before
    if missed:
        raise CaptureError(
            "another thread has compiled while this one did, and hid what compiled code calls",
            user_line(),
            "compile before other threads do, or capture again",
        )


def compiling_begins(_: object = None) -> None:
    """Called before a compiler traces code, of which it runs none; which takes several times as
    long where every call of the compiler is looked at."""
    hook = _THREAD.hook
    if _THREAD.compiles and hook is not None and hook.other is None:
        _THREAD.paused = sys.getprofile() is hook.see
        if _THREAD.paused:
            sys.setprofile(None)


def compiling_ends(_: object = None) -> None:
    """Called before what was compiled runs."""
    if _THREAD.paused and _THREAD.hook is not None:
        _THREAD.paused = False
        sys.setprofile(_THREAD.hook.see)


class Unseen:
    """Within a block of the machinery, which watches nothing, this thread's calls are not looked
    at: to save time. A profiler that captured code has begun stays, and is found. From Python 3.12
    on all are looked at: to take the profile function off and put it back costs more there than the
    function does for the few calls of a block."""

    __slots__ = ("_see",)
    _pays = _CHEAP

    def __enter__(self) -> None:
        hook = _THREAD.hook
        if hook is not None and hook.told.importing is not None:
            hook.go_on()
        self._see = (
            hook.see if self._pays and hook is not None and sys.getprofile() is hook.see else None
        )
        if self._see is not None:
            sys.setprofile(None)

    def __exit__(self, *raised: object) -> None:
        if self._see is not None:
            sys.setprofile(self._see)


class UnseenLoop(Unseen):
    """The same for a block that goes through all of a module: its calls grow with the layers, and
    are left out by every Python."""

    __slots__ = ()
    _pays = True


def watch_also() -> Callable[[object], None]:
    """Returns a function by which another thread, autograd's on CUDA, is watched for the present
    block, too. The thread calls it itself. It may be used as a hook of a tensor. The thread is
    looked at until the block ends."""
    hook = _THREAD.hook

    def watch(_: object) -> None:
        if hook is not None and not hook.told.over and _THREAD.hook is not hook:
            sys.setprofile(hook.see)

    return watch


def _other_profiler() -> Any:
    """The profiler that is active. Raises CaptureError if it cannot be called and begun again."""
    other = sys.getprofile()
    if other is None or callable(other) or hasattr(other, "enable"):
        return other
    raise CaptureError(
        f"a profiler ({type(other).__name__}) watches the Python calls of this thread, which a "
        "capture "
        "has to watch itself",
        user_line(),
        "begin to profile when all graphs are captured",
    )


def _put_back(profiler: Any) -> None:
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()  # cProfile


@dataclass
class _Told:
    """State that a profile function shares with its block. over: its block has ended. refused: what
    a watcher has raised. importing: the frame of a module whose code it does not look at."""

    over: bool = False
    refused: CaptureError | None = None
    importing: FrameType | None = None


class _Hook:
    """The profile function `see` for some watchers. other: one that was there before."""

    def __init__(self, watchers: list[Watcher], other: Any) -> None:
        self.watchers, self.other, self.told = watchers, other, _Told()
        self.see = _profile_function(watchers, other if callable(other) else None, self.told)

    def go_on(self) -> None:
        """Look at calls again if the import that was not looked at has ended."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.told.importing:
            frame = frame.f_back
        if frame is None:
            self.told.importing = None
            if sys.getprofile() is None:
                sys.setprofile(self.see)


def _profile_function(
    watchers: Sequence[Watcher], other: Callable[[FrameType, str, Any], Any] | None, told: _Told
) -> Callable[[FrameType, str, Any], None]:
    """Returns the profile function. It is called a million times in the capture of a large model:
    hence the order of its tests."""
    builtins: dict[str, list[SeesBuiltin]] = {}
    functions: dict[CodeType, list[SeesFunction]] = {}
    for watcher in watchers:
        for name, sees in watcher.builtins().items():
            builtins.setdefault(name, []).append(sees)
        for code, shown in watcher.functions().items():
            functions.setdefault(code, []).append(shown)
    named = {code.co_name for code in functions}
    entered = [(w.entered, w.known) for w in watchers if type(w).entered is not Watcher.entered]
    keeps: dict[int, tuple[CodeType, bool]] = {}

    def see(frame: FrameType, event: str, argument: Any) -> None:
        try:
            if event == "c_call" or event == "c_return" or event == "c_exception":
                if argument.__name__ in builtins and not told.over:
                    for sees in builtins[argument.__name__]:
                        sees(frame, argument, event != "c_call")
            elif told.over:  # in a thread of autograd's, which nobody can tell
                sys.setprofile(None)
            else:
                code = frame.f_code
                if event == "call":
                    if _BREAKS_IMPORTS and code.co_name == "<module>":
                        told.importing = frame
                        sys.setprofile(None)
                        return
                    if _SNAPSHOTS:
                        _look_again(frame.f_back, keeps)
                    for enter, known in entered:
                        if id(code) not in known:
                            enter(frame)
                if code.co_name in named:
                    for shown in functions.get(code, ()):
                        shown(frame, argument, event == "return")
        except CaptureError as error:
            told.refused = error
            raise
        if other is not None:
            other(frame, event, argument)

    return see


def _look_again(frame: FrameType | None, keeps: dict[int, tuple[CodeType, bool]]) -> None:
    """See _SNAPSHOTS; frames of the machinery keep no tensor for longer than a call."""
    if frame is None:
        return
    code = frame.f_code
    if id(code) not in keeps:
        keeps[id(code)] = code, not code.co_filename.startswith(_MACHINERY)
    if keeps[id(code)][1]:
        frame.f_locals  # noqa: B018
