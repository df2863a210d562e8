"""Memory that nobody has any more, given back now."""

import gc

import torch

COLLECTIONS = 8  # at the most: each may find what the last has freed


def free_memory(device: torch.device) -> None:
    """Let go of garbage and of the allocators' cached blocks, pinned ones of the host, too.

    An exception and its frames are a cycle; only when that is gone does autograd's graph go that
    the frames had, and what it had saved may be cycles again, such as groups that are offloaded. So
    garbage is looked for until there is no more. Of a graph whose backward has failed torch's
    engine keeps the rest until the thread's next backward: here.
    """
    with torch.enable_grad():
        torch.ones(1, requires_grad=True, device="cpu").backward()
    for _ in range(COLLECTIONS):
        if not gc.collect():
            break
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
