"""The chunks of a decoder that one rank holds, seen as one model.

    2 ranks, 2 chunks each    rank 0: stages 0 and 2    rank 1: stages 1 and 3

The invariant: every parameter has the name that it has in the whole decoder, so whatever is stored
by name (fresh values, checkpoints, optimizer state) does not depend on how the decoder was cut.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from packgraph.parallel.pieces import stored


class ModelChunks:
    """The modules of this rank, in the order of their stages. A whole decoder is one chunk."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        """Raises ValueError when two chunks have a parameter of the same name."""
        self.chunks = list(chunks)
        names = [name for name, _ in self.named_parameters()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"two chunks of one rank both hold {', '.join(twice)}; cut the decoder into stages "
                "that "
                "share no parameter, or give them to different ranks"
            )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters by their names in the whole decoder."""
        return (named for chunk in self.chunks for named in chunk.named_parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Live parameters and persistent buffers by their names in the whole decoder."""
        return {name: value for chunk in self.chunks for name, value in chunk.state_dict().items()}

    def stored(self) -> dict[str, Tensor]:
        """`state_dict` as checkpoints hold it and ranks compare it: experts shared with other ranks
        as `Pieces`."""
        return stored(self.state_dict(), self.named_parameters())
