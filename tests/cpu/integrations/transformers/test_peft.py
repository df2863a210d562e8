"""Adapters of PEFT: what they compute, through graphs, and what happens when they are switched."""

import copy

import pytest
import torch

import packgraph

pytest.importorskip("transformers", reason="the integration is of this library")
pytest.importorskip("peft", reason="the adapters are of this library")

import peft
from packed_families import (
    CAPACITY,
    batch_of,
    build,
    document_loss,
    gradients,
    random_batches,
)

from packgraph.integrations.transformers import packed

# float32 against plain transformers, as in test_families.py
TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}
IN = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
LORA = {"r": 4, "init_lora_weights": False, **IN}
CASES = {
    "LoRA": peft.LoraConfig(**LORA),
    "DoRA": peft.LoraConfig(**LORA, use_dora=True),
    "rsLoRA": peft.LoraConfig(**LORA, use_rslora=True),
    "with biases": peft.LoraConfig(**LORA, bias="all"),
    "on embedding and head": peft.LoraConfig(
        r=4, init_lora_weights=False, target_modules=["embed_tokens", "lm_head"]
    ),
    "with a whole head": peft.LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "IA3": peft.IA3Config(init_ia3_weights=False, feedforward_modules=["down_proj"], **IN),
}


def adapted(config=None, family="llama"):
    """A model of transformers with an adapter that makes a difference."""
    torch.manual_seed(1)
    model = peft.get_peft_model(build(family), copy.deepcopy(config or CASES["LoRA"]))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad and "magnitude" not in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.train()


class Loop:
    """The same training by graphs and eagerly."""

    def __init__(self, **options):
        self.model = adapted(**options)
        self.model.add_adapter("other", copy.deepcopy(CASES["LoRA"]))
        self.model.set_adapter("default")
        self.twin = copy.deepcopy(self.model)
        self.graphed = packgraph.graph(packed(self.model), capacities=[CAPACITY], warmup=1)
        self.plain = packed(self.twin)
        self.batches = iter(random_batches(40))

    def steps(self, count):
        """Compares losses and gradients of so many batches; returns the last loss, and how many
        calls were replayed."""
        before = packgraph.control(self.graphed).stats.replayed
        for _ in range(count):
            batch = next(self.batches)
            losses = [call(batch) for call in (self.graphed, self.plain)]
            ours, theirs = (
                gradients(loss, model)
                for loss, model in zip(losses, (self.model, self.twin), strict=True)
            )
            assert torch.equal(*losses)
            for name, gradient in theirs.items():
                assert (ours[name] is None) == (gradient is None), name
                assert gradient is None or torch.equal(ours[name], gradient), name
        return float(losses[0].detach()), packgraph.control(self.graphed).stats.replayed - before

    def both(self, change):
        for model in (self.model, self.twin):
            change(model)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(3)
def test_loss_and_gradients_are_those_of_documents_alone(case):
    model = adapted(CASES[case])
    reference = copy.deepcopy(model)
    reference.get_base_model().set_attn_implementation("eager")
    expected = document_loss(reference)
    with torch.no_grad(), reference.disable_adapter():
        assert abs(float(document_loss(reference) - expected)) > 3e-3, "the adapter matters"
    wanted = gradients(expected, reference)
    loss = packed(model)(batch_of())
    found = gradients(loss, model)
    torch.testing.assert_close(loss, expected, **TOLERANCE)
    for name, theirs in wanted.items():
        assert (found[name] is None) == (theirs is None), name
        if theirs is not None:
            torch.testing.assert_close(found[name], theirs, rtol=2e-4, atol=1e-5)


def test_layers_that_peft_repeats_keep_documents_apart():
    """They have configs of their own."""
    config = peft.LoraConfig(**LORA, layer_replication=[[0, 2], [1, 2]])
    model = adapted(config)
    layers = model.get_base_model().model.layers
    assert len(layers) == 3 and len({id(layer.self_attn.config) for layer in layers}) > 1
    expected = document_loss(model)
    torch.testing.assert_close(packed(model)(batch_of()), expected, **TOLERANCE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(7)
def test_graphs_equal_eager_bit_by_bit(case):
    options = {"capacities": [CAPACITY], "strict": True, "warmup": 1}
    found = packgraph.verify(packed(adapted(CASES[case])), random_batches(4), **options)
    assert found and found.replayed == 3, found


def test_an_adapter_that_is_switched_is_another_model():
    loop = Loop()
    assert loop.steps(3)[1] == 2
    loop.both(lambda model: model.set_adapter("other"))
    with pytest.warns(packgraph.PackgraphWarning, match="capturing again"):
        _, replayed = loop.steps(3)
    assert replayed == 3
    names = [n for n, p in loop.model.named_parameters() if p.grad is not None]
    assert names and all("other" in name for name in names)
    loop.both(lambda model: model.set_adapter("default"))
    with pytest.warns(packgraph.PackgraphWarning, match="capturing again"):
        _, replayed = loop.steps(2)
    assert replayed == 2


def test_a_switch_that_graphs_did_not_see_would_be_wrong():
    """The control of the test above: the two adapters make other losses of the same documents."""
    loop, losses = Loop(), []
    for name in ("default", "other"):
        loop.twin.set_adapter(name)
        losses.append(float(loop.plain(batch_of()).detach()))
    assert abs(losses[0] - losses[1]) > 3e-3


@pytest.mark.filterwarnings("ignore::packgraph.PackgraphWarning")
@pytest.mark.slow
def test_adapters_that_are_off_merged_added_or_deleted():
    loop = Loop()
    loop.steps(2)
    changes = {
        "merged": lambda model: model.merge_adapter(),
        "unmerged": lambda model: model.unmerge_adapter(),
        "both at once": lambda model: model.base_model.set_adapter(["default", "other"]),
        "scaled": lambda model: [
            module.set_scale("default", 3.0)
            for module in model.modules()
            if isinstance(module, peft.tuners.lora.LoraLayer)
        ],
        "deleted": lambda model: model.delete_adapter("other"),
        "added": lambda model: (
            torch.manual_seed(3),
            model.add_adapter("third", peft.LoraConfig(**LORA)),
            model.set_adapter("third"),
        ),
    }
    for name, change in changes.items():
        if name == "merged":  # the weights of the base are trained then
            loop.both(lambda model: model.get_base_model().model.norm.weight.requires_grad_(True))
        loop.both(change)
        loop.steps(2)


@pytest.mark.filterwarnings("ignore::packgraph.PackgraphWarning")
@pytest.mark.slow
def test_adapters_that_are_off_for_a_block():
    loop = Loop()
    loop.steps(2)
    loop.both(lambda model: model.get_base_model().model.norm.weight.requires_grad_(True))
    with loop.model.disable_adapter(), loop.twin.disable_adapter():
        loop.steps(2)
        with torch.no_grad():
            batch = batch_of()
            off = loop.graphed(batch)
            assert torch.equal(off, loop.plain(batch))
    assert float(loop.graphed(batch).detach()) != float(off)
    assert loop.steps(2)[1] > 0


@pytest.mark.slow
def test_adapters_are_saved_and_loaded_as_ever(tmp_path):
    loop = Loop()
    loop.steps(2)
    loop.model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build("llama"), tmp_path).train()
    assert torch.equal(packed(again)(batch_of()), packed(loop.model)(batch_of()))


def test_what_the_wrapper_would_do_is_refused():
    tokens = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="adapter default adds tokens"):
        packed(peft.get_peft_model(build("llama"), tokens))
    with pytest.raises(
        ValueError, match="of type ADALORA has not been compared; known are LORA, IA3"
    ):
        packed(peft.get_peft_model(build("llama"), peft.AdaLoraConfig(total_step=9, **IN)))
    conv = peft.LoraConfig(r=96, target_modules=["conv1d"])
    with pytest.raises(ValueError, match="around a convolution would not be called"):
        packed(peft.get_peft_model(build("bamba"), conv))
    config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA, alora_invocation_tokens=[3])
    with pytest.raises(ValueError, match="begins at tokens that its wrapper looks for"):
        packed(peft.get_peft_model(build("llama"), config))


def test_dropout_of_an_adapter_draws_new_numbers():
    config = peft.LoraConfig(**LORA, lora_dropout=0.3)
    model = packed(adapted(config))
    options = {"capacities": [CAPACITY], "strict": True, "warmup": 1}
    assert packgraph.verify(model, random_batches(4), **options)
    graphed = packgraph.graph(model, **options)
    losses = [float(graphed(batch_of()).detach()) for _ in range(4)]
    assert len(set(losses)) == 4


def test_frozen_layers_with_checkpointing_replay():
    loop = Loop()
    loop.both(lambda model: model.get_base_model().enable_input_require_grads())
    loop.both(
        lambda model: model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    )
    assert loop.steps(4)[1] == 3
