"""What all tests share: the event loop they run on, and how Hypothesis searches."""

import os

import pytest
from hypothesis import settings

# Before any test module imports MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401

# They need an environment of their own: make test-clients.
collect_ignore = ["clients"]

# No deadlines: how long an example takes says more about the machine than about the code.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio, as uvicorn does."""
    return "asyncio"
