"""Models of transformers without memory for matrices: filled, they are what `from_pretrained`
gives."""

import pytest
import torch
from packed_families import CASES, build
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from packgraph.integrations.transformers.deferred import (
    ConvertedWeightsError,
    defer_stored,
    skeleton,
)
from packgraph.parallel.data import FlatParameters
from packgraph.parallel.deferred import values_of

CPU = torch.device("cpu")
# Whose experts transformers fuses in a way of its own as it loads, or that it renames.
CONVERTED = {"mixtral", "nemotron_h"}


def deferred(folder, dtype):
    made = skeleton(AutoModelForCausalLM, AutoConfig.from_pretrained(folder), dtype)
    defer_stored(made, folder, CPU)
    return made


@pytest.mark.parametrize("family", sorted(CASES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.few(4)
def test_values_and_buffers_are_those_of_from_pretrained(family, dtype, tmp_path):
    build(family).save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    if family in CONVERTED:
        with pytest.raises(ConvertedWeightsError):
            deferred(tmp_path, dtype)
        return
    found = deferred(tmp_path, dtype)
    assert found.get_input_embeddings().weight.isnan().all()
    waiting = {name for name, p in found.named_parameters() if values_of(p) is not None}
    matrices = {name for name, p in expected.named_parameters() if p.ndim >= 2}
    assert waiting and all("gate" in name or "router" in name for name in matrices - waiting)
    FlatParameters(found.named_parameters(), None)
    ours = [*found.named_parameters(), *found.named_buffers()]
    theirs = [*expected.named_parameters(), *expected.named_buffers()]
    for (name, one), (other, two) in zip(ours, theirs, strict=True):
        assert name == other and one.dtype == two.dtype and torch.equal(one, two), name


def rewritten(folder, change):
    """The same checkpoint after a change of its tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), "extra"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}),
            "model.norm.weight",
        ),
        (
            lambda tensors: tensors.update(
                {"model.norm.weight": torch.zeros(16, dtype=torch.int32)}
            ),
            "model.norm.weight",
        ),
    ],
    ids=["missing", "unexpected", "misshapen", "integers"],
)
def test_what_is_not_stored_as_it_is_here_is_refused(change, named, tmp_path):
    build("llama").save_pretrained(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(ConvertedWeightsError, match=named):
        deferred(tmp_path, torch.float32)
