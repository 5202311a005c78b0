"""A linear layer over a weight prepared once for its device."""

from sglang_ascend.ops.dispatch import Implementation, Op
from sglang_ascend.ops.linear import onednn, reference

_CPU = frozenset({"cpu"})

prepare = Op("linear.prepare", reference.prepare)
prepare.register(
    Implementation(
        "onednn", onednn.prepare_packed, _CPU, onednn.is_available, onednn.accepts_weight
    )
)
linear = Op("linear.linear", reference.linear)
linear.register(
    Implementation("onednn", onednn.linear_packed, _CPU, onednn.is_available, onednn.accepts_rows)
)
