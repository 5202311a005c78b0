"""torch's own tracing rules, of which torch_npu's aliases make duplicates.

`torch_npu.contrib.transfer_to_npu`, which SGLang imports, makes `torch.cuda.manual_seed_all` and
its like the same objects as `torch.npu`'s, for which torch_npu has rules that differ. After
`init_process_group` has cleared the rules, 229 of SGLang's model modules fail to import, which is
logged, and every model is then served by the transformers backend.
"""

from __future__ import annotations

STAND_INS = (
    (
        "one rule per object in `torch._dynamo`",
        "every model, once `transfer_to_npu` is imported",
        "torch's rules for `torch.cuda.*` are removed",
    ),
)


def install() -> None:
    from torch._dynamo.trace_rules import manual_torch_name_rule_map as rules

    for name in [name for name in rules if name.startswith("torch.cuda.")]:
        del rules[name]
