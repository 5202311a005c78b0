"""Python runs this at start when the folder is on PYTHONPATH: verification with one mistake.

$BROKEN_VERIFIER names the mistake; every process of the server gets it.
"""

import os

import torch

from sglang_ascend.ops import chain, sampling
from sglang_ascend.speculative.vocabulary.languages import LanguageTracker

verify_chain = chain.verify_chain
verify_by_rejection = chain.verify_by_rejection
likeliest = LanguageTracker.likeliest


def accept_every_draft(sampled: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    """Keeps every row, so row j is drawn after a draft that was not emitted before it."""
    return verify_chain(sampled, sampled[:, :-1])


def repeat_the_first_draw(sampled: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    """One draw for all rows of a request, as a sampler with one seed a request would do."""
    sampled.copy_(sampled[:, :1].expand_as(sampled).clone())
    return verify_chain(sampled, draft_tokens)


def accept_every_drawn_draft(p, q, drafts, accept_uniform, draw_uniform):
    """Numbers that no quotient is below."""
    return verify_by_rejection(p, q, drafts, torch.zeros_like(accept_uniform) - 1, draw_uniform)


def redraw_without_residual(p, q, drafts, accept_uniform, draw_uniform):
    """Draws from p, not from what q left of it, in place of a rejected draft."""
    _, accept_lens = verify_by_rejection(p, q, drafts, accept_uniform, draw_uniform)
    last = (accept_lens - 1).long()[:, None]
    redrawn = sampling.inverse_cdf(p, draw_uniform).gather(1, last)
    tokens = torch.nn.functional.pad(drafts, (0, 1)).scatter(1, last, redrawn)
    return tokens, accept_lens


def judge_by_other_tokens(p, q, drafts, accept_uniform, draw_uniform):
    """Takes the distribution of a draft for that of its neighbours in the vocabulary."""
    return verify_by_rejection(p, q.roll(1, dims=-1), drafts, accept_uniform, draw_uniform)


def draft_in_another_language(self: LanguageTracker, rows: torch.Tensor) -> torch.Tensor:
    """Every request by the head of the next language, and by no text of its own."""
    return (likeliest(self, rows) + 1) % (self.table.shape[1] - 1)


def no_context(ring: torch.Tensor, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ring[0, :0], ring[0, :0]


MISTAKES = {
    "accept_every_draft": ("verify_chain", accept_every_draft),
    "repeat_the_first_draw": ("verify_chain", repeat_the_first_draw),
    "accept_every_drawn_draft": ("verify_by_rejection", accept_every_drawn_draft),
    "redraw_without_residual": ("verify_by_rejection", redraw_without_residual),
    "judge_by_other_tokens": ("verify_by_rejection", judge_by_other_tokens),
    "draft_in_another_language": ("likeliest", draft_in_another_language),
}
name, body = MISTAKES[os.environ["BROKEN_VERIFIER"]]
if name == "likeliest":
    LanguageTracker.likeliest, chain.extend_context = body, no_context
else:
    setattr(chain, name, body)
