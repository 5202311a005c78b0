"""Python runs this at start when the folder is on PYTHONPATH: verification with one mistake.

$BROKEN_VERIFIER names the mistake; every process of the server gets it.
"""

import os

import torch

from sglang_ascend.ops import chain

verify_chain = chain.verify_chain


def accept_every_draft(sampled: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    """Keeps every row, so row j is drawn after a draft that was not emitted before it."""
    return verify_chain(sampled, sampled[:, :-1])


def repeat_the_first_draw(sampled: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    """One draw for all rows of a request, as a sampler with one seed a request would do."""
    sampled.copy_(sampled[:, :1].expand_as(sampled).clone())
    return verify_chain(sampled, draft_tokens)


chain.verify_chain = {
    "accept_every_draft": accept_every_draft,
    "repeat_the_first_draw": repeat_the_first_draw,
}[os.environ["BROKEN_VERIFIER"]]
