"""What begins every process on the emulated NPU makes SGLang importable, touches no process that
does not import it, and is nothing outside of the emulation."""

from __future__ import annotations

import os
import subprocess
import sys

from npu_emulation.environment import LIBRARIES, START, build_folder, emulated_environment

EMULATED = emulated_environment(os.environ, build_folder())


def run(code: str, environ: dict[str, str]) -> str:
    """What the program printed or, if it failed, how it ended."""
    process = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120
    )
    output = process.stderr if process.returncode else process.stdout
    return output.splitlines()[-1]


FINDERS = "import sys; print([type(finder).__name__ for finder in sys.meta_path])"
LOADED = "import sys; print({'torch', 'triton', 'npu_emulation', 'sglang'} & set(sys.modules))"
IMPORT = "import sglang.srt.sampling.penaltylib; print('imported')"


def test_it_begins_a_process_on_the_emulated_npu_and_loads_nothing():
    assert "StartFinder" in run(FINDERS, EMULATED)
    assert run(LOADED, EMULATED) == "set()"


def test_it_is_nothing_where_the_npu_is_not_emulated():
    elsewhere = {name: value for name, value in EMULATED.items() if name != LIBRARIES}
    assert str(START) in elsewhere["PYTHONPATH"]
    assert "StartFinder" not in run(FINDERS, elsewhere)


def test_sglang_can_be_imported_with_it_only():
    others = [path for path in EMULATED["PYTHONPATH"].split(":") if path != str(START)]
    assert run(IMPORT, EMULATED) == "imported"
    without = run(IMPORT, EMULATED | {"PYTHONPATH": ":".join(others)})
    assert "torchair package is not installed" in without
