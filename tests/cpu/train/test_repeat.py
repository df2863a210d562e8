"""Steps made again: how often, and with how much room."""

import pytest
import torch
from trainkit import ended, tiny, trainer

from packgraph.train.features.moe import MOST_ATTEMPTS


class Crowded:
    """Overflow that says no until it was asked for all the room there is. never: not even then."""

    def __init__(self, never: bool = False) -> None:
        self.blocked, self.asked, self.never = torch.ones(()), [], never

    def begin(self) -> None:
        pass

    def agree(self) -> torch.Tensor:
        return self.blocked

    def make_room(self, whole: bool = False) -> str:
        self.asked.append(whole)
        self.blocked = torch.tensor(float(self.never or not whole))
        return "room was made"


def run_of(folder, overflow):
    run = trainer(folder / "run", tiny(False, steps=1))
    run.optimizer.overflow = overflow
    return run


def test_the_last_attempt_has_all_the_room_there_is(tmp_path):
    """Every attempt may show the lack of a further layer only: with guesses alone a deep model
    would give up."""
    overflow = Crowded()
    run = run_of(tmp_path, overflow)
    assert ended(run)[1]["steps"] == 1 and run.repeated == MOST_ATTEMPTS - 1
    assert overflow.asked == [False] * (MOST_ATTEMPTS - 2) + [True]


def test_what_never_fits_is_an_error(tmp_path):
    run = run_of(tmp_path, Crowded(never=True))
    with pytest.raises(RuntimeError, match=r"did not fit .* --parallel.expert-room"):
        ended(run)
