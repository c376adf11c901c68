"""Keeps the command line's output to what glm5 says."""

from __future__ import annotations

import logging
import warnings

# They report on every start that optional packages are not installed, deprecate their own classes,
# or tell standard output of each kernel that they compile.
_TALKATIVE = (
    "megatron",
    "tilelang.jit",
    "torch.utils.cpp_extension",
    "torch.distributed.checkpoint",
)


def quiet_libraries() -> None:
    """Silences start-up warnings of the libraries; errors still come through."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    # on a CPU torch's warnings name the runtime that stands between it and its callers
    for module in ("megatron", "torch", "transformers", "peft", r"glm5\.runtime\.cpu"):
        warnings.filterwarnings("ignore", module=rf"{module}(\..*)?")
    # from the first time that Python compiles them, which goes by the file, not the module
    warnings.filterwarnings("ignore", category=SyntaxWarning)
