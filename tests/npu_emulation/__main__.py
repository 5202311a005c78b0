"""python -m npu_emulation [--soc NAME] [--cann VERSION] COMMAND...: run it on an emulated NPU."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from npu_emulation.environment import (
    DEFAULT_CANN,
    SOCS,
    CannPresentError,
    emulated_environment,
    require_no_cann,
)
from npu_emulation.stubs import BuildError, build


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m npu_emulation", description=__doc__)
    parser.add_argument("--soc", default=SOCS[0], help="the name that aclrtGetSocName gives")
    parser.add_argument("--cann", default=DEFAULT_CANN, help="the version that CANN reports")
    parser.add_argument("--check", action="store_true", help="only refuse where CANN is present")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    folder = Path(sys.prefix) / "npu_emulation"
    try:
        require_no_cann(os.environ, folder)
        if options.check:
            return
        build(folder)
    except (CannPresentError, BuildError) as error:
        sys.exit(f"npu_emulation: {error}")
    if not options.command:
        parser.error("name a command to run")
    environ = emulated_environment(os.environ, folder, options.soc, options.cann)
    os.execvpe(options.command[0], options.command, environ)


if __name__ == "__main__":
    main()
