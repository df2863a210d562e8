"""Parser of limits on memory: `12GiB`, `12GB`, `512MiB`, or `40%` of what the device has."""

import re

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
READ = UNITS | {"TiB": 2**40, "TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}
SHARE = "%"


def budget_bytes(text: str, total: int | None) -> int:
    """The bytes that `text` allows. total: bytes of the device, None where that is not known.

    Raises ValueError when the text is no budget, or a share of a memory whose size is not known.
    """
    units = {unit.lower(): nbytes for unit, nbytes in READ.items()}
    found = re.fullmatch(rf"(\d+(?:\.\d*)?|\.\d+)\s*({'|'.join(units)}|%)", text.strip().lower())
    if found is None or not float(found[1]):
        raise ValueError(
            "a memory budget is written 12GiB, 12GB, 512MiB or 40% (of the device's memory), not "
            f"{text!r}"
        )
    amount = float(found[1])
    if found[2] != SHARE:
        return round(amount * units[found[2]])
    if amount > 100:
        raise ValueError(f"a memory budget of {text.strip()} is more than there is")
    if total is None:
        raise ValueError(
            f"a memory budget of {text.strip()} needs a CUDA device; write it in GiB or MiB"
        )
    return round(total * amount / 100)


def shown(nbytes: float) -> str:
    """Bytes for people."""
    unit = next((unit for unit in UNITS if nbytes >= UNITS[unit]), "KiB")
    return f"{nbytes / UNITS[unit]:.2f} {unit}"
