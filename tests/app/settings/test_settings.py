"""Settings: what the environment and `.env` may say, and what is said back when they are wrong."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import ValidationError

from app.admission.controller import AdmissionLimits
from app.flags import flag_name, parse_flags
from app.settings import (
    FORMER_NAMES,
    Settings,
    SettingsError,
    env_name,
    load_settings,
    unknown_variables,
)
from app.settings.configs import admission_limits, engine_config
from batching import RERANK_TEMPLATES, EngineConfig


def rejection() -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings()
    return str(caught.value).split("\n")


def test_the_defaults_are_the_engines_defaults() -> None:
    name = "smollm2-135m-instruct"
    assert engine_config(load_settings()) == EngineConfig(model=name, model_id=name)


# Of settings whose values are words; a number gets one more, a boolean its opposite.
OTHER_VALUES: Final = {
    "model": "org/model",
    "model_id": "mine",
    "chat_template": "{{ messages }}",
    "num_blocks": "64",
    "memory_fraction": "0.25",
    "state_cache_mib": "64",
    "vision_cache_mib": "64",
    "dtype": "float16",
    "kv_cache_dtype": "bfloat16",
    "device": "cpu",
    "native": "require",
    "gpu_kernels": "require",
    "generation_config": "openai",
    "pooling": "mean",
    "rerank_template": "{{ messages }}",
    "rerank_tokens": "0,1",
    "cpu_precision": "exact",
    "weights_cache_dir": "weights",
    "host": "::1",
    "api_keys": "key",
    "api_keys_file": "keys",
    "data_dir": "data",
    "response_store": "memory",
    "allowed_hosts": "*",
    "cors_origins": "*",
    "mcp_origins": "http://localhost:3001",
    "media_domains": "images.example.org",
    "kv_events": "tcp://*:5557",
    "kv_events_replay": "ipc:///run/replay",
    "late_head_ms": "0",
    "log_level": "debug",
    "log_format": "json",
}
# Which settings the rest of the server uses.  A new one stands here, or reaches one of the two.
OF_THE_SERVER: Final = {
    "allow_request_chat_template",
    "clamp_max_tokens",
    "host",
    "port",
    "max_choices",
    "max_output_tokens",
    "max_body_bytes",
    "max_connections",
    "api_keys",
    "api_keys_file",
    "share_prefix_cache",
    "allowed_hosts",
    "admin_keys",
    "cors_origins",
    "mcp_origins",
    "web",
    "read_timeout",
    "write_timeout",
    "late_head_ms",
    "exit_on_engine_failure",
    "data_dir",
    "models_dir",
    "response_store",
    "max_stored_responses",
    "max_stored_mib",
    "stored_response_ttl",
    "max_file_mib",
    "max_files_mib",
    "max_file_lines",
    "batch_lines_beside_requests",
    "warm_file",
    "max_images",
    "max_image_mib",
    "vision_pixels",
    "max_image_pixels",
    "media_workers",
    "media_domains",
    "media_timeout",
    "kv_events",
    "kv_events_replay",
    "kv_events_topic",
    "kv_events_buffer",
    "log_level",
    "log_format",
    "models",
    "models_file",
    "serve_hub_cache",
    "idle_unload",
    "min_resident",
    "load_timeout",
    "max_adapters",
    "adapter_dirs",
}


def other_value(field: str) -> str:
    """Return a value that is not the field's default, as the environment would have it."""
    if field in OTHER_VALUES:
        return OTHER_VALUES[field]
    default = Settings.model_fields[field].default
    return str(not default if isinstance(default, bool) else (default or 0) + 1)


def changes(config: EngineConfig | AdmissionLimits, other: Any) -> dict[str, object]:
    """Return the fields in which another config differs, with its values."""
    values = {field.name: getattr(other, field.name) for field in fields(config)}
    return {name: value for name, value in values.items() if value != getattr(config, name)}


def reached(monkeypatch: pytest.MonkeyPatch, field: str) -> tuple[dict[str, object], ...]:
    """Return what changes for the engine and for admission control if only a field is set."""
    default = load_settings()
    with monkeypatch.context() as environment:
        environment.setenv(env_name(field), other_value(field))
        settings = load_settings()
    return (
        changes(engine_config(default), engine_config(settings)),
        changes(admission_limits(default), admission_limits(settings)),
    )


def test_every_setting_reaches_the_engine_or_admission_control_or_is_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reach_none = {field for field in Settings.model_fields if not any(reached(monkeypatch, field))}
    assert reach_none == OF_THE_SERVER


@pytest.mark.parametrize(
    ("config", "index", "constant"),
    [
        (EngineConfig, 0, {"block_size", "sampling_defaults", "memory_budget"}),
        (AdmissionLimits, 1, set()),
    ],
)
def test_every_field_of_a_config_is_set_by_a_setting(
    monkeypatch: pytest.MonkeyPatch, config: type, index: int, constant: set[str]
) -> None:
    changed = [reached(monkeypatch, field)[index] for field in Settings.model_fields]
    assert set().union(*changed) == {field.name for field in fields(config)} - constant


@pytest.mark.parametrize("field", sorted(set(Settings.model_fields) - OF_THE_SERVER))
def test_a_setting_arrives_with_its_value_where_there_is_a_field_of_its_name(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setenv(env_name(field), other_value(field))
    settings = load_settings()
    for config in (engine_config(settings), admission_limits(settings)):
        if field in {own.name for own in fields(config)}:
            assert getattr(config, field) == getattr(settings, field)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model", {"model": "org/model", "model_id": "org/model"}),
        ("model_id", {"model_id": "mine"}),
        ("enable_batching", {"max_num_seqs": 1}),
        ("num_blocks", {"num_blocks": 64, "max_blocks": 64}),
        ("adapters", {"max_adapters": 8}),
        ("allow_runtime_adapters", {"max_adapters": 8}),
    ],
)
def test_a_setting_that_has_another_name_there_arrives(
    monkeypatch: pytest.MonkeyPatch, field: str, change: dict[str, object]
) -> None:
    assert reached(monkeypatch, field)[0] == change


def test_without_batching_one_request_runs_at_a_time_and_keeps_its_cache() -> None:
    config = engine_config(Settings(enable_batching=False, max_num_seqs=8))
    assert (config.max_num_seqs, config.enable_prefix_cache) == (1, True)


def test_a_rerankers_template_is_a_name_a_file_or_a_text(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}", encoding="utf-8")
    for value, template in (
        ("qwen3", RERANK_TEMPLATES["qwen3"]),
        (str(tmp_path / "t.jinja"), "{{ messages }}"),
        ("{{ query }}", "{{ query }}"),
    ):
        assert engine_config(Settings(rerank_template=value)).rerank_template == template
    with pytest.raises(SettingsError, match="MLX_SERVER_RERANK_TEMPLATE is no template"):
        engine_config(Settings(rerank_template="{{ query"))


@pytest.mark.parametrize(
    ("value", "num_blocks", "max_blocks"),
    [("", None, 1024), ("1024", 1024, 1024), ("AUTO", None, None)],
)
def test_the_size_of_the_pool_is_a_ceiling_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch, value: str, num_blocks: int | None, max_blocks: int | None
) -> None:
    monkeypatch.setenv("MLX_SERVER_NUM_BLOCKS", value)
    config = engine_config(load_settings())
    assert (config.num_blocks, config.max_blocks) == (num_blocks, max_blocks)


@pytest.mark.parametrize(
    ("model", "model_id"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("org/Model-4bit", "org/Model-4bit"),
        ("/models/Model.Q4_1.gguf", "Model.Q4_1"),
        ("models/tiny.gguf", "tiny"),
        ("/models/tiny/", "tiny"),
        ("./models/tiny", "tiny"),
    ],
)
def test_clients_see_a_name_and_no_path(model: str, model_id: str) -> None:
    assert Settings(model=model).served_model_id == model_id


def test_the_folder_itself_has_a_name_too(tmp_path: Path) -> None:
    assert Settings(model=".").served_model_id == tmp_path.name


def test_the_environment_outranks_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("MLX_SERVER_PORT=9000\nMLX_SERVER_HOST=0.0.0.0\n", encoding="utf-8")
    monkeypatch.setenv("MLX_SERVER_PORT", "9001")
    settings = load_settings()
    assert (settings.host, settings.port) == ("0.0.0.0", 9001)


def test_flags_outrank_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("MLX_SERVER_HOST=::1\nMLX_SERVER_PORT=9000\n", encoding="utf-8")
    monkeypatch.setenv("MLX_SERVER_PORT", "9001")
    monkeypatch.setenv("MLX_SERVER_MODEL_ID", "mine")
    flags = {"port": "9002", "num_blocks": "AUTO", "cpu_threads": "3"}
    settings = load_settings(flags)
    assert (settings.host, settings.port, settings.model_id) == ("::1", 9002, "mine")
    assert (settings.num_blocks, settings.cpu_threads) == ("auto", 3)


def test_an_empty_value_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("MLX_SERVER_MODEL_ID=\nMLX_SERVER_PORT=\n", encoding="utf-8")
    monkeypatch.setenv("MLX_SERVER_MAX_MODEL_LEN", "")
    settings = load_settings()
    assert (settings.model_id, settings.port, settings.max_model_len) == (None, 8000, None)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(Settings(), "port", 1)  # noqa: B010 - as an assignment mypy rejects it first


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("PORT", "65536", "must be less than or equal to 65535, not '65536'"),
        ("PORT", "http", "must be a valid integer, not 'http'"),
        ("ENABLE_BATCHING", "maybe", "must be a valid boolean, not 'maybe'"),
        ("MAX_NUM_SEQS", "0", "must be greater than or equal to 1, not '0'"),
        ("NUM_BLOCKS", "all", "must be a valid integer or 'auto', not 'all'"),
        ("NUM_BLOCKS", "0", "must be greater than or equal to 1 or 'auto', not '0'"),
        ("MAX_URGENT_WAIT_MS", "0", "must be greater than 0 or 'off', not '0'"),
        ("MAX_STALL_MS", "inf", "must be a finite number, not 'inf'"),
        ("MEMORY_FRACTION", "1", "must be less than 1, not '1'"),
        ("DEVICE", "tpu", "must be 'auto', 'cpu' or 'gpu', not 'tpu'"),
        ("CPU_PRECISION", "fast", "must be 'auto' or 'exact', not 'fast'"),
        ("CPU_PRECISION", "Fastest", "must be 'auto' or 'exact', not 'fastest'"),
    ],
)
def test_a_bad_value_is_one_line_with_the_variable_and_its_limit(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, line: str
) -> None:
    monkeypatch.setenv(f"MLX_SERVER_{name}", value)
    assert rejection() == [f"MLX_SERVER_{name} {line}"]


def test_every_bad_value_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_PORT", "-1")
    monkeypatch.setenv("MLX_SERVER_AGING_RATE", "0")
    assert rejection() == [
        "MLX_SERVER_AGING_RATE must be greater than 0, not '0'",
        "MLX_SERVER_PORT must be greater than or equal to 0, not '-1'",
    ]


def test_a_template_is_a_text_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(text, encoding="utf-8")
    for value in (text, str(tmp_path / "chat.jinja"), "chat.jinja"):
        monkeypatch.setenv("MLX_SERVER_CHAT_TEMPLATE", value)
        assert engine_config(load_settings()).chat_template == text


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("{% if x %}", "is no template: line 1: Unexpected end of template. Jinja was looking for"),
        ("missing.jinja", "cannot be read: missing.jinja: No such file or directory"),
        ("binary.jinja", "cannot be read: binary.jinja: it is no text"),
        ("broken.jinja", "is no template: line 2: unexpected '}'"),
    ],
)
def test_a_template_that_cannot_be_used_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, line: str
) -> None:
    (tmp_path / "binary.jinja").write_bytes(b"\xff")
    (tmp_path / "broken.jinja").write_text("a\n{{ } }}", encoding="utf-8")
    monkeypatch.setenv("MLX_SERVER_CHAT_TEMPLATE", value)
    with pytest.raises(SettingsError) as caught:
        engine_config(load_settings())
    assert str(caught.value).startswith(f"MLX_SERVER_CHAT_TEMPLATE {line}")


def test_prompts_are_warmed_where_they_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_WARM_FILE", "prompts.jsonl")
    monkeypatch.setenv("MLX_SERVER_ENABLE_PREFIX_CACHE", "false")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert str(caught.value) == "MLX_SERVER_WARM_FILE needs MLX_SERVER_ENABLE_PREFIX_CACHE"


def test_a_step_has_a_token_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_MAX_NUM_BATCHED_TOKENS", "4")
    reported = (
        "MLX_SERVER_MAX_NUM_BATCHED_TOKENS (4) must be at least MLX_SERVER_MAX_NUM_SEQS (8): "
        "each running request reads a token a step"
    )
    assert rejection() == [reported]
    monkeypatch.setenv("MLX_SERVER_ENABLE_BATCHING", "false")
    assert load_settings().max_num_seqs == 1


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        (
            "MLX_SERVER_PROT=1",
            "MLX_SERVER_PROT is not a setting; did you mean MLX_SERVER_PORT? (.env)",
        ),
        ("QQQ=1", "QQQ is not a setting (.env)"),
    ],
)
def test_a_line_of_the_file_that_sets_nothing_is_rejected(line: str, reported: str) -> None:
    Path(".env").write_text(f"{line}\n", encoding="utf-8")
    assert rejection() == [reported]


def test_a_variable_that_sets_nothing_is_reported() -> None:
    environ = {
        "HOME": "/",
        "MLX_SERVER_PORT": "1",
        "mlx_server_host": "::1",
        "MLX_SERVER_NUM_BLOCK": "4",
        "MLX_SERVER_MAX_BATCH_TOKENS": "9",
        # The key that commands send.
        "MLX_SERVER_API_KEY": "sk-one",
    }
    assert unknown_variables(environ) == [
        "MLX_SERVER_NUM_BLOCK is not a setting; did you mean MLX_SERVER_NUM_BLOCKS?"
    ]


@pytest.mark.parametrize(("former", "field"), FORMER_NAMES.items())
def test_a_former_name_still_works(
    monkeypatch: pytest.MonkeyPatch, former: str, field: str
) -> None:
    Path(".env").write_text(f"{env_name(former)}=300\n", encoding="utf-8")
    assert getattr(load_settings(), field) == 300
    monkeypatch.setenv(env_name(former).lower(), "400")
    assert getattr(load_settings(), field) == 400
    assert getattr(load_settings(parse_flags([f"{flag_name(former)}=500"])), field) == 500
    assert f"{env_name(field)} must be" in _rejection_of(monkeypatch, former, "x")
    assert unknown_variables(os.environ) == []


def _rejection_of(monkeypatch: pytest.MonkeyPatch, field: str, value: str) -> str:
    with monkeypatch.context() as environment:
        environment.setenv(env_name(field), value)
        return rejection()[0]


def test_a_variable_under_both_names_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_NUM_BLOCKS", "64")
    Path(".env").write_text("MLX_SERVER_BATCH_BLOCK_POOL_SIZE=32\n", encoding="utf-8")
    assert load_settings().num_blocks == 64
    monkeypatch.setenv("MLX_SERVER_BATCH_BLOCK_POOL_SIZE", "")
    assert load_settings().num_blocks == 64
    monkeypatch.setenv("MLX_SERVER_BATCH_BLOCK_POOL_SIZE", "32")
    reported = (
        "MLX_SERVER_BATCH_BLOCK_POOL_SIZE is the former name of MLX_SERVER_NUM_BLOCKS: "
        "set one of them, not both"
    )
    assert rejection() == [reported]


def test_an_env_file_that_is_no_text_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_bytes(b"MLX_SERVER_MODEL=\xff\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"^\.env cannot be read: .*utf-8"):
        load_settings()


def test_the_defaults_are_those_of_admission_control() -> None:
    assert admission_limits(load_settings()) == AdmissionLimits()


def test_a_limit_that_has_another_name_there_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reached(monkeypatch, "enable_batching")[1] == {"max_num_seqs": 1}


@pytest.mark.parametrize("field", ["api_keys_file", "data_dir", "weights_cache_dir"])
def test_a_path_may_begin_at_home(
    field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable := f"MLX_SERVER_{field}".upper(), "~/there")
    assert getattr(load_settings(), field) == tmp_path / "there"
    monkeypatch.setenv(variable, "~no-such-user/there")
    with pytest.raises(SettingsError, match=variable):
        load_settings()


def test_origins_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().allowed_origins == []
    monkeypatch.setenv("MLX_SERVER_CORS_ORIGINS", "https://a.example, https://b.example")
    assert load_settings().allowed_origins == ["https://a.example", "https://b.example"]
