"""Flags: one for each setting, and one line for what is wrong with them."""

import pytest

from app.flags import flag_name, name_flags, parse_flags
from app.settings import Settings, SettingsError, env_name
from tests.support.rows import rows


def help_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    # No line of the help breaks within a name.
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as ended:
        parse_flags(["--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@rows("field", Settings.model_fields)
def test_every_setting_has_a_flag(field: str) -> None:
    assert parse_flags([f"{flag_name(field)}=x"]) == {field: "x"}


def test_the_help_has_each_flags_meaning_default_and_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = help_text(capsys, monkeypatch)
    assert (
        "  --port N " in text
        and "Port to listen on; 0 takes a free one. (default: 8000; MLX_SERVER_PORT)\n" in text
    )
    assert "--device auto|cpu|gpu" in text
    assert "--num-blocks N|auto" in text
    assert "--api-keys-file FILE" in text
    assert "Others on this machine see a flag" in text
    for field in Settings.model_fields:
        assert f"  {flag_name(field)} " in text
        assert f"; {env_name(field)})\n" in text


def test_the_help_calls_other_settings_by_their_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "at least --max-num-seqs. (default" in help_text(capsys, monkeypatch)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "mlx-batch-server 0.1.0\n"


@rows(
    ("arguments", "value"),
    [
        (["--enable-batching"], "true"),
        (["--enable-batching", "false"], "false"),
        (["--enable-batching=maybe"], "maybe"),
        (["--no-enable-batching"], "false"),
        (["--no-enable-batching", "--enable-batching"], "true"),
    ],
)
def test_a_boolean_may_stand_alone(arguments: list[str], value: str) -> None:
    assert parse_flags(arguments) == {"enable_batching": value}


def test_an_empty_value_is_no_value() -> None:
    assert parse_flags(["--model-id", "", "--port=", "--host", "::1"]) == {"host": "::1"}


@rows(
    ("arguments", "line"),
    [
        (["--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["--prot=1"], "unknown flag --prot; did you mean --port?"),
        (["--batch-max"], "unknown flag --batch-max"),
        (["--qqqq"], "unknown flag --qqqq"),
        (["-p", "1"], "unknown flag -p"),
        (["--port"], "--port: expected one argument"),
        (["--no-enable-batching=1"], "--no-enable-batching: ignored explicit argument '1'"),
        (["serve"], "unexpected argument 'serve'"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_flags(arguments)
    text = str(caught.value)
    assert text.startswith(f"mlx-batch-server: {line}")
    assert "\n" not in text


def test_what_a_flag_has_set_is_called_by_the_flag() -> None:
    text = "MLX_SERVER_MODEL_ID and MLX_SERVER_MODEL; MLX_SERVER_PROT"
    assert name_flags(text, {"model": "m"}) == "MLX_SERVER_MODEL_ID and --model; MLX_SERVER_PROT"
