"""Every hook has a patch that would retire it, or a reason why SGLang need not change; each patch
still fits the pinned SGLang.

Fitting is a matter of content: the hash in the manifest, `git apply`, and compilation. A changed
file, hash or hunk must fail.
"""

from __future__ import annotations

import pkgutil

import pytest
from patch_set import (
    BY_FILE,
    FOLDER,
    ROWS,
    apply,
    copy_targets,
    hash_problems,
    in_wheel,
    patched_files,
)

from sglang_ascend.plugin.hooks.ledger import HOOKS

TAG = "https://github.com/sgl-project/sglang/blob/v0.5.23/"

each_patch = pytest.mark.parametrize("row", ROWS, ids=list(BY_FILE))


def test_every_patch_has_a_row_and_every_row_a_patch():
    assert sorted(BY_FILE) == sorted(path.name for path in FOLDER.glob("*.patch"))


def test_every_hook_has_its_patch_or_says_why_not_and_no_patch_retires_one_that_is_gone():
    retired = {(target, row["file"]) for row in ROWS for target in row["retires_hooks"]}
    for_upstream = [hook for hook in HOOKS if hook.patch is not None]
    assert retired == {(hook.target, hook.patch) for hook in for_upstream}
    assert all(hook.unpatched for hook in HOOKS if hook.patch is None)


@pytest.mark.sglang
def test_every_other_patch_names_a_workaround_that_is_still_there():
    import sglang  # noqa: F401  (its modules import only after it)

    for row in ROWS:
        assert bool(row["retires_hooks"]) != ("retires_workaround" in row)
        if not row["retires_hooks"]:
            assert callable(pkgutil.resolve_name(row["retires_workaround"]))


@each_patch
def test_a_row_says_why_where_and_until_when(row):
    assert row["why"] and row["delete_when"]
    assert row["upstream"] == TAG + row["targets"][0]["path"]
    # Of SGLang, or of another engine that had the same mistake.
    assert row["thread"].startswith("https://github.com/")


@each_patch
def test_the_patch_changes_the_files_that_the_manifest_names(row):
    text = (FOLDER / row["file"]).read_text(encoding="utf-8")
    changed = [line[6:] for line in text.splitlines() if line.startswith("+++ b/")]
    assert changed == [target["path"] for target in row["targets"]]


@each_patch
def test_the_patch_applies_to_the_pinned_wheel_and_the_result_compiles(row, tmp_path):
    copy_targets(row, tmp_path)
    assert hash_problems(row, tmp_path) == []
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.py")}
    for path in patched_files(row, tmp_path):
        assert path.read_bytes() != before[path]
        compile(path.read_text(encoding="utf-8"), str(path), "exec")


@each_patch
def test_the_patch_is_small_enough_to_read(row):
    lines = (FOLDER / row["file"]).read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith(("+", "-")) for line in lines) < 30


def test_all_patches_apply_one_after_the_other(tmp_path):
    for row in ROWS:
        patched_files(row, tmp_path)


def test_a_changed_file_is_caught(tmp_path):
    row = ROWS[0]
    copy_targets(row, tmp_path)
    path = tmp_path / in_wheel(row["targets"][0]["path"])
    path.write_text(path.read_text() + "\n")
    assert len(hash_problems(row, tmp_path)) == 1


def test_a_changed_hunk_is_caught(tmp_path):
    row = ROWS[0]
    copy_targets(row, tmp_path)
    text = (FOLDER / row["file"]).read_text()
    context = "    assign_req_to_token_pool[(batch_size,)]("
    assert context in text
    broken = tmp_path / "broken.patch"
    broken.write_text(text.replace(context, context.replace("batch", "other")))
    assert "patch does not apply" in apply(broken, tmp_path)
