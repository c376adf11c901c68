"""The indexer's KL loss: plain autograd's gradients for the indexer, none for anything else."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.lora.attach import attach_lora
from glm5.lora.spec import LoraSpec
from glm5.model.forward import logits
from glm5.model.indexer import LightningIndexer
from glm5.ops import torch_backend
from tests.tiny_models import (
    TinyFolder,
    assert_all_close,
    assert_close,
    draw_tokens,
    edges,
    gradients,
    modules_of,
    probe_loss,
)

COEFF = 0.7
LENGTHS = (21, 1, 9)


class Seen(NamedTuple):
    """What one full layer computed with, as constants."""

    path: str
    indexer: LightningIndexer
    x: Tensor
    q_latent: Tensor
    positions: Tensor
    q: Tensor
    kv: Tensor
    topk_indices: Tensor


def train(model: GPTModel) -> dict[str, Tensor]:
    model.train().zero_grad(set_to_none=True)
    probe_loss(logits(model, draw_tokens(sum(LENGTHS)), edges(LENGTHS))).backward()
    return gradients(model)


def of_indexers(tensors: dict[str, Tensor], *, inside: bool = True) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if (".indexer." in name) == inside}


@pytest.fixture(scope="module")
def trained(tiny_folder: TinyFolder) -> Callable[..., dict[str, Tensor]]:
    """Gradients of the 5.2 model by coefficient and recompute, once each."""
    known: dict[Any, dict[str, Tensor]] = {}

    def get(coeff: float, recompute: str = "none") -> dict[str, Tensor]:
        if (coeff, recompute) not in known:
            model = load_model(tiny_folder("5.2"), indexer_loss_coeff=coeff, recompute=recompute)
            known[coeff, recompute] = train(model)
        return known[coeff, recompute]

    return get


def test_the_rest_of_the_model_does_not_feel_the_coefficient(
    trained: Callable[..., dict[str, Tensor]],
) -> None:
    with_loss, without = trained(COEFF), trained(0.0)
    assert of_indexers(without) == {}
    assert len(of_indexers(with_loss)) == 4 * 5
    assert all(gradient.any() for gradient in of_indexers(with_loss).values())
    # an indexer that learns takes its layer's short documents over the sparse path
    assert_all_close(of_indexers(with_loss, inside=False), without, limit=1e-5)


def test_the_logits_do_not_feel_the_coefficient(tiny_folder: TinyFolder) -> None:
    outputs = [
        logits(load_model(tiny_folder("5"), indexer_loss_coeff=coeff).train(), draw_tokens(20))
        for coeff in (0.0, COEFF)
    ]
    assert torch.equal(*outputs)


def test_gradients_are_those_of_plain_autograd(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_folder("5.2"), indexer_loss_coeff=COEFF)
    seen = _watch(model, monkeypatch)
    got = of_indexers(train(model))
    for layer in seen:
        names, parameters = zip(*layer.indexer.named_parameters(), strict=True)
        loss = COEFF * _kl(layer, model.config.glm5).sum()
        expected = torch.autograd.grad(loss, parameters)
        for name, gradient in zip(names, expected, strict=True):
            assert_close(got.pop(f"{layer.path}.{name}"), gradient, 1e-5, f"{layer.path}.{name}")
    assert got == {}


def _watch(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Notes the inputs of every full layer's indexer and core during the next forward."""
    inputs: dict[str, Any] = {}
    seen: list[Seen] = []
    for path, indexer in modules_of(model, LightningIndexer):
        indexer.register_forward_pre_hook(
            lambda module, args, path=path: inputs.update(now=(path, module, *args))
        )
    sparse_mla_with_mass = torch_backend.sparse_mla_with_mass

    def noted(q: Tensor, kv: Tensor, topk_indices: Tensor, *rest: Any, **named: Any) -> Any:
        if (now := inputs.pop("now", None)) is not None:
            path, module, x, q_latent, row, *_ = now
            constants = (x[:, 0], q_latent[:, 0], row.positions, q, kv, topk_indices)
            seen.append(Seen(path, module, *(tensor.detach() for tensor in constants)))
        return sparse_mla_with_mass(q, kv, topk_indices, *rest, **named)

    monkeypatch.setattr(torch_backend, "sparse_mla_with_mass", noted)
    return seen


def _kl(layer: Seen, glm5: Any) -> Tensor:
    """KL(p || softmax(I)) of every query over its selected keys (arXiv 2512.02556, eq. 4)."""
    target = _attention(layer, glm5)
    scores = _scores(layer, glm5)
    total = []
    for i, selected in enumerate(layer.topk_indices.long()):
        keys = selected[selected >= 0]
        p = target[i, keys] / target[i, keys].sum()
        log_q = torch.log_softmax(scores[i, keys], dim=0)
        total.append((p * (p.log() - log_q)).sum())
    return torch.stack(total)


def _attention(layer: Seen, glm5: Any) -> Tensor:
    """[t, t]: the main attention's probabilities over the selected keys, summed over heads."""
    every = torch.einsum("qhd,kd->hqk", layer.q, layer.kv) / math.sqrt(glm5.qk_head_dim)
    allowed = torch.zeros(every.shape[1:], dtype=torch.bool)
    for i, keys in enumerate(layer.topk_indices.long()):
        allowed[i, keys[keys >= 0]] = True
    return every.masked_fill(~allowed, -torch.inf).softmax(-1).sum(0)


def _scores(layer: Seen, glm5: Any) -> Tensor:
    """[t, t]: index scores from the parameters, written without any of the package's functions."""
    indexer, heads, dim = layer.indexer, glm5.index_n_heads, glm5.index_head_dim
    q = (layer.q_latent @ indexer.linear_wq_b.weight.T).view(-1, heads, dim)
    k = torch.nn.functional.layer_norm(
        layer.x @ indexer.linear_wk.weight.T,
        (dim,),
        indexer.k_norm.weight,
        indexer.k_norm.bias,
        glm5.indexer_norm_eps,
    )
    q, k = _rope(q, layer.positions, glm5), _rope(k[:, None], layer.positions, glm5)[:, 0]
    weights = layer.x @ indexer.linear_weights_proj.weight.T / math.sqrt(heads * dim)
    return torch.einsum("qhk,qh->qk", torch.einsum("qhd,kd->qhk", q, k).relu(), weights)


def _rope(x: Tensor, positions: Tensor, glm5: Any) -> Tensor:
    """x [t, h, d]: the first qk_rope_head_dim rotate as complex numbers x[0] + i x[1], ..."""
    rotated, passed = x[..., : glm5.qk_rope_head_dim], x[..., glm5.qk_rope_head_dim :]
    pairs = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)).contiguous())
    steps = torch.arange(pairs.shape[-1]) / pairs.shape[-1]
    angles = positions[:, None, None] * glm5.rope_theta**-steps
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
    return torch.cat([turned.flatten(-2), passed], dim=-1)


def test_the_fused_loss_trains_the_indexer_alike(
    tiny_folder: TinyFolder,
    trained: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernels run in Triton's interpreter without a GPU only")
    import tests.ops.triton_interpreter  # noqa: F401
    from glm5.ops.indexer_kl.autograd import indexer_kl
    from glm5.ops.sparse_mla.autograd import sparse_mla_with_mass

    rows: list[int] = []

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        rows.append(len(args[0]))
        return indexer_kl(*args, **kwargs)

    monkeypatch.setattr(torch_backend, "indexer_kl", noted)
    monkeypatch.setattr(torch_backend, "sparse_mla_with_mass", sparse_mla_with_mass)
    got = train(load_model(tiny_folder("5.2"), indexer_loss_coeff=COEFF))
    assert rows == [sum(LENGTHS)] * 4
    assert_all_close(got, trained(COEFF), limit=1e-5)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_changes_nothing(
    trained: Callable[..., dict[str, Tensor]], recompute: str
) -> None:
    assert_all_close(trained(COEFF, recompute), trained(COEFF), limit=0)


@pytest.mark.parametrize(("recompute", "plain"), [("none", 3), ("full", 10), ("selective", 10)])
def test_each_layer_that_learns_sums_its_attention_once(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch, recompute: str, plain: int
) -> None:
    """In the one pass that computes the loss; four of seven layers have an indexer."""
    calls = {"sparse_mla": 0, "sparse_mla_with_mass": 0}

    def count(name: str) -> None:
        function = getattr(torch_backend, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(torch_backend, name, counted)

    for name in calls:
        count(name)
    train(load_model(tiny_folder("5.2"), indexer_loss_coeff=COEFF, recompute=recompute))
    assert calls == {"sparse_mla": plain, "sparse_mla_with_mass": 4}


def test_the_loss_follows_the_scale_of_the_main_loss(
    tiny_folder: TinyFolder,
    trained: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron's schedules divide the main loss and tell this scaler by how much."""
    expected = of_indexers(trained(COEFF))
    # Megatron copies later scales into the first one, which other tests find again
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([0.25]))
    got = of_indexers(train(load_model(tiny_folder("5.2"), indexer_loss_coeff=COEFF)))
    assert_all_close({n: 4 * g for n, g in got.items()}, expected, limit=1e-6)


def _refuse(*_: object, **__: object) -> None:
    raise RuntimeError("the KL loss was computed")


@pytest.fixture
def no_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "indexer_kl", _refuse)


@pytest.mark.usefixtures("no_kl")
def test_a_frozen_indexer_costs_no_loss(tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("5"), indexer_loss_coeff=COEFF)
    with pytest.raises(RuntimeError, match="was computed"):
        train(model)
    for _, indexer in modules_of(model, LightningIndexer):
        indexer.requires_grad_(False)
    assert of_indexers(train(model)) == {}


@pytest.mark.usefixtures("no_kl")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_adapters_elsewhere_cost_no_loss(tiny_folder: TinyFolder, recompute: str) -> None:
    model = load_model(tiny_folder("5"), indexer_loss_coeff=COEFF, recompute=recompute)
    spec = LoraSpec(adapter_rank=2, adapter_alpha=2, targets=("q_b_proj",))
    attach_lora(model, spec, seed=0)
    train(model)


@pytest.mark.usefixtures("no_kl")
def test_no_loss_without_training_gradients_or_coefficient(tiny_folder: TinyFolder) -> None:
    token_ids = draw_tokens(20)
    model = load_model(tiny_folder("5"), indexer_loss_coeff=COEFF)
    logits(model.eval(), token_ids)
    with torch.no_grad():
        logits(model.train(), token_ids)
    logits(load_model(tiny_folder("5")).train(), token_ids)
