"""Fields that clients know and this server does not serve yet.

A field is listed with the values that ask for nothing.  With any other value it would change
the answer, so the request is refused and told which field it was.  What cannot change the
answer (`user`, `metadata`, `prompt_cache_key`, ...) is not listed and has no effect.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import PydanticCustomError

Defaults = Mapping[str, tuple[Any, ...]]

# Besides OpenAI's: what vLLM, SGLang and llama.cpp take.
_BOTH: Final[Defaults] = {
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "spaces_between_special_tokens": (True,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "json_schema": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_prompt_text": (False,),
    "timings_per_token": (False,),
    "repetition_detection": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "n_predict": (),
    "n_probs": (0,),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
}

CHAT: Final[Defaults] = {
    **_BOTH,
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "functions": (),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "store": (False,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "documents": (),
    "chat_template": (),
    "thinking_token_budget": (),
}

COMPLETIONS: Final[Defaults] = {
    **_BOTH,
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "prompt_embeds": (),
}

STREAM_OPTIONS: Final[Defaults] = {"continuous_usage_stats": (False,)}

MESSAGE: Final[Defaults] = {
    "function_call": (),
    "audio": (),
}


def without_nulls(data: Any, defaults: Defaults) -> Any:
    """Return an object's fields that are not null: null means the default everywhere.

    Raises:
        PydanticCustomError: a field of `defaults` asks for something.
    """
    if not isinstance(data, dict):
        return data
    given = {name: value for name, value in data.items() if value is not None}
    for name, accepted in defaults.items():
        if name in given and given[name] not in accepted:
            raise PydanticCustomError("unsupported", "this is not supported yet", {"param": name})
    return given
