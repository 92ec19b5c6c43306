"""What tests of servers behind routers share; they run without MLX, in an environment of their own."""

from collections.abc import Callable
from typing import Final

from scripts.cluster.cluster import Cluster

# Seconds of a request; none may wait longer.
TIMEOUT: Final = 60.0

# What the fixture `start_cluster` returns.
StartCluster = Callable[..., Cluster]
