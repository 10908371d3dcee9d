"""Pairs that many tests share."""

from pathlib import Path

import pytest
import torch

from specgen.bundled import data_directory
from tests.engines import Pair, load_pair
from tests.reference_drafts import ReferenceDrafter
from tests.tiny_checkpoints import write_head, write_target


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)  # the models are tiny, and threads that wait for each other are slower


@pytest.fixture(scope="session")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny random pair: its drafts are almost never accepted."""
    path = tmp_path_factory.mktemp("random_pair")
    write_head(path / "drafter", write_target(path / "target"))
    return load_pair(path)


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The bundled pair."""
    return data_directory() / "demo"


@pytest.fixture(scope="session")
def demo_pair(demo_path: Path) -> Pair:
    """The bundled pair, loaded: its drafts are sometimes accepted, at every position."""
    return load_pair(demo_path)


@pytest.fixture(scope="session")
def random_reference(random_pair: Pair) -> ReferenceDrafter:
    """The random pair's target and drafts by other means."""
    return ReferenceDrafter(random_pair.path)


@pytest.fixture(scope="session")
def demo_reference(demo_path: Path) -> ReferenceDrafter:
    """The bundled pair's target and drafts by other means."""
    return ReferenceDrafter(demo_path)
