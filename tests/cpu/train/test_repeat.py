"""Steps made again: how often, and with how much room."""

import types

import pytest
import torch

from packgraph.train.retry import MOST, StepRetries


class Crowded:
    """Overflow that says no until it was asked for all the room there is. never: not even then."""

    def __init__(self, never: bool = False) -> None:
        self.blocked, self.asked, self.never = torch.ones(()), [], never

    def begin(self) -> None:
        pass

    def make_room(self, whole: bool = False) -> str:
        self.asked.append(whole)
        self.blocked = torch.tensor(float(self.never or not whole))
        return "room was made"


def repeats(overflow) -> StepRetries:
    executor = types.SimpleNamespace(
        train_step=lambda *_: (torch.zeros(()), torch.zeros(())),
        rebuild=lambda: None,
        free_graphs=lambda bucket: None,
    )
    return StepRetries(
        executor,
        types.SimpleNamespace(overflow=overflow, guard=None, set_limits=lambda limits: None),
        torch.device("cpu"),
    )


def make_until_it_fits(steps: StepRetries) -> int:
    loss, _ = steps.launch([], 1, 1e-3)
    attempts = 1
    while steps.verdicts(loss)[0]:
        _, ((loss, _, _),) = steps.again()
        attempts += 1
    return attempts


def test_the_last_attempt_has_all_the_room_there_is():
    """Every attempt may show the lack of a further layer only: with guesses alone a deep model
    would give up."""
    overflow = Crowded()
    assert make_until_it_fits(repeats(overflow)) == MOST
    assert overflow.asked == [False] * (MOST - 2) + [True]


def test_what_never_fits_is_an_error():
    with pytest.raises(RuntimeError, match=r"did not fit .* --parallel.expert-room"):
        make_until_it_fits(repeats(Crowded(never=True)))
