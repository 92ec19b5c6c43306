"""The file of hosts, in the JSON that `mlx.distributed_config` writes and `mlx.launch` reads."""

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from app.settings import SettingsError, env_name

_MIN_HOSTS: Final = 2
# `ssh` would take a host with a dash in front for an option.
_HOST: Final = re.compile(r"[\w@.:%-]+(?<!\n)", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*=[^\0\n]*", re.ASCII)

# A device for RDMA, or several; None where there is none.
Device = str | list[str] | None


@dataclass(frozen=True)
class Host:
    """The host of a rank.

    name: by which ssh reaches it.
    addresses: IPv4, in the network of the ranks.
    rdma: the devices by which it reaches the host of each rank; empty if it has none.
    """

    name: str
    addresses: Sequence[str]
    rdma: Sequence[Device]


@dataclass(frozen=True)
class Hostfile:
    """The hosts in the order of their ranks.

    backend: of `mx.distributed`; empty if the file names none.
    variables: of the environment of all ranks.
    """

    hosts: Sequence[Host]
    backend: str
    variables: Mapping[str, str]

    def to_json(self) -> str:
        hosts = [
            {"ssh": host.name, "ips": [*host.addresses], "rdma": [*host.rdma]}
            for host in self.hosts
        ]
        return json.dumps({"hosts": hosts})

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]


def read_hostfile(setting: str) -> Hostfile:
    """Read a file of hosts; its text stands for a file, too.

    Raises:
        SettingsError: it cannot be read, or is no such file; one line.
    """
    try:
        return _hostfile(_text(setting))
    except ValueError as error:
        raise SettingsError(f"{env_name('ranks')}: {error}") from None


def _text(setting: str) -> str:
    """Return the JSON that a setting names, or is."""
    if setting.lstrip().startswith(("[", "{")):
        return setting
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{setting} cannot be read: {reason}") from None


def _hostfile(text: str) -> Hostfile:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
    fields = document if isinstance(document, dict) else {"hosts": document}
    listed = fields.get("hosts")
    if not isinstance(listed, list):
        raise ValueError("no list of hosts")
    hosts = [_host(each, f"host {rank}") for rank, each in enumerate(listed)]
    if len(hosts) < _MIN_HOSTS:
        raise ValueError(f"at least {_MIN_HOSTS} hosts are needed, not {len(hosts)}")
    _check_addresses(hosts)
    backend = fields.get("backend", "")
    if not isinstance(backend, str):
        raise ValueError("backend must be a text")
    return Hostfile(hosts, backend, _variables(fields.get("envs", [])))


def _host(fields: Any, place: str) -> Host:
    if not isinstance(fields, dict):
        raise ValueError(f"{place} is no object")
    name = fields.get("ssh")
    if not isinstance(name, str) or not _HOST.fullmatch(name) or name.startswith("-"):
        raise ValueError(f'{place} has no name in "ssh"')
    addresses = fields.get("ips")
    if not isinstance(addresses, list) or not addresses:
        raise ValueError(f'{place} ({name}) has no address in "ips"')
    for address in addresses:
        if not _is_ipv4(address):
            raise ValueError(f'{place} ({name}) has {address!r} in "ips", which is no IPv4 address')
    rdma = fields.get("rdma", [])
    if not isinstance(rdma, list) or not all(_is_device(device) for device in rdma):
        raise ValueError(f'{place} ({name}) has no list of devices in "rdma"')
    return Host(name, addresses, rdma)


def _is_ipv4(address: object) -> bool:
    try:
        return isinstance(address, str) and bool(ipaddress.IPv4Address(address))
    except ValueError:
        return False


def _is_device(device: object) -> bool:
    names = device if isinstance(device, list) else [device]
    return device is None or (bool(names) and all(isinstance(name, str) for name in names))


def _check_addresses(hosts: Sequence[Host]) -> None:
    """Check that hosts have addresses of their own; a host with several ranks is named several times."""
    found: dict[str, str] = {}
    for host in hosts:
        for address in host.addresses:
            if found.setdefault(address, host.name) != host.name:
                raise ValueError(
                    f"{found[address]} and {host.name} have the same address, {address}"
                )


def _variables(listed: object) -> dict[str, str]:
    if not isinstance(listed, list):
        raise ValueError('"envs" is no list')
    found: dict[str, str] = {}
    for each in listed:
        if not isinstance(each, str) or not _VARIABLE.fullmatch(each):
            raise ValueError(f'{each!r} in "envs" is not NAME=value')
        name, _, value = each.partition("=")
        found[name] = value
    return found
