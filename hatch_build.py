"""Puts the built extension, if there is one, into the wheel, which is then for one platform."""

import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        extension = f"kernels/mlx_cpu_kernels/_native{sysconfig.get_config_var('EXT_SUFFIX')}"
        if not (Path(self.root) / extension).exists():
            return
        # git ignores it, and so would the wheel.
        build_data["artifacts"].append(extension)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
