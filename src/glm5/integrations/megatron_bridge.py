"""Megatron-Bridge reaches GLM-5 through glm5: importing this module registers it.

From then on `AutoBridge` takes `GLM5Bridge` for `GlmMoeDsaForCausalLM` in place of its own bridge,
until `unregister()`.
"""

from glm5.integrations.bridge.bridge import GLM5Bridge
from glm5.integrations.bridge.provider import GLM5ModelProvider
from glm5.integrations.bridge.registration import register, unregister

__all__ = ["GLM5Bridge", "GLM5ModelProvider", "register", "unregister"]

register()
