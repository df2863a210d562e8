"""What the Python code of one thread calls, seen without replacing anything.

Some effects of captured code pass by torch's dispatcher: seeding a generator, drawing from Python's `random`, moving
the state of a random generator, resizing a storage. All of them end in a C function, or in one of a few functions of
`torch.random`. `sys.setprofile` tells of every such call, in the thread that asks for it and in no other: what other
threads do is neither seen nor slowed down, and no function has to be replaced for the whole process.

A watcher that raises stops the call before it happens. Python takes the profile function off then, so code that
swallows the error would go on unseen: it is raised again when the block ends.
"""
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, MappingProxyType
from typing import Any

from packgraph.graphs.errors import CaptureError, user_line

# Before Python 3.13 a frame that a profile function has seen keeps a copy of its variables as they were then, and so
# tensors that the code has let go of. Looking at a caller's variables makes that copy anew.
_SNAPSHOTS = sys.version_info < (3, 13)
# (calling frame, C function, whether it is done), and (frame of the function, its result, whether it is done)
SeesBuiltin = Callable[[FrameType, Any, bool], None]
SeesFunction = Callable[[FrameType, Any, bool], None]


class Watcher:
    """What somebody wants to know of a thread's calls.

    builtins: by name of C functions, called before and after each. functions: by code, likewise. entered: called for
    every frame that begins.
    """

    builtins: Mapping[str, SeesBuiltin] = MappingProxyType({})
    functions: Mapping[CodeType, SeesFunction] = MappingProxyType({})

    def entered(self, frame: FrameType) -> None:
        """A Python function begins."""


class _Thread(threading.local):
    """The watchers of a thread, and its profile function while there are any."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self.hook: _Hook | None = None


_THREAD = _Thread()


@contextlib.contextmanager
def watched_calls(watcher: Watcher) -> Iterator[None]:
    """Within the block `watcher` sees the calls of this thread.

    Raises CaptureError when another profiler has the thread's only place for one and cannot share it, or takes it in
    the block; and again what a watcher has raised, if the code around has swallowed it.
    """
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
        replaced = sys.getprofile() != hook.see
        _THREAD.hook, hook.over = before, True
        _put_back(before.see if before is not None else hook.other)
        if done and hook.refused is not None:
            raise hook.refused
        if done and replaced:
            raise CaptureError("a profiler begins or ends inside a captured stage: what the stage does to random "
                               "generators could not be seen", user_line(), "profile from outside of the call")


def watch_also() -> Callable[[object], None]:
    """What another thread has to call that works for the present block: autograd's, which runs backwards on CUDA. It
    may be used as a hook of a tensor. The thread is looked at until the block ends."""
    hook = _THREAD.hook

    def watch(_: object) -> None:
        if hook is not None and not hook.over and _THREAD.hook is not hook:
            sys.setprofile(hook.see)

    return watch


def _other_profiler() -> Any:
    """The profiler that is active. Raises CaptureError if it cannot be called and begun again."""
    other = sys.getprofile()
    if other is None or callable(other) or hasattr(other, "enable"):
        return other
    raise CaptureError(f"a profiler ({type(other).__name__}) watches the Python calls of this thread, which a capture "
                       "has to watch itself", user_line(), "begin to profile when all graphs are captured")


def _put_back(profiler: Any) -> None:
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()  # cProfile


class _Hook:
    """The profile function for some watchers. other: one that was there before. refused: what a watcher has raised."""

    def __init__(self, watchers: list[Watcher], other: Any) -> None:
        self.watchers, self.other, self.over = watchers, other, False
        self.refused: CaptureError | None = None
        self._builtins: dict[str, list[SeesBuiltin]] = {}
        self._functions: dict[CodeType, list[SeesFunction]] = {}
        for watcher in watchers:
            for name, sees in watcher.builtins.items():
                self._builtins.setdefault(name, []).append(sees)
            for code, shown in watcher.functions.items():
                self._functions.setdefault(code, []).append(shown)
        self._names = {code.co_name for code in self._functions}
        self._entered = [w.entered for w in watchers if type(w).entered is not Watcher.entered]

    def see(self, frame: FrameType, event: str, argument: Any) -> None:
        """The profile function."""
        if self.over:  # in a thread of autograd's, which nobody can tell
            sys.setprofile(None)
            return
        try:
            if event == "call":
                if _SNAPSHOTS and frame.f_back is not None:
                    frame.f_back.f_locals  # noqa: B018  (see _SNAPSHOTS)
                for entered in self._entered:
                    entered(frame)
                if frame.f_code.co_name in self._names:
                    for shown in self._functions.get(frame.f_code, ()):
                        shown(frame, None, False)
            elif event == "return":
                if frame.f_code.co_name in self._names:
                    for shown in self._functions.get(frame.f_code, ()):
                        shown(frame, argument, True)
            elif argument.__name__ in self._builtins:
                for sees in self._builtins[argument.__name__]:
                    sees(frame, argument, event != "c_call")
        except CaptureError as error:
            self.refused = error
            raise
        if callable(self.other):
            self.other(frame, event, argument)
