"""The rules name the parameters of the core's own attention as the installed release does."""

from typing import Any

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.spec_utils import build_module
from torch import nn

from glm5.checkpoint.core_layout import core_rules, layout_of_core
from glm5.checkpoint.tiny import tiny_config
from glm5.config import Glm5Config
from glm5.runtime.distributed import ensure_distributed
from tests.cores.core_indexer import Linear, core_config

pytestmark = pytest.mark.cores


class NormedLinear(ColumnParallelLinear):
    """The parameters of Transformer Engine's linear with a norm before it."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, **options: Any) -> None:
        super().__init__(inputs, outputs, config=config, **options)
        self.layer_norm_weight = nn.Parameter(torch.ones(inputs))


class Parts(LocalSpecProvider):
    """Megatron's parts without Transformer Engine, and stand-ins for what only that has."""

    def linear(self) -> type:
        return Linear

    def column_parallel_layer_norm_linear(self) -> type:
        return NormedLinear


def test_every_parameter_of_the_attention_has_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(getattr(multi_latent_attention, "TELinear", NormedLinear), type):
        # 0.16 asks what kind of linear it has
        monkeypatch.setattr(multi_latent_attention, "TELinear", NormedLinear)
    ensure_distributed(torch.device("cpu"))
    glm5 = Glm5Config.from_hf_dict(tiny_config("5"))
    config = core_config(glm5, experimental_attention_variant="dsa", qk_layernorm=True)
    spec = specs.get_dsa_module_spec_for_backend(config, Parts())
    # the newest accepts no stand-in for these two
    spec.submodules.linear_q_down_proj = ColumnParallelLinear
    spec.submodules.linear_kv_down_proj = ColumnParallelLinear
    attention = build_module(spec, config=config, layer_number=1)
    prefix = "decoder.layers.0.self_attention."
    rules = core_rules(glm5, layout_of_core(), include_mtp=False)
    named = {r.mcore_name.removeprefix(prefix) for r in rules if r.mcore_name.startswith(prefix)}
    assert named == {name for name, _ in attention.named_parameters()}
