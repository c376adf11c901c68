"""What options may be, and options of several verbs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

HfDir = Annotated[
    str,
    typer.Argument(metavar="HF_DIR", help="Hugging Face folder, or a repository owner/name."),
]

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


class Variant(StrEnum):
    """The published models that a tiny one can be shaped like."""

    GLM_5 = "5"
    GLM_5_1 = "5.1"
    GLM_5_2 = "5.2"


class BaseWeights(StrEnum):
    """How a model holds the linears that an FP8 release quantises."""

    DTYPE = "dtype"
    FP8 = "fp8"


class Form(StrEnum):
    """What an export writes."""

    ADAPTER = "adapter"
    MERGED = "merged"
    HF = "hf"


class Consumer(StrEnum):
    """What an adapter folder is loaded by."""

    PEFT = "peft"
    SGLANG = "sglang"
    VLLM = "vllm"


class MergedWeights(StrEnum):
    """How the weights of a merged checkpoint are stored."""

    BF16 = "bf16"
    FP8 = "fp8"


class ExpertLora(StrEnum):
    """How the adapters of the routed experts are laid out."""

    PER_EXPERT = "per_expert"
    SHARED_OUTER = "shared_outer"


class ExpertAdapters(StrEnum):
    """The same, or none."""

    PER_EXPERT = "per_expert"
    SHARED_OUTER = "shared_outer"
    NONE = "none"


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class CoreSide(StrEnum):
    """What a conversion of a core's own checkpoint makes."""

    HF = "hf"
    CORE = "core"


class CoreRope(StrEnum):
    """Which dimensions of an indexer head a Megatron-Core rotates."""

    FIRST = "first"
    LAST = "last"


class CoreNorms(StrEnum):
    """Where a Megatron-Core has the norms of the latents."""

    FUSED = "fused"
    OWN = "own"


class Mode(StrEnum):
    """What trains."""

    LORA = "lora"
    FULL = "full"
