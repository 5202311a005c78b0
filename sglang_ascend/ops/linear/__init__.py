"""Linear layers: of a weight prepared once for its device, and of matrices of each head's own."""

from sglang_ascend.ops.dispatch import CPU, Implementation, Op, is_installed, numba_body
from sglang_ascend.ops.linear import onednn, reference

NUMBA = "sglang_ascend.ops.linear.numba"


def _has_numba_body() -> bool:
    """It takes what it does not multiply itself to oneDNN."""
    return onednn.is_available() and onednn.has_fused_products() and is_installed("numba")


def _has_onednn_alone() -> bool:
    return onednn.is_available() and not _has_numba_body()


prepare = Op("linear.prepare", reference.prepare)
prepare.register(numba_body(NUMBA, "prepare", "accepts_weight", _has_numba_body))
prepare.register(
    Implementation("onednn", onednn.prepare_packed, CPU, _has_onednn_alone, onednn.accepts_weight)
)
linear = Op("linear.linear", reference.linear)
linear.register(numba_body(NUMBA, "linear", "accepts_rows", _has_numba_body))
linear.register(
    Implementation("onednn", onednn.linear_packed, CPU, _has_onednn_alone, onednn.accepts_rows)
)
by_head = Op("linear.by_head", reference.by_head)
by_head.register(numba_body(f"{NUMBA}_heads", "by_head", "accepts"))
