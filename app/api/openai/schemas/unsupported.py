"""Fields of OpenAI, vLLM, SGLang and llama.cpp that this server does not support.

A field is listed with the values that ask for nothing.  Any other value would change the output,
so the request is refused by an error that names the field.  Fields that cannot change the output
(`user`, `metadata`, `safety_identifier`, ...) are not listed and have no effect.
"""

from typing import Final

from app.api.schemas.base import Defaults

# vLLM, SGLang and llama.cpp take these besides OpenAI's.
_BOTH: Final[Defaults] = {
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
    "return_prompt_text": (False,),
    "repetition_detection": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "n_probs": (0,),
    "tfs_z": (1,),
    "stop_regex": (),
    "num_ctx": (),
    "lora_path": (),
    "adapters": (),
    "draft_model": (),
    "mirostat": (0,),
    "min_keep": (0, 1),
    "adaptive_target": (-1, -0.01),
}

CHAT: Final[Defaults] = {
    **_BOTH,
    "best_of": (1,),
    "reasoning_format": ("auto", "deepseek"),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("low", "medium", "high"),
    "store": (False,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "documents": (),
}

COMPLETIONS: Final[Defaults] = {
    **_BOTH,
    "response_format": ({"type": "text"},),
    "enable_thinking": (False,),
    "thinking": (False, {"type": "disabled"}),
    "reasoning": ({"effort": "none"}, {"enabled": False}),
    "thinking_token_budget": (-1,),
    "thinking_budget_tokens": (-1,),
    "prompt_embeds": (),
}

INFILL: Final[Defaults] = {
    **COMPLETIONS,
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "grammar": ("",),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "json_schema": ({},),
    "length_penalty": (1,),
    "logprob_token_ids": ([],),
    "logprobs": (),
    "lora": ([],),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "n_cmpl": (1,),
    "prompt_logprobs": (),
    "return_progress": (False,),
    "return_token_ids": (False,),
    "return_tokens": (False,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "timings_per_token": (False,),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
}

MESSAGE: Final[Defaults] = {"function_call": (), "audio": ()}
