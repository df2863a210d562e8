"""A packed batch on its way through a layer, and the proof that the layer kept documents apart.

    run_layer -- LayerCall --> layer -- LayerCall --> attention or mixer of ours: an entry in `ran`
        `------------ refuse_other_ways: has every one of them run? ------------'

What runs in a layer is decided by its configs, classes and attributes, which anybody may change at
any time. So nothing is concluded from them: an implementation that was not ours leaves no entry.
Replays run no Python; graphs watch all of it, and a change leads back here.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from packgraph.packing.batch import PackedBatch

BATCH = "packed_batch"  # keyword argument of layers


class LayerCall(NamedTuple):
    """The arguments that a layer hands down to its attention and mixers.

    window: of attention in this layer, None for none. ran: class of each module that ran ours.
    """

    batch: PackedBatch
    window: int | None
    ran: list[str]

    def refuse_other_attention(
        self, module: nn.Module, length: int, mask: Tensor | None, given: dict[str, Any]
    ) -> None:
        """Raises ValueError where attention is asked for something else than causal attention
        within documents and the layer's window. given: further arguments of its implementation."""
        wrong = {
            "a mask of its own": mask is not None,
            f"{length} keys": length != self.batch.tokens.shape[0],
            f"a window of {given.get('sliding_window')}, not {self.window}": (
                given.get("sliding_window", self.window) != self.window
            ),
            "no causal order": not given.get("is_causal", getattr(module, "is_causal", True)),
        }
        if any(wrong.values()):
            told = ", ".join(what for what, there in wrong.items() if there)
            raise ValueError(
                f"{type(module).__name__} asks for attention with {told}, which packed documents "
                f"cannot have; use the model's own attention"
            )


def refuse_other_ways(layer: Any, call: LayerCall) -> None:
    """Raises ValueError unless every module that reads other tokens has run ours."""
    if len(call.ran) < layer.token_mixers:
        ran = ", ".join(call.ran) or "none"
        raise ValueError(
            f"documents would see each other in {type(layer).__name__}: of {layer.token_mixers} "
            f"modules that read other tokens {ran} ran packgraph's implementation; call "
            "packed(model) again after set_attn_implementation, and after replacing a module or "
            "its config"
        )
