"""Models held against transformers': the same weights, the same documents, packed here and one by
one there."""

from pathlib import Path
from typing import Any

import torch
from model_batches import hand_batch, random_documents

from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.models.hf import load_pretrained, save_pretrained
from packgraph.models.hf_families import family_of

# Two float32 programs that sum up to 64 terms in different order through up to three layers:
# measured differences are below 3e-6 of each tensor's largest entry; RELATIVE leaves room for other
# builds of the matrix product.
RELATIVE = 2e-5
EXPERTS = (
    "set_experts_implementation"  # of versions that choose kernels for experts; eager = one by one
)


def assert_close(
    ours: torch.Tensor, theirs: torch.Tensor, name: str, relative: float = RELATIVE
) -> None:
    """No entry differs by more than `relative` of the largest one."""
    error = (ours - theirs).abs().max()
    assert error <= relative * theirs.abs().max() + 1e-9, f"{name}: {error} of {theirs.abs().max()}"


def randomised(config: DecoderConfig, seed: int) -> DecoderModel:
    """A model whose norms and biases are random too, so that no factor of one or zero hides an
    error."""
    model = DecoderModel(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    biases = [
        value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")
    ]
    with torch.no_grad():
        for tensor in [
            parameter for parameter in model.parameters() if parameter.dim() == 1
        ] + biases:
            tensor.add_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model


def saved_and_loaded(
    config: DecoderConfig, folder: Path, shard_bytes: int | None = None
) -> DecoderConfig:
    """The config that a checkpoint of a randomised model is loaded with; its tensors are the
    model's, and its files whole."""
    model = randomised(config, seed=1)
    save_pretrained(model, folder, max_shard_bytes=shard_bytes)
    loaded, found = load_pretrained(folder)
    before, after = model.state_dict(), loaded.state_dict()
    assert loaded.config == found and before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    files = {file.name for file in folder.iterdir()}
    assert ("model.safetensors" in files) == (shard_bytes is None)
    assert not any(file.endswith(".tmp") for file in files)
    return found


def theirs_from(folder: Path, implementation: str = "sdpa") -> Any:
    """The model of transformers in `folder`, in training mode; every weight of it must come from
    there."""
    transformers = __import__("transformers")
    architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model, told = getattr(transformers, architecture).from_pretrained(
        folder,
        attn_implementation=implementation,
        output_loading_info=True,
        **(
            {"experts_implementation": "eager"}
            if hasattr(transformers.PreTrainedModel, EXPERTS)
            else {}
        ),
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        told
    )
    assert model.dtype == torch.float32
    return model.train()


def compare_with_transformers(
    ours: DecoderModel,
    folder: Path,
    lengths: list[int],
    rows: int,
    implementation: str = "sdpa",
    relative: float = RELATIVE,
) -> None:
    """Save `ours`, load it there; logits and all gradients must agree for documents of these
    lengths in `rows` rows.

    relative: of gradients.
    """
    save_pretrained(ours, folder)
    theirs = theirs_from(folder, implementation)
    documents = random_documents(lengths, ours.config.vocab_size, seed=3)
    batch = hand_batch(documents, rows, len(lengths) + 2)
    ours(batch).backward()
    logits = ours.logits(batch).detach()
    count, start = sum(length - 1 for length in lengths), 0
    for document in documents:
        expected = theirs(input_ids=torch.tensor([document]), use_cache=False).logits[0]
        assert_close(logits[start : start + len(document)], expected.detach(), "logits")
        start += len(document)
        targets = torch.tensor(document[1:], dtype=torch.int64)
        (
            torch.nn.functional.cross_entropy(expected[:-1], targets, reduction="sum") / count
        ).backward()
    gradients = {
        name.removeprefix(f"{theirs.base_model_prefix}."): value.grad
        for name, value in theirs.named_parameters()
    }
    written = family_of(ours.config).tensor_name
    named = {written(name, ""): parameter for name, parameter in ours.named_parameters()}
    assert set(named) == set(gradients)
    for name, parameter in named.items():
        assert_close(parameter.grad, gradients[name], name, relative)
