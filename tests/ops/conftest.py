"""Triton's interpreter, in which the kernels are tested on a CPU."""

from __future__ import annotations

import pytest


@pytest.fixture
def triton_interpreter(monkeypatch):
    """Kernels whose modules are imported from here on are interpreted.

    Triton reads the variable where a function is defined. What it defines itself (tl.sum, tl.cdiv)
    may have been imported before, by SGLang for one: those are defined again.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    import triton.language as tl
    from triton.language import standard
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    compiled = {name: f for name, f in vars(standard).items() if isinstance(f, JITFunction)}
    for name, function in compiled.items():
        interpreted = InterpretedFunction(function.fn)
        monkeypatch.setattr(standard, name, interpreted)
        if getattr(tl, name, None) is function:
            monkeypatch.setattr(tl, name, interpreted)
