"""The chunks of a streamed response."""

import httpx

from scripts.sse import Chunk, chunks_in


def chunks(response: httpx.Response) -> list[Chunk]:
    return chunks_in(response.content)
