"""A server that would run without us, or not as asked, does not start: one sentence, exit code 1.

SGLang logs and swallows a plugin's exception, and a hook that it could not apply; it would serve
without them. Each way to start a server is a real process; where it lacks something, a begun one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from begun import template

pytestmark = pytest.mark.sglang

LAUNCH = """
import runpy, sys
sys.argv[:] = ["sglang.launch_server", *sys.argv[1:]]
runpy.run_module("sglang.launch_server", run_name="__main__")
"""

WRONG_VERSION = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.5.24" if name == "sglang" else real(name)
"""

MISSING_TARGET = """
import sglang
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
del KVCacheConfigurator._build_ascend_mla_kv_pool
"""

FAILED_REGISTRATION = """
import sglang
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
def register(*arguments, **options):
    raise TypeError("register() got an unexpected keyword argument")
SpeculativeAlgorithm.register = register
"""

AS_ORDINARY_EXCEPTION = """
import sglang_ascend.plugin.errors
class StartupRefused(ValueError):
    pass
sglang_ascend.plugin.errors.StartupRefused = StartupRefused
"""

ENGINE = """
import sys
import sglang
if __name__ == "__main__":
    sglang.Engine(
        model_path=sys.argv[1],
        skip_tokenizer_init=True,
        speculative_algorithm="MTP",
        speculative_num_steps=16,
    )
    print("served")
"""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True)


def run_text(text: str, flags: list[str]) -> subprocess.CompletedProcess[str]:
    return template().run_text(text, flags, os.environ, timeout=300)


def assert_refused(done: subprocess.CompletedProcess[str], *said: str) -> None:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    sentences = [line for line in lines if line.startswith("sglang-ascend: ")]
    assert done.returncode == 1, done.stderr
    assert len(sentences) == 1, done.stderr
    assert lines[-1] == sentences[0]
    assert "Traceback" not in done.stderr
    assert "served" not in done.stdout
    for part in said:
        assert part in sentences[0]


@pytest.fixture
def flags(tiny_mimo) -> list[str]:
    # No port is ever opened: every one of these is refused while arguments are resolved.
    common = f"--model-path {tiny_mimo} --skip-tokenizer-init --speculative-algorithm MTP"
    return common.split()


def test_another_version_of_sglang_is_refused(flags):
    done = run_text(WRONG_VERSION + LAUNCH, flags)
    assert_refused(done, "adapts SGLang 0.5.23, found 0.5.24", "install sglang==0.5.23")


def test_the_same_refusal_as_an_ordinary_exception_is_only_logged(flags):
    """The control: SGLang goes on without us, and stops elsewhere for another reason."""
    done = run_text(WRONG_VERSION + AS_ORDINARY_EXCEPTION + LAUNCH, flags)
    assert "Failed to execute general plugin: sglang_ascend" in done.stderr
    assert not done.stderr.strip().splitlines()[-1].startswith("sglang-ascend: ")


def test_a_hook_whose_target_is_gone_is_refused(flags):
    done = run_text(MISSING_TARGET + LAUNCH, flags)
    # SGLang's own account of the failed hook is a logged traceback; ours is the last word.
    sentence = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert sentence.startswith("sglang-ascend: hook sglang.srt.mem_cache.kv_cache_configurator.")
    assert "_build_ascend_mla_kv_pool could not be applied" in sentence
    assert "sglang-ascend doctor" in sentence


def test_a_registration_that_fails_is_refused(flags):
    done = run_text(FAILED_REGISTRATION + LAUNCH, flags)
    assert_refused(done, "registration failed (TypeError: register() got an", "doctor")


@pytest.mark.parametrize("name", ["SGLANG_ASCEND_HOOKS", "SGLANG_ASCEND_LOG_WAITS"])
def test_a_variable_that_registration_reads_is_refused_by_its_name(flags, monkeypatch, name):
    monkeypatch.setenv(name, "yes")
    assert_refused(run_text(LAUNCH, flags), f"sglang-ascend: {name}='yes' is not usable")


def test_a_variable_that_nothing_reads_is_warned_of(flags, monkeypatch):
    monkeypatch.setenv("SGLANG_ASCEND_LOOKUP_DRAFT", "8")
    done = run_text(LAUNCH, [*flags, "--speculative-eagle-topk=2"])
    assert "SGLANG_ASCEND_LOOKUP_DRAFT is set but nothing reads it: did you mean" in done.stderr
    assert "SGLANG_ASCEND_HOOKS is set" not in done.stderr


def test_launch_server_refuses_a_tree(flags):
    done = run(sys.executable, "-m", "sglang.launch_server", *flags, "--speculative-eagle-topk=2")
    assert_refused(done, "--speculative-eagle-topk 2 asks for a tree")


def test_sglang_serve_takes_the_same_route(flags):
    sglang = Path(sys.executable).with_name("sglang")
    done = run(sglang, "serve", *flags, "--speculative-num-draft-tokens=4", "--pp-size=2")
    assert_refused(done, "--pp-size above 1 is not served with --speculative-algorithm MTP")


def test_the_offline_engine_takes_the_same_route(tiny_mimo):
    done = run(sys.executable, "-c", ENGINE, tiny_mimo)
    assert_refused(done, "--speculative-num-steps must be between 1 and 15, got 16")
