"""`python -m MODULE ARGUMENTS` as a copy of the template, whose socket is in the environment.

For `python -S -E`: without packages and without sitecustomize.py, which are the copy's.
"""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import begun  # noqa: E402

program = begun.begin(os.environ[begun.TEMPLATE], sys.argv[1:], os.environ, (0, 1, 2))
status = program.wait()
sys.exit(status if status >= 0 else 128 - status)  # as a shell says of a signal
