"""Training with experts shared by replicas: as one process trains, and checkpoints that any other
layout can read."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from dispatchkit import H, Layer
from distkit import run_ranks
from torch import nn

from packgraph.moe.dispatch.dispatcher import LocalDispatcher
from packgraph.moe.dispatch.over_ranks import make_dispatcher
from packgraph.parallel.expert import split_experts
from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import single_process
from packgraph.parallel.pieces import Pieces, collect, stored
from packgraph.train.checkpoint.writer import load_tensors, save_checkpoint
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.optimizer import Optimizer

EXPERTS, TOKENS, SHARES = 8, 12, 4
LAYOUTS = [Layout(dp=2, ep=2), Layout(dp=4, ep=2), Layout(dp=4, ep=4)]


class Net(nn.Module):
    """Two layers with a router and experts each, between dense ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(H, H), nn.Linear(H, 1)
        self.gates = nn.ModuleList(nn.Linear(H, EXPERTS, bias=False) for _ in range(2))
        self.layers = nn.ModuleList(Layer(LocalDispatcher(EXPERTS), EXPERTS) for _ in range(2))
        self.float()

    def forward(self, x):
        hidden = self.first(x)
        for gate, layer in zip(self.gates, self.layers, strict=True):
            weights, experts = gate(hidden).softmax(-1).topk(2)
            hidden = hidden + layer(hidden, experts.int(), weights)
        return self.last(hidden).square().sum() / (TOKENS * SHARES)


class Training:
    """One rank's model and optimizer."""

    def __init__(self, mesh, dispatcher="padded"):
        self.mesh, self.model = mesh, Net()
        split_experts(
            self.model,
            mesh,
            partial(make_dispatcher, dispatcher, factor=max(1.0, float(mesh.size("ep")))),
        )
        self.optimizer = Optimizer(
            self.model.named_parameters(), OptimizerConfig(clip_norm=0.5), mesh
        )

    def step(self, number, overlap=False):
        """One step on this replica's share of its tokens. Returns loss of the share and norm."""
        self.optimizer.zero_grad()
        share = range(self.mesh.place["dp"], SHARES, self.mesh.size("dp"))
        losses = []
        for index, part in enumerate(share):
            draw = torch.Generator().manual_seed(100 * number + part)
            loss = self.model(torch.randn(TOKENS, H, generator=draw))
            if overlap and index == len(share) - 1:
                self.optimizer.flat.overlap(loss)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum(), self.optimizer.step(0.02)

    def tensors(self):
        model = stored(self.model.state_dict(), self.model.named_parameters())
        state = self.optimizer.state_tensors()
        return {f"model.{name}": value for name, value in model.items()} | {
            f"optimizer.{name}": value for name, value in state.items()
        }

    def gradients(self):
        return {
            member.name: span.part(member, span.own_gradients)
            for span in self.optimizer.flat.spans
            for member in span.members
        }


def train(mesh, dispatcher, overlap):
    """Whole gradients of the first step; norms; what there is at last, and the names of what is
    stored in pieces."""
    training, norms, first = Training(mesh, dispatcher), [], {}
    for number in range(4):
        _, norm = training.step(number, overlap)
        norms.append(norm.clone())
        if number == 0:
            first = dict(collect(mesh, training.gradients()))
    in_pieces = [name for name, value in training.tensors().items() if isinstance(value, Pieces)]
    return first, norms, dict(collect(mesh, training.tensors())), in_pieces


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("dispatcher", "overlap"), [("padded", True), ("host_splits", False)])
def test_replicas_that_share_experts_train_as_one_process(layout, dispatcher, overlap):
    gradients, norms, tensors, _ = train(single_process(), "local", False)
    results = run_ranks(train, layout.dp, dispatcher, overlap, layout=layout)
    assert {name for name in results[0][3] if name.startswith("model.")} == {
        f"model.layers.{layer}.experts.{stack}"
        for layer in range(2)
        for stack in ("gate_up_proj", "down_proj")
    }
    found_gradients, _, found, _ = results[0]
    assert found_gradients.keys() == gradients.keys() and found.keys() == tensors.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(
            found_gradients[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: n + text
        )
    for name, value in tensors.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: n + text
        )
    for _, its_norms, _, _ in results:
        torch.testing.assert_close(torch.stack(its_norms), torch.stack(norms), rtol=1e-4, atol=0)


def save(mesh, folder):
    training = Training(mesh)
    training.step(0)
    save_checkpoint(Path(folder), 1, training.tensors(), {}, 1, mesh)
    return dict(collect(mesh, training.tensors()))


def load(mesh, folder):
    training = Training(mesh)
    load_tensors(Path(folder) / "step-00000001", training.tensors(), mesh=mesh)
    return dict(collect(mesh, training.tensors()))


def test_a_checkpoint_is_read_at_any_other_number_of_ranks_that_share_experts(tmp_path):
    saved = run_ranks(save, 4, str(tmp_path), layout=LAYOUTS[1])[0]
    assert saved["model.layers.0.experts.down_proj"].shape[0] == EXPERTS
    for loaded in (
        load(single_process(), str(tmp_path)),
        run_ranks(load, 2, str(tmp_path), layout=LAYOUTS[0])[0],
        run_ranks(load, 4, str(tmp_path), layout=LAYOUTS[2])[0],
    ):
        assert loaded.keys() == saved.keys()
        assert not [name for name, value in saved.items() if not torch.equal(loaded[name], value)]


def test_one_process_keeps_all_experts_and_takes_the_dispatcher():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    assert (
        split_experts(model, single_process(), partial(make_dispatcher, "padded", factor=2.0)) == 2
    )
    assert model.layers[0].dispatcher is not model.layers[1].dispatcher
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(
        isinstance(value, Pieces)
        for value in stored(model.state_dict(), model.named_parameters()).values()
    )


def split_twice(mesh):
    model, make = Net(), partial(make_dispatcher, "padded", factor=2.0)
    frozen = model.layers[1].experts.down_proj.requires_grad_(False)
    split_experts(model, mesh, make)
    kept = model.layers[1].experts.down_proj
    assert not kept.requires_grad and torch.equal(kept, frozen[4 * mesh.rank : 4 * mesh.rank + 4])
    with pytest.raises(ValueError, match=r"layers\.0\.experts: these experts were split before"):
        split_experts(model, mesh, make)
    return True


def test_experts_are_split_once():
    assert all(run_ranks(split_twice, 2, layout=Layout(ep=2)))
