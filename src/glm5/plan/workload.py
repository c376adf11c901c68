"""What is trained: the part of a run file that memory and speed depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from glm5.lora.spec import ExpertLora
from glm5.train.run_config import DEFAULT_INDEXER_LOSS_COEFF
from glm5.train.sections import ATTENTION_TARGETS, INDEXER_TARGETS

Mode = Literal["lora", "full"]
BaseWeights = Literal["dtype", "fp8"]
Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")

DEFAULT_SEQ_LEN = 8192


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One packed row of `seq_len` tokens per micro-batch, in bf16; adapters are bf16, too."""

    mode: Mode = "lora"
    base_weights: BaseWeights = "dtype"
    """With LoRA: the frozen linears in bf16 ("dtype"), or in float8 with scales ("fp8")."""
    seq_len: int = DEFAULT_SEQ_LEN
    recompute: Recompute = "full"
    adapter_rank: int = 16
    targets: tuple[str, ...] = ATTENTION_TARGETS
    """With LoRA: Hugging Face names of the linears that get adapters."""
    expert_lora: ExpertLora = "per_expert"
    """With LoRA: the adapters of routed experts, where the MLP's linears are among the targets."""
    indexer_loss: bool = True
    """In full training: whether the indexer learns from its loss."""

    def keeps_input(self, *linears: str) -> bool:
        """Whether the backward pass needs the input of any of these linears."""
        return self.mode == "full" or any(name in self.targets for name in linears)

    def keeps_input_of_experts(self, *linears: str) -> bool:
        """The same of routed experts."""
        return self.keeps_input(*linears) and (self.mode == "full" or self.expert_lora != "none")

    @property
    def trains_indexer(self) -> bool:
        """Whether the indexer's loss runs."""
        if self.mode == "full":
            return self.indexer_loss
        return not set(INDEXER_TARGETS).isdisjoint(self.targets)

    @property
    def indexer_loss_coeff(self) -> float:
        """As a run file without train.indexer_loss_coeff would have it."""
        return DEFAULT_INDEXER_LOSS_COEFF if self.trains_indexer else 0.0
