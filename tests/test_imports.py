"""Imports go one way, and the command line answers before anything heavy is loaded."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specgen

ROOT = Path(specgen.__file__).parent
Imports = dict[str, set[str]]  # package, or module directly in specgen/: the others that it imports

# A package imports those before it and never one behind it.
ORDER = (
    *("config", "storage", "record", "device", "kv", "ops", "attention", "models", "decoding"),
    *("text", "core", "prompts", "checkpoints", "report", "engine", "jobs", "experiments", "cli"),
)
DOORS = {"__init__", "__main__"}  # of specgen: they import what is behind them
MODULES = {"device", "storage"}  # directly in specgen/
# Beyond the order: what decodes computes no rate, and what reads and shows knows no tensors.
ONLY: Imports = {
    "device": set(),
    "kv": {"device"},
    "decoding": {"config", "device", "kv", "attention", "models"},
    "text": {"config", "storage"},
    "prompts": {"config", "record", "storage", "text"},  # of record, the ids of turns
    "checkpoints": {
        *("config", "device", "ops", "models", "storage", "text")
    },  # of text, tokens of a draft model
    "report": {"config", "text", "record"},  # of text, the pieces of a page's tokens
}
HEAVY = ("torch", "ray", "transformers", "datasets", "flashinfer", "lm_eval", "scipy", "pyarrow")
LIGHT = (
    *("cli.main", "config", "record", "report", "prompts", "text.tokenizer", "core.scheduler"),
    *("core.spec_length", "experiments.study_tables", "experiments.output", "experiments.heads_tables"),
)  # a package stands for all its modules


def package_of(module: str) -> str:
    """The package that ``module``, dotted and below specgen, is in; a module beside the packages stands for itself."""
    return module.split(".")[0]


def read_imports(root: Path) -> Imports:
    """Every import below ``root``, also inside functions and under TYPE_CHECKING; the front door imports them all."""
    imports: Imports = {}
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        if module in DOORS:
            continue
        found = {name for node in ast.walk(ast.parse(path.read_text())) for name in _targets(node)}
        owner = package_of(module)
        imports.setdefault(owner, set()).update({package_of(name) for name in found} - {owner})
    return imports


def _targets(node: ast.AST) -> list[str]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [
        name.removeprefix("specgen.") for name in names if name.startswith("specgen.") and "__" not in name
    ]


def wrong_arrows(imports: Imports) -> list[str]:
    """Every arrow that the list above does not allow."""
    wrong = []
    for owner, found in imports.items():
        allowed = ONLY.get(owner, set(ORDER[: ORDER.index(owner)]))
        wrong += [f"{owner} -> {name}" for name in found - allowed]
    return sorted(wrong)


def test_every_arrow_goes_down():
    assert wrong_arrows(read_imports(ROOT)) == []


def test_models_know_no_backend_of_attention():
    """Of attention they see what its ``__init__`` holds: what a layer says of itself, and ``Attend``."""
    targets = {
        name
        for path in (ROOT / "models").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _targets(node)
        if name.startswith("attention")
    }
    modules = {path.stem for path in (ROOT / "attention").glob("*.py")}
    assert targets
    assert {name.split(".")[1] for name in targets} & modules == set()


def test_every_package_is_in_the_list():
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} == set(ORDER) - MODULES
    assert {path.stem for path in ROOT.glob("*.py")} == MODULES | DOORS


def test_every_package_says_what_it_may_import():
    said = {
        name: ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text()))
        for name in ORDER
        if name not in MODULES
    }
    assert [name for name, text in said.items() if text is None or "May import" not in text] == []


def test_a_file_name_has_one_meaning():
    names = [path.name for path in ROOT.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


@pytest.mark.parametrize(
    ("path", "line", "arrow"),
    [
        ("ops/cpu.py", "from specgen.models.llama import Llama", "ops -> models"),
        ("attention/sdpa.py", "from specgen.models.llama import Llama", "attention -> models"),
        ("models/llama.py", "from specgen.decoding.drafting import Head", "models -> decoding"),
        ("attention/sdpa.py", "def f():\n    from specgen.core import sequence", "attention -> core"),
        ("decoding/verify.py", "from specgen.core.engine_core import EngineCore", "decoding -> core"),
        ("report/report.py", "from specgen.engine.engine import Engine", "report -> engine"),
        ("device.py", "from specgen.config import require", "device -> config"),
        ("decoding/sampling.py", "from specgen.ops.jit_modules import Module", "decoding -> ops"),
        ("jobs/run.py", "if TYPE_CHECKING:\n    import specgen.experiments.turns", "jobs -> experiments"),
        ("jobs/run.py", "from specgen.cli.main import main", "jobs -> cli"),
    ],
)
def test_a_wrong_arrow_is_found(tmp_path, path, line, arrow):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(line)
    assert wrong_arrows(read_imports(tmp_path)) == [arrow]


IMPORT_IN_TURN = f"""
import importlib, pkgutil, sys
for name in {LIGHT}:
    module = importlib.import_module(f"specgen.{{name}}")
    inside = pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + ".")
    for each in (module.__name__, *(found.name for found in inside)):
        importlib.import_module(each)
        print(*(f"{{each}} loads {{heavy}}" for heavy in {HEAVY} if heavy in sys.modules))
"""


def test_light_modules_load_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", IMPORT_IN_TURN], check=True, capture_output=True, text=True)
    assert done.stdout.split("\n") == [""] * (done.stdout.count("\n") + 1)
    assert done.stdout.count("\n") >= 30


WITHOUT_GPU_PACKAGES = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys(("flashinfer", "triton"))  # as on a Mac
import specgen
for module in pkgutil.walk_packages(specgen.__path__, "specgen."):
    kernels = (
        *("automaton_kernels", "cuda", "fp8_cuda", "fp8_kernels", "fused_sum", "launch", "rope"),
        *("router_kernel", "row_kernels", "skinny", "delta_kernels", "wide_heads"),
    )
    if module.name.rpartition(".")[2] not in kernels and ".ops.expert_" not in module.name:
        importlib.import_module(module.name)
from specgen import Engine, EngineConfig, SamplingParams
from specgen.config.bundled import data_directory
from specgen.cli.main import app
pair = [str(data_directory() / "demo" / name) for name in ("target", "drafter")]
engine = Engine(EngineConfig(model=pair[0], drafter=pair[1], device="cpu"))
sampling = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, ignore_eos=True)
assert [len(output.token_ids) for output in engine.generate(["Tom has 3 apples."], sampling)] == [4]
app(["inspect", *pair], standalone_mode=False)
"""


@pytest.mark.slow
def test_all_but_the_kernels_of_gpus_works_without_their_packages():
    done = subprocess.run([sys.executable, "-c", WITHOUT_GPU_PACKAGES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "EAGLE" in done.stdout


def private_names(source: str) -> set[str]:
    """Names with a leading underscore, of modules or in them, that ``source`` uses of libraries other than Python's."""
    tree, roots, found = ast.parse(source), dict[str, str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
            roots |= {
                each.asname or (top := each.name.split(".")[0]): each.name if each.asname else top
                for each in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            named = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            found |= {*named.values()}
            roots |= named
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            root, _, rest = ast.unparse(node).partition(".")
            found |= {f"{roots[root]}.{rest}"} if root in roots else set()
    others = {*sys.stdlib_module_names, "_typeshed", "specgen"}
    private = re.compile(r"[\w.]+\._(?!_)[\w.]+")  # no more than names
    return {name for name in found if private.fullmatch(name) and name.split(".")[0] not in others}


def test_private_names_of_libraries_are_those_that_pyproject_bounds():
    example = (
        "import os, torch as t\nfrom ray import _a, b\nfrom ray._c import d\nos._e; t.e._f(); x._g; b.h._i"
    )
    assert private_names(example) == {"ray._a", "ray._c.d", "torch.e._f", "ray.b.h._i"}
    found = set().union(*(private_names(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")))
    assert "torch._scaled_mm" in found
    stated = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert {name for name in found if name not in stated} == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "count"),
    [({}, "1500"), ({"OMP_WAIT_POLICY": "active"}, "30000000000"), ({"GOMP_SPINCOUNT": "7"}, "7")],
    ids=["nothing", "policy", "count"],
)
def test_threads_do_not_spin_for_long_unless_the_user_says_so(said: dict[str, str], count: str) -> None:
    """What OpenMP itself says when torch loads it; a newcomer's machine is a busy one."""
    own = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", "import specgen.cli.main, torch"],
        env=own | said | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch runs on another OpenMP here")
    assert f"GOMP_SPINCOUNT = '{count}'" in done.stderr
