"""The names of checkpoints of the core's own DSA modules, and what they tell of the release."""

import pytest

from glm5.checkpoint.core_layout import (
    CoreLayout,
    core_rules,
    layout_of_core,
    layout_of_names,
    stacked_name,
)
from glm5.checkpoint.rules import HalfSwap, check_total
from glm5.checkpoint.tiny import tiny_config
from glm5.config import Glm5Config
from glm5.errors import CheckpointError
from glm5.runtime.megatron_core import probe_core

OLD = CoreLayout(indexer_rope="last", latent_norms="fused", mlp_norm="fused")
NEW = CoreLayout(indexer_rope="first", latent_norms="own", mlp_norm="fused")
LOCAL = CoreLayout(indexer_rope="first", latent_norms="own", mlp_norm="own")
BY_HEAD = {"linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias"}


def tiny(**changed: object) -> Glm5Config:
    return Glm5Config.from_hf_dict(tiny_config("5.2") | changed)


def names(layout: CoreLayout) -> list[str]:
    return [rule.mcore_name for rule in core_rules(tiny(), layout, include_mtp=True)]


@pytest.mark.parametrize("layout", [OLD, NEW, LOCAL])
def test_the_names_tell_the_layout(layout: CoreLayout) -> None:
    assert layout_of_names(names(layout)) == layout


def test_the_names_of_each_side() -> None:
    attention = "decoder.layers.0.self_attention."
    for expected in (
        f"{attention}linear_q_up_proj.layer_norm_weight",
        f"{attention}linear_kv_up_proj.layer_norm_weight",
        f"{attention}core_attention.indexer.k_norm.bias",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.3.pre_mlp_layernorm.weight",
        "mtp.layers.0.transformer_layer.self_attention.linear_q_up_proj.layer_norm_weight",
    ):
        assert expected in names(OLD), expected
    assert f"{attention}q_layernorm.weight" in names(NEW)
    assert not set(names(OLD)) & {f"{attention}q_layernorm.weight", f"{attention}indexer."}
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in names(LOCAL)
    # a layer that shares its selection has no indexer
    assert not any(name.startswith(f"decoder.layers.3.{attention[17:]}core") for name in names(NEW))


def test_only_what_is_cut_by_heads_is_swapped_and_only_for_the_last_dimensions() -> None:
    rules = core_rules(tiny(), OLD, include_mtp=True)
    swapped = [rule.mcore_name for rule in rules if isinstance(rule, HalfSwap)]
    assert {name.partition(".indexer.")[2] for name in swapped} == BY_HEAD
    # four indexers and that of the MTP layer
    assert len(swapped) == 5 * len(BY_HEAD)
    assert not any(isinstance(r, HalfSwap) for r in core_rules(tiny(), NEW, include_mtp=True))


@pytest.mark.parametrize("layout", [OLD, NEW, LOCAL])
def test_every_tensor_once(layout: CoreLayout) -> None:
    rules = core_rules(tiny(), layout, include_mtp=True)
    check_total(rules, [n for rule in rules for n in rule.hf_names], names(layout))


def test_a_rope_that_is_not_half_of_the_head_is_refused_where_halves_are_swapped() -> None:
    config = tiny(index_head_dim=32)
    core_rules(config, NEW, include_mtp=True)
    with pytest.raises(CheckpointError, match="cannot be exchanged"):
        core_rules(config, OLD, include_mtp=True)


@pytest.mark.parametrize(
    "found",
    [
        [],
        ["decoder.layers.self_attention.linear_qkv.weight"],
        [*names(OLD), *names(NEW)],
        [name for name in names(NEW) if not name.endswith(".q_layernorm.weight")],
    ],
)
def test_names_of_no_known_layout_are_refused(found: list[str]) -> None:
    with pytest.raises(CheckpointError, match="no layout of Megatron-Core's own DSA") as caught:
        layout_of_names(found)
    assert "0.18" in str(caught.value.expected)


def test_the_dimensions_can_be_told_and_must_be_known() -> None:
    assert layout_of_names(names(NEW), "last").indexer_rope == "last"
    assert layout_of_core("last", "fused").indexer_rope == "last"
    for wrong in (layout_of_core, lambda rope: layout_of_names(names(NEW), rope)):
        with pytest.raises(CheckpointError, match="unknown dimensions"):
            wrong("middle")  # type: ignore[operator]


def test_the_place_of_the_norms_must_be_known() -> None:
    with pytest.raises(CheckpointError, match="unknown place of the norms"):
        layout_of_core("last", "none")  # type: ignore[arg-type]


def test_the_installed_core_is_the_default() -> None:
    core, layout = probe_core(), layout_of_core()
    assert (layout.indexer_rope, layout.latent_norms) == (core.indexer_rope, core.latent_norms)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight",
            ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", 12),
        ),
        ("output_layer.weight", ("output_layer.weight", None)),
    ],
)
def test_experts_are_parts_of_a_stack(name: str, expected: tuple[str, int | None]) -> None:
    assert stacked_name(name) == expected
