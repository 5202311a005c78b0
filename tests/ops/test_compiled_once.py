"""No kernel that a step launches outside its graphs is compiled under a request: of batches of 1 to
160 requests none asks Triton for a program that the warm-up at start has not."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("compiled_kernels.py")


def programs(*words: str) -> dict[str, dict[str, int]]:
    """How many each kernel asks for at start and later."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, str(PROGRAM), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_nothing_is_compiled_after_the_warm_up():
    found = programs()
    assert len(found["later"]) == 7
    assert set(found["at_start"].values()) == {1} and set(found["later"].values()) == {0}


def test_the_control_specialized_kernels_are_compiled_again():
    assert all(programs("specialized")["later"].values())
