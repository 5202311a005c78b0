"""Python runs this at start when the folder is on PYTHONPATH: the K of every step is given.

$FORCED_DRAFTS is "random", or the K of step 1, 2, ..., which begins again at its end.
$MISTAKE is empty, or "not caught up": the MTP layer never sees what it skipped.
"""

from __future__ import annotations

import os
import random
from itertools import cycle

from sglang_ascend.speculative.adaptive.controller import AdaptiveDrafts
from sglang_ascend.speculative.skipped import SkippedRows

given = os.environ["FORCED_DRAFTS"]
rng = random.Random(11)
schedule = cycle([] if given == "random" else map(int, given.split(",")))


def choose(drafts: AdaptiveDrafts, *args) -> int:
    if given == "random":
        return rng.randint(0, drafts.max_drafts)
    return next(schedule)


AdaptiveDrafts.choose = choose
if os.environ.get("MISTAKE") == "not caught up":
    SkippedRows.catch_up = lambda *args: None
