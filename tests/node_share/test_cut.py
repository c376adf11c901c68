"""Models cut to fewer layers and smaller widths keep the published schedule."""

import pytest

from glm5.errors import ConfigError
from glm5.node_share.cut import cut_model
from glm5.plan.models import read_model

GLM52 = read_model("GLM-5.2")[1]


def test_layers_are_the_first_ones() -> None:
    cut = cut_model(GLM52, layers=10)
    assert cut.num_hidden_layers == 10 and cut.num_nextn_predict_layers == 0
    assert cut.indexer_types == GLM52.indexer_types[:10]
    assert cut.mlp_layer_types == GLM52.mlp_layer_types[:10]
    assert cut.hidden_size == GLM52.hidden_size and cut.vocab_size == GLM52.vocab_size


def test_all_layers_and_widths_are_kept_by_default() -> None:
    cut = cut_model(GLM52)
    assert cut.indexer_types == GLM52.indexer_types
    assert cut.n_routed_experts == GLM52.n_routed_experts == 256


def test_widths_are_divided_but_those_of_a_head() -> None:
    cut = cut_model(GLM52, layers=2, narrow=8)
    assert cut.hidden_size * 8 == GLM52.hidden_size
    assert cut.n_routed_experts == 32 and cut.index_topk == 256
    assert (cut.d_qk, cut.d_v, cut.index_head_dim) == (GLM52.d_qk, GLM52.d_v, GLM52.index_head_dim)
    assert max(cut.eos_token_id) < cut.vocab_size


@pytest.mark.parametrize("arguments", [{"layers": 79}, {"layers": 0}, {"narrow": 7}])
def test_what_cannot_be_cut(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        cut_model(GLM52, **arguments)
