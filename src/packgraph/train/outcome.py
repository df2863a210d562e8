"""The end of work in a thread, for the thread that waits for it."""

from types import TracebackType


class Outcome:
    """Takes the error that ends its block, of whatever kind, for another thread.

    Attributes:
        error: That error, None where there was none.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.error = error
        return True
