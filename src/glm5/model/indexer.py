"""The lightning indexer: cheap scores that choose which keys each query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from glm5.model.linear import ReplicatedLinear
from glm5.model.parallel import gather_keys, gather_tokens, sum_gradient_over_tp
from glm5.model.routes import Routes
from glm5.model.tokens import TokenRow
from glm5.model.transformer_config import Glm5TransformerConfig, build_device
from glm5.ops.backends import get_backend
from glm5.ops.rope import apply_rope, rope_cos_sin


@dataclass(frozen=True)
class IndexInputs:
    """What the index scores are made of; every scale is already inside `weights`.

    q [t, index_n_heads, index_head_dim]; k [t_k, index_head_dim], the keys of all context-parallel
    ranks; weights [t, index_n_heads] fp32.
    """

    q: Tensor
    k: Tensor
    weights: Tensor

    @property
    def want_gradients(self) -> bool:
        """Whether a loss on the scores would train anything."""
        return self.q.requires_grad or self.k.requires_grad or self.weights.requires_grad


class LightningIndexer(MegatronModule):
    """score(i, j) = sum_h w_ih relu(q_ih . k_j) (arXiv 2512.02556, eq. 1).

    q = rope(W_q c_i) from the normalised q latent, k = rope(LayerNorm(W_k x_j)), the rope on the
    first qk_rope_head_dim of index_head_dim; w = W_w x_i / sqrt(index_n_heads * index_head_dim) in
    fp32.
    """

    def __init__(self, config: Glm5TransformerConfig) -> None:
        super().__init__(config=config)
        glm5 = config.glm5
        head_dim, num_heads = glm5.index_head_dim, glm5.index_n_heads
        self.linear_wq_b = ReplicatedLinear(glm5.q_lora_rank, num_heads * head_dim, config=config)
        self.linear_wk = ReplicatedLinear(glm5.hidden_size, head_dim, config=config)
        self.k_norm = nn.LayerNorm(
            head_dim,
            eps=glm5.indexer_norm_eps,
            dtype=config.params_dtype,
            device=build_device(config),
        )
        sum_gradient_over_tp(*self.k_norm.parameters())
        # bf16 rounding of the head weights flips near-tied selections
        self.linear_weights_proj = ReplicatedLinear(
            glm5.hidden_size, num_heads, config=config, compute_dtype=torch.float32
        )
        self.weight_scale = num_heads**-0.5 * head_dim**-0.5
        self.backend = get_backend(config.dsa_attention_backend)
        self.observed = False
        """Set by who wants to see a selection for every query, also where none is needed."""

    @property
    def learns(self) -> bool:
        """Whether the indexer's loss trains it, in this pass or when this pass is recomputed."""
        wanted = self.training and self.config.indexer_loss_coeff > 0
        return wanted and any(p.requires_grad for p in self.parameters())

    def project(self, x: Tensor, q_latent: Tensor, row: TokenRow) -> IndexInputs:
        """x [s / tp, b, hidden_size]; q_latent [s / tp, b, q_lora_rank] normalised."""
        glm5 = self.config.glm5
        cos, sin = rope_cos_sin(row.positions, glm5.qk_rope_head_dim, glm5.rope_theta)
        q = self._all_tokens(self.linear_wq_b(q_latent)[0], row)
        k = self._all_tokens(self.k_norm(self.linear_wk(x)[0]), row)
        weights = self._all_tokens(self.linear_weights_proj(x)[0], row)
        q = q.view(-1, glm5.index_n_heads, glm5.index_head_dim)
        return IndexInputs(
            q=self._rope_first_dims(q, cos, sin),
            k=gather_keys(self._rope_first_dims(k, cos, sin), row.batch),
            weights=weights * self.weight_scale,
        )

    def _all_tokens(self, x: Tensor, row: TokenRow) -> Tensor:
        """x [s / tp, b, d] -> [t, d]; every rank runs the whole indexer, so gradients agree."""
        return row.flatten(gather_tokens(x, self.config, partial_grad=False))

    def select(self, inputs: IndexInputs, row: TokenRow, routes: Routes) -> Tensor:
        """The topk_indices [t, index_topk] int32 of the row; -1 for queries that attend densely."""
        queries = inputs.q, inputs.weights, row.starts, row.ends
        q, weights, starts, ends = (routes.take(x, dense=False) for x in queries)
        topk = self.config.glm5.index_topk
        selected = self.backend.select_topk(q, inputs.k, weights, starts, ends, topk)
        nothing = selected.new_full((len(inputs.q) - len(selected), topk), -1)
        return routes.join(nothing, selected)

    def forward(
        self, x: Tensor, q_latent: Tensor, row: TokenRow, routes: Routes
    ) -> tuple[Tensor, IndexInputs | None]:
        """(topk_indices, inputs of the KL loss, which have gradients only when this one `learns`).

        Where all queries attend densely nothing is computed: ([0, index_topk], None). The main loss
        never reaches the indexer, nor the indexer's loss the model, hence the detach.
        """
        if self.observed:
            routes = Routes.all_sparse(len(row.starts))
        if not routes.num_sparse:
            return row.starts.new_empty(0, self.config.glm5.index_topk), None
        with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
            inputs = self.project(x.detach(), q_latent.detach(), row)
        return self.select(inputs, row, routes), inputs

    def _rope_first_dims(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        glm5 = self.config.glm5
        rope_dim = glm5.qk_rope_head_dim
        rotated, passed = x.split([rope_dim, glm5.index_head_dim - rope_dim], dim=-1)
        rotated = apply_rope(rotated, cos, sin, interleaved=glm5.indexer_rope_interleave)
        return torch.cat([rotated, passed], dim=-1)
