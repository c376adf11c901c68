"""LoRA on `kv_b_proj` inside the absorbed attention, never merged into the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.lora.factors import Adapted, LoraPair
from glm5.model.linear import AbsorbedProjection, split_heads


class AbsorbedLora(Adapted):
    """Both sides of `AbsorbedProjection` with W + scale * B A, in factored form.

    Per head B = [B_k; B_v]: (W_k + s B_k A)^T q = W_k^T q + s A^T (B_k^T q), and
    (W_v + s B_v A) c = W_v c + s B_v (A c). A bf16 merge would round small deltas away.
    """

    base: AbsorbedProjection

    def absorb_query(self, q_nope: Tensor) -> Tensor:
        """q_nope [t, h, qk_nope_head_dim] -> [t, h, kv_lora_rank]."""
        pair = self._only_pair()
        b_k, _ = self._heads(pair, q_nope.dtype)
        low_rank = torch.einsum("thd,hdr->thr", q_nope, b_k)
        return self.base.absorb_query(q_nope) + low_rank @ pair.a.to(q_nope.dtype) * pair.scale

    def expand_output(self, out_latent: Tensor) -> Tensor:
        """out_latent [t, h, kv_lora_rank] -> [t, h, v_head_dim]."""
        pair = self._only_pair()
        _, b_v = self._heads(pair, out_latent.dtype)
        low_rank = out_latent @ pair.a.to(out_latent.dtype).T
        delta = torch.einsum("thr,hdr->thd", low_rank, b_v)
        return self.base.expand_output(out_latent) + delta * pair.scale

    def expand_latent(self, kv_latent: Tensor) -> tuple[Tensor, Tensor]:
        """kv_latent [t, kv_lora_rank] -> [t, h, qk_nope_head_dim], [t, h, v_head_dim]."""
        pair = self._only_pair()
        base = self.base.expand_latent(kv_latent)
        delta = split_heads(pair.up(pair.down(kv_latent)), self.base.head_dims)
        return base[0] + delta[0], base[1] + delta[1]

    def _only_pair(self) -> LoraPair:
        (name,) = self.hf_linears
        return self.pair(name)

    def _heads(self, pair: LoraPair, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        head_dims = self.base.head_dims
        per_head = pair.b.to(dtype).view(-1, sum(head_dims), pair.b.shape[-1])
        b_k, b_v = per_head.split(head_dims, dim=1)
        return b_k, b_v
