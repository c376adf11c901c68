"""`glm5 bench kernels`."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from glm5.bench.ceilings import Ceilings, Work, measure_ceilings
from glm5.bench.kernels import COLUMNS, Row, cells, failed, measure
from glm5.bench.problems import OURS
from glm5.cli.output import Output
from glm5.errors import BackendError, CheckFailedError, ConfigError

_PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "tilelang",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "flash-mla",
    "sgl-flash-mla",
)


def run_bench_kernels(
    *, with_peers: bool, roofline: Path | None, json: bool, only: str = ""
) -> None:
    """Prints ceilings and times of the cases whose names hold `only`.

    Raises BackendError without a GPU, ConfigError for a name that no case holds, CheckFailedError
    when an output of ours is wrong.
    """
    import torch

    if not torch.cuda.is_available():
        raise BackendError(
            "the kernels are timed on a GPU",
            got="no CUDA device",
            expected="an NVIDIA GPU",
            remedy="run this on the machine whose speed you want to know",
        )
    from glm5.bench.cases import all_problems, case_names
    from glm5.bench.peers import Peers, find_peers
    from glm5.bench.timing import interleaved_medians, peak_bytes

    if not case_names(only):
        raise ConfigError(
            "no case of the benchmark has this in its name",
            got=only,
            expected="a part of " + "; ".join(case_names()),
        )
    output = Output(json)
    peers = find_peers() if with_peers else Peers()
    if peers.missing:
        output.say(f"not compared: {peers.missing}")
    ceilings = measure_ceilings()
    output.say(_ceilings_text(ceilings))
    rows: list[Row] = []
    works: dict[tuple[str, str], Work] = {}
    for problem in all_problems(peers, only):
        output.say(f"measuring {problem.case}")
        rows += measure(
            problem, ceilings, clock=interleaved_medians, meter=peak_bytes, all_names=with_peers
        )
        works |= {(problem.case, name): work for name, work in problem.works.items()}
    if roofline is not None:
        from glm5.bench.plot import plot_roofline

        ours = [row for row in rows if row.implementation == OURS]
        plot_roofline(ours, works, ceilings, roofline)
    show(output, rows, ceilings, _machine(), str(peers.missing))


def show(
    output: Output, rows: list[Row], ceilings: Ceilings, machine: dict[str, str], missing: str
) -> None:
    """The table or the JSON object; raises CheckFailedError when an output of ours was wrong."""
    output.table("kernels", COLUMNS, [cells(row, rows) for row in rows])
    output.say(", ".join(f"{name} {value}" for name, value in machine.items()))
    if output.as_json:
        result: dict[str, Any] = {
            **machine,
            "ceilings": ceilings._asdict(),
            "not_compared": missing,
            "rows": [row.as_dict() for row in rows],
        }
        output.result(result)
    wrong = failed(rows)
    if wrong:
        raise CheckFailedError(
            "an output of the kernels is wrong, so it was not timed",
            got=", ".join(f"{row.case}, {row.operation}" for row in wrong),
            expected="errors at most twice those of plain PyTorch",
        )


def _ceilings_text(ceilings: Ceilings) -> str:
    matmul, *memory = ceilings
    names = ("HBM copy", "L2 gather", "fp32 sums into L2")
    rates = [f"{n} {rate / 1e12:.2f} TB/s" for n, rate in zip(names, memory, strict=True)]
    return ", ".join([f"ceilings: bf16 matmul {matmul / 1e12:.0f} TFLOP/s", *rates])


def _machine() -> dict[str, str]:
    import torch

    found = {"device": torch.cuda.get_device_name()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
