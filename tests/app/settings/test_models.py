"""Which models the settings name, and what is wrong with a file of models."""

from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings, SettingsError
from app.settings.models import served_models
from batching import SamplingDefaults, ServedModel


def models(**fields: Any) -> list[ServedModel]:
    return served_models(Settings(_env_file=None, **fields))


def of_file(tmp_path: Path, text: str, **fields: Any) -> list[ServedModel]:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return models(models_file=path, **fields)


def test_one_model_is_the_default_and_is_loaded_at_the_start() -> None:
    (model,) = models(model="~/models/Qwen3/", idle_unload=60)
    assert (model.model_id, model.config.model) == ("Qwen3", "~/models/Qwen3/")
    assert model.loads_at_start and not model.is_pinned and model.idle_unload == 60


def test_further_models_have_their_own_names_or_given_ones() -> None:
    served = models(models=" org/Qwen3-4B , small=/models/a.gguf,/models/b.gguf,", model_id="first")
    assert [(m.model_id, m.config.model) for m in served] == [
        ("first", "smollm2-135m-instruct"),
        ("org/Qwen3-4B", "org/Qwen3-4B"),
        ("small", "/models/a.gguf"),
        ("b", "/models/b.gguf"),
    ]
    assert [m.loads_at_start for m in served] == [True, False, False, False]


@pytest.mark.parametrize("listed", ["=a.gguf", "a="])
def test_an_item_without_a_name_or_a_model_is_an_error(listed: str) -> None:
    with pytest.raises(SettingsError, match=r"MLX_SERVER_MODELS: '.*' lacks a name or a model"):
        models(models=listed)


def test_what_folders_hold_comes_last_without_what_is_named_already() -> None:
    settings = Settings(_env_file=None, model="/m/a.gguf", models="b=/m/b.gguf")
    found = {"a": "/m/a.gguf", "other": "/m/b.gguf", "b": "/m/c.gguf", "d": "/m/d.gguf"}
    assert [m.model_id for m in served_models(settings, found)] == ["a", "b", "d"]


FILE = """
[models.qwen]
model = "org/Qwen3-4B-4bit"
aliases = ["gpt-4o", "qwen3"]
pinned = true
max_num_seqs = 2
num_blocks = "auto"
sampling = { temperature = 0.2, top_k = 20 }

[models."org/small"]
model = "smollm2-135m-instruct"
load_at_start = true
idle_unload = 5.5

[models.lazy]
model = "/m/lazy.gguf"
"""


def test_a_file_has_models_with_settings_of_their_own(tmp_path: Path) -> None:
    qwen, small, lazy = of_file(tmp_path, FILE, idle_unload=600, max_num_seqs=4)
    assert (qwen.model_id, qwen.config.model) == ("qwen", "org/Qwen3-4B-4bit")
    assert qwen.aliases == ("gpt-4o", "qwen3")
    assert qwen.is_pinned and qwen.loads_at_start
    assert (qwen.config.max_num_seqs, small.config.max_num_seqs) == (2, 4)
    assert (qwen.config.max_blocks, small.config.max_blocks) == (None, 1024)
    assert qwen.config.sampling_defaults == SamplingDefaults(temperature=0.2, top_k=20)
    assert small.config.sampling_defaults == SamplingDefaults()
    assert [m.loads_at_start for m in (small, lazy)] == [True, False]
    assert [m.idle_unload for m in (qwen, small, lazy)] == [600, 5.5, 600]


def test_the_model_of_the_variable_is_served_beside_a_file_if_it_is_set(tmp_path: Path) -> None:
    served = of_file(tmp_path, FILE, model="/m/default.gguf", models="further=/m/f.gguf")
    assert [m.model_id for m in served] == ["default", "qwen", "org/small", "lazy", "further"]


def test_the_name_of_a_model_that_is_not_served_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="MLX_SERVER_MODEL_ID is the name of MLX_SERVER_MODEL"):
        of_file(tmp_path, FILE, model_id="x")


def test_without_batching_no_model_has_it(tmp_path: Path) -> None:
    served = of_file(tmp_path, FILE, enable_batching=False)
    assert {m.config.max_num_seqs for m in served} == {1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has tables"),
        ("[models]", "it has tables"),
        ("models = 3", "it has tables"),
        ("[models.a]\nmodel = 'm'\n[server]\n", "and nothing else"),
        ("[models.a]\nmodel = 'm'\nmodel = 'n'", "line 3"),
        ("[models.a]\nmodel = 'm'\n[models.a]\n", "line 3"),
        ("[models.a]\npinned = true\n", "line 1: models.a.model: Field required"),
        (
            "\n[models.a]\nmodel = 'm'\nmax_num_seq = 3\n",
            "line 4: models.a.max_num_seq is not a setting of a model; did you mean max_num_seqs?",
        ),
        ("[models.a]\nmodel = 'm'\nxyz = 3\n", "models.a.xyz is not a setting of a model$"),
        (
            "[models.a]\nmodel = 'm'\ndevice = 'cpu'\n",
            "line 3: models.a.device is .*; it is one for all models: MLX_SERVER_DEVICE",
        ),
        (
            "[models.a]\nmodel = 'm'\nmax_num_seqs = 0\n",
            "line 3: models.a.max_num_seqs: .*equal to 1",
        ),
        ("[models.a]\nmodel = 'm'\ndtype = 'int3'\n", "line 3: models.a.dtype: .*'bfloat16'"),
        (
            "[models.b]\nmodel = 'm'\n[models.'a']\nmodel = 'm'\n[models.a.sampling]\ntop_p = 2\n",
            "line 3: models.a.sampling.top_p: .*equal to 1",
        ),
        (
            "[models.a]\nmodel = 'm'\nsampling.temprature = 2\n",
            "line 3: models.a.sampling.temprature is .*; did you mean temperature?",
        ),
        ("[models.a]\nmodel = ''\n", "line 2: models.a.model: .*at least 1 character"),
        (
            "[models.a]\nmodel = 'm'\nmax_num_seqs = 1024\n",
            "line 1: models.a: max_num_batched_tokens .* must be at least max_num_seqs",
        ),
        ("[models]\na = 3\n", "line 1: models.a: Input should be a valid dictionary"),
        (
            "[models.a]\nmodel = 'm'\n[models.b]\nmodel = 'm'\naliases = ['a']\n",
            "two models or adapters are named 'a'",
        ),
        (
            "[models.a]\nmodel = 'm'\nchat_template = '/no/such/file'\n",
            "MLX_SERVER_CHAT_TEMPLATE cannot be read",
        ),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line_and_key(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        of_file(tmp_path, text)


def test_every_mistake_has_a_line(tmp_path: Path) -> None:
    text = "[models.a]\nmodel = 3\nx = 1\n[models.b]\ny = 2\n"
    with pytest.raises(SettingsError) as caught:
        of_file(tmp_path, text)
    lines = str(caught.value).splitlines()
    assert [line.partition("models.toml, ")[2].partition(":")[0] for line in lines] == [
        "line 2",
        "line 3",
        "line 4",
        "line 5",
    ]


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="MLX_SERVER_MODELS_FILE cannot be read"):
        models(models_file=tmp_path / "none.toml")


@pytest.mark.parametrize("listed", ["a=/m/x.gguf,a=/m/y.gguf", "x=1,smollm2-135m-instruct"])
def test_two_models_of_one_name_are_an_error(listed: str) -> None:
    with pytest.raises(SettingsError, match="two models or adapters are named"):
        models(models=listed)


def test_adapters_are_those_of_the_default_model_or_of_a_table_of_the_file(tmp_path: Path) -> None:
    (model,) = models(adapters=" cats = /adapters/cats , dogs=org/dogs,")
    assert model.adapters == {"cats": "/adapters/cats", "dogs": "org/dogs"}
    assert model.config.max_adapters == 8
    text = FILE + "max_adapters = 3\nmax_adapter_rank = 64\nadapters = { mice = '~/mice' }\n"
    qwen, _, lazy = of_file(tmp_path, text)
    assert (qwen.adapters, qwen.config.max_adapters) == ({}, 0)
    assert (lazy.adapters, lazy.config.max_adapters) == ({"mice": "~/mice"}, 3)
    assert lazy.config.max_adapter_rank == 64
    first, *_, lazy = of_file(tmp_path, text, model="m.gguf", adapters="cats=a")
    assert (first.adapters, [*lazy.adapters]) == ({"cats": "a"}, ["mice"])


def test_any_model_may_get_adapters_where_they_are_loaded_at_run_time() -> None:
    served = models(models="a=a.gguf", allow_runtime_adapters=True, adapter_dirs="/adapters")
    assert [model.config.max_adapters for model in served] == [8, 8]
    with pytest.raises(SettingsError, match="RUNTIME_ADAPTERS needs MLX_SERVER_ADAPTER_DIRS"):
        models(allow_runtime_adapters=True, adapter_dirs=" , ")


@pytest.mark.parametrize("listed", ["cats", "=a", "cats="])
def test_an_adapter_without_a_name_or_a_folder_is_an_error(listed: str) -> None:
    with pytest.raises(SettingsError, match=f"MLX_SERVER_ADAPTERS: '{listed}' lacks a name"):
        models(adapters=listed)


def test_an_adapter_has_a_name_that_no_model_has(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="two models or adapters are named 'a'"):
        models(models="a=a.gguf", adapters="a=/adapters/a")
    settings = Settings(_env_file=None, model="m.gguf", adapters="a=/adapters/a")
    assert [m.model_id for m in served_models(settings, {"a": "/m/a.gguf"})] == ["m"]


def test_adapters_belong_to_a_model_that_is_set(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="MLX_SERVER_ADAPTERS are those of MLX_SERVER_MODEL"):
        of_file(tmp_path, FILE, adapters="cats=a")
    text = "[models.a]\nmodel = 'm'\nallow_runtime_adapters = true\n"
    with pytest.raises(SettingsError, match="it is one for all models: MLX_SERVER_ALLOW_RUNTIME"):
        of_file(tmp_path, text)
    with pytest.raises(SettingsError, match=r"line 3: models\.a\.adapters\.x: .*at least 1"):
        of_file(tmp_path, "[models.a]\nmodel = 'm'\nadapters.x = ''\n")
