"""Giving up graphs between steps: what is known to run eagerly from now on needs none.

The memory of a pool belongs to all graphs in it, so it is free only when the slot's last variant is gone.
"""
from typing import Any

from packgraph.graphs.graphed import GraphedModule, control
from packgraph.graphs.signature import signature


def forget(graphed: GraphedModule, args: tuple[Any, ...]) -> int:
    """Free the graphs of calls like `args` in all slots; how many variants there were.

    The device must have ended what it was given, and no microbatch may be in flight. A later call captures again.
    Raises RuntimeError when a slot is in flight.
    """
    own = control(graphed)
    call = signature(args, {}, own.device)
    return 0 if call is None else own._slots.drop(call.key)


def forget_code(graphed: GraphedModule) -> None:
    """Whatever is compiled is tried out once more before the next capture: on another rank that has failed, and ranks
    that exchange data in it must all begin at the same point again."""
    control(graphed)._coded.clear()


def forget_all(graphed: GraphedModule) -> int:
    """As `forget`, for all calls. Unlike after `close`, what is compiled stays in use for eager calls."""
    own = control(graphed)
    own._rehearsed.clear()  # the tensors that graphs use, kept for them
    return own._slots.clear()
