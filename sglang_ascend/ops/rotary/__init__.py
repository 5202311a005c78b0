"""Rotary position embeddings in their two pairings."""

from sglang_ascend.ops.dispatch import Op
from sglang_ascend.ops.on_npu import npu_body
from sglang_ascend.ops.rotary import fused, reference

rotate_halves = Op("rotary.rotate_halves", reference.rotate_halves)
rotate_halves.register(npu_body(fused.rotate_halves, fused.accepts_halves))
rotate_pairs = Op("rotary.rotate_pairs", reference.rotate_pairs)
rotate_pairs.register(npu_body(fused.rotate_pairs, fused.accepts_pairs))
