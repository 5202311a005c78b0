"""Operators on the emulated NPU have the CPU's values, and torch_npu's own calls are counted."""

from __future__ import annotations

import pytest
import torch
import torch_npu

from npu_emulation.counters import counted, num_pending
from npu_emulation.goldens import GOLDENS, UnsupportedArgumentError
from npu_emulation.goldens.registry import golden
from npu_emulation.numerics import EmulationError


def test_a_block_of_aten_and_npu_operators_has_the_values_of_plain_torch(numerics):
    host = {
        "x": torch.randn(4, 32),
        "residual": torch.randn(4, 32),
        "gamma": torch.randn(32),
        "weight": torch.randn(32, 16),
    }
    x, residual, gamma, weight = (tensor.to("npu") for tensor in host.values())
    y, _, total = torch_npu.npu_add_rms_norm(x, residual, gamma, 1e-6)
    result = torch_npu.npu_swiglu(y @ weight)
    sum64 = (host["x"] + host["residual"]).double()
    y64 = sum64 / (sum64.square().mean(-1, keepdim=True) + 1e-6).sqrt() * host["gamma"]
    gate, up = (y64 @ host["weight"].double()).chunk(2, -1)
    torch.testing.assert_close(result.cpu(), (gate / (1 + (-gate).exp()) * up).float())
    torch.testing.assert_close(total.cpu(), sum64.float())
    assert numerics.computed["npu::npu_swiglu"] == 1


def test_nothing_is_computed_before_someone_waits(numerics):
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    with counted() as counts:
        result = (x + 1) * 2
        assert num_pending() == 2
    assert counts.launches == 2
    assert result.tolist() == [4.0] * 4
    assert num_pending() == 0


def test_an_index_by_integers_waits_for_nothing(numerics):
    x, places = torch.arange(4.0, device="npu"), torch.tensor([2, 0], device="npu")
    doubled = x * 2
    with counted() as counts:
        picked = doubled[places]
    assert counts.stream_syncs == 0
    assert num_pending() == 2
    assert picked.tolist() == [4.0, 0.0]


def test_in_place_and_out_operators_write_where_they_should(numerics):
    x = torch.arange(6.0, device="npu")
    x[2:4].mul_(10)
    torch.add(x[:2], 1, out=x[4:])
    x.index_put_((torch.tensor([0], device="npu"),), torch.tensor([7.0], device="npu"))
    assert x.tolist() == [7.0, 1.0, 20.0, 30.0, 1.0, 2.0]


def test_shapes_that_depend_on_values_are_the_cpu_s(numerics):
    x = torch.tensor([3.0, -1.0, 2.0, -5.0])
    on_device = x.to("npu")
    assert torch.equal(on_device[on_device > 0].cpu(), x[x > 0])
    assert torch.equal(torch.nonzero(on_device > 0).cpu(), torch.nonzero(x > 0))
    assert torch.equal(torch.unique((on_device > 0).int()).cpu(), torch.tensor([0, 1]).int())


def test_a_cast_to_float64_gives_float32_as_torch_npu_does(numerics):
    whole = torch.tensor([2**32 - 1, 5])
    cast = whole.to("npu").double()
    assert cast.dtype == torch.float32
    assert torch.equal(cast.cpu(), whole.float())


def test_random_numbers_follow_the_seed_and_not_the_moment_they_are_waited_for(numerics):
    torch.manual_seed(5)
    first = torch.randn(8, device="npu")
    torch.rand(8, device="npu").cpu()
    torch.manual_seed(5)
    again = torch.randn(8, device="npu")
    again.cpu()
    assert torch.equal(first.cpu(), again.cpu())
    assert first.cpu().std() > 0


def test_every_definition_takes_the_parameters_of_torch_npu_s_schema():
    import inspect

    for name, definition in GOLDENS.items():
        namespace, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), operator)
        known = set()
        for overload in packet.overloads():
            known |= {argument.name for argument in getattr(packet, overload)._schema.arguments}
        assert set(inspect.signature(definition).parameters) <= known, name


def test_an_operator_without_a_definition_says_so(numerics):
    with pytest.raises(EmulationError, match="npu::npu_gelu is not emulated: define it"):
        torch_npu.npu_gelu(torch.ones(4, device="npu"))


def test_an_argument_that_a_definition_does_not_take_is_refused(numerics):
    x = torch.ones(2, 8, device="npu")
    with pytest.raises(UnsupportedArgumentError, match="npu_dynamic_quant with dst_type_max="):
        torch_npu.npu_dynamic_quant(x, dst_type_max=1.0)


@pytest.fixture
def wrong_swiglu():
    right = GOLDENS["npu::npu_swiglu"]
    golden("npu::npu_swiglu")(lambda input, dim=-1: input)
    yield
    golden("npu::npu_swiglu")(right)


def test_a_definition_whose_shape_contradicts_torch_npu_is_an_error(numerics, wrong_swiglu):
    result = torch_npu.npu_swiglu(torch.ones(2, 4, device="npu"))
    with pytest.raises(EmulationError, match=r"\(2, 2\) .* in torch_npu and \(2, 4\)"):
        result.cpu()


def test_composites_are_computed_in_inference_mode_too(numerics):
    """There they reach it whole, and `to` looks like a view, which is left to torch_npu."""
    host = torch.arange(12.0).view(3, 4)
    with torch.inference_mode():
        x = host.to("npu")
        assert torch.equal(x.to(torch.bfloat16).cpu(), host.bfloat16())
        assert torch.equal(torch.nn.functional.linear(x, x).cpu(), host @ host.T)
        assert torch.equal(x.chunk(2, -1)[1].contiguous().cpu(), host[:, 2:])
