"""What is asked of one kind of branch of a decoder layer, without its weights."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from packgraph.models.work import BranchWork

if TYPE_CHECKING:
    from packgraph.models.config import DecoderConfig


class BranchKind:
    """One kind of branch. Subclasses override what differs.

    Attributes:
        name: Of its stage and in `DecoderConfig.branches`.
        letter: In `DecoderConfig.pattern`.
        title: In messages.
        section: The section of the configuration that has its shape, and in it the field that is 0
            where there is none; empty = its shape stands in the configuration itself.
        is_mixer: Whether it exchanges information between tokens.
        is_sequential: Whether it reads the tokens of a row in order: rows cannot be cut in zigzag.
        has_tensor_plan: Whether `parallel/tensor.py` can split it.
    """

    name: ClassVar[str]
    letter: ClassVar[str]
    title: ClassVar[str]
    section: ClassVar[str] = ""
    is_mixer: ClassVar[bool] = False
    is_sequential: ClassVar[bool] = False
    has_tensor_plan: ClassVar[bool] = False

    def weights(self, config: "DecoderConfig") -> int:
        """Elements of the matrices that a token passes in one such branch."""
        raise NotImplementedError

    def work(self, config: "DecoderConfig") -> BranchWork:
        """What one branch has to do for a token, for cutting pipeline stages."""
        return BranchWork(self.weights(config), self.weights(config))

    def saved_columns(self, config: "DecoderConfig") -> float:
        """Numbers per token that autograd saves for the backward."""
        raise NotImplementedError

    def exchanged_columns(self, config: "DecoderConfig") -> int:
        """Numbers per token that ranks exchange which share a row by heads (Ulysses)."""
        return 0

    def operations(self, config: "DecoderConfig", lengths: Sequence[int]) -> int:
        """Floating point operations of the forward beside products with weights, for documents of
        these lengths in tokens."""
        return 0

    def context_problem(self, config: "DecoderConfig", ranks: int) -> str | None:
        """Why `ranks` ranks cannot share a row by heads in this branch; None if they can."""
        return None
