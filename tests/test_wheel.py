"""A wheel holds the bundled data, and finds it from any working directory."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel
from packaging.requirements import Requirement

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]  # which is built once

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from this checkout without the network: the build backend is among the development dependencies."""
    path = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return zipfile.ZipFile(path / build_wheel(str(path)))


def test_all_data_and_code_are_inside(wheel):
    names = set(wheel.namelist())
    bundled = [*files(ROOT / "data/demo"), *files(ROOT / "data/prompts"), *files(ROOT / "eval")]
    assert names >= {f"specgen/{file.relative_to(ROOT)}" for file in bundled}
    assert names >= {str(file.relative_to(ROOT)) for file in files(ROOT / "specgen")}
    assert {"specgen/py.typed", "specgen/report/page.html", "specgen/report/page.css"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_nothing_else_is_inside(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"specgen"}


def test_it_is_under_25_megabytes(wheel):
    """So that it is carried to where there is no network; most of it is the bundled pair."""
    assert 10_000_000 < Path(wheel.filename).stat().st_size < 25_000_000


def test_what_has_private_names_is_bounded(wheel):
    """See pyproject.toml, which names the places."""
    bounds = {each.name: each.specifier for each in requirements(wheel)}
    assert [bounds["torch"].contains(each) for each in ("2.11.0", "2.15.0", "2.16.0")] == [True, True, False]
    assert [bounds["lm-eval"].contains(each) for each in ("0.4.13", "0.4.20", "0.5.0")] == [True, True, False]


def test_flashinfer_is_required_only_on_linux_and_below_the_next_minor_version(wheel):
    """Its own requirements have nothing for a Mac; see pyproject.toml for the bound."""
    (flashinfer,) = (each for each in requirements(wheel) if each.name == "flashinfer-python")
    platforms = {name: flashinfer.marker.evaluate({"sys_platform": name}) for name in ("linux", "darwin")}
    assert platforms == {"linux": True, "darwin": False}
    versions = ("0.6.17", "0.6.18.post1", "0.7.2.post1", "0.8.0")
    assert [flashinfer.specifier.contains(each) for each in versions] == [False, True, True, False]


def test_the_data_are_found_from_any_directory(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    wheel.extractall(site)
    elsewhere.mkdir()
    code = (
        "from specgen.config.bundled import data_directory\n"
        "from specgen.experiments.study import word_problems_task\n"
        "from specgen.prompts import DataSource\n"
        "print(data_directory(), len(list(DataSource(dataset='bundled', num_prompts=3).open())))\n"
        "print(word_problems_task()['dataset_kwargs']['data_files']['test'])\n"
        "from specgen.report import page\n"
        "html = page.Page(title='a', settings={}).to_html()\n"
        "print(page.__file__, 'color-scheme: light dark' in html)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=elsewhere, env=environment)
    problems = f"{site}/specgen/eval/tasks/word_problems.jsonl"
    shown = [f"{site}/specgen/report/page.py", "True"]
    assert done.stdout.split() == [f"{site}/specgen/data", "3", problems, *shown]


def requirements(wheel: zipfile.ZipFile) -> list[Requirement]:
    """Those of an installation without extras."""
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(metadata).decode().splitlines()
    found = [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if "Requires-Dist" in line]
    return [each for each in found if "extra ==" not in str(each.marker)]


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
