"""Names of models: Ollama's clients append a tag."""

from contextlib import suppress

from batching import ModelNotFound, SchedulerManager

_TAG = ":latest"


def known_name(manager: SchedulerManager, name: str) -> str:
    """Return the id of a model, or the name of an adapter, or the name without its tag if there is none of these."""
    for known in (name, name.removesuffix(_TAG)):
        if (adapter := manager.adapter(known)) is not None:
            return adapter.name
        with suppress(ModelNotFound):
            return manager.resolve(known)
    return name.removesuffix(_TAG)
