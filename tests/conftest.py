"""The fixtures are in ``fixtures.py``: pytest-xdist's first process, which only hands out tests, needs no torch."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    runs_tests = hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"
    if runs_tests:
        config.pluginmanager.import_plugin("tests.fixtures")
