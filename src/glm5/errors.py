"""Every error a user can cause, told the same way: what, got, expected, remedy."""


class Glm5Error(Exception):
    """Base of all errors that glm5 raises on purpose."""

    exit_code = 2
    """Of the command line: 2 for wrong usage or input, 1 where a check failed."""

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.got = got
        self.expected = expected
        self.remedy = remedy
        parts = [what]
        if got is not None:
            parts.append(f"  got:      {got}")
        if expected is not None:
            parts.append(f"  expected: {expected}")
        if remedy is not None:
            parts.append(f"  remedy:   {remedy}")
        super().__init__("\n".join(parts))


class ConfigError(Glm5Error, ValueError):
    """A model or run configuration that cannot be right."""


class CheckpointError(Glm5Error, ValueError):
    """A checkpoint folder that is incomplete, damaged, or of another model."""


class BackendError(Glm5Error, ValueError):
    """An attention backend that is unknown or cannot run here."""


class MegatronCoreError(Glm5Error, ValueError):
    """An installed Megatron-Core that is not known here."""


class LayoutError(Glm5Error, ValueError):
    """A parallel layout that this model cannot be built on."""


class AdapterError(Glm5Error, ValueError):
    """A LoRA target, shape or adapter folder that does not fit the model."""


class DataError(Glm5Error, ValueError):
    """A training data file, named with its line, that cannot be used."""


class ReplayError(Glm5Error, ValueError):
    """A rollout's record of its discrete choices that cannot be those of its tokens."""


class EngineError(Glm5Error):
    """A rollout engine that does not answer, or answers something else than was asked."""


class RewardError(Glm5Error, ValueError):
    """A reward that cannot be computed."""


class CheckFailedError(Glm5Error):
    """A comparison that the command exists to make came out wrong."""

    exit_code = 1


class DivergedError(Glm5Error):
    """A loss or gradient that is no longer a number."""

    exit_code = 1


class GapError(Glm5Error):
    """A rollout engine and a trainer that disagree on how likely the sampled tokens are."""

    exit_code = 1
