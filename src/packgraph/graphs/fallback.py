"""Running eagerly instead of replaying: asked for by the user, or forced by a fact; always counted with its reason."""
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_BYPASS: ContextVar[str | None] = ContextVar("packgraph_eager_reason", default=None)

WARM_UP = "warm-up"
EVALUATION = "evaluation mode"
NO_GRAD = "gradients are off"
UNDECLARED = "capacity not declared"
DOCUMENTS = "more documents than any capacity"
UNKNOWN_SHAPE = "unknown shape"
NO_SLOT = "no free slot"
CAPTURE_FAILED = "capture failed"
TOO_MANY_KEYS = "too many different call signatures"
CLOSED = "closed"
INSIDE = "inside the capture of another module"
NOT_LEAVES = "parameters are not leaf parameters"
OTHER_STATE = "an eager stage made another state than at capture (one region)"
SAVED_TENSOR_HOOKS = "saved-tensor hooks are active (checkpoint or offload around the module)"
HIDDEN_STATE = "the module holds state that cannot be watched"
BUSY = "another thread is inside the module, which is to be captured"
NO_KEY = "an argument cannot be part of a key"


@contextlib.contextmanager
def eager(reason: str) -> Iterator[None]:
    """Run graphed modules eagerly inside this block; every call is counted under `reason` in their stats.

    Raises ValueError when `reason` is empty: a fallback without a reason cannot be explained later.
    """
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError("packgraph.eager needs a reason to count, for example packgraph.eager('debugging')")
    token = _BYPASS.set(reason)
    try:
        yield
    finally:
        _BYPASS.reset(token)


def bypass_reason() -> str | None:
    """The reason of the innermost `eager` block around the caller, or None."""
    return _BYPASS.get()


@dataclass
class Stats:
    """What a graphed module has done so far.

    captured: variants captured, counting every region of every slot and key. replayed: calls served by graphs.
    fallbacks: calls served eagerly, by reason. recaptures: variants dropped and why (a larger bucket took their slot,
    a parameter's storage was replaced). capture_seconds: time spent capturing. pool_bytes: memory that the pools of
    all slots hold now. compiled: pieces of code that torch.compile made, each a forward and its backward. recompiles:
    those of them that were made for stages that had code already: for other inputs (another bucket), or for other
    constants. compile_seconds: time spent generating code. choices: by bucket, how it is run since graphs were timed
    against eager (train/autotune.py), with the figures that say why; empty where nobody has timed them.
    """

    captured: int = 0
    replayed: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    recaptures: Counter[str] = field(default_factory=Counter)
    capture_seconds: float = 0.0
    compiled: int = 0
    recompiles: Counter[str] = field(default_factory=Counter)
    compile_seconds: float = 0.0
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)
    _pool_bytes: Callable[[], int] = field(default=int, repr=False)

    def dropped(self, reason: str, count: int) -> None:
        """Count so many variants that are captured again at their next use."""
        if count:
            self.recaptures[reason] += count

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pools of all slots hold now."""
        return self._pool_bytes()
