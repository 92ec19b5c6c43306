"""A request whose input is complete, and all that is made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import time

from fastapi import Request
from pydantic_core import PydanticCustomError

from app.api.openai.logprobs import TokenBytes
from app.api.openai.responses.conversation import (
    REASONING,
    SUMMARY,
    attachments,
    to_conversation,
    unsealed,
)
from app.api.openai.responses.event_writer import OutputOptions
from app.api.openai.responses.items.input_items import CompactionTrigger, InputItem, all_tools
from app.api.openai.responses.items.output_items import ResponseConversation, ResponseObject
from app.api.openai.responses.items.tools import CallableTool, check_tools
from app.api.openai.responses.request import ENCRYPTED_REASONING, ResponseRequest
from app.api.openai.responses.stored.own import OwnResponses
from app.api.openai.schemas.queue_options import served_tier
from app.generation.job import GenerationJob
from app.prompts.chat import PreparedChat, prepare_chat
from app.prompts.conversation import Conversation
from app.prompts.images.image_marks import Attachment
from app.prompts.render import Attached
from app.server_state import server_state
from app.storage.seal import Sealer
from batching import InvalidRequest, ModelInfo


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request together with the items that it goes on from.

    items: the items of the responses before or of the conversation, and then those of the request.
    num_before: how many are not of the request.
    compacts: the conversation is to be summarized.
    tools: the tools that may be called, by the name that the model knows.
    """

    body: ResponseRequest
    items: Sequence[InputItem]
    num_before: int
    compacts: bool
    tools: Mapping[str, CallableTool]
    sealer: Sealer

    @property
    def attachments(self) -> Mapping[str, Attachment]:
        """The images and files of all items, by their marks."""
        return attachments(self.items, self.num_before, self._before)

    @property
    def _before(self) -> str:
        """The field that names what it goes on from."""
        return "" if (before := self.body.before) is None else before.param

    def conversation(self) -> Conversation:
        """Return the conversation; it takes as long as the reasoning that it unseals is long.

        Raises:
            InvalidRequest: sealed reasoning is not from here, or too long in all.
        """
        items = unsealed(self.items, self.sealer, self.num_before, self._before)
        return to_conversation(self.body, items, compacts=self.compacts)

    def prepare(self, model: ModelInfo, attached: Mapping[str, Attached]) -> PreparedChat:
        """Return the prompt and the form of the output.

        attached: the images and files, by their marks.

        Raises:
            InvalidRequest: the conversation cannot be rendered, or the output's form cannot be had.
        """
        return prepare_chat(
            model,
            self.conversation(),
            grammar=None if self.compacts else self.body.text.format.grammar(),
            truncation=self.body.prompt_truncation(),
            attached=attached,
            may_call=not self.compacts,
        )

    def output_options(self, token_bytes: TokenBytes) -> OutputOptions:
        body = self.body
        return OutputOptions(
            tools=self.tools,
            is_summarized=body.reasoning.is_summarized,
            seal=partial(self.sealer.seal, REASONING)
            if ENCRYPTED_REASONING in body.include
            else None,
            token_bytes=None if body.num_logprobs is None else token_bytes,
            generates=body.generates,
            seal_summary=partial(self.sealer.seal, SUMMARY) if self.compacts else None,
        )


async def resolve(request: Request, body: ResponseRequest) -> ResolvedRequest:
    """Complete the input of a request by the items that it goes on from.

    Raises:
        RequestError: a response or an item that it names does not exist, or see `check_tools`.
    """
    given = body.input
    compacts = bool(given) and isinstance(given[-1], CompactionTrigger)
    given = given[:-1] if compacts else given
    items = await OwnResponses(request).resolved(body.before, given)
    if not items and body.instructions is None:
        raise InvalidRequest("input", "there is nothing to respond to")
    tools = all_tools(body.tools, items)
    try:
        check_tools(body.tools, tools, body.tool_choice)
    except PydanticCustomError as error:
        raise InvalidRequest((error.context or {})["param"], error.message()) from None
    num_before, sealer = len(items) - len(given), server_state(request).sealer
    return ResolvedRequest(body, items, num_before, compacts, tools, sealer)


def new_response(body: ResponseRequest, job: GenerationJob) -> ResponseObject:
    """Return the response before its first token."""
    choice, conversation = body.tool_choice, body.conversation
    retention = body.prompt_cache_retention
    return ResponseObject(
        id=job.completion_id,
        object="response",
        created_at=int(time()),
        completed_at=None,
        status="queued" if body.background else "in_progress",
        background=body.background,
        error=None,
        incomplete_details=None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata,
        model=job.model_id,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        # The spelling of OpenAI's type; requests may have either.
        prompt_cache_retention=retention and retention.replace("-", "_"),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        store=body.store,
        conversation=None if conversation is None else ResponseConversation(id=conversation),
        reasoning=body.reasoning.echo(),
        safety_identifier=body.safety_identifier,
        service_tier=served_tier(body.service_tier),
        temperature=job.spec.sampling.temperature,
        text={"format": body.text.format.echo(), "verbosity": body.text.verbosity},
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        tools=[tool.model_dump() for tool in body.tools],
        top_logprobs=body.top_logprobs or 0,
        top_p=job.spec.sampling.top_p,
        truncation=body.truncation,
        usage=None,
        user=body.user,
    )
