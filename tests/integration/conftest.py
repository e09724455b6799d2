"""One local Ray cluster for every integration test of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/integration" in str(item.path):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Its address. Two CPUs, as small as the machines the defaults are for.

    Workers import the tests' fakes from the repository.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_metrics_report_interval_ms", "2000")  # 10 s by default: tests would wait for it
    os.environ["PYTHONPATH"] = f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="hisparse", log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
