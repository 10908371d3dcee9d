"""The fixtures are in ``fixtures.py``: pytest-xdist's first process, which only hands out tests, needs no torch."""

import gc

import pytest


def pytest_configure(config: pytest.Config) -> None:
    runs_tests = hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"
    if runs_tests:
        gc.disable()  # of thousands of tests that are collected none is garbage: 4 s of looking for it
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
