"""Global names count layers over stages and experts over ranks."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from glm5.model.names import GlobalNames

Named = Callable[..., GlobalNames]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Named:
    """names(first_layer, ep_rank, ep_size, experts) -> the names of a rank there."""

    def make(first_layer: int, ep_rank: int = 0, ep_size: int = 1, experts: int = 8) -> GlobalNames:
        module = "glm5.model.names"
        monkeypatch.setattr(f"{module}.get_transformer_layer_offset", lambda *_: first_layer)
        state = f"{module}.parallel_state"
        monkeypatch.setattr(f"{state}.get_expert_model_parallel_world_size", lambda: ep_size)
        monkeypatch.setattr(f"{state}.get_expert_model_parallel_rank", lambda: ep_rank)
        config = SimpleNamespace(num_moe_experts=experts)
        return GlobalNames(SimpleNamespace(config=config, vp_stage=None))

    return make


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("decoder.layers.0.input_layernorm.weight", "decoder.layers.5.input_layernorm.weight"),
        (
            "decoder.layers.11.mlp.experts.local_experts.3.linear_fc1.weight",
            "decoder.layers.16.mlp.experts.local_experts.7.linear_fc1.weight",
        ),
        # the path of a module, as adapters are named by
        ("decoder.layers.1.mlp.linear_fc1.", "decoder.layers.6.mlp.linear_fc1."),
        # MTP layers are counted by themselves, their experts are not
        ("mtp.layers.0.enorm.weight", "mtp.layers.0.enorm.weight"),
        (
            "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.0.linear_fc2.weight",
            "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.4.linear_fc2.weight",
        ),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ],
)
def test_numbers_are_shifted(names: Named, local: str, expected: str) -> None:
    assert names(5, ep_rank=1, ep_size=2)(local) == expected


def test_one_process_shifts_nothing(names: Named) -> None:
    name = "decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight"
    assert names(0)(name) == name


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_ranks_together_name_every_expert_once(names: Named, ep_size: int) -> None:
    got = [
        names(0, ep_rank=rank, ep_size=ep_size)(f"x.local_experts.{local}.w")
        for rank in range(ep_size)
        for local in range(8 // ep_size)
    ]
    assert got == [f"x.local_experts.{expert}.w" for expert in range(8)]
