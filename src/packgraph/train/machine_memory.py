"""Memory that a process may still take: of the device, or of the host within the limits of its
control groups.

A container or a batch system limits a process to less than the machine has. The kernel ends what
takes more without a word, so the smallest of all limits counts. Caches of files do not: the kernel
gives them up first.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path("/")
UNLIMITED = 2**60  # control groups of version 1 write a number near 2**63 where there is no limit


def available_memory(
    device: torch.device, local_processes: int = 1, root: Path = ROOT
) -> int | None:
    """Bytes that this process may still take on `device`; None where the system does not say.

    Args:
        device: A CUDA device, whose free memory counts, or the CPU.
        local_processes: Processes of the run on this host, which share the memory of the host.
        root: Where `proc` and `sys` are.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [*_of_machine(root), *_of_control_groups(root)]
    return max(min(found), 0) // local_processes if found else None


def _of_machine(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield int(rest.split()[0]) * 1024


def _of_control_groups(root: Path) -> Iterator[int]:
    """What each limit leaves: of the process's own control group and of those around it."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _limits(
                root / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_",
            )


def _limits(top: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    group = top / path.lstrip("/")
    inside = [group, *group.parents]
    # A container sees its own group as the top, and the host's path to it leads nowhere.
    for folder in inside[: inside.index(top) + 1]:
        most, taken = _number(folder / limit), _number(folder / usage)
        if most is not None and taken is not None and most < UNLIMITED:
            counts = dict(line.split() for line in _lines(folder / "memory.stat"))
            yield (
                most
                - taken
                + sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            )


def _number(file: Path) -> int | None:
    """The number in a file; None where there is none, or `max`."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:  # another system, or one that does not show it
        return []
