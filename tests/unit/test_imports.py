"""Imports point one way, and the project's names do not disturb those who own the same names elsewhere."""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import program, schema
from benchmarks.schema import BenchConfig
from helix.packages import import_package
from helix.schema import choices, field_types
from launch.inputs.job_kinds import DECODE, SERVE

ROOT = Path(__file__).parents[2]
OURS = ("kernels", "comm", "helix", "launch", "torchrun_entry", "benchmarks")
PACKAGES = tuple(name for name in OURS if name != "torchrun_entry")

# What each package may import of ours.
ALLOWED = {
    "kernels": {"kernels"},
    "comm": {"kernels", "comm"},
    "helix": {"kernels", "comm", "helix"},
    "launch": {"kernels", "comm", "helix", "launch"},
    "torchrun_entry": {"kernels", "comm", "launch"},
    "benchmarks": set(OURS),
}
# Of others, kernels may import these alone.
KERNELS_LIBRARIES = {"torch", "triton"}

# Inside a package, a room (a folder, or a file beside the folders) imports only from levels before its own, or itself.
# Files of a room that are named have a level of their own: what layers use of a worker, and what of it uses layers.
LEVELS = {
    "kernels": [
        {"precompile", "dispatch", "resident_blocks", "overlap", "scaled", "scaled_keys", "sm90", "packed_sm90"},
        {"gated_delta", "paged_keys"},
        {"dense.reference"},
        {f"{family}.reference" for family in ("attention", "indexer", "moe", "recurrent", "sparse", "tokens")},
        {"mla.reference", "offload.reference"},
        {"attention"},
        {"indexer", "mla", "peers", "recurrent", "sparse", "offload"},
        {"dense", "tokens"},
        {"moe"},
    ],
    "helix": [
        {"errors", "files", "log", "layout", "packages", "sampling_params", "schema", "transformers_import"},
        {"config"},
        {"hub", "rank_info", "kv_placement", "tokenizer"},
        {"devices"},
        {"engine.request", "worker.graph_keys"},
        {"engine.scheduler_output"},
        {"worker"},
        {"attention"},
        {"layers"},
        {"models"},
        {"speculation"},
        {"worker.model_runner", "worker.prompt_scores"},
        {"worker.warmup"},
        {"engine"},
        {"checks"},
        {"setup"},
        {"planner"},
        {"__main__"},
    ],
    "launch": [{"answers"}, {"client"}, {"serving"}, {"inputs"}, {"job"}],
    "benchmarks": [
        {"cases", "constants", "jobs", "runner", "schema", "timer"},
        {"ranks"},
        {"papers.policies"},
        {"kernels", "program", "quality"},
        {"models"},
        {"records"},
        {"papers"},
    ],
}
COMMANDS = 99  # the level of other files beside the rooms of launch and benchmarks: what one types
# `from helix import LLM` and the command `helix`: the two imports against the order, the first inside a function.
FRONT_DOORS = {("helix/__init__.py", "launch.llm", True), ("helix/__main__.py", "launch.cli", False)}
HEAVY = {"torch", "triton", "transformers", "comm", "kernels"}  # clients go without
# Imports that take seconds, and that rank 0 alone needs; and one of an extra of its own.
LATE = {"transformers", "tokenizers", "tomllib", "gguf", "huggingface_hub"}


def sources(*more: str) -> list[Path]:
    return [ROOT / "torchrun_entry.py", *(f for p in (*PACKAGES, *more) for f in sorted((ROOT / p).rglob("*.py")))]


def name_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {name_of(str(f.relative_to(ROOT))) for f in sources("tests")}


parsed = cache(ast.parse)


@cache
def imports(source: str) -> list[tuple[str, bool]]:
    """Modules imported, and whether inside a function."""
    found, tree = [], parsed(source)
    inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f) if n is not f}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where things come from"
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES
            names = {alias.name for alias in node.names if f"{node.module}.{alias.name}" not in MODULES}
            found += [
                (module, node in inside) for module in (*sorted(modules), *([node.module or ""] if names else []))
            ]
    return found


def level_of(module: str) -> int | None:
    """The level of a module in its package; None where it lies in no room."""
    package, _, rest = module.partition(".")
    room = rest.partition(".")[0]
    levels = {name: i for i, rooms in enumerate(LEVELS[package]) for name in rooms}
    found = levels.get(rest, levels.get(room))
    return COMMANDS if found is None and package in ("launch", "benchmarks") and "." not in rest else found


def violations(path: str, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path` (relative to the root)."""
    mine = name_of(path)
    package, _, rest = mine.partition(".")
    problems = []
    if package in LEVELS and rest and level_of(mine) is None:
        problems.append(f"{path} lies in no room of {package}: {LEVELS[package]}")
    for module, late in imports(source):
        top = module.split(".")[0]
        if (path, module, late) in FRONT_DOORS:
            continue
        if late and top not in LATE:
            problems.append(f"{path} imports {module} inside a function")
        if top in OURS and top not in ALLOWED[package]:
            problems.append(f"{path} imports {module}: {package} may import {sorted(ALLOWED[package])}")
        if package == "kernels" and top not in OURS and top not in KERNELS_LIBRARIES | sys.stdlib_module_names:
            problems.append(f"{path} imports {module}: kernels may import {sorted(KERNELS_LIBRARIES)}")
        if package in LEVELS and top == package and rest and "." in module and not problems:
            theirs, own = level_of(module), level_of(mine)
            same = theirs == own and module.split(".")[1] == mine.split(".")[1]
            if theirs is None or own is None:
                problems.append(f"{path} imports {module}, which lies in no room")
            elif not same and (theirs > own or (theirs == own and own != COMMANDS)):
                problems.append(f"{path} imports {module}, which does not come before it")
    return problems


def test_imports_point_one_way() -> None:
    files = sources()
    assert len(files) > 40
    problems = [p for f in files for p in violations(str(f.relative_to(ROOT)), f.read_text())]
    assert problems == []


@pytest.mark.parametrize(
    "path, source",
    [
        ("kernels/x.py", "import torch"),
        ("kernels/moe/x.py", "import numpy"),
        ("kernels/attention/x.py", "from kernels.peers.ll_protocol import turn"),
        ("comm/x.py", "from helix.layout import HelixLayout"),
        ("helix/__init__.py", "from launch.llm import LLM"),
        ("helix/layout.py", "def f():\n    from launch.llm import LLM"),
        ("helix/layout.py", "from helix.engine.core import Engine"),
        ("helix/worker/step.py", "from helix.worker.model_runner import ModelRunner"),
        ("launch/inputs/x.py", "from launch.job import spawn"),
        ("launch/x.py", "from benchmarks.timer import seconds"),
        ("benchmarks/records/x.py", "from benchmarks.bench import main"),
        ("launch/new/x.py", "import torch"),
        ("torchrun_entry.py", "from helix.config import Config"),
    ],
)
def test_violations_are_found(path: str, source: str) -> None:
    assert violations(path, source)


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    edges = {
        name_of(str(f.relative_to(ROOT))): {m for m, _ in imports(f.read_text()) if m in MODULES} for f in sources()
    }
    assert sum(map(len, edges.values())) > 300
    assert cycle(edges) == []
    assert cycle(edges | {"kernels.dispatch": {"launch.job.rank"}}) != []


@pytest.mark.parametrize(
    "client", ["launch.plan", "launch.simulate", "launch.llm", "launch.batch", "launch.chat", "launch.serving.routes"]
)
def test_clients_reach_neither_torch_nor_kernels(client: str) -> None:
    """By whatever they import when they are imported; what they load from there on comes from `import_module`."""
    reached, left, heavy = set[str](), [client], set[str]()
    while left:
        if (module := left.pop()) in reached:
            continue
        reached.add(module)
        file = ROOT / f"{module.replace('.', '/')}.py"
        source = (file if file.exists() else file.with_suffix("") / "__init__.py").read_text()
        for name, late in imports(source):
            parts = name.split(".")
            heavy |= {f"{module} imports {name}"} if parts[0] in HEAVY and not late else set()
            left += [] if late else [m for n in range(1, len(parts) + 1) if (m := ".".join(parts[:n])) in MODULES]
    assert len(reached) > 10 and heavy == set()


def test_each_kind_of_work_is_a_module_that_is_imported_where_it_is_done() -> None:
    work = [DECODE.module, SERVE.module, *program.MODULES.values()]
    kinds = {*choices(field_types(BenchConfig)["kind"])}
    assert {"none", *program.MODULES} == kinds == {f.stem for f in (schema.CONF / "bench").glob("*.yaml")}
    assert all(module in MODULES and "run" in definitions(module) for module in work), work


def definitions(module: str) -> set[str]:
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_kernels_package_is_cheap_and_unversioned() -> None:
    for file in ROOT.glob("kernels/**/__init__.py"):
        assert imports(file.read_text()) == [] and "__version__" not in file.read_text(), file


def test_every_room_is_a_package() -> None:
    """What a wheel holds of them, `tests/e2e/test_installed.py` compares."""
    assert {file.parent for file in sources()[1:]} == {file.parent for file in sources() if file.name == "__init__.py"}


def test_another_s_launch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROS has a package `launch`."""
    other = ModuleType("launch")
    other.__file__ = "/opt/ros/launch/__init__.py"
    monkeypatch.setitem(sys.modules, "launch", other)
    with pytest.raises(
        ImportError, match="its package 'launch', but this process has imported another one from /opt/ros/"
    ):
        import_package("launch")
