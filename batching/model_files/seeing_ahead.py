"""Whether the rows of an image see each other, those behind themselves too: Gemma's do.

Transformers 5 says so of them (`create_masks_for_vision_model` of gemma3 and gemma4); where a layer attends to a
window, they see no further back than others.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

_GEMMA3_ROWS: Final = 256
_GEMMA4_ROWS: Final = 280


class SeeingAhead(NamedTuple):
    """The layers in which rows of an image see each other.

    only_windowed: those that attend to a window; else all.
    max_rows: the most rows side by side, which no step may cut.
    """

    only_windowed: bool
    max_rows: int


def seeing_ahead_of(config: Mapping[str, Any]) -> SeeingAhead | None:
    """Return how the images of a model see ahead; None if they are causal as text is."""
    match config["model_type"]:
        case "gemma3":
            return SeeingAhead(False, int(config.get("mm_tokens_per_image", _GEMMA3_ROWS)))
        case "gemma4" if config["text_config"].get("use_bidirectional_attention") == "vision":
            rows = int(config.get("vision_soft_tokens_per_image", _GEMMA4_ROWS))
            return SeeingAhead(True, rows)
    return None
