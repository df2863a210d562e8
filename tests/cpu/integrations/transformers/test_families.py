"""Every family of packgraph.integrations.transformers against plain transformers, document by
document, and through graphs."""

from pathlib import Path

import pytest
import torch

import packgraph

pytest.importorskip("transformers", reason="the integration is of this library")

from packed_families import (
    CAPACITY,
    CASES,
    DOCUMENTS,
    batch_of,
    build,
    document_loss,
    family_table,
    gradients,
    plain,
    random_batches,
)

from packgraph.integrations.transformers import FAMILIES, packed

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "huggingface.md"
# float32 on both sides: sums over rows and keys in other orders, through two layers and back.
# Relative to the largest number of a tensor, as single entries may cancel.
TOLERANCE = 2e-5
VISIBLE = 3e-3  # what a change of a config that matters changes a loss of about three by, at least


def far(ours, theirs):
    """The largest difference, relative to the largest number."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))


def test_every_family_has_a_case():
    assert CASES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", CASES)
@pytest.mark.few(2)
def test_loss_and_gradients_are_those_of_documents_alone(family):
    model = build(family)
    reference = plain(model)
    expected = document_loss(reference)
    wanted = gradients(expected, reference)
    loss = packed(model)(batch_of())
    found = gradients(loss, model)
    assert far(loss, expected) < TOLERANCE
    assert found.keys() == wanted.keys()
    for name, theirs in wanted.items():
        assert (found[name] is None) == (theirs is None), name
        if theirs is not None:
            assert far(found[name], theirs) < TOLERANCE, name


@pytest.mark.parametrize("family", CASES)
@pytest.mark.few(2)
def test_the_comparison_sees_what_the_family_does(family):
    expected = float(document_loss(plain(build(family))))
    together = [[token for document in DOCUMENTS for token in document]]
    assert abs(float(document_loss(plain(build(family)), together)) - expected) > VISIBLE
    for change in CASES[family].matters:
        assert abs(float(document_loss(plain(build(family, **change)))) - expected) > VISIBLE, (
            change
        )


@pytest.mark.parametrize("family", CASES)
@pytest.mark.few(10)
def test_graphs_equal_eager_bit_by_bit(family):
    found = packgraph.verify(
        packed(build(family)), random_batches(4), capacities=[CAPACITY], strict=True, warmup=1
    )
    assert found and found.replayed == 3, found


@pytest.mark.parametrize("family", CASES)
@pytest.mark.few(4)
def test_what_padding_holds_does_not_matter(family):
    model = packed(build(family))
    losses, found = [], []
    for token in (0, 17):
        batch = batch_of()
        batch.tokens.masked_fill_(batch.padding_mask, token)
        batch.position_ids.masked_fill_(batch.padding_mask, token)
        losses.append(model(batch))
        found.append(
            {n: g.clone() for n, g in gradients(losses[-1], model).items() if g is not None}
        )
    assert torch.equal(*losses)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_guide_lists_what_is_tested():
    text = GUIDE.read_text(encoding="utf-8")
    shown = text.partition("packed_families.py -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == family_table(), "python tests/helpers/packed_families.py prints the table"
