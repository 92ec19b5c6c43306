"""Whether a model takes images, and how."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class VisionModel:
    """A model that takes images.

    folder: the directory with the files of its processor.
    model_type: its type, as its config names it.
    image_token_id: the token that stands for a row of an image in a prompt.
    max_span: the most rows of an image that see each other; 0 if they see what is before them only.
    """

    folder: Path
    model_type: str
    image_token_id: int
    max_span: int = 0


@dataclass(frozen=True, slots=True)
class NoVision:
    """A model that takes no images; `reason` says why, and follows its name in a sentence."""

    reason: str


TEXT_ONLY: Final = NoVision("takes text only")
