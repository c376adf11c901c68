"""LoRA on `kv_b_proj` inside the absorbed attention, never merged into the weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5.lora.factors import LoraPair
from glm5.model.linear import LatentUpProjection


class AbsorbedLora(nn.Module):
    """Both sides of `LatentUpProjection` with W + scale * B A, in factored form.

    Per head B = [B_k; B_v]: (W_k + s B_k A)^T q = W_k^T q + s A^T (B_k^T q), and
    (W_v + s B_v A) c = W_v c + s B_v (A c). A bf16 merge would round small deltas away.
    """

    def __init__(
        self, base: LatentUpProjection, hf_linear: str, *, rank: int, scale: float
    ) -> None:
        super().__init__()
        self.base = base
        self.hf_linears = (hf_linear,)
        out_features, in_features = base.weight.shape
        pair = LoraPair(rank, in_features, out_features, scale, base.weight)
        self.pairs = nn.ModuleDict({hf_linear: pair})

    @property
    def _pair(self) -> LoraPair:
        (pair,) = self.pairs.values()
        return pair

    def absorb_query(self, q_nope: Tensor) -> Tensor:
        """q_nope [t, h, qk_nope_head_dim] -> [t, h, kv_lora_rank]."""
        pair, (b_k, _) = self._pair, self._heads(q_nope.dtype)
        low_rank = torch.einsum("thd,hdr->thr", q_nope, b_k)
        return self.base.absorb_query(q_nope) + low_rank @ pair.a.to(q_nope.dtype) * pair.scale

    def expand_output(self, out_latent: Tensor) -> Tensor:
        """out_latent [t, h, kv_lora_rank] -> [t, h, v_head_dim]."""
        pair, (_, b_v) = self._pair, self._heads(out_latent.dtype)
        low_rank = out_latent @ pair.a.to(out_latent.dtype).T
        delta = torch.einsum("thr,hdr->thd", low_rank, b_v)
        return self.base.expand_output(out_latent) + delta * pair.scale

    def _heads(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        b = self._pair.b.to(dtype)
        b_k, b_v = b.view(-1, sum(self.base.head_dims), b.shape[-1]).split(
            self.base.head_dims, dim=1
        )
        return b_k, b_v
