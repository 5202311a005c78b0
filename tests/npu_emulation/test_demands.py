"""What this package says that torch_npu demands is what torch_npu says, and its calls keep to it:
each call site, on each SoC, under the real schemas and Meta kernels.
"""

from __future__ import annotations

import ast
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch_npu
from npu_calls import GOOD

from sglang_ascend.ops.npu import DEMANDS, CheckedCalls, difference, documentation
from sglang_ascend.ops.npu.demand import Demand

ROOT = Path(__file__).parents[2]
GOOD_CALLS = [(name, kind) for name, kinds in GOOD.items() for kind in kinds]
# torch_npu's own Meta kernel asks for k, which its schema leaves out; storage formats have none.
WITHOUT_META = {
    ("npu_top_k_top_p", "p alone"): (TypeError, "'k'"),
    ("npu_format_cast", ""): (NotImplementedError, "no fake impl"),
    ("get_npu_format", ""): (NotImplementedError, "no fake impl"),
}
# The number by which torch_npu's own Meta kernels know the SoCs.
SOCS = {"Ascend910B3": 223, "Ascend910_9392": 253, "Ascend950PR_9599": 260}


def call_sites(folder: Path) -> dict[str, list[str]]:
    """torch.ops.npu.NAME and torch_npu.NAME that are called anywhere in the package."""
    sites: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if owner in ("torch.ops.npu", "torch_npu"):
                    sites.setdefault(node.func.attr, []).append(f"{path.name}:{node.lineno}")
    return sites


@pytest.mark.parametrize("name", DEMANDS)
def test_the_installed_operator_is_the_one_that_is_described(name):
    demand, docs = DEMANDS[name], documentation()
    assert difference(demand, docs) is None
    for rule in demand.rules:
        assert not rule.line or rule.quote in docs[rule.line - 1]


def test_another_operator_is_noticed():
    demand, docs = DEMANDS["npu_top_k_top_p"], documentation()
    assert "no operator npu_gone" in difference(Demand("npu_gone", ()), docs)
    assert "no longer says" in difference(demand, docs[1:])
    other = Demand("npu_swiglu", demand.rules)
    assert "no longer says" in difference(other, docs[:100])
    packet = SimpleNamespace(name="npu_swiglu", schema=demand.schema, rules=())
    assert "another schema" in difference(packet, docs)


def test_every_operator_that_is_called_has_its_demands():
    sites = call_sites(ROOT / "sglang_ascend")
    assert sites
    assert {name: where for name, where in sites.items() if name not in DEMANDS} == {}


def test_a_call_without_demands_would_be_found(tmp_path):
    (tmp_path / "body.py").write_text("def f(x):\n    return torch.ops.npu.npu_gelu(x)\n")
    assert call_sites(tmp_path) == {"npu_gelu": ["body.py:2"]}


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize(("name", "kind"), GOOD_CALLS)
def test_a_documented_call_passes_the_meta_kernel(name, kind, soc, monkeypatch):
    registrations = torch_npu.op_plugin.meta._meta_registrations
    monkeypatch.setattr(registrations, "get_soc_version", lambda: SOCS[soc], raising=False)
    error, message = WITHOUT_META.get((name, kind), (None, ""))
    with CheckedCalls(), pytest.raises(error, match=message) if error else nullcontext():
        getattr(torch.ops.npu, name)(**GOOD[name][kind])
