"""A server of tools as the Model Context Protocol's Python SDK makes it, with sessions, or with `--stateless`.

It prints its address, and serves until it is ended.
"""

import socket
import sys

import uvicorn
from mcp.server.mcpserver import MCPServer  # type: ignore[import-not-found]
from starlette.middleware.cors import CORSMiddleware


def forecast(city: str, days: int = 1) -> str:
    """Tell the weather of the next days."""
    return f"{city}: rain for {days} days"


def fail() -> str:
    """Fail."""
    raise ValueError("no such station")


def main() -> None:
    tools = MCPServer("weather")
    for tool in (forecast, fail):
        tools.add_tool(tool)
    permitted = CORSMiddleware(
        tools.streamable_http_app(stateless_http="--stateless" in sys.argv),
        allow_origins=["*"],
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Mcp-Session-Id"],
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp\n")
        sys.stdout.flush()
        uvicorn.Server(uvicorn.Config(permitted, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
