"""A linear layer over a weight prepared once for its device."""

from sglang_ascend.ops.dispatch import Implementation, Op, imported_at_call, is_installed
from sglang_ascend.ops.linear import onednn, reference

_CPU = frozenset({"cpu"})


def _has_numba_body() -> bool:
    """It takes what it does not multiply itself to oneDNN."""
    return onednn.is_available() and onednn.has_fused_products() and is_installed("numba")


def _has_onednn_alone() -> bool:
    return onednn.is_available() and not _has_numba_body()


def _numba_body(name: str, accepts: str) -> Implementation:
    function, accepts_call = (
        imported_at_call("sglang_ascend.ops.linear.numba", of_body) for of_body in (name, accepts)
    )
    return Implementation("numba", function, _CPU, _has_numba_body, accepts_call)


prepare = Op("linear.prepare", reference.prepare)
prepare.register(_numba_body("prepare", "accepts_weight"))
prepare.register(
    Implementation("onednn", onednn.prepare_packed, _CPU, _has_onednn_alone, onednn.accepts_weight)
)
linear = Op("linear.linear", reference.linear)
linear.register(_numba_body("linear", "accepts_rows"))
linear.register(
    Implementation("onednn", onednn.linear_packed, _CPU, _has_onednn_alone, onednn.accepts_rows)
)
