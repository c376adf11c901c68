"""Compiles kernels in a process of its own, where Triton's interpreter is off."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# What a program may use of a Hopper multiprocessor.
SHARED_BYTES = 227 * 1024


def compile_report(module: str) -> dict[str, Any]:
    """What the program `module` prints: a JSON object, one entry per kernel."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    run = subprocess.run(
        [sys.executable, "-m", module],
        env=environment,
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    report: dict[str, Any] = json.loads(run.stdout)
    return report
