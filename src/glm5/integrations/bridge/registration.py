"""Which bridge Megatron-Bridge takes for GLM-5."""

from __future__ import annotations

from typing import Any

from megatron.bridge.models.conversion import model_bridge
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.utils.instantiate_utils import target_allowlist
from megatron.core.models.gpt import GPTModel
from transformers import GlmMoeDsaForCausalLM

from glm5.integrations.bridge.bridge import GLM5Bridge
from glm5.integrations.bridge.provider import GLM5ModelProvider
from glm5.model.spec import decoder_spec

_CONVERSION = (GlmMoeDsaForCausalLM, GPTModel)
# Megatron-Bridge's dispatchers, and what each finds an implementation by.
_DISPATCHERS = (
    (model_bridge.get_model_bridge, GlmMoeDsaForCausalLM),
    (model_bridge.stream_weights_megatron_to_hf, _CONVERSION),
    (model_bridge.stream_weights_megatron_to_hf_quant, _CONVERSION),
    (model_bridge.stream_adapter_weights_megatron_to_hf, _CONVERSION),
)
# What a run config of Megatron-Bridge may name, beside its own packages: nothing else of ours.
_TARGETS = tuple(
    f"{named.__module__}.{named.__qualname__}" for named in (GLM5ModelProvider, decoder_spec)
)
_replaced: list[Any] = []


def register() -> None:
    """Puts `GLM5Bridge` in the place of Megatron-Bridge's own; a second call does nothing."""
    if _replaced:
        return
    # importing the models has registered the one that is replaced
    import megatron.bridge.models

    assert megatron.bridge.models
    _replaced.extend([dispatcher._exact_types[key] for dispatcher, key in _DISPATCHERS])
    for target in _TARGETS:
        target_allowlist.add_exact(target)
    MegatronModelBridge.register_bridge(
        source=GlmMoeDsaForCausalLM,
        target=GPTModel,
        provider=GLM5ModelProvider,
        model_type="glm_moe_dsa",
    )(GLM5Bridge)


def unregister() -> None:
    """Puts back what `register` replaced; nothing happens where nothing is registered."""
    for (dispatcher, key), implementation in zip(_DISPATCHERS, list(_replaced), strict=False):
        dispatcher.impl(key)(implementation)
    _replaced.clear()
    for target in _TARGETS:
        target_allowlist.remove_exact(target)
