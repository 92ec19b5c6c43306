"""What a model is asked for when a conversation is compacted, and how its summary stands in the next prompt."""

from typing import Final

REQUEST: Final = (
    "Stop here. Write a summary of this conversation, from which someone who has not read it can go on with the "
    "work. Say what the user wants, with all constraints and preferences; what has been done and decided, and why; "
    "facts, names, paths and results that are needed later, exactly as they were; and what is to be done next. "
    "Answer with the summary only."
)
_INTRODUCTION: Final = "The conversation before this message, in summary:"


def summary_message(summary: str) -> str:
    """Return the message of a user that stands for a compacted conversation."""
    return f"{_INTRODUCTION}\n\n{summary}"
