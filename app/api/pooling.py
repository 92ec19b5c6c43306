"""The common parts of the endpoints of embeddings, scores, rankings and decisions."""

from collections.abc import Sequence

from fastapi import Request

from app.admission.admitted_request import AdmittedRequest
from app.generation.prompt_task import PromptJob, PromptTask
from app.prompts.inputs import InputReader
from app.prompts.render import Truncation
from app.server_state import server_state
from app.settings import env_name
from batching import AsyncEngine, Embeddings, InvalidRequest, ModelInfo, NoEmbeddings, SequenceSpec


def embeddings_of(model: ModelInfo) -> Embeddings:
    """Return how a model makes embeddings.

    Raises:
        InvalidRequest: it makes none.
    """
    found = model.embeddings
    if isinstance(found, NoEmbeddings):
        message = f"the model '{model.model_id}' {found.reason}"
        if not found.is_described:
            setting = f"{env_name('pooling')}=last"
            message += f"; the server's setting {setting} makes embeddings of it all the same"
        raise InvalidRequest("model", message)
    return found


def input_reader(
    request: Request,
    model: ModelInfo,
    truncation: Truncation | None,
    *,
    add_special_tokens: bool = True,
) -> InputReader:
    """Return what reads the inputs of a model that embeds."""
    limit = embeddings_of(model).max_tokens or model.max_model_len
    return InputReader(
        model=model,
        max_tokens=min(limit, model.max_model_len),
        max_all_tokens=server_state(request).settings.max_queued_tokens,
        truncation=truncation,
        add_special_tokens=add_special_tokens,
    )


def prompted(embeddings: Embeddings, name: str | None, text: str) -> str:
    """Return a text after one of the model's prompts; None is the default prompt, if there is one.

    Raises:
        InvalidRequest: the model has no prompt of that name.
    """
    name = embeddings.default_prompt if name is None else name
    if name is None:
        return text
    if name not in embeddings.prompts:
        known = ", ".join(sorted(embeddings.prompts)) or "none"
        raise InvalidRequest("prompt_name", f"the model's prompts are: {known}")
    return embeddings.prompts[name] + text


async def begin_prompts(
    request: Request,
    engine: AsyncEngine,
    specs: Sequence[SequenceSpec],
    admitted: AdmittedRequest,
    *,
    completion_id: str,
    prefix: Sequence[int] = (),
) -> PromptTask:
    """Return the task that reads prompts, which begins with `collect`.

    prefix: see `PromptJob`.

    Raises:
        QueueFull: too many prompt tokens wait.
    """
    job = PromptJob(
        completion_id=completion_id,
        model_id=engine.model.model_id,
        specs=specs,
        group_size=server_state(request).settings.max_num_seqs,
        prefix=tuple(prefix),
    )
    await admitted.reserve_tokens(job.num_prompt_tokens)
    return PromptTask(engine, job, admitted)
