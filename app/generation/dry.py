"""The penalty DRY in tokens of a model."""

from app.generation.params import DryPenalty
from batching import AsyncEngine, DryParams


def dry_params(engine: AsyncEngine, dry: DryPenalty | None) -> DryParams | None:
    """Return the penalty with the tokens of its breakers; blocking.

    A breaker is each token that contains its text, and the tokens that it consists of, if these are several.
    """
    if dry is None:
        return None
    model, texts = engine.model, engine.grammars.token_texts
    sequences = (
        tuple(model.tokenizer.encode(text, add_special_tokens=False)) for text in dry.breakers
    )
    return DryParams(
        multiplier=dry.multiplier,
        base=dry.base,
        allowed_length=dry.allowed_length,
        last_n=dry.last_n,
        breakers=frozenset().union(*map(texts.containing, dry.breakers)),
        breaker_sequences=tuple(dict.fromkeys(each for each in sequences if len(each) > 1)),
    )
