"""The top-k and top-p filter of logits."""

from __future__ import annotations

import math

from torch import Tensor

from npu_emulation.goldens.registry import golden


@golden("npu::npu_top_k_top_p")
def top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """logits [rows, V] with -inf for what is left out; p [rows] like logits, k [rows] int32.

    First x below the k-th largest (its equals stay), then, of the rest in ascending order, those
    whose probabilities sum to at most 1 - p; the largest always stays.
    """
    kept = logits.float()
    if k is not None:
        places = (kept.shape[-1] - k.long()).clamp(min=0).unsqueeze(-1)
        kth = kept.sort(-1).values.gather(-1, places)
        kept = kept.masked_fill(kept < kth, -math.inf)
    if p is not None:
        ascending, order = kept.sort(dim=-1, stable=True)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - p.float().unsqueeze(-1)
        dropped[..., -1] = False
        kept = kept.masked_fill(dropped.scatter(-1, order, dropped), -math.inf)
    return kept.to(logits.dtype)
