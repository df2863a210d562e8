"""No host sync in a training step, checked without a device: nothing in it reads a tensor on the
host (R13)."""

import pytest
import torch
from trainkit import ended, tiny, trainer

from packgraph.graphs.checks.host_sync import CaptureChecker, HostReads, Journal
from packgraph.graphs.errors import CaptureError


def watch_steps(run, monkeypatch, spoil=None):
    """Run everything that a step does after its packs were made on the host under the guards of
    captured code."""

    def guarded(owner, name):
        original = getattr(owner, name)

        def watched(*arguments):
            with HostReads(), CaptureChecker(Journal(), refuse=True, device=None):
                if spoil is not None:
                    spoil(run)
                return original(*arguments)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (run.executor, "run_step"),
        (run.optimizer, "zero_grad"),
        (run.optimizer, "step"),
        (run, "_numbers"),
    ):
        guarded(owner, name)


def test_a_step_reads_nothing_on_the_host(tmp_path, monkeypatch):
    run = trainer(tmp_path / "run", tiny(False, steps=6))
    watch_steps(run, monkeypatch)
    assert ended(run)[1]["steps"] == 6


def test_a_read_in_the_step_is_seen(tmp_path, monkeypatch):
    """Negative control: one number read in the step fails the test above."""
    run = trainer(tmp_path / "run", tiny(False, steps=6))
    watch_steps(
        run, monkeypatch, spoil=lambda run: float(next(run.model.parameters()).detach().sum())
    )
    with pytest.raises(CaptureError, match="float"):
        ended(run)


def test_the_guards_see_what_a_loss_divided_on_the_host_would_do():
    with (
        pytest.raises(CaptureError),
        HostReads(),
        CaptureChecker(Journal(), refuse=True, device=None),
    ):
        torch.ones(3).sum() / torch.ones(()).item()
