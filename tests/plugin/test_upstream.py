"""`make check-upstream` finds what moved, changed or vanished between two wheels, and nothing else.

The back-test is SGLang 0.5.22 against 0.5.23, on the functions that this package had hooked before
0.5.23 came to be checked. `tests/data/sglang_functions.json` has their digests, and a test that
downloads both wheels compares them; `REGENERATE=1` in the environment writes the file anew.
"""

from __future__ import annotations

import importlib.util
import json
import os
import zipfile
from pathlib import Path

import pytest

from sglang_ascend.plugin.hooks import upstream
from sglang_ascend.plugin.hooks.source import digest
from sglang_ascend.plugin.hooks.upstream import changes
from sglang_ascend.plugin.hooks.uses import Use, code_uses, mentioned, patch_uses, uses
from sglang_ascend.plugin.hooks.wheel import Wheel

DATA = Path(__file__).parents[1] / "data" / "sglang_functions.json"
OLD, NEW = "0.5.22", "0.5.23"
# Found by hand; the last three stood in the ledger as templates, and were found by this check.
CHANGED = {
    "_send_kv_chunk",
    "_compute_lm_head",
    "UnquantizedLinearMethod.apply",
    "_validate_one_request",
    "TpModelWorker.forward_batch_generation",
    "_build_ascend_mla_kv_pool",
    "checkpoint_into_tree",
    "eagle_prepare_for_decode",
    "_launch_scheduler_processes",
    "_launch_detokenizer_subprocesses",
    "update_weights_from_disk",
}


def is_of(names: set[str], target: str) -> bool:
    return any(target.endswith(f".{name}") for name in names)


def test_exactly_the_functions_that_changed_have_another_digest():
    old, new = (json.loads(DATA.read_text())[version] for version in (OLD, NEW))
    assert len(old) == 31 and old.keys() == new.keys()
    differing = {name for name in old if old[name] != new[name]}
    assert differing == {name for name in old if is_of(CHANGED, name)}
    assert len(differing) == len(CHANGED)


def zipped(path: Path, files: dict[str, str]) -> Wheel:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"sglang/{name}", text)
    return Wheel(path)


def test_the_recorded_digests_are_those_of_the_installed_wheel(tmp_path):
    spec = importlib.util.find_spec("sglang")
    assert spec and spec.origin
    installed = Path(spec.origin).parent
    names = json.loads(DATA.read_text())[NEW]
    paths = {
        path
        for path in installed.rglob("*.py")
        if path.stem in {p for n in names for p in n.split(".")}
    }
    files = {path.relative_to(installed).as_posix(): path.read_text() for path in paths}
    wheel = zipped(tmp_path / "w.whl", files)
    assert {name: digest(wheel.definition(name).node) for name in names} == names


def test_two_downloaded_wheels_say_the_same(tmp_path):
    old, new = (Wheel(upstream.download(version, tmp_path)) for version in (OLD, NEW))
    names = list(json.loads(DATA.read_text())[NEW])
    found = changes(old, new, [Use("hook", name, "") for name in names])
    assert {change.name for change in found} == {name for name in names if is_of(CHANGED, name)}
    assert {change.what for change in found} == {"changed"}
    digests = {
        version: {name: digest(wheel.definition(name).node) for name in names}
        for version, wheel in ((OLD, old), (NEW, new))
    }
    if os.environ.get("REGENERATE"):
        DATA.write_text(json.dumps(digests, indent=1) + "\n")
    assert json.loads(DATA.read_text()) == digests
    # The release with itself, by everything that the plugin uses.
    patches = sorted(upstream.PATCHES.glob("*/*.patch"))
    used = uses(new, patches)
    assert {use.kind for use in used} == {"hook", "patch", "override", "import"}
    assert changes(new, new, used, mentioned()) == []


BASE = '''
import os
from sglang.tools import helper as assist

LIMIT = 3

class Base:
    width: int = 4

    def inherited(self, rows):
        return rows

class Worker(Base):
    """Serves."""

    def run(self, batch, *, page_size=1):
        """Runs."""
        # at once
        return assist(batch)

    def _private(self):
        return 1

    def untouched(self):
        return 0

if os.name:
    def free(x):
        return x
'''
TOOLS = "def helper(x):\n    return x + 1\n"


def compare(tmp_path, names, *, base=BASE, tools=TOOLS, members=(), **more):
    old = zipped(tmp_path / "old.whl", {"core.py": BASE, "tools.py": TOOLS})
    files = {"core.py": base, "tools.py": tools, **{f"{k}.py": v for k, v in more.items()}}
    new = zipped(tmp_path / "new.whl", files)
    used = [Use("import", f"sglang.{name}", "here") for name in names]
    return {c.name: c.what for c in changes(old, new, used, frozenset(members))}


ALL = ["core.Worker.run", "core.free", "core.LIMIT", "tools.helper", "core.assist", "core"]


def test_comments_docstrings_and_layout_are_no_change(tmp_path):
    base = BASE.replace('"""Runs."""', '"""Runs it.\n\n        Twice."""').replace("# at once", "")
    base = base.replace("batch, *, page_size=1", "batch,\n        *,\n        page_size = 1")
    assert compare(tmp_path, ALL, base=base) == {}


@pytest.mark.parametrize(
    ("name", "text", "other"),
    [
        ("core.Worker.run", "assist(batch)", "assist(batch) or 0"),
        ("core.Worker.run", "page_size=1", "page_size=2"),
        ("core.free", "return x\n", "return -x\n"),
        ("core.LIMIT", "LIMIT = 3", "LIMIT = 4"),
    ],
)
def test_another_body_signature_or_value_is_a_change_of_that_name_alone(
    tmp_path, name, text, other
):
    assert text in BASE
    found = compare(tmp_path, ALL, base=BASE.replace(text, other))
    assert found == {f"sglang.{name}": "changed"}


def test_what_is_imported_again_changes_with_its_origin(tmp_path):
    found = compare(tmp_path, ALL, tools=TOOLS.replace("+ 1", "+ 2"))
    assert found == {"sglang.tools.helper": "changed", "sglang.core.assist": "changed"}


def test_what_a_module_takes_from_another_by_a_star_is_found_there(tmp_path):
    more = "from sglang.core import *\nfrom .tools import *\n"
    old, new = (
        zipped(tmp_path / f"{number}.whl", {"core.py": BASE, "tools.py": tools, "more.py": more})
        for number, tools in enumerate((TOOLS, TOOLS.replace("+ 1", "+ 2")))
    )
    used = [Use("import", f"sglang.more.{name}", "") for name in ("helper", "free", "nothing")]
    assert {c.name: c.what for c in changes(old, new, used)} == {
        "sglang.more.helper": "changed",
        "sglang.more.nothing": "not in the old release",
    }


def test_a_name_that_moved_is_told_from_one_that_vanished(tmp_path):
    core = BASE.replace("from sglang.tools import helper as assist", "assist = len")
    assert compare(tmp_path, ["tools.helper"], base=core, tools="", more=TOOLS) == {
        "sglang.tools.helper": "moved to sglang/more.py"
    }
    changed = TOOLS.replace("+ 1", "+ 2")
    assert compare(tmp_path, ["tools.helper"], base=core, tools="", more=changed) == {
        "sglang.tools.helper": "moved to sglang/more.py, changed"
    }
    assert compare(tmp_path, ["tools.helper"], base=core, tools="") == {
        "sglang.tools.helper": "vanished"
    }


def test_of_a_class_counts_what_the_plugin_mentions(tmp_path):
    mentions = {"run", "_private", "width"}
    for text, other, expected in (
        ("return 0", "return 2", ""),  # of no interest
        ("assist(batch)", "assist(batch) or 0", ""),  # a public method keeps its signature
        ("page_size=1", "page_size=2", "changed: run"),
        ("return 1", "return 2", "changed: _private"),
    ):
        assert text in BASE
        found = compare(tmp_path, ["core.Worker"], base=BASE.replace(text, other), members=mentions)
        assert found.get("sglang.core.Worker", "") == expected


def test_overrides_and_imports_are_read_from_the_plugins_source(tmp_path):
    wheel = zipped(tmp_path / "w.whl", {"core.py": BASE, "tools.py": TOOLS})
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    (plugin / "ours.py").write_text(
        "from sglang.core import Worker\n"
        "class Ours(Worker):\n"
        "    def inherited(self, rows): ...\n"
        "    def run(self, batch): ...\n"
        "    def of_our_own(self): ...\n"
    )
    found = [(use.kind, use.name) for use in code_uses(wheel, plugin)]
    assert found == [
        ("import", "sglang.core.Worker"),
        ("override", "sglang.core.Base.inherited"),
        ("override", "sglang.core.Worker.run"),
    ]


PATCH = """--- a/python/sglang/core.py
+++ b/python/sglang/core.py
@@ -3,1 +3,1 @@
-LIMIT = 3
+LIMIT = 5
@@ -25,3 +25,3 @@
 if os.name:
     def free(x):
-        return x
+        return -x
"""


def test_a_patch_depends_on_the_function_around_a_hunk_or_on_its_lines(tmp_path):
    wheel = zipped(tmp_path / "w.whl", {"core.py": BASE, "tools.py": TOOLS})
    patch = tmp_path / "a.patch"
    patch.write_text(PATCH)
    module, function = patch_uses(wheel, [patch])
    assert (module.name, function.name) == ("sglang.core", "sglang.core.free")
    elsewhere = zipped(tmp_path / "n.whl", {"core.py": BASE + "\n\ndef more(): ...\n"})
    assert changes(wheel, elsewhere, [module, function]) == []
    other = zipped(tmp_path / "o.whl", {"core.py": BASE.replace("LIMIT = 3", "LIMIT = 4")})
    assert [change.name for change in changes(wheel, other, [module, function])] == ["sglang.core"]


def test_the_command_exits_with_1_if_anything_changed(tmp_path, monkeypatch, capsys):
    old, new = tmp_path / "old.whl", tmp_path / "new.whl"
    zipped(old, {"core.py": BASE, "tools.py": TOOLS})
    zipped(new, {"core.py": BASE.replace("return x\n", "return 1\n"), "tools.py": TOOLS})
    used = [Use("hook", "sglang.core.free", "here")]
    monkeypatch.setattr(upstream, "uses", lambda wheel, patches: used)
    assert upstream.main([str(old), "--from", str(old)]) == 0
    assert upstream.main([str(new), "--from", str(old), "--json"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("0 of 1 names changed")
    (change,) = json.loads("".join(said[1:]))
    assert change == {
        "kind": "hook",
        "name": "sglang.core.free",
        "what": "changed",
        "used_by": "here",
    }
