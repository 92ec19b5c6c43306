"""How coding agents are started for a server: only by variables and arguments, so that no file changes.

docs/clients.md has the same for users who write their own configuration.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.commands.server.server_address import Server
from app.settings.names import KEY_VARIABLE

_PROVIDER: Final = "mlx-batch-server"
# What programs send that need a key, to a server that needs none.
_NO_KEY: Final = "none"
# It takes a model that it does not know to have a million tokens.
_CLAUDE_CONTEXT: Final = "CLAUDE_CODE_MAX_CONTEXT_TOKENS"
# Tokens: opencode needs numbers, also for a model that is not loaded yet.
_CONTEXT: Final = 32_768
_MAX_OUTPUT: Final = 4096


class Target(NamedTuple):
    """What a program is pointed to; the context is in tokens, None if it is not known yet."""

    server: Server
    model: str
    context: int | None
    takes_images: bool = False

    @property
    def key(self) -> str:
        return self.server.api_key or _NO_KEY


@dataclass(frozen=True)
class Start:
    """Arguments of a program, and the variables that it gets and those that it must not have."""

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


class Program(NamedTuple):
    """A coding agent; `min_context` is in tokens."""

    install: str
    start: Callable[[Target], Start]
    min_context: int = 32_000


def _claude(target: Target) -> Start:
    """Start Claude Code, whose other ways to reach a model outrank its base URL."""
    names = ("MODEL", *(f"DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    window = {} if target.context is None else {_CLAUDE_CONTEXT: str(target.context)}
    return Start(
        variables={
            "ANTHROPIC_BASE_URL": target.server.url,
            "ANTHROPIC_AUTH_TOKEN": target.key,
            **{f"ANTHROPIC_{name}": target.model for name in names},
            **window,
        },
        removed=(
            "ANTHROPIC_API_KEY",
            "CLAUDE_CODE_USE_BEDROCK",
            "CLAUDE_CODE_USE_FOUNDRY",
            "CLAUDE_CODE_USE_VERTEX",
        ),
    )


def _codex(target: Target) -> Start:
    """Start Codex, whose flag `-c` takes what its configuration file has."""
    provider = f"model_providers.{_PROVIDER}"
    # A string of JSON is one of TOML, too.
    values: dict[str, object] = {
        "model": target.model,
        "model_provider": _PROVIDER,
        f"{provider}.name": _PROVIDER,
        f"{provider}.base_url": f"{target.server.url}/v1",
        f"{provider}.wire_api": "responses",
    }
    if not target.takes_images:
        # One that the model opens would end the conversation.
        values["features.view_image"] = False
    if target.context is not None:
        values["model_context_window"] = target.context
    variables = {}
    if target.server.api_key:
        values[f"{provider}.env_key"] = KEY_VARIABLE
        variables[KEY_VARIABLE] = target.server.api_key
    arguments = [("-c", f"{name}={json.dumps(value)}") for name, value in values.items()]
    return Start(tuple(part for pair in arguments for part in pair), variables)


def _opencode(target: Target) -> Start:
    """Start opencode, which merges a variable over its configuration files."""
    key = target.server.api_key
    context = target.context or _CONTEXT
    limit = {"context": context, "output": min(_MAX_OUTPUT, context // 2)}
    model: dict[str, object] = {"name": target.model, "limit": limit}
    if target.takes_images:
        # It leaves images out otherwise.
        model["modalities"] = {"input": ["text", "image"], "output": ["text"]}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {
            "baseURL": f"{target.server.url}/v1",
            "apiKey": f"{{env:{KEY_VARIABLE}}}" if key else _NO_KEY,
        },
        "models": {target.model: model},
    }
    name = f"{_PROVIDER}/{target.model}"
    config = {"provider": {_PROVIDER: provider}, "model": name, "small_model": name}
    variables = {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}
    return Start(variables=variables | ({KEY_VARIABLE: key} if key else {}))


def _aider(target: Target) -> Start:
    """Start aider: a project's `.env` outranks `OPENAI_API_KEY`, but not these variables."""
    return Start(
        (
            *("--model", f"openai/{target.model}", "--edit-format", "diff"),
            "--no-show-model-warnings",
        ),
        {
            "AIDER_OPENAI_API_BASE": f"{target.server.url}/v1",
            "AIDER_OPENAI_API_KEY": target.key,
        },
    )


PROGRAMS: Final[Mapping[str, Program]] = {
    "claude": Program("npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Program("npm install -g @openai/codex", _codex),
    "opencode": Program("npm install -g opencode-ai", _opencode),
    "aider": Program("python -m pip install aider-install && aider-install", _aider, min_context=0),
}
