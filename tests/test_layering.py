"""The shape of the package: who may import what, no cycles, files and functions of a screen.

Imports inside functions count as much as those at the top, and so do imports for typing alone and
names given to importlib.
Every rule has a seeded violation, in a tree of its own, that it must catch.
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sglang_ascend"

# The two laws: the only folder in which a module may be imported.
LAWS = {"sglang": "plugin", "torch_npu": "ops", "triton": "ops", "sgl_kernel_npu": "ops"}

# The import table, bottom to top: each part and the parts that it may import, besides itself.
TABLE: dict[str, set[str]] = {
    "__init__": set(),
    "torchvision_ops": set(),
    "env": set(),
    "files": set(),
    "svg": set(),
    "refusals": set(),
    "tables": set(),
    "stack": set(),
    "bench": {"files", "models", "refusals", "svg", "tables"},
    "ops": {"env"},
    "sampling": {"ops"},
    "attention": {"ops"},
    "speculative": {"ops", "attention", "refusals", "sampling", "svg", "tables"},
    "checkpoint": set(),
    "quantization": {"ops", "checkpoint", "files", "refusals", "tables"},
    "memory": {"checkpoint", "quantization", "refusals", "speculative"},
    "models": {"env", "files"},
    "training": {
        "bench",
        "checkpoint",
        "files",
        "ops",
        "quantization",
        "refusals",
        "speculative",
        "svg",
        "tables",
    },
    "ptq": {"checkpoint", "files", "quantization", "refusals", "svg", "tables", "training"},
    "verify": {"env", "files", "stack", "ops", "bench"},
}
TABLE["plugin"] = TABLE.keys() - {
    *(
        "__init__",
        "files",
        "svg",
        "refusals",
        "tables",
        "bench",
        "memory",
        "training",
        "ptq",
        "verify",
    )
}
TABLE["cli"] = TABLE.keys() - {"__init__"}
TABLE["__main__"] = {"cli"}

MAX_FOLDER_FILES = 12
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60  # kernels excepted: a kernel is one function on purpose


def sources(package: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package), ast.parse(path.read_text(encoding="utf-8"))


def part_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def module_name(package: Path, path: Path) -> str:
    parts = [package.name, *path.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(package: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of every import, made absolute; `from a import b` gives `a.b`."""
    here = [package.name, *path.parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__") and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def law_violations(package: Path) -> list[str]:
    return [
        f"{path}:{line} imports {name}, which only {folder}/ may"
        for path, tree in sources(package)
        for line, name in imported(package, path, tree)
        if (folder := LAWS.get(name.split(".")[0])) and part_of(path) != folder
    ]


def table_violations(package: Path) -> list[str]:
    found = [
        f"{path} belongs to no row of the import table"
        for path, _ in sources(package)
        if part_of(path) not in TABLE
    ]
    for path, tree in sources(package):
        allowed = {part_of(path), *TABLE.get(part_of(path), ())}
        for line, name in imported(package, path, tree):
            root, _, rest = name.partition(".")
            part = rest.split(".")[0]
            if root == package.name and part in TABLE and part not in allowed:
                found.append(f"{path}:{line} imports {name}, above or beside it in the table")
    return found


def cycle_violations(package: Path) -> list[str]:
    modules = {module_name(package, path): (path, tree) for path, tree in sources(package)}
    graph: dict[str, set[str]] = {}
    for module, (path, tree) in modules.items():
        names = [name for _, name in imported(package, path, tree)]
        targets = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = (targets & modules.keys()) - {module}
    cycles: list[str] = []
    finished: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            cycles.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in finished:
            for target in sorted(graph[module]):
                visit(target, (*trail, module))
            finished.add(module)

    for module in sorted(graph):
        visit(module, ())
    return cycles


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(name.partition("(")[0].endswith("jit") for name in decorators)


def size_violations(package: Path) -> list[str]:
    found = []
    for path, tree in sources(package):
        num_lines = len((package / path).read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            found.append(f"{path} has {num_lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    found.append(f"{path}:{node.lineno} {node.name} has {num_lines} lines")
    return found


def folder_violations(package: Path) -> list[str]:
    counts = Counter(path.parent for path, _ in sources(package))
    return [
        f"{folder}/ has {count} files"
        for folder, count in counts.items()
        if count > MAX_FOLDER_FILES
    ]


def environment_violations(package: Path) -> list[str]:
    return [
        f"{path}:{node.lineno} names {node.value} itself; use sglang_ascend.env"
        for path, tree in sources(package)
        if part_of(path) != "env"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and re.fullmatch(r"SGLANG_ASCEND_\w+", str(node.value))
    ]


def test_sglang_is_imported_only_in_plugin_and_device_libraries_only_in_ops():
    assert law_violations(PACKAGE) == []


def test_every_part_imports_only_what_the_table_names():
    assert table_violations(PACKAGE) == []


def documented_table() -> dict[str, set[str]]:
    """The rows `| `part` | what it holds | what it may import |` of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/?` \|.*\| ([^|]*) \|$", text, flags=re.MULTILINE)
    table = {}
    for part, cell in rows:
        named = set(re.findall(r"`(\w+)`", cell))
        others = {name for name, _ in rows} - {part}
        table[part] = others - named if cell.startswith("everything") else named
    return table


def test_the_documented_import_table_is_the_one_that_is_enforced():
    documented = documented_table()
    assert documented == {part: TABLE[part] for part in TABLE.keys() - {"__init__", "__main__"}}


def test_no_module_imports_itself_through_others():
    assert cycle_violations(PACKAGE) == []


def test_files_and_functions_fit_a_screen():
    assert size_violations(PACKAGE) == []


def test_a_folder_holds_what_one_look_takes_in():
    assert folder_violations(PACKAGE) == []


def test_environment_variables_are_named_only_in_env():
    assert environment_violations(PACKAGE) == []


LONG_BODY = "".join(f"    x = {i}\n" for i in range(MAX_FUNCTION_LINES))
SEEDED = [
    (law_violations, {"attention/gqa.py": "import sglang.srt\n"}),
    (law_violations, {"ops/dispatch.py": "from sglang.srt import utils\n"}),
    (law_violations, {"speculative/step.py": "def f():\n    import torch_npu\n"}),
    (law_violations, {"cli.py": "import importlib\nimportlib.import_module('sglang.version')\n"}),
    (law_violations, {"plugin/hooks/registration.py": "import triton.language as tl\n"}),
    (law_violations, {"models/x.py": "def f():\n    from sgl_kernel_npu.norm import rms\n"}),
    (table_violations, {"ops/x.py": "def f():\n    from sglang_ascend.plugin import hooks\n"}),
    (table_violations, {"plugin/x.py": "from sglang_ascend import training\n"}),
    (table_violations, {"attention/x.py": "from ..speculative.step import run\n"}),
    (table_violations, {"env.py": "import sglang_ascend.ops.dispatch\n"}),
    (table_violations, {"models/x.py": "from sglang_ascend.cli import app\n"}),
    (table_violations, {"utils.py": ""}),
    (
        cycle_violations,
        {"ops/a.py": "from . import b\n", "ops/b.py": "def f():\n    from .a import g\n"},
    ),
    (
        cycle_violations,
        {
            "ops/a.py": "import sglang_ascend.ops.b\n",
            "ops/b.py": "from sglang_ascend.ops.c import h\n",
            "ops/c.py": "from sglang_ascend.ops import a\n",
        },
    ),
    (
        cycle_violations,
        {
            "ops/a.py": "if TYPE_CHECKING:\n    from sglang_ascend.ops import b\n",
            "ops/b.py": "from sglang_ascend.ops.a import f\n",
        },
    ),
    (folder_violations, {f"ops/x{i}.py": "" for i in range(MAX_FOLDER_FILES + 1)}),
    (size_violations, {"cli.py": "x = 0\n" * (MAX_FILE_LINES + 1)}),
    (size_violations, {"plugin/x.py": "async def f():\n" + LONG_BODY}),
    (environment_violations, {"cli.py": "import os\nos.environ['SGLANG_ASCEND_CACHE']\n"}),
]


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    package = folder / PACKAGE.name
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    return package


@pytest.mark.parametrize(("rule", "files"), SEEDED)
def test_a_seeded_violation_is_caught(rule, files, tmp_path):
    assert len(rule(write_tree(tmp_path, files))) == 1


def test_what_the_rules_allow_is_not_caught(tmp_path):
    package = write_tree(
        tmp_path,
        {
            "plugin/entry.py": "import sglang\nfrom sglang_ascend.speculative import step\n",
            "speculative/step.py": "from sglang_ascend.ops import attention\n",
            "ops/attention/__init__.py": "from sglang_ascend.ops.attention import reference\n",
            "ops/attention/reference.py": "if TYPE_CHECKING:\n    from .. import dispatch\n",
            "ops/attention/triton.py": "import triton\n\n@triton.jit\ndef kernel():\n" + LONG_BODY,
        },
    )
    rules = {rule for rule, _ in SEEDED}
    assert {rule.__name__: rule(package) for rule in rules} == {rule.__name__: [] for rule in rules}


def entry_points() -> dict[str, dict[str, str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {**project["entry-points"], "console": project["scripts"]}


@pytest.mark.parametrize("group", ["sglang.srt.platforms", "sglang.srt.plugins"])
def test_each_sglang_group_has_exactly_one_entry_point(group):
    """With two platforms, SGLANG_PLATFORM would make SGLang skip our general plugin in silence."""
    assert len(entry_points()[group]) == 1


def test_every_entry_point_names_something_that_exists():
    for group in entry_points().values():
        for target in group.values():
            module, _, attribute = target.partition(":")
            path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            for node in tree.body:
                if isinstance(node, ast.Assign):
                    named |= {ast.unparse(target) for target in node.targets}
            assert attribute in named, f"{target}: {path} defines no {attribute}"
