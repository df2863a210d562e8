"""The learning rate as a pure function of the step: linear warm-up, then cosine decay to a floor.

peak        /‾‾\\_
           /     ‾\\_
floor     /         ‾‾‾‾‾
          0  warm-up  decay   steps
"""

import math


def learning_rate_at(
    step: int, *, peak: float, warmup_steps: int, decay_steps: int, min_fraction: float
) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    The first step of a warm-up of n has peak/n, its last step the peak. The cosine (Loshchilov and
    Hutter 2017, SGDR, without restarts) reaches `peak * min_fraction` at `decay_steps` and stays
    there.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    span = max(1, decay_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return peak * (min_fraction + (1 - min_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))
