"""`verify` passes on right models and fails on every wrong one, naming the quantity."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from glm5.checkpoint.dequantise import readable_by_transformers
from glm5.checkpoint.load import load_model
from glm5.config import Glm5Config
from glm5.errors import CheckpointError
from glm5.model.indexer import LightningIndexer
from glm5.model.tokens import TokenRow
from glm5.ops.indexer.selection import select_from_scores
from glm5.ops.masks import document_bounds
from glm5.ops.rope import rope_cos_sin
from glm5.ops.rotation import rotate
from glm5.parity.hf_side import load_reference
from glm5.parity.verify import Report, cases, latent_eps_notes, verify
from tests.hf_folders import rewrite
from tests.tiny_models import VARIANTS, TinyFolder, modules_of

CPU = torch.device("cpu")
OUTPUTS = {"logits", "hidden states", "gradients"}

Failed = set[tuple[str, str]]


@pytest.fixture(scope="module")
def reference(tiny_folder: TinyFolder) -> Callable[[str], nn.Module]:
    """reference(variant) -> the transformers model; no test changes it."""
    models: dict[str, nn.Module] = {}

    def get(variant: str) -> nn.Module:
        if variant not in models:
            folder = tiny_folder(variant)
            models[variant] = load_reference(folder, Glm5Config.from_hf(folder), CPU)
        return models[variant]

    return get


@pytest.fixture
def model(tiny_folder: TinyFolder) -> GPTModel:
    return load_model(tiny_folder("5"))


def failed(report: Report) -> Failed:
    """(case, quantity) of everything that failed; a report with a failure is not ok."""
    found = {(f.case, f.quantity) for f in report.findings if not f.ok}
    assert report.ok == (not found)
    return found


def worst(report: Report, case: str, quantity: str) -> str:
    (name,) = [f.worst for f in report.findings if (f.case, f.quantity) == (case, quantity)]
    return name


def assert_far_below_limit(report: Report) -> None:
    assert failed(report) == set()
    assert len(report.findings) == 1 + 5 * len(cases(8))
    assert max(f.error for f in report.findings) < 1e-5


@pytest.mark.cores
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_agrees(
    tiny_folder: TinyFolder, reference: Callable[[str], nn.Module], variant: str
) -> None:
    report = verify(load_model(tiny_folder(variant)), reference(variant))
    assert_far_below_limit(report)
    assert report.as_dict()["ok"] is True


@pytest.mark.parametrize("variant", ["5", "5.2"])
def test_the_second_opinion_agrees(
    tiny_folder: TinyFolder, reference: Callable[[str], nn.Module], variant: str
) -> None:
    model = load_model(tiny_folder(variant), backend="megatron")
    assert_far_below_limit(verify(model, reference(variant), seed=1))


def test_an_fp8_checkpoint_agrees_with_its_dequantised_copy(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("5", fp8=True)
    with readable_by_transformers(folder, Glm5Config.from_hf(folder)) as copy:
        oracle = load_reference(copy, Glm5Config.from_hf(copy), CPU)
    assert_far_below_limit(verify(load_model(folder), oracle))


def test_a_tie_in_one_layer_is_not_a_fault_of_the_next(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    def tie(tensors: dict[str, torch.Tensor]) -> None:
        # every score of layer 0 is 0: the two sides choose other keys
        tensors["model.layers.0.self_attn.indexer.weights_proj.weight"].zero_()

    folder = rewrite(tiny_folder("5"), tmp_path / "hf", tie)
    report = verify(load_model(folder), load_reference(folder, Glm5Config.from_hf(folder), CPU))
    assert report.tied_rows > 0
    assert_far_below_limit(report)


def test_one_selected_key_leaves_queries_without_a_gradient(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = rewrite(tiny_folder("5"), tmp_path / "hf", lambda tensors: None, index_topk=1)
    reference = load_reference(folder, Glm5Config.from_hf(folder), CPU)
    assert verify(load_model(folder), reference).ok


def test_odd_widths_agree(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """transformers' grouped product would take no rows of 44 bytes."""

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if ".experts." in name or ".shared_experts." in name:
                columns = "down_proj" in name
                tensors[name] = (tensors[name][:, :11] if columns else tensors[name][:11]).clone()

    folder = rewrite(tiny_folder("5"), tmp_path / "hf", narrow, moe_intermediate_size=11)
    reference = load_reference(folder, Glm5Config.from_hf(folder), CPU)
    assert_far_below_limit(verify(load_model(folder), reference))


def test_cases_lie_on_both_sides_of_topk() -> None:
    lengths = {case.name: case.lengths for case in cases(8)}
    assert max(lengths["short"]) < 8 < min(lengths["long"])
    assert {1, 8, 9} <= set(lengths["packed"])
    assert all(min(case.lengths) >= 1 for case in cases(1))


def test_the_same_seed_gives_the_same_report(
    model: GPTModel, reference: Callable[[str], nn.Module]
) -> None:
    assert verify(model, reference("5"), seed=3) == verify(model, reference("5"), seed=3)


# Negative controls: each breaks one thing that has been wrong in some published code.

Break = Callable[[GPTModel, pytest.MonkeyPatch], None]


def half_split(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, first: bool) -> Tensor:
    return rotate(x, cos, sin, interleaved=not interleaved, first=first)


def main_rope_half_split(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.model.attention.rotate", half_split)


def main_rope_theta(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "glm5.model.attention.rope_cos_sin",
        lambda positions, dim, theta: rope_cos_sin(positions, dim, 10_000.0),
    )


def latent_eps(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in model.decoder.layers:
        layer.self_attention.q_layernorm.eps = 1e-2
        layer.self_attention.kv_layernorm.eps = 1e-2


def swapped_gate_and_up(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    gate, up = weight.data.chunk(2)
    weight.data = torch.cat([up, gate])


def perturbed_weight(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.decoder.layers[1].self_attention.linear_kv_up_proj.weight.data[5, 3] += 0.1


def zeroed_expert_bias(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.decoder.layers[1].mlp.router.expert_bias.zero_()


@pytest.mark.parametrize(
    ("break_it", "first_bad_layer"),
    [
        (main_rope_half_split, 0),
        (main_rope_theta, 0),
        (latent_eps, 0),
        (swapped_gate_and_up, 0),
        (perturbed_weight, 1),
        (zeroed_expert_bias, 1),
    ],
)
def test_a_wrong_model_fails_at_every_length(
    model: GPTModel,
    reference: Callable[[str], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    break_it: Break,
    first_bad_layer: int,
) -> None:
    break_it(model, monkeypatch)
    report = verify(model, reference("5"))
    wrong = failed(report)
    for case in ("short", "long", "packed", "batched"):
        assert {(case, quantity) for quantity in OUTPUTS} <= wrong
    assert int(worst(report, "long", "hidden states").split()[1]) >= first_bad_layer


def indexer_rope_half_split(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.model.indexer.rotate", half_split)


def indexer_rope_on_the_last_dims(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def rope_last(self: LightningIndexer, x: Tensor, row: TokenRow) -> Tensor:
        rope_dim = self.config.glm5.qk_rope_head_dim
        cos, sin = rope_cos_sin(row.positions, rope_dim, self.config.glm5.rope_theta)
        return rotate(x, cos, sin, interleaved=True, first=False)

    monkeypatch.setattr(LightningIndexer, "_rope_first_dims", rope_last)


def indexer_sees_the_raw_latent(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in model.decoder.layers:
        _feed_raw_latent(layer.self_attention)


def _feed_raw_latent(attention: Any) -> None:
    raw: list[Tensor] = []
    attention.q_layernorm.register_forward_pre_hook(lambda _, args: raw.append(args[0]))
    attention.indexer.register_forward_pre_hook(lambda _, args: (args[0], raw.pop(), *args[2:]))


def no_relu(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("qhd,kd,qh->qk", q.float(), k.float(), weights)


def scores_without_relu(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.ops.indexer.reference.index_scores", no_relu)
    monkeypatch.setattr("glm5.parity.mcore_side.index_scores", no_relu)


def no_head_weights(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in model.decoder.layers:
        layer.self_attention.indexer.linear_weights_proj.weight.data.fill_(0.1)


def no_key_norm_bias(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in model.decoder.layers:
        layer.self_attention.indexer.k_norm.bias.data.zero_()


@pytest.mark.parametrize(
    "break_it",
    [
        indexer_rope_half_split,
        indexer_rope_on_the_last_dims,
        indexer_sees_the_raw_latent,
        scores_without_relu,
        no_head_weights,
        no_key_norm_bias,
    ],
)
def test_a_wrong_indexer_shows_only_above_topk(
    model: GPTModel,
    reference: Callable[[str], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    break_it: Break,
) -> None:
    """Below topk every key is selected whatever the scores are: why both lengths are run."""
    break_it(model, monkeypatch)
    wrong = failed(verify(model, reference("5")))
    short = {quantity for case, quantity in wrong if case == "short"}
    assert short == {"indexer scores"}
    for case in ("long", "packed", "batched"):
        expected = {*OUTPUTS, "indexer scores", "wrongly selected rows"}
        assert {quantity for c, quantity in wrong if c == case} == expected


def test_a_selection_that_contradicts_right_scores_is_named(
    model: GPTModel, reference: Callable[[str], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kernel does whose scores are right where they are shown, and wrong where used."""
    monkeypatch.setattr("glm5.ops.indexer.reference.index_scores", no_relu)
    report = verify(model, reference("5"))
    wrong = failed(report)
    assert ("long", "wrongly selected rows") in wrong
    assert worst(report, "long", "wrongly selected rows").startswith("layer ")
    assert not {quantity for case, quantity in wrong if case == "short"}


def test_ties_are_counted_and_do_not_fail(
    model: GPTModel, reference: Callable[[str], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no head weights all scores are 0: any selection is right, ours differs and passes."""
    oracle = load_copy(reference("5"))
    for layer in model.decoder.layers:
        layer.self_attention.indexer.linear_weights_proj.weight.data.zero_()
    for layer in oracle.model.layers:
        layer.self_attn.indexer.weights_proj.weight.data.zero_()
    monkeypatch.setattr("glm5.ops.torch_backend.select_topk", _latest_keys)
    report = verify(model, oracle)
    assert failed(report) == set()
    assert report.tied_rows > 0


def _latest_keys(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int
) -> Tensor:
    recency = torch.arange(len(k), dtype=torch.float32).expand(len(q), -1)
    return select_from_scores(recency, starts, ends, topk)


def load_copy(model: Any) -> Any:
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    for ours, theirs in zip(copy.model.layers, model.model.layers, strict=True):
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            eps = getattr(theirs.self_attn, name).variance_epsilon
            getattr(ours.self_attn, name).variance_epsilon = eps
    return copy.eval()


def test_a_wrong_gradient_fails_alone_and_is_named(
    model: GPTModel, reference: Callable[[str], nn.Module]
) -> None:
    weight = model.decoder.layers[1].self_attention.linear_q_up_proj.weight
    weight.register_hook(lambda gradient: gradient * 1.01)
    report = verify(model, reference("5"))
    assert {quantity for _, quantity in failed(report)} == {"gradients"}
    assert worst(report, "long", "gradients") == "model.layers.1.self_attn.q_b_proj.weight"


def test_a_missing_gradient_fails(model: GPTModel, reference: Callable[[str], nn.Module]) -> None:
    model.decoder.final_layernorm.weight.requires_grad_(False)
    report = verify(model, reference("5"))
    assert {quantity for _, quantity in failed(report)} == {"gradients"}
    assert worst(report, "short", "gradients") == "model.norm.weight"


def test_documents_that_see_each_other_fail_where_there_are_two(
    model: GPTModel, reference: Callable[[str], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_document(seq_len: int, batch: int, *unused: Any) -> TokenRow:
        return TokenRow(
            *document_bounds(torch.tensor([0, seq_len * batch]), seq_len * batch), batch
        )

    monkeypatch.setattr("glm5.model.attention.token_row", one_document)
    wrong = failed(verify(model, reference("5")))
    assert {case for case, _ in wrong} == {"packed", "batched"}


def test_a_nan_that_changes_no_logit_fails(
    model: GPTModel, reference: Callable[[str], nn.Module]
) -> None:
    (name, bias), *_ = [x for x in model.named_buffers() if x[0].endswith("expert_bias")]
    bias[0] = torch.nan
    report = verify(model, reference("5"))
    assert ("-", "weights that are not finite") in failed(report)
    assert worst(report, "-", "weights that are not finite") == name


def test_another_latent_eps_is_noted(tiny_folder: TinyFolder) -> None:
    glm5 = Glm5Config.from_hf(tiny_folder("5"))
    assert latent_eps_notes(glm5) == ()
    (note,) = latent_eps_notes(glm5.model_copy(update={"latent_norm_eps": 1e-5}))
    assert "1e-05" in note and "1e-06" in note


def test_a_nan_fails(model: GPTModel, reference: Callable[[str], nn.Module]) -> None:
    model.decoder.layers[2].mlp.shared_experts.linear_fc2.weight.data[0, 0] = float("nan")
    assert ("short", "logits") in failed(verify(model, reference("5")))


def test_a_layer_that_shares_another_layers_selection_fails(
    tiny_folder: TinyFolder, reference: Callable[[str], nn.Module]
) -> None:
    """IndexShare with layer 4 reading layer 1's selection instead of layer 2's."""
    model = load_model(tiny_folder("5.2"))
    layers, of_layer_1 = model.decoder.layers, []
    layers[1].register_forward_hook(lambda module, args, out: of_layer_1.append(out[1]))
    layers[4].self_attention.register_forward_pre_hook(
        lambda module, args: (args[0], of_layer_1[-1], *args[2:])
    )
    report = verify(model, reference("5.2"))
    wrong = failed(report)
    assert {case for case, _ in wrong} == {"long", "packed", "batched"}
    assert {("long", quantity) for quantity in OUTPUTS} <= wrong


@pytest.mark.parametrize("schedule", ["FFFFSSS", "FFSSSSF"])
def test_a_wrong_schedule_in_the_config_does_not_load(
    tiny_folder: TinyFolder, tmp_path: Path, schedule: str
) -> None:
    folder = tmp_path / schedule
    shutil.copytree(tiny_folder("5.2"), folder)
    raw = json.loads((folder / "config.json").read_text())
    kinds = [{"F": "full", "S": "shared"}[letter] for letter in schedule]
    raw.update(indexer_types=kinds, index_topk_freq=None, index_skip_topk_offset=None)
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="indexer"):
        load_model(folder)


def test_negative_controls_start_from_a_model_that_passes(
    model: GPTModel, reference: Callable[[str], nn.Module]
) -> None:
    assert failed(verify(model, reference("5"))) == set()
    assert len(list(modules_of(model, LightningIndexer))) == 3
