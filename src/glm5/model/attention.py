"""Multi-latent attention: absorbed over the keys that the indexer selected, else dense."""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from glm5.model.indexer import IndexInputs, LightningIndexer
from glm5.model.indexer_loss import add_indexer_loss
from glm5.model.linears import linears_of
from glm5.model.norm import RMSNorm
from glm5.model.parallel import gather_keys, tp_sum
from glm5.model.query_shares import QueryShares
from glm5.model.replay import LayerChoices
from glm5.model.routes import Routes
from glm5.model.tokens import TokenRow, token_row
from glm5.model.transformer_config import Glm5TransformerConfig
from glm5.ops.backends import get_backend
from glm5.ops.causal_attention import causal_attention
from glm5.ops.rope import rope_cos_sin
from glm5.ops.rotation import rotate

IndexerType = Literal["full", "shared"]


class DSASelfAttention(MegatronModule):
    """DeepSeek Sparse Attention of one layer; top-k comes in and goes out as a value.

    q_latent = norm(W_qa x); [kv_latent, k_rope] = W_kva x, the latent normalised;
    q = [W_k^T q_nope, rope(q_rope)]; kv = [kv_latent, rope(k_rope)];
    out = W_o (W_v sparse_mla(q, kv, topk_indices))      (arXiv 2405.04434 and 2512.02556)
    A document of at most index_topk tokens selects every key, so it takes the same sum without
    absorption, which costs less: out = W_o softmax([q_nope, q_rope] . [W_k c, k_rope]) W_v c.
    """

    def __init__(
        self,
        config: Glm5TransformerConfig,
        layer_number: int,
        indexer_type: IndexerType,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        del pg_collection, name
        self.layer_number = layer_number
        glm5 = config.glm5
        heads = glm5.num_attention_heads
        linears = linears_of(config)
        self.linear_q_down_proj = linears.replicated(
            glm5.hidden_size, glm5.q_lora_rank, config=config
        )
        self.q_layernorm = RMSNorm(config, glm5.q_lora_rank, glm5.latent_norm_eps)
        self.linear_q_up_proj = linears.column(
            glm5.q_lora_rank,
            heads * glm5.qk_head_dim,
            config=config,
            init_method=config.init_method,
            bias=False,
        )
        self.linear_kv_down_proj = linears.replicated(glm5.hidden_size, glm5.d_qk, config=config)
        self.kv_layernorm = RMSNorm(config, glm5.kv_lora_rank, glm5.latent_norm_eps)
        self.linear_kv_up_proj = linears.latent_up(config)
        self.linear_proj = linears.row(
            heads * glm5.v_head_dim,
            glm5.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        self.indexer = LightningIndexer(config) if indexer_type == "full" else None
        self.backend = get_backend(config.dsa_attention_backend)
        self.recompute_core = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def forward(
        self,
        hidden_states: Tensor,
        topk_indices: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        choices: LayerChoices | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden_states [s, b, hidden_size] normalised -> (output of that shape, topk_indices).

        topk_indices [t, index_topk] int32 of the nearest full layer above, [0, index_topk] where
        no query needs a selection; a full layer replaces it. Under sequence parallelism
        hidden_states is [s / tp, b, hidden_size]; where ranks share the queries, topk_indices is
        [t / tp, index_topk].
        """
        row = self._token_row(hidden_states, packed_seq_params)
        own, routes = self._own_tokens(row), self._routes(row)
        q_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
        index_inputs = None
        if self.indexer is not None:
            topk_indices, index_inputs = self.indexer(
                hidden_states, q_latent, own, row, routes, choices
            )
        assert topk_indices is not None, f"layer {self.layer_number} shares a top-k nobody made"
        q, kv = self._queries(q_latent, row), self._keys(hidden_states, own)
        learns = index_inputs is not None and index_inputs.want_gradients
        out, mass = self._attend(q, kv, topk_indices, routes, with_mass=learns)
        output, _ = self.linear_proj(row.unflatten(out))
        if index_inputs is not None and mass is not None:
            output = self._with_indexer_loss(output, index_inputs, topk_indices, mass)
        return output, topk_indices

    def _token_row(self, hidden_states: Tensor, packed: PackedSeqParams | None) -> TokenRow:
        seq_len, batch, _ = hidden_states.shape
        if self.config.sequence_parallel:
            seq_len *= self.config.tensor_model_parallel_size
        return token_row(seq_len, batch, packed, hidden_states.device)

    def _own_tokens(self, row: TokenRow) -> TokenRow:
        """Of the tokens of the tensor-parallel ranks, those that this one has outside attention."""
        if not self.config.sequence_parallel:
            return row
        group = parallel_state.get_tensor_model_parallel_group()
        return row.share(group.rank(), group.size())

    def _routes(self, row: TokenRow) -> Routes:
        everything = Routes.all_sparse(len(row.starts))
        # the indexer learns from the absorbed attention of every query, and the backward of
        # PyTorch's dense kernels adds in any order
        learns = self.indexer is not None and self.indexer.learns
        if learns or self.config.deterministic_attention:
            return everything
        return row.routes(self.config.glm5.index_topk)

    def _shares(self, routes: Routes, device: torch.device) -> QueryShares | None:
        return QueryShares(routes, device) if self.config.shares_queries else None

    def _queries(self, q_latent: Tensor, row: TokenRow) -> Tensor:
        """q [t, h / tp, qk_head_dim] of all queries and this rank's heads: it has their weights."""
        glm5 = self.config.glm5
        cos, sin = rope_cos_sin(row.positions, glm5.qk_rope_head_dim, glm5.rope_theta)
        q = row.flatten(self.linear_q_up_proj(q_latent)[0])
        q = q.view(q.shape[0], -1, glm5.qk_head_dim)
        return rotate(q, cos, sin, interleaved=glm5.rope_interleave, first=False)

    def _keys(self, x: Tensor, own: TokenRow) -> Tensor:
        """kv [t_k, d_qk] of all tokens: there is one latent head, so every rank needs it whole."""
        glm5 = self.config.glm5
        cos, sin = rope_cos_sin(own.positions, glm5.qk_rope_head_dim, glm5.rope_theta)
        kv = own.flatten(self.linear_kv_down_proj(x)[0])
        kv_latent, k_rope = kv.split([glm5.kv_lora_rank, glm5.qk_rope_head_dim], dim=-1)
        k_rope = rotate(k_rope, cos, sin, interleaved=glm5.rope_interleave, first=True)
        return gather_keys(torch.cat([self.kv_layernorm(kv_latent), k_rope], dim=-1), own.batch)

    def _attend(
        self, q: Tensor, kv: Tensor, topk_indices: Tensor, routes: Routes, *, with_mass: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out [t, h / tp * v_head_dim], mass of `_sparse` or None); recomputed when asked for.

        Where mass is asked for every query attends sparsely.
        """
        if not (self.recompute_core and self.training):
            return self._core(routes, with_mass, q, kv, topk_indices)

        def core(q: Tensor, kv: Tensor, topk_indices: Tensor) -> tuple[Tensor, Tensor | None]:
            # the pass that recomputes comes after the loss
            return self._core(
                routes, with_mass and not torch.is_grad_enabled(), q, kv, topk_indices
            )

        return tensor_parallel.checkpoint(core, False, q, kv, topk_indices)

    def _core(
        self, routes: Routes, with_mass: bool, q: Tensor, kv: Tensor, topk_indices: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        assert not (with_mass and routes.dense_lengths), "the dense path knows no selected keys"
        if not routes.num_sparse:
            return self._dense(q, kv, routes.dense_lengths).flatten(1), None
        if not routes.dense_lengths:
            out, mass = self._sparse(q, kv, topk_indices, routes, with_mass=with_mass)
            return out.flatten(1), mass
        shares = self._shares(routes, q.device)
        selecting = routes if shares is None else shares.own_routes
        sparse_topk = selecting.take(topk_indices, dense=False)
        sparse_q = routes.take(q, dense=False)
        sparse, _ = self._sparse(sparse_q, kv, sparse_topk, routes, with_mass=False)
        dense_q, dense_kv = (routes.take(x, dense=True) for x in (q, kv))
        dense = self._dense(dense_q, dense_kv, routes.dense_lengths)
        return routes.join(dense, sparse).flatten(1), None

    def _sparse(
        self, q: Tensor, kv: Tensor, topk_indices: Tensor, routes: Routes, *, with_mass: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Over selected keys: out [t, h / tp, v_head_dim], mass [t_r, topk] fp32 where asked for.

        q are the sparse queries of `routes`, topk_indices those t_r of them that this rank attends
        for. mass is the attention of this rank's heads to each selected key.
        """
        shares = self._shares(routes, q.device)
        q = self._sparse_queries(q, shares)
        out_latent, mass = self._over_selected_keys(q, kv, topk_indices, with_mass=with_mass)
        if shares is None:
            return self.linear_kv_up_proj.expand_output(out_latent), mass
        out = self.linear_kv_up_proj.expand_output(shares.tokens_to_heads(out_latent))
        return shares.in_order(out), mass

    def _over_selected_keys(
        self, q: Tensor, kv: Tensor, topk_indices: Tensor, *, with_mass: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The backend's attention: out_latent [t_r, heads, d_v], mass where asked for."""
        glm5, deterministic = self.config.glm5, self.config.deterministic_attention
        arguments = q, kv, topk_indices, glm5.softmax_scale, glm5.d_v
        if not with_mass:
            return self.backend.sparse_mla(*arguments, deterministic=deterministic)[0], None
        out, _, mass = self.backend.sparse_mla_with_mass(*arguments, deterministic=deterministic)
        return out, mass

    def _dense(self, q: Tensor, kv: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Over all keys of documents of these lengths: out [t, h / tp, v_head_dim]."""
        glm5 = self.config.glm5
        kv_latent, k_rope = kv.split([glm5.kv_lora_rank, glm5.qk_rope_head_dim], dim=-1)
        k_nope, v = self.linear_kv_up_proj.expand_latent(kv_latent)
        k_rope = k_rope[:, None].expand(-1, k_nope.shape[1], -1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        return causal_attention(q, k, v, lengths, glm5.softmax_scale)

    def _sparse_queries(self, q: Tensor, shares: QueryShares | None) -> Tensor:
        """q [t, h / tp, qk_head_dim] -> [W_k^T q_nope, q_rope], absorbed.

        [t, h / tp, d_qk] of this rank's heads, or [t_r, h, d_qk] of its share of the queries.
        """
        if shares is not None:
            q = shares.by_rank(q)
        q = self.linear_kv_up_proj.absorb_query(q)
        return q if shares is None else shares.heads_to_tokens(q)

    def _with_indexer_loss(
        self, output: Tensor, index_inputs: IndexInputs, topk_indices: Tensor, mass: Tensor
    ) -> Tensor:
        mass, add = mass.detach(), tp_sum()
        # ranks that share the queries have all heads of theirs
        if add is not None and not self.config.shares_queries:
            add(mass)
        coeff = self.config.indexer_loss_coeff
        return add_indexer_loss(self.backend, output, index_inputs, topk_indices, mass, coeff=coeff)
