"""Solvers: which codes and scales stand for a float weight."""

from sglang_ascend.quantization.solve.clipping import learned_clipping
from sglang_ascend.quantization.solve.gptq import gptq, hessian_error
from sglang_ascend.quantization.solve.hqq import hqq
from sglang_ascend.quantization.solve.qoq import qoq
from sglang_ascend.quantization.solve.rtn import Grid, rtn

__all__ = ["Grid", "gptq", "hessian_error", "hqq", "learned_clipping", "qoq", "rtn"]
