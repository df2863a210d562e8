"""How ranks are laid out, in words."""

from packgraph.parallel.mesh import Layout


def test_a_layout_names_the_axes_that_have_several_ranks() -> None:
    assert str(Layout(dp=2, tp=4, ep=2)) == "dp 2 x tp 4 x ep 2"
    assert str(Layout(dp=1)) == "one rank"
