import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# What a program may use of a Hopper multiprocessor.
SHARED_BYTES = 227 * 1024


def test_kernels_compile_for_hopper() -> None:
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    program = [sys.executable, "-m", "tests.ops.indexer.compile_kernels"]
    run = subprocess.run(
        program, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    report = json.loads(run.stdout)
    assert all(kernel["shared_bytes"] <= SHARED_BYTES for kernel in report.values())
    hopper = [kernel for name, kernel in report.items() if name.startswith("hopper")]
    # Two warpgroups of two halves, each 128 dimensions in steps of 16.
    assert [kernel["wgmma"] for kernel in hopper] == [2 * 2 * 8] * len(hopper)
    assert all(kernel["tma"] for kernel in hopper)
    assert report["portable"]["wgmma"]
