"""The files under docker/: valid, and of one mind with each other and with the server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from app.api.ops.metrics import router
from app.http.browser_guard import checked_names
from app.observability.metrics.registry import Metrics
from app.settings import Settings
from tests.support.metrics_page import PROCESS, MetricsPage

ROOT: Final = Path(__file__).parent.parent
DOCKER: Final = ROOT / "docker"
DASHBOARD: Final = DOCKER / "grafana" / "dashboards" / "mlx-batch-server.json"

# What the server exports, rejections included.
EXPORTED: Final = Metrics(["fake/model"], rejection_reasons=("queue_full",))

METRIC: Final = re.compile(r"\b(?:vllm:|mlx_server:|process_)\w+")
SELECTOR: Final = re.compile(r"([\w:]+)\{([^}]*)\}")
GROUPED: Final = re.compile(r"by \(([^)]*)\)")


def read_yaml(path: str) -> Any:
    return yaml.safe_load(read(path))


def read(path: str) -> str:
    return (DOCKER / path).read_text(encoding="utf-8")


def dockerfile_lines() -> list[str]:
    return read("Dockerfile").splitlines()


def services() -> dict[str, Any]:
    found: dict[str, Any] = read_yaml("compose.yaml")["services"]
    return found


def mounts(service: str) -> dict[str, str]:
    """Return what is mounted where, by the place in the container."""
    # Split at the last colon: what is mounted may be `${NAME:-default}`.
    pairs = [v.removesuffix(":ro").rsplit(":", 1) for v in services()[service]["volumes"]]
    return {place: source for source, place in pairs}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"]


def grouped(expression: str) -> set[str]:
    """Return the labels that an expression groups by."""
    return {word.strip() for words in GROUPED.findall(expression) for word in words.split(",")}


def labels_by_name() -> dict[str, set[str]]:
    """Return the labels that Prometheus knows each exported sample by."""
    known = {s.name: {*s.labels, "instance", "job"} for s in MetricsPage(EXPORTED).samples}
    return {name: {"instance", "job"} for name in PROCESS} | known


def test_every_published_port_is_on_this_machine_only() -> None:
    ports = [port for service in services().values() for port in service.get("ports", [])]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_a_page_whose_name_points_to_the_published_port_is_refused() -> None:
    """Without keys, as it is: the server listens on all addresses of its container."""
    [host] = re.findall(r"MLX_SERVER_HOST=(\S+)", "\n".join(dockerfile_lines()))
    environment = services()["server"]["environment"]
    assert environment["MLX_SERVER_API_KEYS"] == "${MLX_SERVER_API_KEYS:-}"
    assert environment["MLX_SERVER_ALLOWED_HOSTS"] == "${MLX_SERVER_ALLOWED_HOSTS:-}"
    names = checked_names(host, [], has_keys=False)
    assert names is not None
    assert not names.allow("evil.example:8000")
    [job] = read_yaml("prometheus.yml")["scrape_configs"]
    assert all(map(names.allow, ["127.0.0.1:8000", *job["static_configs"][0]["targets"]]))


def test_every_image_is_pinned() -> None:
    images = [service["image"] for service in services().values() if "image" in service]
    assert len(images) == 2
    assert all(re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+", image) for image in images)


def test_all_but_the_server_is_optional() -> None:
    profiles = {name: service.get("profiles") for name, service in services().items()}
    optional = {
        "cluster": ["replica-1", "replica-2", "signing-key", "router"],
        "monitoring": ["prometheus", "grafana"],
    }
    named = {name: [profile] for profile, names in optional.items() for name in names}
    assert profiles == {"server": None, **named}


def test_the_router_is_sent_to_every_replica() -> None:
    replicas = [name for name in services() if name.startswith("replica-")]
    [command] = re.findall(r"^CMD (\[.*\])$", read("router.Dockerfile"), re.MULTILINE)
    assert json.loads(command)[2:] == [f"http://{name}:8000" for name in replicas]
    assert services()["router"]["depends_on"] == replicas


def test_replicas_have_data_of_their_own_and_one_key() -> None:
    made = mounts("signing-key")
    folders = [mounts(name) for name in services() if name.startswith("replica-")]
    data = services()["replica-1"]["environment"]["MLX_SERVER_DATA_DIR"]
    assert {folder[data] for folder in folders} == set(made.values())
    assert len(set(made.values())) == len(folders) == 2
    [script] = services()["signing-key"]["command"][2:]
    assert all(f"{place}/signing.key" in script for place in made)


def test_the_image_of_the_router_is_built_from_existing_files() -> None:
    copied = [
        line.split()[1:-1] for line in read("router.Dockerfile").splitlines() if "COPY " in line
    ]
    sources = [source for sources in copied for source in sources]
    assert len(sources) == 3
    assert all((ROOT / source).exists() for source in sources)
    passed = [line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines()]
    assert all(any(Path(source).is_relative_to(p) for p in passed if p) for source in sources)


@pytest.mark.parametrize(
    "service", ["server", "replica-1", "replica-2", "signing-key", "prometheus", "grafana"]
)
def test_what_is_mounted_is_there(service: str) -> None:
    volumes = read_yaml("compose.yaml")["volumes"]
    for source in mounts(service).values():
        if source.startswith("./"):
            assert (DOCKER / source).exists(), source
        else:
            assert source in volumes or source.startswith("${"), source


def test_a_new_volume_belongs_to_the_server() -> None:
    [made] = [line for line in dockerfile_lines() if "install -d" in line]
    assert "-o server -g server" in made
    assert set(mounts("server")) <= set(made.split())


def test_the_image_is_built_from_existing_files() -> None:
    copied = [line.split()[1:-1] for line in dockerfile_lines() if line.startswith("COPY ")]
    ours = [sources for sources in copied if not sources[0].startswith("--from=")]
    assert len(ours) == 5
    assert all((ROOT / source).exists() for sources in ours for source in sources)
    # All of it passes the ignore file, which begins by leaving everything outside.
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{source}" for sources in ours for source in sources} <= set(ignored)


def test_prometheus_reads_what_the_server_serves() -> None:
    [job] = read_yaml("prometheus.yml")["scrape_configs"]
    [host, port] = job["static_configs"][0]["targets"][0].split(":")
    dockerfile = "\n".join(dockerfile_lines())
    assert host in services()
    assert f"EXPOSE {port}\n" in dockerfile
    assert f"MLX_SERVER_PORT={port}\n" in dockerfile
    assert router.url_path_for("read_metrics") == job.get("metrics_path", "/metrics")


def test_prometheus_shows_a_key_where_there_is_one() -> None:
    """Without a key the file is empty, and a server without keys looks at none."""
    [job] = read_yaml("prometheus.yml")["scrape_configs"]
    source = mounts("prometheus")[job["authorization"]["credentials_file"]]
    assert source == "${PROMETHEUS_KEY_FILE:-/dev/null}"


def test_every_variable_of_the_server_is_a_setting() -> None:
    names = {f"MLX_SERVER_{field}".upper() for field in Settings.model_fields}
    for service in ("server", "replica-1"):
        assert services()[service]["environment"].keys() <= names


def test_grafana_finds_prometheus() -> None:
    [source] = read_yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    [_, port, _] = services()["prometheus"]["ports"][0].split(":")
    assert source["url"] == f"http://prometheus:{port}"
    assert source["isDefault"]
    interval = read_yaml("prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval


def test_grafana_finds_the_dashboard() -> None:
    [provider] = read_yaml("grafana/provisioning/dashboards/dashboards.yaml")["providers"]
    folder = provider["options"]["path"]
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/{DASHBOARD.name}"
    assert DOCKER / mounts("grafana")[folder] == DASHBOARD.parent


def test_the_dashboard_uses_only_metrics_that_are_exported() -> None:
    for expression in expressions():
        names = {*METRIC.findall(expression), *(name for name, _ in SELECTOR.findall(expression))}
        assert names, expression
        assert names <= labels_by_name().keys(), expression


def test_the_dashboard_uses_only_labels_of_its_metrics() -> None:
    known = labels_by_name()
    for expression in expressions():
        for name, matchers in SELECTOR.findall(expression):
            matched = {matcher.partition("=")[0] for matcher in matchers.split(",")}
            assert matched | grouped(expression) <= known[name], expression


def test_legends_name_labels_that_are_left() -> None:
    for panel in panels():
        for target in panel["targets"]:
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named == grouped(target["expr"]) - {"le"}


def test_the_dashboard_asks_the_data_source_that_is_chosen() -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    variables = {v["name"]: v for v in dashboard()["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    asking = [*panels(), *(v for v in variables.values() if v["type"] == "query")]
    assert [asker for asker in asking if asker["datasource"] != chosen] == []


def test_no_panel_covers_another() -> None:
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard()["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    "topic",
    [
        *("prompt_tokens_total", "generation_tokens_total", "time_to_first_token", "inter_token"),
        *("e2e_request_latency", "queue_wait", "num_requests_running", "num_requests_waiting"),
        *("kv_cache_usage", "prefix_cache_hits", "num_preemptions", "admission_rejections"),
        *("failed_steps", "process_resident_memory"),
    ],
)
def test_the_dashboard_shows(topic: str) -> None:
    assert any(topic in expression for expression in expressions())
