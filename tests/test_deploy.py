"""The files under deploy/: valid, and of one mind with each other and with the server."""

import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml

from app.http.browser_guard import checked_names
from app.settings import Settings, env_name

ROOT: Final = Path(__file__).parent.parent
DEPLOY: Final = ROOT / "deploy"
ROUTERS: Final = DEPLOY / "routers"
INSTALLED: Final = "/opt/mlx-batch-server"
SHUTDOWN_TIMEOUT: Final = float(Settings.model_fields["shutdown_timeout"].default)

SETTING: Final = re.compile(r"\bMLX_SERVER_[A-Z0-9_]+\b")
SCRIPT: Final = re.compile(r"\./smg\.sh|[\w/.-]+/(?:smg|vllm-router)\.sh")


def files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "deploy", "docker"], cwd=ROOT, capture_output=True, check=True
    )
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """Return Kubernetes' objects by kind and name."""
    texts = [path.read_text(encoding="utf-8") for path in (DEPLOY / "kubernetes").glob("*.yaml")]
    objects = [made for text in texts for made in yaml.safe_load_all(text)]
    return {(made["kind"], made["metadata"]["name"]): made for made in objects}


def pod(kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = manifests()[kind, name]["spec"]["template"]["spec"]
    return found


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for kind, name in (("StatefulSet", "mlx"), ("Deployment", "mlx-router")):
        spec = pod(kind, name)
        [container] = spec["containers"]
        yield spec, container


def unit(name: str) -> list[tuple[str, str]]:
    """Return the assignments of a systemd unit."""
    lines = (DEPLOY / name).read_text(encoding="utf-8").splitlines()
    return [
        (key, value)
        for key, equals, value in (line.partition("=") for line in lines)
        if equals and not key.startswith("#")
    ]


def plists() -> dict[str, dict[str, Any]]:
    return {path.stem: plistlib.loads(path.read_bytes()) for path in (DEPLOY / "launchd").iterdir()}


def test_every_setting_that_is_named_exists() -> None:
    known = {env_name(field) for field in Settings.model_fields}
    named = {path: SETTING.findall(path.read_text(encoding="utf-8")) for path in files()}
    assert sum(map(len, named.values())) > 20
    assert {str(p): set(names) - known for p, names in named.items() if set(names) - known} == {}


def test_every_script_of_a_router_that_is_named_exists_and_can_be_started() -> None:
    named = {name for path in files() for name in SCRIPT.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 3
    for name in named:
        script = ROUTERS / Path(name).name
        assert script.stat().st_mode & 0o111
        assert script.read_text(encoding="utf-8").startswith("#!/bin/sh\n")


@pytest.mark.parametrize("name", ["smg.sh", "vllm-router.sh"])
def test_scripts_are_posix_shell(name: str) -> None:
    subprocess.run(["sh", "-n", ROUTERS / name], check=True)


def started_with(tmp_path: Path, name: str, *arguments: str, **environment: str) -> list[str]:
    """Return the arguments with which a script starts its router, one a line, or what its Python writes."""
    program = tmp_path / name
    if not program.exists():
        program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    done = subprocess.run(
        [ROUTERS / f"{name}.sh", *arguments],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["smg", "vllm-router"])
def test_a_script_passes_on_what_it_gets(tmp_path: Path, name: str) -> None:
    urls = ["http://a:1", "http://b:2"]
    arguments = started_with(tmp_path, name, "9000", *urls, "--policy", "random")
    assert arguments[arguments.index("--port") + 1] == "9000"
    first = arguments.index("--worker-urls") + 1
    assert arguments[first : first + 2] == urls
    # The last one counts.
    assert arguments[-2:] == ["--policy", "random"]
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    elsewhere = started_with(tmp_path, name, "9000", *urls, HOST="0.0.0.0")
    assert elsewhere[elsewhere.index("--host") + 1] == "0.0.0.0"


def test_a_key_of_smg_is_no_argument_of_a_process(tmp_path: Path) -> None:
    """But of the function that a process calls."""
    (module := tmp_path / "lib" / "smg" / "cli.py").parent.mkdir(parents=True)
    module.write_text("def main(arguments):\n    print('main', *arguments)\n", encoding="utf-8")
    python = f'#!/bin/sh\necho "$@"\nexec "{sys.executable}" "$@"\n'
    for name, text in (("smg", "#!/bin/sh\n"), ("python", python)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    environment = {"PYTHONPATH": str(tmp_path / "lib"), "SMG_API_KEY": "secret"}
    arguments = started_with(tmp_path, "smg", "9000", "http://a:1", **environment)
    assert arguments[-1].startswith("main launch --port 9000 ")
    assert arguments[-1].endswith(" http://a:1 --api-key secret")
    assert "secret" not in "".join(arguments[:-1])


def test_vllm_router_reads_the_events_of_each_server(tmp_path: Path) -> None:
    urls = ["http://a:8001", "http://b:8002"]
    arguments = started_with(tmp_path, "vllm-router", "9000", *urls, KV_EVENT_MODEL="m")
    assert "kv_aware" in arguments
    assert "cache_aware" not in arguments
    following = [arguments[i + 1] for i, a in enumerate(arguments) if a == "--kv-event-source"]
    assert sorted(following) == ["http://a:8001=tcp://a:9001", "http://b:8002=tcp://b:9002"]
    replays = [arguments[i + 1] for i, a in enumerate(arguments) if a == "--kv-event-replay-source"]
    assert sorted(replays) == ["http://a:8001=tcp://a:10001", "http://b:8002=tcp://b:10002"]
    first = arguments.index("--worker-urls") + 1
    assert arguments[first : first + 2] == urls


def test_what_stops_a_server_waits_for_its_requests() -> None:
    """However it is started."""
    for name in ("mlx-batch-server.service", "mlx-batch-server@.service"):
        assert float(dict(unit(name))["TimeoutStopSec"]) > SHUTDOWN_TIMEOUT
    assert plists()["org.example.mlx-batch-server"]["ExitTimeOut"] > SHUTDOWN_TIMEOUT
    [server, _] = containers()
    spec, container = server
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    slept = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    timeout = slept + float(environment["MLX_SERVER_SHUTDOWN_TIMEOUT"])
    assert spec["terminationGracePeriodSeconds"] > timeout


def test_a_server_for_each_port_differs_from_the_only_one_by_that() -> None:
    alone, each = unit("mlx-batch-server.service"), unit("mlx-batch-server@.service")
    expected = {("Environment", "MLX_SERVER_DATA_DIR=/var/lib/mlx-batch-server")}
    missing = set(alone) - set(each) - expected
    assert missing == {
        ("Description", "mlx-batch-server"),
        ("StateDirectory", "mlx-batch-server"),
    }
    added = {value for _, value in set(each) - set(alone)}
    assert {"MLX_SERVER_PORT=%i", "MLX_SERVER_DATA_DIR=/var/lib/mlx-batch-server/%i"} <= added


def test_all_servers_of_a_machine_get_one_key(tmp_path: Path) -> None:
    [command] = [value for key, value in unit("mlx-batch-server@.service") if key == "ExecStartPre"]
    command = command.replace("/var/lib/mlx-batch-server", str(tmp_path))
    for port in ("8001", "8002", "8001"):
        (tmp_path / port).mkdir(exist_ok=True)
        subprocess.run(command.replace("%i", port), shell=True, check=True)
    keys = {path.read_bytes() for path in tmp_path.rglob("signing.key")}
    assert [len(key) for key in keys] == [32]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_units_are_valid(tmp_path: Path) -> None:
    """As systemd sees them, with programs where they would be installed."""
    for path in DEPLOY.glob("*.service"):
        text = path.read_text(encoding="utf-8")
        for program in re.findall(rf"^ExecStart={INSTALLED}/(\S+)", text, re.MULTILINE):
            (made := tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
            made.touch(0o755)
        name = path.name.replace("@", "@8001")
        (tmp_path / name).write_text(text.replace(INSTALLED, str(tmp_path)), encoding="utf-8")
    shutil.copy(
        tmp_path / "mlx-batch-server@8001.service", tmp_path / "mlx-batch-server@8002.service"
    )
    units = sorted(tmp_path.glob("*.service"))
    assert len(units) == 4
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],
        env={"PATH": "/usr/bin:/bin", "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_router_unit_starts_the_servers_that_it_names() -> None:
    settings = dict(unit("mlx-batch-server-router.service"))
    ports = re.findall(r"http://127\.0\.0\.1:(\d+)", settings["ExecStart"])
    assert ports == re.findall(r"mlx-batch-server@(\d+)\.service", settings["Wants"])


def test_launchd_starts_what_is_there() -> None:
    found = plists()
    assert all(plist["Label"] == name for name, plist in found.items())
    assert all(plist["RunAtLoad"] and plist["KeepAlive"] for plist in found.values())
    server, router = (found[f"org.example.{name}"] for name in ("mlx-batch-server", "mlx-router"))
    assert server["ProgramArguments"][1:] == ["-m", "app"]
    # On a network: neither is without keys.
    assert server["EnvironmentVariables"]["MLX_SERVER_HOST"] == "0.0.0.0"
    assert "MLX_SERVER_API_KEYS_FILE" in server["EnvironmentVariables"]
    assert "SMG_API_KEY" in router["EnvironmentVariables"]


def test_haproxys_backends_have_the_same_servers() -> None:
    """With the same ids, by which they are hashed."""
    text = (ROUTERS / "haproxy.cfg").read_text(encoding="utf-8")
    servers = re.findall(r"^  server (\S+ \S+ id \d+)", text, re.MULTILINE)
    half = len(servers) // 2
    assert servers[:half] == servers[half:] != []


def test_selectors_find_their_pods() -> None:
    found = manifests()
    labels = {
        name: made["spec"]["template"]["metadata"]["labels"]
        for (kind, name), made in found.items()
        if kind in ("StatefulSet", "Deployment")
    }
    assert set(labels) == {"mlx", "mlx-router"}
    for (kind, name), made in found.items():
        spec = made["spec"]
        selector = spec["podSelector"] if kind == "NetworkPolicy" else spec["selector"]
        assert selector.get("matchLabels", selector) == labels[name], kind
    [rule] = found["NetworkPolicy", "mlx"]["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": labels["mlx-router"]}}]


def test_probes_ask_for_paths_of_a_port_that_there_is() -> None:
    paths = set()
    for _, container in containers():
        [port] = container["ports"]
        probes = [container[name]["httpGet"] for name in container if name.endswith("Probe")]
        assert {probe["port"] for probe in probes} == {port["name"]}
        paths |= {probe["path"] for probe in probes}
    assert paths == {"/health", "/ready", "/readiness", "/liveness"}


def test_volumes_are_mounted_that_there_are() -> None:
    spec, container = next(containers())
    claims = manifests()["StatefulSet", "mlx"]["spec"]["volumeClaimTemplates"]
    volumes = {made["metadata"]["name"] for made in claims} | {v["name"] for v in spec["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment["MLX_SERVER_DATA_DIR"] == mounts["data"]
    assert mounts["signing-key"] == f"{mounts['data']}/signing.key"


def test_the_router_is_sent_to_every_pod() -> None:
    replicas = manifests()["StatefulSet", "mlx"]["spec"]
    [_, (_, router)] = containers()
    urls = [argument for argument in router["command"] if argument.startswith("http")]
    named = [f"http://mlx-{n}.{replicas['serviceName']}:8000" for n in range(replicas["replicas"])]
    assert urls == named


def test_pods_answer_to_the_names_that_the_router_and_probes_use() -> None:
    """Without keys they check `Host`, which is that of a URL, as smg sends it."""
    [(_, server), (_, router)] = containers()
    environment = {variable["name"]: variable["value"] for variable in server["env"]}
    allowed = Settings(allowed_hosts=environment["MLX_SERVER_ALLOWED_HOSTS"]).allowed_host_names
    names = checked_names("0.0.0.0", allowed, has_keys=False)
    assert names is not None
    urls = [urlsplit(argument) for argument in router["command"] if argument.startswith("http")]
    assert all(map(names.allow, ["10.0.0.1:8000", *(url.netloc for url in urls)]))
    assert not names.allow("evil.example:8000")


def test_one_pod_at_a_time_is_disrupted() -> None:
    budget = manifests()["PodDisruptionBudget", "mlx"]
    assert budget["apiVersion"] == "policy/v1"
    assert budget["spec"]["maxUnavailable"] == 1


def test_every_object_has_the_version_of_its_kind() -> None:
    versions = {kind: made["apiVersion"] for (kind, _), made in manifests().items()}
    assert versions == {
        "Service": "v1",
        "StatefulSet": "apps/v1",
        "Deployment": "apps/v1",
        "PodDisruptionBudget": "policy/v1",
        "NetworkPolicy": "networking.k8s.io/v1",
    }
