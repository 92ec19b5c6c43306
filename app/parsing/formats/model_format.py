"""The format of a model's messages."""

from app.parsing.formats.marked_format import MarkedFormat
from app.parsing.harmony.harmony_format import harmony_format
from app.parsing.message_format import MessageFormat
from app.parsing.reasoning.reasoning_markers import reasoning_markers
from app.parsing.tools.tool_format import tool_format
from batching import ModelInfo


def message_format(model: ModelInfo) -> MessageFormat:
    """Return the format of a model's messages, for which a dozen markers are tokenized once."""
    return model.derived(_found_format)


def _found_format(model: ModelInfo) -> MessageFormat:
    if (harmony := harmony_format(model)) is not None:
        return harmony
    return MarkedFormat(model, reasoning_markers(model), tool_format(model))
