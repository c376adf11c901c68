"""IndexShare's selection travels as a value: nothing in the model remembers a forward."""

import copy
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.model.attention import DSASelfAttention
from glm5.model.forward import logits
from tests.tiny_models import (
    TinyFolder,
    assert_all_close,
    draw_tokens,
    edges,
    gradients,
    modules_of,
    probe_loss,
)


@pytest.fixture
def model(tiny_folder: TinyFolder) -> GPTModel:
    return load_model(tiny_folder("5.2"))


def test_shared_layers_have_no_indexer(model: GPTModel) -> None:
    kinds = model.config.glm5.indexer_types
    assert kinds == ("full",) * 3 + ("shared",) * 3 + ("full",)
    for layer, kind in zip(model.decoder.layers, kinds, strict=True):
        assert (layer.self_attention.indexer is not None) == (kind == "full")


def test_a_shared_layer_gets_the_very_tensor_of_the_full_layer_above(model: GPTModel) -> None:
    given: list[Any] = []
    returned: list[Tensor] = []
    for _, attention in modules_of(model, DSASelfAttention):
        attention.register_forward_pre_hook(lambda _, args: given.append(args[1]))
        attention.register_forward_hook(lambda _, args, out: returned.append(out[1]))
    logits(model, draw_tokens(29), edges([20, 9]))
    assert given[0] is None
    assert [given[i + 1] is returned[i] for i in range(6)] == [True] * 6
    for shared in (3, 4, 5):
        assert returned[shared] is returned[2]
    for full in (0, 1, 2, 6):
        assert returned[full].shape == (29, 8)
        assert returned[full].dtype == torch.int32
    assert not torch.equal(returned[1], returned[2])
    assert not torch.equal(returned[6], returned[2])


def test_a_shared_layer_without_a_selection_is_our_bug(model: GPTModel) -> None:
    with pytest.raises(AssertionError, match="layer 4 shares a top-k nobody made"):
        model.decoder.layers[3].self_attention(torch.zeros(4, 1, 64), None)


def test_an_attention_mask_is_refused(model: GPTModel) -> None:
    rows = draw_tokens(6).view(1, 6)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with pytest.raises(AssertionError, match="attention_mask must be None"):
        model(rows, torch.arange(6)[None], attention_mask=mask)


def _state(model: GPTModel) -> dict[str, Any]:
    """Every attribute of our modules and of all configs, by value."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        if type(module).__module__.startswith("glm5."):
            state |= {f"{path}.{k}": v for k, v in vars(module).items() if k[0] != "_"}
        for name, value in vars(module).items():
            if isinstance(value, TransformerConfig):
                state |= {f"{path}.{name}.{k}": _frozen(v) for k, v in vars(value).items()}
    return state


def _frozen(value: Any) -> Any:
    """Containers by their content, which a forward could change in place."""
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _hidden_selections(model: GPTModel) -> list[str]:
    """Modules and configs that hold an integer tensor in an attribute."""
    holders = [*model.named_modules(), ("config", model.config)]
    return [
        f"{path}.{name}"
        for path, holder in holders
        for name, value in vars(holder).items()
        if isinstance(value, Tensor) and value.dtype == torch.int32
    ]


@pytest.mark.parametrize("training", [False, True])
def test_a_forward_and_backward_change_no_attribute(model: GPTModel, training: bool) -> None:
    model.train(training)
    before = _state(model)
    assert len(before) > 100
    probe_loss(logits(model, draw_tokens(29), edges([20, 9]))).backward()
    after = _state(model)
    assert after.keys() == before.keys()
    changed = [name for name, value in before.items() if not _same(after[name], value)]
    assert changed == []
    assert _hidden_selections(model) == []


def _same(a: Any, b: Any) -> bool:
    return a is b or bool(a == b)


def test_two_micro_batches_in_flight_do_not_mix(model: GPTModel) -> None:
    """F1 F2 B1 B2 equals F1 B1 F2 B2, bit for bit: a stored selection would be the second's."""
    first, second = (draw_tokens(29, seed=seed) for seed in (1, 2))
    cut = edges([20, 9])
    probe_loss(logits(model, first, cut)).backward()
    probe_loss(logits(model, second)).backward()
    one_by_one = gradients(model)
    model.zero_grad(set_to_none=True)
    losses = [probe_loss(logits(model, first, cut)), probe_loss(logits(model, second))]
    for loss in losses:
        loss.backward()
    assert_all_close(gradients(model), one_by_one, limit=0)


def test_the_indexer_gets_no_gradient_from_the_main_loss(model: GPTModel) -> None:
    probe_loss(logits(model.train(), draw_tokens(29))).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {name for name, _ in model.named_parameters() if ".indexer." in name}


@pytest.mark.parametrize("batch", [1, 2])
def test_every_linear_gets_rows_that_one_product_takes(model: GPTModel, batch: int) -> None:
    """torch.matmul folds [s, b, d] into rows only where the strides say so."""
    seen: dict[str, bool] = {}

    def note(path: str, args: tuple[Any, ...]) -> None:
        (x, *_) = args
        seen[path] = x.dim() == 2 or x.stride(0) == x.stride(1) * x.shape[1]

    hooks = [
        module.register_forward_pre_hook(lambda _, args, path=path: note(path, args))
        for path, module in model.named_modules()
        if path.rpartition(".")[2].startswith("linear_") or path == "output_layer"
        if "kv_up" not in path and ".experts." not in path
    ]
    token_ids = draw_tokens(8 * batch).view(batch, 8)
    with torch.no_grad():
        model(token_ids, torch.arange(8).expand(batch, 8), None)
    for hook in hooks:
        hook.remove()
    assert len(seen) > 40
    assert [path for path, folds in seen.items() if not folds] == []
