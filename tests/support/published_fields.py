"""Fields that an API documents and its SDK's types do not demand: what they call optional, or do not know.

From OpenAI's OpenAPI document 2.3.0 and Anthropic's, both of 2026-05-31, and Open Responses' of 2026-04-24: all that
these have as required, null or not.  `make test-conformance` holds the server to the documents themselves.
"""

from typing import Final

import anthropic.types as a
import anthropic.types.beta as b
import openai.types as o
import openai.types.chat as c
import openai.types.responses as r
from anthropic.types.beta import beta_raw_message_delta_event
from anthropic.types.raw_message_delta_event import Delta
from openai.types.chat import chat_completion, chat_completion_chunk
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from openai.types.responses import response_text_delta_event, response_text_done_event
from pydantic import BaseModel

_MESSAGE: Final = "container diagnostics stop_details stop_reason stop_sequence"
_DELTA: Final = "container stop_details stop_reason stop_sequence"
_USAGE: Final = """
    cache_creation cache_creation_input_tokens cache_read_input_tokens inference_geo output_tokens_details
    server_tool_use service_tier
"""
_DELTA_USAGE: Final = """
    cache_creation_input_tokens cache_read_input_tokens input_tokens output_tokens_details server_tool_use
"""

REQUIRED: Final[dict[type[BaseModel], str]] = {
    # Of chat, OpenAI's document has `service_tier`, `annotations` and the details of `usage` as optional, and OpenAI
    # sends them always.
    c.ChatCompletion: "service_tier system_fingerprint usage",
    c.ChatCompletionChunk: "service_tier system_fingerprint",
    c.ChatCompletionMessage: "annotations content refusal",
    chat_completion.Choice: "logprobs",
    chat_completion_chunk.Choice: "finish_reason logprobs",
    chat_completion.ChoiceLogprobs: "content refusal",
    chat_completion_chunk.ChoiceLogprobs: "content refusal",
    c.ChatCompletionTokenLogprob: "bytes",
    c.chat_completion_token_logprob.TopLogprob: "bytes",
    o.Completion: "system_fingerprint",
    o.CompletionChoice: "logprobs",
    o.CompletionUsage: "completion_tokens_details prompt_tokens_details",
    PromptTokensDetails: "audio_tokens cached_tokens",
    CompletionTokensDetails: """
        accepted_prediction_tokens audio_tokens reasoning_tokens rejected_prediction_tokens
    """,
    o.FileObject: "expires_at",
    # As its example in OpenAI's document.
    o.Batch: """
        cancelled_at cancelling_at completed_at error_file_id errors expired_at expires_at failed_at finalizing_at
        in_progress_at metadata output_file_id request_counts
    """,
    r.Response: """
        background completed_at conversation error frequency_penalty incomplete_details instructions max_output_tokens
        max_tool_calls metadata presence_penalty previous_response_id prompt_cache_key reasoning safety_identifier
        service_tier status store temperature text tool_choice top_logprobs top_p truncation usage user
    """,
    r.ResponseOutputText: "logprobs",
    r.ResponseFunctionToolCall: "id status",
    r.ResponseCustomToolCall: "id",
    r.FunctionTool: "description parameters strict",
    r.ResponseTextConfig: "format",
    # Open Responses' table of log probabilities in events is that of items.
    response_text_delta_event.Logprob: "bytes top_logprobs",
    response_text_delta_event.LogprobTopLogprob: "bytes logprob token",
    response_text_done_event.Logprob: "bytes top_logprobs",
    response_text_done_event.LogprobTopLogprob: "bytes logprob token",
    r.ResponseFunctionCallArgumentsDoneEvent: "name",
    a.Message: _MESSAGE,
    b.BetaMessage: f"{_MESSAGE} context_management",
    a.Usage: _USAGE,
    b.BetaUsage: f"{_USAGE} iterations speed",
    a.MessageDeltaUsage: _DELTA_USAGE,
    b.BetaMessageDeltaUsage: f"{_DELTA_USAGE} iterations",
    Delta: _DELTA,
    beta_raw_message_delta_event.Delta: _DELTA,
    b.BetaRawMessageDeltaEvent: "context_management",
    a.TextBlock: "citations",
    b.BetaTextBlock: "citations",
    a.ToolUseBlock: "caller",
    b.BetaToolUseBlock: "caller",
    b.BetaMessageTokensCount: "context_management",
    a.ModelInfo: "capabilities deprecated_at line max_input_tokens max_tokens retires_at",
    o.ErrorObject: "code param",
    a.shared.ErrorResponse: "request_id",
}

# Those of them that the types do not know.
UNKNOWN_TO_SDK: Final[dict[type[BaseModel], set[str]]] = {
    r.Response: {"presence_penalty", "frequency_penalty", "store"},
    response_text_delta_event.Logprob: {"bytes"},
    response_text_delta_event.LogprobTopLogprob: {"bytes"},
    response_text_done_event.Logprob: {"bytes"},
    response_text_done_event.LogprobTopLogprob: {"bytes"},
    r.ResponseFunctionCallArgumentsDoneEvent: {"name"},
}
