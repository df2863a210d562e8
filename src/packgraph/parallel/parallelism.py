"""Interface of a kind of parallelism to the rest of a run.

    options     ParallelConfig      how many ranks; `layout` hands them to the mesh
    mesh        Axis, Layout        whose tokens ranks have, hence who adds up gradients
    validation  `problems`          all reasons against it, before any process group exists
    model       `apply`             every rank keeps its part, in place
    verify      `tried`             layouts that `packgraph verify` holds against one process
    gradients   parameters          a plain one is summed over `copies` of the mesh; a part of a
                                    tensor says over whom (`Part.copies`); a DTensor knows it
    checkpoint  parameters          a plain one is stored by one rank; a part says of what it is one
                                    (`Part.shape`, `.offsets`); a DTensor knows it

The invariant: what parameters say about themselves is all that gradient reduction, optimizer state
and checkpoints know, so none of them names an axis. `train/parallelisms.py` has the list.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from packgraph.parallel.mesh import Layout, Mesh


class Parallelism:
    """One way to spread a run over ranks. Configurations are those of the trainer.

    Attributes:
        name: Of its axis, and of the option that says how many ranks it has.
    """

    name: ClassVar[str]

    def problems(self, config: Any, world: int) -> list[str]:
        """All reasons why a run of `config` in `world` processes cannot be spread so."""
        return []

    def apply(self, models: Sequence[nn.Module], mesh: Mesh, config: Any) -> None:
        """Spread this rank's chunks of the model, in place. Called on every rank, also where the
        axis has one rank. Collective."""

    def tried(self, layout: Layout) -> list[Layout]:
        """Layouts that verify tries beside `layout`, whose dp is known: this axis takes places of
        dp."""
        return []
