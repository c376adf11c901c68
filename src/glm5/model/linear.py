"""Linear layers that Megatron-Core does not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from glm5.model.parallel import sum_gradient_over_tp
from glm5.model.transformer_config import Glm5TransformerConfig, build_device
from glm5.ops.absorbed import HeadPair, HeadRows, from_latent, to_latent


class ReplicatedLinear(nn.Module):
    """y = x W^T with the whole weight on every tensor-parallel rank, in Megatron's calling
    convention.

    x [..., in_features]; y [..., out_features] in `compute_dtype` (default: the dtype of x);
    weight [out_features, in_features]. Returns (y, None): there is no bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        config: Glm5TransformerConfig,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.config = config
        self.compute_dtype = compute_dtype
        device = build_device(config)
        weight = torch.empty(out_features, in_features, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(weight)
        sum_gradient_over_tp(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        dtype = self.compute_dtype or x.dtype
        return F.linear(x.to(dtype), self.weight.to(dtype)), None


class AbsorbedProjection(nn.Module):
    """`kv_b_proj` used from both sides of the absorbed attention, never as a plain linear.

    weight [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank], per head W_k above W_v.
    Absorbed MLA (arXiv 2405.04434, section 2.1.2): q_nope . (W_k c) = (W_k^T q_nope) . c.
    """

    head_dims: tuple[int, int]
    """(qk_nope_head_dim, v_head_dim)"""

    @property
    def key_rows(self) -> HeadRows:
        """Where W_k is."""
        return HeadRows(sum(self.head_dims), 0, self.head_dims[0])

    @property
    def value_rows(self) -> HeadRows:
        """Where W_v is."""
        return HeadRows(sum(self.head_dims), *self.head_dims)

    def absorb_query(self, q: Tensor, pair: HeadPair | None = None) -> Tensor:
        """q [t, h, qk_nope_head_dim + p] = [q_nope, q_p] -> [W_k^T q_nope, q_p]
        [t, h, kv_lora_rank + p]; pair: of a frozen W_k."""
        raise NotImplementedError

    def expand_output(self, out_latent: Tensor, pair: HeadPair | None = None) -> Tensor:
        """out_latent [t, h, kv_lora_rank] -> W_v out_latent [t, h, v_head_dim]; pair: of a frozen
        W_v."""
        raise NotImplementedError

    def expand_latent(self, kv_latent: Tensor) -> tuple[Tensor, Tensor]:
        """kv_latent [t, kv_lora_rank] -> W_k c [t, h, qk_nope_head_dim], W_v c [t, h, v_head_dim].

        Without absorption: what short documents attend to.
        """
        raise NotImplementedError


class LatentUpProjection(AbsorbedProjection, ColumnParallelLinear):
    """`AbsorbedProjection` with a weight in the model's dtype."""

    weight: nn.Parameter
    input_size: int

    def __init__(self, config: Glm5TransformerConfig) -> None:
        glm5 = config.glm5
        self.head_dims = (glm5.qk_nope_head_dim, glm5.v_head_dim)
        super().__init__(
            glm5.kv_lora_rank,
            glm5.num_attention_heads * sum(self.head_dims),
            config=config,
            init_method=config.init_method,
            bias=False,
        )

    def absorb_query(self, q: Tensor, pair: HeadPair | None = None) -> Tensor:
        if pair is not None:
            return to_latent(q, self.weight, self.key_rows, pair)
        w_k, _ = self._heads()
        q_nope, passed = q.tensor_split([self.head_dims[0]], dim=-1)
        return torch.cat([torch.einsum("thd,hdr->thr", q_nope, w_k), passed], dim=-1)

    def expand_output(self, out_latent: Tensor, pair: HeadPair | None = None) -> Tensor:
        if pair is not None:
            return from_latent(out_latent, self.weight, self.value_rows, pair)
        _, w_v = self._heads()
        return torch.einsum("thr,hdr->thd", out_latent, w_v)

    def expand_latent(self, kv_latent: Tensor) -> tuple[Tensor, Tensor]:
        keys_and_values = F.linear(kv_latent, self.weight)
        return split_heads(keys_and_values, self.head_dims)

    def _heads(self) -> tuple[Tensor, Tensor]:
        per_head = self.weight.view(-1, sum(self.head_dims), self.input_size)
        w_k, w_v = per_head.split(self.head_dims, dim=1)
        return w_k, w_v


def split_heads(x: Tensor, head_dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """x [t, h * (d_k + d_v)] -> [t, h, d_k], [t, h, d_v]: per head, keys before values."""
    keys, values = x.unflatten(-1, (-1, sum(head_dims))).split(head_dims, dim=-1)
    return keys, values
