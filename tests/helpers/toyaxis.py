"""A toy kind of parallelism, all of it: replicas on an axis of their own."""

from dataclasses import dataclass, replace

from packgraph.parallel.layout import Axis, Layout
from packgraph.parallel.mesh import Parallelism
from packgraph.train.config.sections import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class ToyOptions(ParallelConfig):
    """toy: ranks that run different packs, beside those of dp."""

    toy: int = 1

    def layout(self) -> Layout:
        return replace(super().layout(), more=(Axis("toy", self.toy, own="packs"),))


class ToyParallelism(Parallelism):
    name = "toy"

    def problems(self, config, world):
        options = config.parallel
        ranks, both = getattr(options, "toy", 1), options.tp > 1
        return [f"parallel.toy = {ranks} is not known with tp"] if ranks > 1 and both else []

    def apply(self, models, mesh, config):
        for model in models:
            model.toy_ranks = mesh.size("toy")
