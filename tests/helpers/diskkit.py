"""What a disk may hold after a process was killed or the power went, at every file operation of a
folder.

`Recording` notes what a process does to the files of a folder, in order: names that appear, go and
move, contents, and what was fsynced. `Disk` replays such a list up to any operation and builds what
may be found then: after a kill all that was done; after a power loss only what was fsynced is
certain. Of the rest any part may be there, in any order: names without contents, contents without
names, one folder's names and not another's (as SQLite's and CrashMonkey's tests have it:
https://www.sqlite.org/testing.html, Mohan et al., OSDI 2018).
"""

import builtins
import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock


class Op(NamedTuple):
    """One operation. what: content, mkdir, rmdir, unlink, rename, sync-file or sync-folder. path:
    within the folder."""

    when: int
    what: str
    path: str
    target: str = ""
    content: bytes = b""


class Recording:
    """Notes the operations of this process on the files below `root` within the block."""

    def __init__(self, root: Path) -> None:
        self.root, self.ops = Path(root).resolve(), list[Op]()
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Recording":
        for name, what in (
            ("mkdir", "mkdir"),
            ("rmdir", "rmdir"),
            ("unlink", "unlink"),
            ("remove", "unlink"),
            ("rename", "rename"),
            ("replace", "rename"),
        ):
            self._patch(os, name, self._names(getattr(os, name), what))
        self._patch(os, "fsync", self._syncs(os.fsync))
        for module in (builtins, io):
            self._patch(module, "open", self._opens(open))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        self._look()

    def _patch(self, module: Any, name: str, function: Callable[..., Any]) -> None:
        self._stack.enter_context(mock.patch.object(module, name, function))

    def _opens(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            stream = real(file, mode, *args, **kwargs)
            if set(mode) & set("wax+"):
                self._look()  # a name appears, without a content
            return stream

        return opened

    def _names(self, real: Callable[..., Any], what: str) -> Callable[..., Any]:
        def changed(path: Any, *args: Any, **kwargs: Any) -> Any:
            first = self._within(path, kwargs.get("dir_fd", kwargs.get("src_dir_fd")))
            second = self._within(args[0], kwargs.get("dst_dir_fd")) if what == "rename" else ""
            if first is not None:
                self._look()
            result = real(path, *args, **kwargs)
            if first is not None:
                assert second is not None, "moved out of the folder"
                self._note(what, first, second)
            return result

        return changed

    def _syncs(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def synced(descriptor: int) -> None:
            path = self._within(f"/proc/self/fd/{descriptor}", None)
            if path is not None:
                self._look()
            real(descriptor)
            if path is not None:
                self._note("sync-folder" if (self.root / path).is_dir() else "sync-file", path)

        return synced

    def _within(self, path: Any, folder: int | None) -> str | None:
        """`path` relative to the root, None if it lies elsewhere."""
        whole = Path(os.readlink(f"/proc/self/fd/{folder}")) if folder is not None else Path.cwd()
        whole = whole / os.fspath(path)
        if str(whole).startswith("/proc/self/fd/"):
            whole = Path(os.readlink(whole))
        whole = whole.parent.resolve() / whole.name
        return str(whole.relative_to(self.root)) if whole.is_relative_to(self.root) else None

    def _note(self, what: str, path: str, target: str = "", content: bytes = b"") -> None:
        self.ops.append(Op(time.monotonic_ns(), what, path, target, content))

    def _look(self) -> None:
        """Note the contents of files that changed since the last look."""
        for place, _, files in os.walk(self.root):
            for name in files:
                path = os.path.join(place, name)
                with contextlib.suppress(FileNotFoundError):  # another process has removed it
                    found = os.stat(path)
                    state = (found.st_ino, found.st_size, found.st_mtime_ns)
                    if self._seen.get(path) != state:
                        descriptor = os.open(path, os.O_RDONLY)
                        with os.fdopen(descriptor, "rb") as stream:
                            self._note(
                                "content", os.path.relpath(path, self.root), content=stream.read()
                            )
                        self._seen[path] = state


@dataclass
class _File:
    content: bytes = b""
    synced: bytes | None = None


@dataclass
class _Folder:
    """names: as the process sees them. synced: as the disk certainly has them. pending: changes
    since, in order."""

    names: dict[str, "_File | _Folder"] = field(default_factory=dict)
    synced: dict[str, "_File | _Folder"] = field(default_factory=dict)
    pending: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)

    def change(self, change: Callable[[dict[str, Any]], None]) -> None:
        change(self.names)
        self.pending.append(change)


Tree = dict[str, Any]  # name -> bytes or another tree
Choose = Callable[[_Folder], dict[str, Any]]


class Disk:
    """The disk after some operations."""

    def __init__(self) -> None:
        self.root = _Folder()

    def apply(self, op: Op) -> None:
        """Do the next operation."""
        if op.what == "sync-folder":
            folder = self._at(op.path)
            folder.synced, folder.pending = dict(folder.names), []
            return
        folder, name = self._at(os.path.dirname(op.path)), os.path.basename(op.path)
        if op.what == "content":
            if not isinstance(folder.names.get(name), _File):
                folder.change(_adding(name, _File()))
            folder.names[name].content = op.content  # type: ignore[union-attr]
        elif op.what == "sync-file":
            entry = folder.names[name]
            entry.synced = entry.content  # type: ignore[union-attr]
        elif op.what == "mkdir":
            folder.change(_adding(name, _Folder()))
        elif op.what == "rename":
            target, entry = self._at(os.path.dirname(op.target)), folder.names[name]
            assert target is folder, "only within one folder"
            folder.change(_moving(name, os.path.basename(op.target), entry))
        else:
            folder.change(_removing(name))

    def _at(self, path: str) -> _Folder:
        folder = self.root
        for part in Path(path).parts:
            folder = folder.names[part]  # type: ignore[assignment]
        return folder

    def killed(self) -> Iterator[tuple[str, Tree]]:
        """What a kill leaves: all that was done; a file that is not fsynced may lack what was not
        yet written."""
        yield "killed", _tree(self.root, _now, lambda file: file.content)
        yield "killed while it wrote", _tree(self.root, _now, _half)

    def lost_power(self) -> Iterator[tuple[str, Tree]]:
        """What a power loss may leave."""
        certain = lambda file: file.synced or b""  # noqa: E731
        yield "only what was synced", _tree(self.root, lambda folder: folder.synced, certain)
        yield "names without contents", _tree(self.root, _now, certain)
        yield (
            "zeros for contents",
            _tree(
                self.root,
                _now,
                lambda f: f.content if f.synced == f.content else bytes(len(f.content)),
            ),
        )
        yield (
            "contents without names",
            _tree(self.root, lambda folder: folder.synced, lambda file: file.content),
        )
        for number, folder in enumerate(_folders(self.root)):
            if not folder.pending:
                continue
            yield (
                f"names of folder {number} alone",
                _tree(
                    self.root,
                    lambda other, one=folder: _now(other) if other is one else other.synced,
                    certain,
                ),
            )
            for left in range(len(folder.pending)):
                for what, kept in (
                    ("without", folder.pending[:left] + folder.pending[left + 1 :]),
                    ("with", [folder.pending[left]]),
                ):
                    names = _changed(folder.synced, kept)
                    if names is not None:
                        yield (
                            f"names of folder {number} {what} change {left}",
                            _tree(
                                self.root,
                                lambda other, one=folder, found=names: (
                                    found if other is one else _now(other)
                                ),
                                certain,
                            ),
                        )


def _adding(name: str, entry: Any) -> Callable[[dict[str, Any]], None]:
    return lambda names: names.__setitem__(name, entry)


def _removing(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda names: names.__delitem__(name)


def _moving(name: str, target: str, entry: Any) -> Callable[[dict[str, Any]], None]:
    def move(names: dict[str, Any]) -> None:
        del names[name]
        names[target] = entry

    return move


def _changed(
    names: dict[str, Any], changes: Sequence[Callable[[dict[str, Any]], None]]
) -> dict[str, Any] | None:
    """`names` after some of the changes; None if that cannot be."""
    found = dict(names)
    try:
        for change in changes:
            change(found)
    except KeyError:
        return None
    return found


def _now(folder: _Folder) -> dict[str, Any]:
    return folder.names


def _half(file: _File) -> bytes:
    return file.content if file.synced == file.content else file.content[: len(file.content) // 2]


def _folders(folder: _Folder) -> Iterator[_Folder]:
    yield folder
    known = {
        id(entry): entry for names in (folder.names, folder.synced) for entry in names.values()
    }
    for entry in known.values():
        if isinstance(entry, _Folder):
            yield from _folders(entry)


def _tree(folder: _Folder, choose: Choose, content: Callable[[_File], bytes]) -> Tree:
    return {
        name: _tree(entry, choose, content) if isinstance(entry, _Folder) else content(entry)
        for name, entry in choose(folder).items()
    }


def write(tree: Tree, folder: Path) -> None:
    """Make `tree` a folder."""
    folder.mkdir()
    for name, entry in tree.items():
        if isinstance(entry, bytes):
            (folder / name).write_bytes(entry)
        else:
            write(entry, folder / name)


def states(ops: Sequence[Op], power: bool = True) -> Iterator[tuple[int, str, Tree]]:
    """What may be found after every operation, each different state once: (operations done, how it
    came, tree)."""
    disk, seen = Disk(), set[int]()
    for number, op in enumerate(ops):
        disk.apply(op)
        for what, tree in (*disk.killed(), *(disk.lost_power() if power else ())):
            key = hash(_frozen(tree))
            if key not in seen:
                seen.add(key)
                yield number + 1, f"after {op.what} {op.path}: {what}", tree


def _frozen(tree: Tree) -> Any:
    return frozenset(
        (name, entry if isinstance(entry, bytes) else _frozen(entry))
        for name, entry in tree.items()
    )
