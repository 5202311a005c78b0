"""The attention kernels compile for an H100, without one, and their tiles fit it: shared memory as
tiles.py counts it, and sums that stay in registers. Nothing is run, and nothing said of speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SHARED_BYTES = 227 << 10
PROGRAM = Path(__file__).with_name("compiled_for_h100.py")


@pytest.fixture(scope="module")
def programs():
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, str(PROGRAM)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout)


def test_every_program_fits_the_shared_memory_and_the_control_does_not(programs):
    too_large = {name for name, program in programs.items() if program["shared"] > SHARED_BYTES}
    assert too_large == {"control"}


def test_shared_memory_is_what_the_tiles_were_chosen_by(programs):
    """2 B * 576 * (64 rows + 3 tiles of 32 keys) for the factors, then what warps exchange."""
    factors = 2 * 576 * (64 + 3 * 32)
    for name in ("mla 16 heads, 4 rows, torch.bfloat16", "mla 128 heads, 4 rows, torch.bfloat16"):
        assert factors <= programs[name]["shared"] <= factors + (16 << 10)
        assert programs[name]["wgmma"], "64 rows are a warp group's"


def test_the_sums_stay_in_registers(programs):
    """fp32, for which speed is no aim, spills and so shows that spills are seen."""
    for name, program in programs.items():
        if "float32" not in name and name != "control":
            assert program["spilled"] <= 128, name
    assert programs["mla 16 heads, 4 rows, torch.float32"]["spilled"] > 128
