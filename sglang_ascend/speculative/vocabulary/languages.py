"""Which language each running request writes now, told by token ids alone."""

from __future__ import annotations

import torch

from sglang_ascend.speculative.vocabulary.file import DraftVocabulary, Language

# Tokens after which what was read before counts half: a reply may change its language.
HALF_LIFE = 16
DECAY = 0.5 ** (1 / HALF_LIFE)
# What is read of a prompt: what is older weighs less than 2 % of what is read.
WINDOW = 6 * HALF_LIFE
# Of a language's text, the least share of tokens that its list lacks or that are of another script.
MIN_UNLISTED, MIN_OTHER_SCRIPT = 0.01, 0.001


def evidence(vocabulary: DraftVocabulary) -> torch.Tensor:
    """log p(token | language), float32 [vocab_size, languages + 1].

    A listed token has the share that was counted. The others have what is left, divided as the
    language divides its tokens among scripts. The last column is text of no listed language, every
    token as likely: what it gains, the whole head drafts. Special tokens say nothing.
    """
    scripts = vocabulary.script_of_token
    assert scripts is not None
    columns = [_log_probs(language, scripts) for language in vocabulary.languages]
    columns.append(torch.full((len(scripts),), 1 / len(scripts)).log())
    table = torch.stack(columns, dim=1)
    if vocabulary.special_script is not None:
        table[scripts == vocabulary.special_script] = 0.0
    return table


def _log_probs(language: Language, scripts: torch.Tensor) -> torch.Tensor:
    """float32 [vocab_size]."""
    ids, counts = language.token_ids, language.counts.double()
    num_scripts = int(scripts.max()) + 1
    of_script = torch.zeros(num_scripts, dtype=torch.float64).index_add_(0, scripts[ids], counts)
    share = of_script / counts.sum() + MIN_OTHER_SCRIPT
    tokens_of = torch.bincount(scripts, minlength=num_scripts).clamp_min(1)
    probs = MIN_UNLISTED * (share / share.sum() / tokens_of)[scripts]
    probs[ids] += (1 - MIN_UNLISTED) * counts / counts.sum()
    return probs.log().float()


class LanguageTracker:
    """The running sums of evidence of the requests in each row of a pool. Does not synchronise."""

    def __init__(self, table: torch.Tensor, num_rows: int, device: torch.device | str) -> None:
        self.table = table.to(device)
        self._sums = torch.zeros(num_rows, table.shape[1], device=device)

    def restart(self, rows: torch.Tensor, known: list[list[int]]) -> None:
        """Requests begin in ``rows``, each with the tokens that it has."""
        for row, tokens in zip(rows, known, strict=True):
            last = torch.tensor(tokens[-WINDOW:], dtype=torch.int64, device=self.table.device)
            weights = DECAY ** torch.arange(len(last) - 1, -1, -1.0, device=self.table.device)
            self._sums[row] = weights @ self.table[last]

    def advance(self, rows: torch.Tensor, tokens: torch.Tensor, num_kept: torch.Tensor) -> None:
        """The first ``num_kept`` (int [batch]) of ``tokens`` (int64 [batch, width]) are emitted."""
        age = num_kept[:, None] - 1 - torch.arange(tokens.shape[1], device=tokens.device)
        weights = torch.where(age < 0, 0.0, DECAY ** age.float())
        new = (weights[:, None] @ self.table[tokens])[:, 0]
        self._sums[rows] = self._sums[rows] * (DECAY ** num_kept.float())[:, None] + new

    def likeliest(self, rows: torch.Tensor) -> torch.Tensor:
        """int64 [batch], places of languages; their number stands for none of them."""
        return self._sums[rows].argmax(dim=1)
