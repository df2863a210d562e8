"""Stages as compiled code: how it is made, what watchers see of it, what is refused, how it adds
gradients."""
