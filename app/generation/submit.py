"""Hands a job to an engine."""

from app.admission.admitted_request import AdmittedRequest
from app.generation.beam_search import BeamSearch
from app.generation.choice import Choice
from app.generation.generation import Generation
from app.generation.job import GenerationJob
from batching import AsyncEngine


async def submit(engine: AsyncEngine, job: GenerationJob, request: AdmittedRequest) -> Generation:
    """Queue the sequences of a job.

    Raises:
        QueueFull: too many prompt tokens wait.
        DeadlineExceeded: the request's time is over.
        EngineStopped, EngineStalled: the engine serves no requests.
    """
    await request.reserve_tokens(job.num_prompt_tokens)
    tokens = await engine.submit([request.applied_to(spec) for spec in job.specs])
    request.held.callback(tokens.close)
    choices = [
        Choice(index, engine.model.tokenizer, job.text, job.new_parser())
        for index in range(len(job.specs) * job.spec.num_choices)
    ]
    return Generation(job, tokens, choices, request)


async def search_beams(
    engine: AsyncEngine, job: GenerationJob, request: AdmittedRequest
) -> BeamSearch:
    """Prepare a beam search, which begins with `collect`.

    Raises:
        QueueFull: too many prompt tokens wait.
    """
    await request.reserve_tokens(job.num_prompt_tokens)
    return BeamSearch(engine, job, request)
