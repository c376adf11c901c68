"""LoRA on `kv_b_proj` inside the absorbed attention, never merged into the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.lora.factors import Adapted, LoraPair
from glm5.model.linear import AbsorbedProjection, split_heads
from glm5.ops.absorbed import HeadPair


class AbsorbedLora(Adapted):
    """Both sides of `AbsorbedProjection` with W + scale * B A, in factored form.

    Per head B = [B_k; B_v]: (W_k + s B_k A)^T q = W_k^T q + s A^T (B_k^T q), and
    (W_v + s B_v A) c = W_v c + s B_v (A c). A bf16 merge would round small deltas away.
    """

    base: AbsorbedProjection

    def absorb_query(self, q: Tensor) -> Tensor:
        """q [t, h, qk_nope_head_dim + p] -> [t, h, kv_lora_rank + p]."""
        of_keys, _ = self._head_pairs(q.dtype)
        return self.base.absorb_query(q, of_keys)

    def expand_output(self, out_latent: Tensor) -> Tensor:
        """out_latent [t, h, kv_lora_rank] -> [t, h, v_head_dim]."""
        _, of_values = self._head_pairs(out_latent.dtype)
        return self.base.expand_output(out_latent, of_values)

    def expand_latent(self, kv_latent: Tensor) -> tuple[Tensor, Tensor]:
        """kv_latent [t, kv_lora_rank] -> [t, h, qk_nope_head_dim], [t, h, v_head_dim]."""
        pair = self._only_pair()
        base = self.base.expand_latent(kv_latent)
        delta = split_heads(pair.up(pair.down(kv_latent)), self.base.head_dims)
        return base[0] + delta[0], base[1] + delta[1]

    def _only_pair(self) -> LoraPair:
        (name,) = self.hf_linears
        return self.pair(name)

    def _head_pairs(self, dtype: torch.dtype) -> tuple[HeadPair, HeadPair]:
        """Those of the keys and of the values."""
        pair, head_dims = self._only_pair(), self.base.head_dims
        a, b = pair.a.to(dtype), pair.b.to(dtype)
        b_k, b_v = b.view(-1, sum(head_dims), b.shape[-1]).split(head_dims, dim=1)
        return HeadPair(a, b_k, pair.scale), HeadPair(a, b_v, pair.scale)
