"""Python runs this at start when the folder is on PYTHONPATH: processes that share a request, with
one mistake between them.

$BROKEN_PROCESSES names the mistake; every process of the server gets it.
"""

import os

import torch

manual_seed = torch.manual_seed


def ranks_draw_apart() -> None:
    """Each rank seeds its sampler by itself."""
    torch.manual_seed = lambda seed: manual_seed(seed + os.getpid())


{"ranks_draw_apart": ranks_draw_apart}[os.environ["BROKEN_PROCESSES"]]()
