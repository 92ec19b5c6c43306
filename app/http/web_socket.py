"""Requests for a WebSocket (RFC 6455) that get a response instead."""

from starlette.types import Message, Scope, Send


def sender(scope: Scope, send: Send) -> Send:
    """Return a `send` for the messages of an HTTP response, also where the request is for a WebSocket."""
    if scope["type"] != "websocket":
        return send

    async def send_instead(message: Message) -> None:
        # ASGI's extension for it, which uvicorn has.
        await send({"body": b"", **message, "type": f"websocket.{message['type']}"})

    return send_instead
