"""The fields of a chat request that shape its prompt, besides the turns."""

from collections.abc import Sequence
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from app.api.openai.chat.messages import MessageParam
from app.api.openai.schemas.reasoning import ReasoningOptions
from app.api.openai.schemas.tool_calling.tool_choice import ToolChoice
from app.api.openai.schemas.tool_calling.tools import ToolList
from app.api.schemas.fields import Text, field_error
from app.parsing import tool_spec
from app.prompts.conversation import Conversation
from app.prompts.images.image_marks import Attachment, attachments_in

# The longest of models have some 20,000.
_MAX_TEMPLATE: Final = 128 * 1024


class ConversationOptions(ReasoningOptions):
    tools: ToolList = Field(default_factory=list)
    tool_choice: ToolChoice | None = Field(
        default=None, description="`auto` with tools, else `none`."
    )
    parallel_tool_calls: bool = True
    chat_template: Annotated[Text, Field(max_length=_MAX_TEMPLATE)] | None = Field(
        default=None, description="In place of the model's, if the server allows that; vLLM's."
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        begins_again = (
            self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        )
        if self.continue_final_message and begins_again:
            raise field_error(
                "it cannot be combined with add_generation_prompt", "continue_final_message"
            )
        return self

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        if self.tool_choice is not None:
            self.tool_choice.check(self.tools)
        return self

    @property
    def effective_tool_choice(self) -> tool_spec.ToolChoice:
        if self.tool_choice is not None:
            return self.tool_choice.to_choice()
        return "auto" if self.tools else "none"

    def attachments_of(self, messages: Sequence[MessageParam]) -> dict[str, Attachment]:
        """Return the images and files of turns, by their marks."""
        found: dict[str, Attachment] = {}
        for index, message in enumerate(messages):
            found |= attachments_in(message.content, f"messages.{index}.content")
        return found

    def conversation_of(self, messages: Sequence[MessageParam]) -> Conversation:
        return Conversation(
            messages=[message.to_message() for message in messages],
            tools=[tool.to_spec() for tool in self.tools],
            tool_choice=self.effective_tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.effort,
            thinking=self.thinking_switch,
            thinking_budget=self.thinking_budget,
            template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )
