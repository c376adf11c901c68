"""Runs plain Triton kernels on the CPU, kernel by kernel, without TRITON_INTERPRET."""

from collections.abc import Iterable
from types import ModuleType

import pytest
import triton.experimental.gluon  # noqa: F401 (expects the compiled functions when imported)
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction


def interpret(monkeypatch: pytest.MonkeyPatch, modules: Iterable[ModuleType]) -> None:
    """Replace every kernel of these modules by its interpreted form."""
    set_attr = interpreter._LangPatchScope.set_attr

    def set_attr_for_new_numpy(self, target, name, value):
        # Triton 3.6 says int(array), which numpy 2.4 refuses for arrays of one dimension.
        if name == "__index__":
            value = _to_int
        set_attr(self, target, name, value)

    monkeypatch.setattr(interpreter._LangPatchScope, "set_attr", set_attr_for_new_numpy)
    for module in (tl, tl.standard, *modules):
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                interpreted = interpreter.InterpretedFunction(function.fn)
                monkeypatch.setattr(module, name, interpreted)


def _to_int(scalar) -> int:
    return int(scalar.handle.data.item())
