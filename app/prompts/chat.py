"""The prompt of a conversation, and the output format of its completions."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.parsing.formats.model_format import message_format
from app.parsing.message_format import MessageSpec
from app.parsing.output_format import GrammarSpec, OutputFormat
from app.parsing.tool_spec import NamedTool
from app.prompts.breakpoints import retained_prefixes
from app.prompts.conversation import Conversation
from app.prompts.render import Attached, ChatPrompt, Truncation, chat_prompt
from batching import ModelInfo, RetainedPrefix


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """`retained` are the beginnings of the prompt that the conversation's breakpoints ask for."""

    prompt: ChatPrompt
    output: OutputFormat
    retained: tuple[RetainedPrefix, ...] = ()


def prepare_chat(
    model: ModelInfo,
    conversation: Conversation,
    *,
    grammar: GrammarSpec | None = None,
    truncation: Truncation | None = None,
    attached: Mapping[str, Attached] | None = None,
    may_call: bool = True,
) -> PreparedChat:
    """Render a conversation and choose the format of its output.  It blocks, so not on the event loop.

    attached: the images and files of the conversation, by their marks.
    may_call: `False` takes nothing for a call of the tools that the prompt describes.
    grammar: constrains the content; with tools, the output is either calls or such content.

    Raises:
        InvalidRequest: the model cannot serve the conversation as it is.
        PromptTooLong: the prompt cannot fit in the context.
    """
    format_ = message_format(model)
    prompt = chat_prompt(model, conversation, format_, truncation, attached)
    spec = MessageSpec(
        tools=conversation.offered_tools if may_call else (),
        tool_choice=conversation.tool_choice if may_call else "none",
        is_parallel=_is_parallel(conversation),
        content=grammar,
        begun=_begun(conversation),
        thinking_budget=conversation.thinking_limit,
    )
    retained: tuple[RetainedPrefix, ...] = ()
    if any(message.breakpoints for message in conversation.messages):
        retained = retained_prefixes(model, conversation, format_, prompt, attached or {})
    return PreparedChat(prompt, format_.output(spec, prompt.text), retained)


def _is_parallel(conversation: Conversation) -> bool:
    """True if the model may make several calls; a named tool is called once."""
    return conversation.parallel_tool_calls and not isinstance(conversation.tool_choice, NamedTool)


def _begun(conversation: Conversation) -> str:
    """Return the text that the completion continues."""
    last = conversation.messages[-1]
    is_continued = conversation.continue_final_message and last.role == "assistant"
    return last.content if is_continued else ""
