"""Makes Triton's CPU interpreter run: import this before any module that holds a kernel."""

from typing import Any

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    # Triton 3.6 calls int() on one-element arrays, which NumPy no longer allows.
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch
