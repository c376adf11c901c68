"""The lightning indexer: cheap scores that choose which keys each query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from glm5.model.linear import ReplicatedLinear
from glm5.model.linears import linears_of
from glm5.model.parallel import (
    gather_keys,
    gather_rows,
    of_this_rank,
    query_rows,
    sum_gradient_over_tp,
)
from glm5.model.query_shares import QueryShares
from glm5.model.replay import LayerChoices
from glm5.model.routes import Routes
from glm5.model.tokens import TokenRow
from glm5.model.transformer_config import Glm5TransformerConfig, build_device
from glm5.ops.backends import get_backend
from glm5.ops.rope import rope_cos_sin
from glm5.ops.rotation import rotate


@dataclass(frozen=True)
class IndexInputs:
    """What the index scores are made of; every scale is already inside `weights`.

    q [t, index_n_heads, index_head_dim] of the queries whose keys this rank selects;
    k [t_k, index_head_dim], the keys of all ranks; weights [t, index_n_heads] fp32.
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
        linears = linears_of(config)
        self.linear_wq_b = linears.replicated(glm5.q_lora_rank, num_heads * head_dim, config=config)
        self.linear_wk = linears.replicated(glm5.hidden_size, head_dim, config=config)
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

    def project(self, x: Tensor, q_latent: Tensor, own: TokenRow, queries: TokenRow) -> IndexInputs:
        """x [s / tp, b, hidden_size]; q_latent [s / tp, b, q_lora_rank] normalised.

        `own` are the tokens of x, `queries` those whose keys this rank selects.

        Tensor-parallel ranks that share attention by heads run the whole indexer each.
        """
        k = own.flatten(self.k_norm(self.linear_wk(x)[0]))
        k = gather_keys(
            self._rope_first_dims(k, own), own.batch, partial_grad=self.config.shares_queries
        )
        weights = own.flatten(self.linear_weights_proj(x)[0]) * self.weight_scale
        q_latent = own.flatten(q_latent)
        if self.config.shares_queries:
            weights = of_this_rank(gather_rows(weights, own.batch, partial_grad=True))
            # q would be twice as wide
            q_latent = of_this_rank(gather_rows(q_latent, own.batch, partial_grad=True))
            return IndexInputs(self._queries(q_latent, queries), k, weights)
        q, weights = (
            gather_rows(x, own.batch, partial_grad=False)
            for x in (self._queries(q_latent, own), weights)
        )
        return IndexInputs(q, k, weights)

    def _queries(self, q_latent: Tensor, row: TokenRow) -> Tensor:
        """q_latent [t, q_lora_rank] -> q [t, index_n_heads, index_head_dim] of the same tokens."""
        glm5 = self.config.glm5
        q = self.linear_wq_b(q_latent)[0]
        q = q.view(-1, glm5.index_n_heads, glm5.index_head_dim)
        return self._rope_first_dims(q, row)

    def select(self, inputs: IndexInputs, queries: TokenRow, routes: Routes) -> Tensor:
        """The topk_indices [t, index_topk] int32 of the queries; -1 for those that attend densely.

        `routes` are those of these queries alone.
        """
        q, weights, starts, ends = inputs.q, inputs.weights, queries.starts, queries.ends
        if routes.dense_lengths:
            q, weights, starts, ends = (
                routes.take(x, dense=False) for x in (q, weights, starts, ends)
            )
        topk = self.config.glm5.index_topk
        selected = self.backend.select_topk(q, inputs.k, weights, starts, ends, topk)
        if not routes.dense_lengths:
            return selected
        nothing = selected.new_full((len(inputs.q) - len(selected), topk), -1)
        return routes.join(nothing, selected)

    def forward(
        self,
        x: Tensor,
        q_latent: Tensor,
        own: TokenRow,
        row: TokenRow,
        routes: Routes,
        choices: LayerChoices | None = None,
    ) -> tuple[Tensor, IndexInputs | None]:
        """(topk_indices, inputs of the KL loss, which have gradients only when this one `learns`).

        `own` are the tokens of x, `row` and `routes` all queries: this rank selects for them, or
        for its share. Where all of them attend densely nothing is computed: ([0, index_topk],
        None). A replayed selection is taken as it is: without a loss there are no inputs then. The
        main loss never reaches the indexer, nor the indexer's loss the model, hence the detach.
        """
        if self.observed:
            routes = Routes.all_sparse(len(row.starts))
        replayed = None if choices is None else choices.take_topk()
        if not routes.num_sparse:
            return row.starts.new_empty(0, self.config.glm5.index_topk), None
        rows, queries = query_rows(len(row.starts), shared=self.config.shares_queries), row
        if self.config.shares_queries:
            queries = row.of_this_rank()
            routes = QueryShares(routes, x.device).own_routes
        learns = self.learns and torch.is_grad_enabled()
        observer = None if choices is None else choices.observer
        if replayed is not None and observer is None and not learns:
            return replayed.rows(rows, queries.starts, queries.ends), None
        with torch.set_grad_enabled(learns):
            inputs = self.project(x.detach(), q_latent.detach(), own, queries)
        if replayed is not None and observer is None:
            return replayed.rows(rows, queries.starts, queries.ends), inputs
        selected = self.select(inputs, queries, routes)
        if choices is not None and observer is not None:
            observer.see_topk(choices.layer, rows, selected)
        if replayed is not None:
            selected = replayed.rows(rows, queries.starts, queries.ends)
        return selected, inputs

    def _rope_first_dims(self, x: Tensor, row: TokenRow) -> Tensor:
        glm5 = self.config.glm5
        cos, sin = rope_cos_sin(row.positions, glm5.qk_rope_head_dim, glm5.rope_theta)
        return rotate(x, cos, sin, interleaved=glm5.indexer_rope_interleave, first=True)
