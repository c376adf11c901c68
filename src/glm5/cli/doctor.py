"""`glm5 doctor`: what this machine has."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement
from packaging.version import Version

from glm5.cli.output import Output
from glm5.errors import MegatronCoreError
from glm5.runtime.megatron_core import SUPPORTED, probe_core

# What the numbers of this project were proved with; the last two columns are for people.
_PACKAGES = (
    ("torch", "==2.11.*", "required"),
    ("megatron-core", SUPPORTED, "required"),
    ("transformers", ">=5.13", "required"),
    ("safetensors", ">=0.5", "required"),
    ("peft", ">=0.21", "optional: export of adapters"),
    ("tilelang", ">=0.1.15,<0.2", "optional: the backend tilelang"),
    ("nvidia-cudnn-frontend", ">=1.32,<2", "optional: the backend cudnn"),
    ("transformer-engine", "", "optional"),
)


def run_doctor(*, json: bool) -> int:
    """Prints versions, device and backends; returns 1 when something required is missing."""
    output = Output(json)
    packages = [_package(*entry) for entry in _PACKAGES]
    device = _device()
    core, problem = _core()
    backends = _backends()
    output.table("packages", ("package", "version", "supported", "need", ""), packages)
    rows = [(name, "yes" if available else "no", reason) for name, available, reason in backends]
    output.table("attention backends", ("backend", "runs here", "reason"), rows)
    output.table(
        "Megatron-Core", ("what", "answer"), [(what, str(answer)) for what, answer in core.items()]
    )
    if problem:
        output.say(problem)
    output.say(f"python {platform.python_version()}; device: {device}")
    ok = not problem and all(good for *_, need, good in packages if need == "required")
    if json:
        output.result(
            {
                "ok": ok,
                "python": platform.python_version(),
                "device": device,
                "packages": {name: found for name, found, *_ in packages},
                "megatron_core": core,
                "backends": {name: available for name, available, _ in backends},
            }
        )
    return 0 if ok else 1


def _package(name: str, supported: str, need: str) -> tuple[str, str, str, str, bool]:
    try:
        found = version(name)
    except PackageNotFoundError:
        return name, "-", supported, need, need != "required"
    good = Version(found) in Requirement(f"{name}{supported}").specifier
    return name, found, supported, need, good


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"


def _core() -> tuple[dict[str, object], str]:
    """What the installed Megatron-Core does, or why that cannot be told."""
    try:
        return asdict(probe_core()), ""
    except MegatronCoreError as error:
        return {}, str(error)


def _backends() -> list[tuple[str, bool, str]]:
    from glm5.ops.backends import backend_report

    return [(status.name, status.available, status.reason) for status in backend_report()]
