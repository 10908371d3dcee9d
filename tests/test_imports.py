"""Imports go one way, and the command line answers before anything heavy is loaded."""

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import specgen

ROOT = Path(specgen.__file__).parent
Imports = dict[str, set[str]]  # module or package directly in specgen/: the others that it imports

# Nobody imports, directly or through others, from a line above or from the same line.
LAYERS = (
    {"cli"},
    {"evaluation", "audit", "bench"},
    {"run", "merge"},
    {"run_output"},
    {"job"},
    {"ray_engine"},
    {"engine"},
    {"build"},
    {"step_costs"},
    {"engine_core"},
    {"scoring"},
    {"step"},
    {"batch", "graphs", "packing"},
    {"drafting", "scheduler"},
    {"models"},
    {"ops"},
)
FOLDS = {"report", "acceptance", "intervals", "timings"}  # events -> numbers
VIEWS = {"tables", "audit_table", "report_html", "charts", "page", "display"}  # numbers -> text, HTML
LEAVES = {"config", "events", "json_fields"}  # free for all; they import nothing else
ONLY: Imports = {  # these import what is listed here and LEAVES, and nothing else
    "ops": {"layout"},
    "models": {"ops"},
    "attention": {"kv_cache", "layout", "ops"},
    "kv_cache": set(),
    "divergence": set(),
    "layout": {"transfer"},
    "transfer": set(),
    "graphs": set(),
    "sampling": {"transfer"},
    "verify": {"sampling"},
    "sequence": set(),
    "spec_length": set(),
    "scheduler": {"sequence", "limits", "pages", "prefix_cache"},
    "limits": set(),
    "prefix_cache": {"pages"},
    "pages": set(),
    **dict.fromkeys(FOLDS, FOLDS),
    **dict.fromkeys(VIEWS, VIEWS | FOLDS),
    "references": {"bundled"},
    "against": {"intervals", "references"},
    "against_table": {"against", "display", "references"},
}
HEAVY = ("torch", "ray", "transformers", "datasets", "flashinfer", "lm_eval")
LIGHT = (
    "cli",
    "config",
    "events",
    "report",
    "tables",
    "audit_table",
    "bench.output",
    "bench.commands",
    "report_html",
    "against",
    "against_table",
    "results",
    "scheduler",
    "spec_length",
    "bundled",
    "prompts",
    "tokenizer",
)


def read_imports(root: Path) -> Imports:
    """Every import below ``root``, also inside functions and under TYPE_CHECKING."""
    imports: Imports = {}
    for path in root.rglob("*.py"):
        owner = path.relative_to(root).with_suffix("").parts[0]
        found = {name for node in ast.walk(ast.parse(path.read_text())) for name in _targets(node)}
        imports.setdefault(owner, set()).update(found - {owner})
    return imports


def _targets(node: ast.AST) -> list[str]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name.split(".")[1] for name in names if name.startswith("specgen.")]


def reachable(imports: Imports, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = set(imports.get(start, ()))
    while waiting:
        seen |= waiting
        waiting = set().union(*(imports.get(name, ()) for name in waiting)) - seen
    return seen


def wrong_arrows(imports: Imports) -> list[str]:
    """Every arrow that the tables above do not allow."""
    wrong = []
    for height, layer in enumerate(LAYERS):
        above = set().union(*LAYERS[: height + 1])
        for owner in layer & imports.keys():
            wrong += [f"{owner} -> {name} (or through others)" for name in reachable(imports, owner) & above]
    for owner, allowed in ONLY.items():
        wrong += [f"{owner} -> {name}" for name in imports.get(owner, set()) - allowed - LEAVES - {owner}]
    for owner in LEAVES:
        wrong += [f"{owner} -> {name}" for name in imports.get(owner, set()) - LEAVES]
    return sorted(wrong)


def test_every_arrow_goes_down():
    assert wrong_arrows(read_imports(ROOT)) == []


def test_no_import_goes_in_a_circle():
    TopologicalSorter(read_imports(ROOT)).prepare()


@pytest.mark.parametrize(
    ("path", "line", "arrow"),
    [
        ("ops.py", "from specgen.models.llama import Llama", "ops -> models"),
        ("models/llama.py", "import specgen.attention.sdpa", "models -> attention"),
        ("models/llama.py", "from specgen.kv_cache import KVCache", "models -> kv_cache"),
        ("attention/sdpa.py", "def f():\n    from specgen import sequence", "attention -> sequence"),
        ("verify.py", "from specgen.engine_core import EngineCore", "verify -> engine_core"),
        ("report.py", "from specgen.results import RunDirectory", "report -> results"),
        ("events.py", "from specgen import layout", "events -> layout"),
        ("scheduler.py", "import specgen.drafting", "scheduler -> drafting"),
        ("drafting.py", "import specgen.helper", "drafting -> engine_core (or through others)"),
    ],
)
def test_a_wrong_arrow_is_found(tmp_path, path, line, arrow):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(line)
    (tmp_path / "helper.py").write_text("from specgen.engine_core import EngineCore")
    assert any(found.startswith(arrow) for found in wrong_arrows(read_imports(tmp_path)))


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_nothing_heavy(module):
    code = f"import sys, specgen.{module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


WITHOUT_GPU_PACKAGES = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys(("flashinfer", "triton"))  # as on a Mac
import specgen
for module in pkgutil.walk_packages(specgen.__path__, "specgen."):
    if module.name.rpartition(".")[2] not in ("argmax", "cuda", "launch", "rope", "rows", "skinny"):
        importlib.import_module(module.name)
from specgen import Engine, EngineConfig, SamplingParams
from specgen.bundled import data_directory
from specgen.cli import app
pair = [str(data_directory() / "demo" / name) for name in ("target", "drafter")]
engine = Engine(EngineConfig(model=pair[0], drafter=pair[1], device="cpu"))
sampling = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, ignore_eos=True)
assert [len(output.token_ids) for output in engine.generate(["Tom has 3 apples."], sampling)] == [4]
app(["inspect", *pair], standalone_mode=False)
"""


def test_all_but_the_kernels_of_gpus_works_without_their_packages():
    done = subprocess.run([sys.executable, "-c", WITHOUT_GPU_PACKAGES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "EAGLE" in done.stdout


@pytest.mark.parametrize(
    ("said", "count"),
    [({}, "3000"), ({"OMP_WAIT_POLICY": "active"}, "30000000000"), ({"GOMP_SPINCOUNT": "7"}, "7")],
    ids=["nothing", "policy", "count"],
)
def test_threads_do_not_spin_for_long_unless_the_user_says_so(said: dict[str, str], count: str) -> None:
    """What OpenMP itself says when torch loads it; a newcomer's machine is a busy one."""
    own = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", "import specgen.cli, torch"],
        env=own | said | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch runs on another OpenMP here")
    assert f"GOMP_SPINCOUNT = '{count}'" in done.stderr
