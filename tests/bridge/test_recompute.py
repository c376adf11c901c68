"""Where the host's own modules read another micro-batch's selection: bshd with recompute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bridge.models import bridged, make_lora
from tests.tiny_models import TinyFolder, assert_all_close, draw_tokens, gradients, probe_loss

RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp", "moe"],
    },
}
Train = Callable[..., dict[str, Tensor]]


@pytest.fixture
def train(tiny_folder: TinyFolder) -> Train:
    """train(adapted, calls, **fields) -> gradients of F1 F2 B1 B2 on the tiny 5.2, which shares.

    `calls` gets an entry whenever the attention core of a shared layer runs.
    """

    def run(adapted: bool, calls: list[Any], **fields: Any) -> dict[str, Tensor]:
        lora = make_lora() if adapted else None
        _, (model,) = bridged(tiny_folder("5.2"), lora=lora, **fields)
        for number, (name, factor) in enumerate(model.named_parameters()):
            if ".adapter." in name:
                generator = torch.Generator().manual_seed(number)
                torch.nn.init.normal_(factor, std=0.1, generator=generator)
        model.train()
        attention = model.decoder.layers[4].self_attention
        core = attention._core

        def counted(*args: Any) -> Any:
            calls.append(args[0])
            return core(*args)

        attention._core = counted
        losses = []
        for seed in (1, 2):
            rows = draw_tokens(2 * 24, seed=seed).view(2, 24)
            losses.append(probe_loss(model(rows, None, attention_mask=None)))
        for loss in losses:
            loss.backward()
        return gradients(model)

    return run


@pytest.mark.parametrize("adapted", [False, True], ids=["weights", "adapters"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_gradients_are_the_bits_of_kept_activations(
    train: Train, adapted: bool, recompute: str
) -> None:
    kept: list[Any] = []
    again: list[Any] = []
    expected = train(adapted, kept)
    assert len(expected) > 90
    assert_all_close(train(adapted, again, **RECOMPUTE[recompute]), expected, limit=0)
    assert (len(kept), len(again)) == (2, 4)
