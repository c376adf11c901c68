"""Options that say which adapters there are, as a run file's `[lora]` does."""

from __future__ import annotations

from typing import get_args

from glm5.errors import ConfigError
from glm5.lora.spec import ExpertLora
from glm5.ops.grouped import MAX_RANK
from glm5.train.sections import MLP_TARGETS, AttentionTarget, IndexerTarget, MlpTarget

_KNOWN = (*get_args(AttentionTarget), *get_args(MlpTarget), *get_args(IndexerTarget))


def targets_of(text: str) -> tuple[str, ...]:
    """The linears of `--targets`, which has commas between them.

    Raises:
        ConfigError: a name that no linear of the model has, or the same one twice.
    """
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in _KNOWN]:
        raise ConfigError(
            "--targets names no linear of the model",
            got=", ".join(map(repr, unknown)),
            expected=f"some of {', '.join(_KNOWN)}, with commas between them",
        )
    if len(set(names)) < len(names):
        raise ConfigError("--targets names a linear twice", got=text)
    return names


def check_expert_lora(expert_lora: ExpertLora, targets: tuple[str, ...]) -> None:
    """Refuses an option that would do nothing.

    Raises:
        ConfigError: another form of the experts' adapters than the usual one, and no such adapters.
    """
    if expert_lora != "per_expert" and not _have_experts(targets):
        raise ConfigError(
            f"--expert-lora {expert_lora} does nothing",
            got=f"targets {', '.join(targets)}",
            expected=f"one of {', '.join(MLP_TARGETS)} among them",
            remedy="leave --expert-lora out, or name such a linear in --targets",
        )


def check_adapter_rank(rank: int, expert_lora: ExpertLora, targets: tuple[str, ...]) -> None:
    """Refuses what training refuses.

    Raises:
        ConfigError: routed experts would get adapters that their kernels do not compute.
    """
    if rank > MAX_RANK and expert_lora != "none" and _have_experts(targets):
        raise ConfigError(
            "the rank of the adapters of routed experts is too large",
            got=f"--adapter-rank {rank}",
            expected=f"at most {MAX_RANK}, which the grouped kernels compute",
            remedy="choose a smaller one, or --expert-lora none",
        )


def _have_experts(targets: tuple[str, ...]) -> bool:
    return not set(MLP_TARGETS).isdisjoint(targets)
