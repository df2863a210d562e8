"""How ranks are laid out, in words."""

from packgraph.parallel.layout import Axis, Layout


def test_a_layout_names_the_axes_that_have_several_ranks() -> None:
    assert str(Layout(dp=2, tp=4, ep=2)) == "dp 2 x tp 4 x ep 2"
    assert str(Layout(dp=1)) == "one rank"


def test_only_further_axes_with_several_ranks_keep_blocks_from_sharing_layers() -> None:
    axes = [Layout(shard_ranks=2, more=(Axis("rp", size, "packs"),)) for size in (1, 2)]
    assert [len(layout.problems(4)) for layout in axes] == [0, 1]
    assert "not there yet with further axes (rp)" in axes[1].problems(4)[0]


def test_an_axis_without_ranks_is_told() -> None:
    assert "rp = 0 must be at least 1" in Layout(more=(Axis("rp", 0, "packs"),)).problems(2)
    assert Layout(more=(Axis("rp", 0, "packs"),)).replicas(2) == 0
