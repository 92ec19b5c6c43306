"""Names of models: Ollama's clients append a tag."""

from contextlib import suppress

from batching import ModelNotFound, SchedulerManager

_TAG = ":latest"


def known_name(manager: SchedulerManager, name: str) -> str:
    """Return the id of a model, or the name without its tag if no such model is served."""
    for known in (name, name.removesuffix(_TAG)):
        with suppress(ModelNotFound):
            return manager.resolve(known)
    return name.removesuffix(_TAG)
