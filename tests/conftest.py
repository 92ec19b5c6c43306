"""What all tests share: the event loop they run on, and how Hypothesis searches."""

import gc
import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import settings

_MAX_WORKERS = 4


def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes `make test` takes; each of them loads the model."""
    return min(_MAX_WORKERS, len(os.sched_getaffinity(0)) if _HAS_AFFINITY else os.cpu_count() or 1)


def _keep_to_own_cores() -> None:
    """Give a worker of pytest-xdist its share of the cores.

    The waiting threads of BLAS spin: four workers on the same four cores took over ten minutes
    for what takes three and a half this way.
    """
    if (name := os.environ.get("PYTEST_XDIST_WORKER")) and _HAS_AFFINITY:
        cores = sorted(os.sched_getaffinity(0))
        first, step = int(name.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.sched_setaffinity(0, cores[first % len(cores) :: step])


# Not on a Mac.
_HAS_AFFINITY = hasattr(os, "sched_setaffinity")
# Products here are small: a second thread of BLAS, which spins, more than doubles what they cost.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Before MLX and BLAS count the cores.
_keep_to_own_cores()
# Before any test module imports MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: E402, F401
from batching.engine import frozen  # noqa: E402
from scripts.server_process import Server  # noqa: E402
from tests.support.weekly import WEEK, is_in_turn  # noqa: E402

_SAMPLE = f"samples: those of week {WEEK}, which TEST_WEEK={WEEK} takes again"

# They need environments of their own: make test-clients, -conformance, -routers and -web.
collect_ignore = ["clients", "conformance", "routers", "web"]

# No deadlines: how long an example takes says more about the machine than about the code.
settings.register_profile("dev", deadline=None, max_examples=40)
settings.register_profile("ci", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


# Tests that run in one of so many weeks, and in the others with `make test-slow`: those of whole servers and models, which
# take most of the time.
_IN_TURN = {
    "tests/reliability/": 3,
    "tests/fuzz/": 2,
    "tests/scripts/test_make_model.py": 2,
    "tests/test_agent_replay.py": 2,
    "tests/test_agent_traffic.py": 2,
    "tests/test_batches.py": 2,
    "tests/test_conformance.py": 2,
    "tests/test_responses_conformance.py": 2,
    "tests/batching/backend/test_invariance.py": 2,
    "tests/batching/backend/test_damaged_models.py": 2,
    "tests/batching/backend/test_failures.py": 2,
    "tests/batching/backend/test_fit.py": 2,
    "tests/batching/backend/test_self_check.py": 2,
    "tests/batching/backend/test_windowed_models.py": 2,
    "tests/batching/backend/platforms/gpu/": 2,
    "tests/batching/backend/weights_cache/": 2,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        num_weeks = next((n for path, n in _IN_TURN.items() if item.nodeid.startswith(path)), 1)
        if not is_in_turn(item.nodeid, num_weeks):
            item.add_marker(pytest.mark.slow)


def pytest_report_header() -> str:
    return _SAMPLE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # The head is not there with -q.
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(_SAMPLE)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio, as uvicorn does."""
    return "asyncio"


@pytest.fixture(scope="session")
def bundled_server() -> Iterator[Server]:
    """Serve the bundled model with default settings, to all files that ask it for words."""
    with Server() as started:
        yield started
        assert started.stop() == 0


@pytest.fixture(autouse=True)
def _logging_stays_as_it_is() -> Iterator[None]:
    """Undo what a test that starts a server does to the loggers of all others."""
    loggers = [logging.getLogger(name) for name in (None, "uvicorn", "sse_starlette")]
    levels = [logger.level for logger in loggers]
    root, raises = loggers[0], logging.raiseExceptions
    handlers = root.handlers.copy()
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    logging.raiseExceptions = raises


@pytest.fixture(scope="session", autouse=True)
def _engines_that_stop_traverse_little() -> Iterator[None]:
    """Freeze for good what pytest has imported and collected.

    An engine that stops unfreezes all objects and traverses them: a fifth of a second here, for each test of an engine.
    """
    gc.collect()
    gc.freeze()
    kept = SimpleNamespace(freeze=lambda: None, unfreeze=lambda: None, collect=gc.collect)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frozen, "gc", kept)
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_stored_at_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give servers that are started without a folder for data one that goes with the tests."""
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))
