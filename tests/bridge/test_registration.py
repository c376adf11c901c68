"""One import puts our bridge in the place of the built-in one; unregister puts that back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.bridge import AutoBridge
from megatron.bridge.models.glm_moe_dsa.glm5_bridge import GLM5Bridge as BuiltIn
from transformers import GlmMoeDsaForCausalLM

from glm5.integrations.bridge.registration import _DISPATCHERS
from glm5.integrations.megatron_bridge import GLM5Bridge, register, unregister
from tests.tiny_models import TinyFolder


@pytest.fixture(autouse=True)
def _registered_afterwards() -> Iterator[None]:
    yield
    register()


def entries() -> list[Any]:
    return [dispatcher._exact_types[key] for dispatcher, key in _DISPATCHERS]


def bridge_of(folder: Path) -> Any:
    return AutoBridge.from_hf_pretrained(str(folder))._model_bridge


def test_the_import_registers(tiny_folder: TinyFolder) -> None:
    assert type(bridge_of(tiny_folder("5.2"))) is GLM5Bridge


def test_unregister_brings_the_built_in_bridge_back(tiny_folder: TinyFolder) -> None:
    ours = entries()
    unregister()
    built_in = entries()
    assert type(bridge_of(tiny_folder("5.2"))) is BuiltIn
    assert all(one is not other for one, other in zip(ours, built_in, strict=True))
    unregister()
    assert all(one is other for one, other in zip(entries(), built_in, strict=True))
    register()
    assert type(bridge_of(tiny_folder("5.2"))) is GLM5Bridge
    register()
    unregister()
    assert all(one is other for one, other in zip(entries(), built_in, strict=True))


def test_no_other_architecture_changes() -> None:
    keys = [set(dispatcher._exact_types) for dispatcher, _ in _DISPATCHERS]
    unregister()
    assert keys == [set(dispatcher._exact_types) for dispatcher, _ in _DISPATCHERS]
    assert GlmMoeDsaForCausalLM in keys[0]
