"""Hooks take the place of the functions that they were written for, and of no others.

Each has the arguments of what it replaces and knows its source; one that is not in place, or that
another plugin overrides, is noticed. A server without speculation has none on CUDA and on an NPU.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from begun import template

from sglang_ascend.plugin.hooks.ledger import COMMON_HOOKS, CPU_HOOKS, HOOKS, Hook

pytestmark = pytest.mark.sglang

MAX_HOOKS = 22

SERVER = """
import json, os, sys
import sglang_ascend.plugin.device as device
device.device_profile = lambda profile=getattr(device, sys.argv[1]): profile
import sglang
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.resolution_hooks import run_hook
from sglang.srt.arg_groups.validation_hook import handle_aux_hidden_state_capture
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

found = [sorted(HookRegistry._patched)]
for algorithm in json.loads(sys.argv[2]):
    server_args = ServerArgs(model_path="m", load_format="dummy", speculative_algorithm=algorithm)
    run_hook(handle_aux_hidden_state_capture, server_args)
    found.append(sorted(HookRegistry._patched))
print(json.dumps([found, os.environ["SGLANG_ASCEND_SERVES_MTP"]]))
"""


@pytest.fixture(autouse=True)
def plugins(loaded_plugins):
    pass


def test_there_are_few_and_each_says_why_it_is_there_and_when_it_goes():
    targets = [hook.target for hook in HOOKS]
    assert len(targets) == len(set(targets)) <= MAX_HOOKS
    for hook in HOOKS:
        assert hook.why and hook.delete_when
        assert (hook.patch is None) != (hook.unpatched is None)


def test_all_of_this_device_are_in_place():
    from sglang_ascend.plugin.hooks.registration import hooks_of_this_device, missing_hooks

    assert missing_hooks() == []
    assert set(CPU_HOOKS) < set(hooks_of_this_device())


def test_the_upstream_link_names_a_file_of_the_installed_sglang():
    import sglang

    tag = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/"
    installed = Path(sglang.__file__).parents[1]
    for hook in HOOKS:
        assert hook.upstream.startswith(tag)
        assert (installed / hook.upstream.removeprefix(tag)).is_file()


def replaced_and_replacing(hook: Hook):
    """(SGLang's function, ours without what SGLang's registry passes in front)."""
    from sglang_ascend.plugin.hooks.registration import original_of, replacement_of

    for name, _ in hook.definitions:
        ours = replacement_of(hook)
        if hook.methods:
            ours = vars(ours)[name.rpartition(".")[2]]
        yield original_of(hook, name), ours, int(hook.kind in ("around", "after"))


def differing_parameters(original, ours, num_in_front: int) -> list:
    """Pairs of parameters that differ in name, kind or default."""
    expected = list(inspect.signature(original).parameters.values())
    taken = list(inspect.signature(ours).parameters.values())[num_in_front:]
    of_both = [[(p.name, p.kind, p.default) for p in side] for side in (expected, taken)]
    longest = max(map(len, of_both))
    padded = [side + [None] * (longest - len(side)) for side in of_both]
    return [pair for pair in zip(*padded, strict=True) if pair[0] != pair[1]]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_the_replacement_takes_exactly_the_arguments_of_what_it_replaces(hook):
    for original, ours, num_in_front in replaced_and_replacing(hook):
        assert original.__module__.startswith("sglang.")
        assert differing_parameters(original, ours, num_in_front) == []


def test_a_replacement_of_any_arguments_another_name_kind_or_default_is_caught():
    def theirs(self, rows, *, page_size=1): ...

    def same(self, rows, *, page_size=1): ...

    def any_arguments(*args, **kwargs): ...

    def other_name(self, row, *, page_size=1): ...

    def other_kind(self, rows, page_size=1): ...

    def other_default(self, rows, *, page_size=2): ...

    def one_more(self, rows, *, page_size=1, debug=False): ...

    assert differing_parameters(theirs, same, 0) == []
    for ours in (any_arguments, other_name, other_kind, other_default, one_more):
        assert differing_parameters(theirs, ours, 0), ours


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_the_recorded_source_is_the_installed_one(hook):
    from sglang_ascend.plugin.hooks.registration import original_of
    from sglang_ascend.plugin.hooks.source import digest_of

    assert [digest for _, digest in hook.definitions] == [
        digest_of(original_of(hook, name)) for name, _ in hook.definitions
    ]


def test_another_source_is_warned_of_in_one_sentence(monkeypatch, caplog):
    from sglang_ascend.plugin.hooks import registration

    changed = replace(HOOKS[0], sources=("0" * 16,))
    monkeypatch.setattr(registration, "hooks_of_this_device", lambda: (changed,))
    with caplog.at_level(logging.WARNING):
        registration.require_hooks()
    (record,) = caplog.records
    assert f"SGLang's {changed.target} is not what its hook was written for" in record.getMessage()


def lose(monkeypatch, hook: Hook) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {hook.target})


def test_a_required_hook_that_sglang_failed_to_apply_stops_the_server(monkeypatch):
    from sglang_ascend.plugin.errors import StartupRefused
    from sglang_ascend.plugin.hooks.registration import missing_hooks, require_hooks

    lost = next(hook for hook in CPU_HOOKS if hook.required)
    lose(monkeypatch, lost)
    assert missing_hooks() == [lost]
    with pytest.raises(StartupRefused, match=lost.target):
        require_hooks()


def test_any_other_is_warned_of_in_one_sentence(monkeypatch, caplog):
    from sglang_ascend.plugin.hooks.registration import require_hooks

    lost = next(hook for hook in HOOKS if not hook.required)
    lose(monkeypatch, lost)
    with caplog.at_level(logging.WARNING):
        require_hooks()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"sglang-ascend: hook {lost.target} could not be applied")


def test_a_hook_that_another_plugin_overrides_is_missing(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_ascend.plugin.hooks.registration import missing_hooks

    lost = next(hook for hook in CPU_HOOKS if hook.kind == "replace")
    theirs = (HookType.REPLACE, lambda *arguments: None, None)
    hooks = {**HookRegistry._hooks, lost.target: [*HookRegistry._hooks[lost.target], theirs]}
    monkeypatch.setattr(HookRegistry, "_hooks", hooks)
    assert missing_hooks() == [lost]


def test_the_variable_leaves_the_required_ones(monkeypatch):
    from sglang_ascend.plugin.hooks.registration import hooks_of_this_device

    monkeypatch.setenv("SGLANG_ASCEND_HOOKS", "required")
    assert {hook.required for hook in hooks_of_this_device()} == {True}


def hooks_by_moment(profile: str, *algorithms: str | None, environ=None) -> tuple[list[list], str]:
    """Targets changed once plugins are loaded, and after each server's arguments; and what a
    process that starts now is told."""
    environ = {**os.environ, "SGLANG_ASCEND_SERVES_MTP": "", **(environ or {})}
    arguments = [profile, json.dumps(algorithms)]
    done = template().run_text(SERVER, arguments, environ, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_on_cuda_a_plain_server_has_none_and_one_with_mtp_has_them():
    (loaded, plain, eagle, mtp), told = hooks_by_moment("CUDA", None, "EAGLE", "MTP")
    assert loaded == plain == eagle == []
    assert mtp == sorted(hook.target for hook in COMMON_HOOKS)
    assert told == "1"


def test_on_an_npu_too():
    (loaded, plain, nextn), told = hooks_by_moment("NPU", None, "NEXTN")
    assert loaded == plain == nextn == [] and told == ""


def test_a_process_that_such_a_server_starts_has_them_from_the_start():
    (loaded, _), told = hooks_by_moment("CUDA", "mtp", environ={"SGLANG_ASCEND_SERVES_MTP": "1"})
    assert len(loaded) == len(COMMON_HOOKS) and told == "1"


def test_a_plain_server_has_them_if_that_is_asked_for():
    (loaded, plain), _ = hooks_by_moment("CUDA", None, environ={"SGLANG_ASCEND_HOOKS": "all"})
    assert len(loaded) == len(COMMON_HOOKS) and plain == loaded
