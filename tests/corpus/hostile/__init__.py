"""Small training loops around code that a graph could get wrong; importing this registers them."""

import importlib.util

from corpus.hostile import effects, loop, more, state  # noqa: F401

if all(map(importlib.util.find_spec, ("transformers", "peft"))):
    from corpus.hostile import models  # noqa: F401
