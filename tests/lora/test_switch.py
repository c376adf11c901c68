"""Without its adapters an adapted model is its base, and afterwards it is itself again."""

import torch

from glm5.checkpoint.load import load_model
from glm5.lora.attach import attach_lora
from glm5.lora.spec import LoraSpec
from glm5.lora.switch import without_adapters
from glm5.model.forward import logits
from tests.tiny_models import TinyFolder, draw_tokens
from tests.training import randomise_adapters, snapshot

TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLPS = ("gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def test_the_base_and_back(tiny_folder: TinyFolder) -> None:
    tokens = draw_tokens(20)
    model = load_model(tiny_folder("5"), dtype="float32")
    base = logits(model, tokens)
    attach_lora(model, LoraSpec(adapter_rank=2, adapter_alpha=4.0, targets=TARGETS + MLPS), seed=0)
    randomise_adapters(model)
    adapted, before, names = logits(model, tokens), snapshot(model), list(model.state_dict())
    modules = dict(model.named_modules())
    with without_adapters([model]):
        # bit for bit: not an adapter that adds nothing, but none
        assert torch.equal(logits(model, tokens), base)
    assert not torch.allclose(adapted, base)
    assert torch.equal(logits(model, tokens), adapted)
    assert list(model.state_dict()) == names
    assert all(torch.equal(value, before[name]) for name, value in snapshot(model).items())
    assert dict(model.named_modules()) == modules


def test_an_error_inside_puts_them_back(tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("5"), dtype="float32")
    attach_lora(model, LoraSpec(adapter_rank=2, adapter_alpha=4.0, targets=TARGETS), seed=0)
    modules = dict(model.named_modules())
    try:
        with without_adapters([model]):
            raise KeyError
    except KeyError:
        pass
    assert dict(model.named_modules()) == modules
