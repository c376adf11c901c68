"""What cannot be split is refused before a parameter is made, with a name and a way out."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import LayerType

from glm5.checkpoint.tiny import tiny_config
from glm5.config import Glm5Config
from glm5.errors import ConfigError, LayoutError
from glm5.model.transformer_config import Glm5TransformerConfig, glm5_transformer_config
from glm5.runtime.distributed import Layout


def configure(
    layout: Layout, changed: dict[str, Any] | None = None, **options: Any
) -> Glm5TransformerConfig:
    return glm5_transformer_config(
        Glm5Config.from_hf_dict(tiny_config("5.2") | (changed or {})),
        device=torch.device("cpu"),
        dtype=torch.float32,
        backend="torch",
        layout=layout,
        **options,
    )


@pytest.mark.parametrize(
    ("layout", "changed", "named"),
    [
        (Layout(tp=3), {}, "num_attention_heads.*4 over 3"),
        (Layout(tp=8), {}, "num_attention_heads.*4 over 8"),
        (Layout(tp=2), {"vocab_size": 321}, "vocab_size.*321 over 2"),
        (Layout(tp=4), {"intermediate_size": 162}, "intermediate_size.*162 over 4"),
        (
            Layout(tp=4),
            {"moe_intermediate_size": 34},
            "moe_intermediate_size x n_shared.*34 over 4",
        ),
        (Layout(ep=3), {}, "n_routed_experts.*8 over 3"),
        (Layout(ep=16), {}, "n_routed_experts.*8 over 16"),
        (Layout(etp=4), {"moe_intermediate_size": 34}, "moe_intermediate_size.*34 over 4"),
    ],
)
def test_what_does_not_divide_is_named(layout: Layout, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(LayoutError, match=f"(?s){named}.*another tp, ep or etp"):
        configure(layout, changed)


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=4), Layout(ep=8), Layout(tp=2, pp=4, cp=2, ep=2)]
)
def test_what_divides_is_taken_over(layout: Layout) -> None:
    config = configure(layout)
    assert config.tensor_model_parallel_size == layout.tp
    assert config.sequence_parallel == (layout.tp > 1)
    assert config.pipeline_model_parallel_size == layout.pp
    assert config.context_parallel_size == layout.cp
    assert config.expert_model_parallel_size == layout.ep


def test_stages_are_interleaved_over_the_pipeline_ranks() -> None:
    config = configure(Layout(pp=2, vpp=2))
    layout = config.pipeline_model_parallel_layout
    assert config.virtual_pipeline_model_parallel_size == 2
    # rank 0 has the first and the third stage of layers [1, 1, 4, 1]
    counts = [[stage.count(LayerType.decoder) for stage in stages] for stages in layout.layout]
    assert counts == [[1, 4], [1, 1]]
    with pytest.raises(LayoutError, match=r"(?s)layers per stage.*4 positive"):
        configure(Layout(pp=2, vpp=2), layers_per_stage=[2, 5])


@pytest.mark.parametrize(
    ("stages", "layers"),
    [(1, [3, 4]), (2, [3, 3]), (2, [7]), (2, [7, 0]), (2, [2, 2, 3]), (1, []), (2, [])],
)
def test_layers_per_stage_must_fit_the_stages(stages: int, layers: list[int]) -> None:
    with pytest.raises(LayoutError, match=f"(?s)layers per stage.*{stages} positive numbers"):
        configure(Layout(pp=stages), layers_per_stage=layers)


@pytest.mark.parametrize("coeff", [-1.0, float("nan"), float("inf")])
def test_the_indexer_loss_has_a_weight(coeff: float) -> None:
    with pytest.raises(ConfigError, match=f"(?s)indexer_loss_coeff is no weight.*{coeff}"):
        configure(Layout(), indexer_loss_coeff=coeff)


@pytest.mark.parametrize("kind", ["all", "Full", "", None, True])
def test_an_unknown_recompute_is_not_none(kind: object) -> None:
    with pytest.raises(ConfigError, match=r"(?s)unknown kind of recompute.*none, selective, full"):
        configure(Layout(), recompute=kind)


@pytest.mark.parametrize("kind", ["token", "Heads", "", None])
def test_an_unknown_attention_parallel_is_not_heads(kind: object) -> None:
    with pytest.raises(ConfigError, match=r"(?s)unknown kind of attention_parallel.*tokens, heads"):
        configure(Layout(tp=2), attention_parallel=kind)
