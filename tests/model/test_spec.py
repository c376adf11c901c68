"""Multi-token prediction equals the formula of arXiv 2412.19437, section 2.2."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer

from glm5.checkpoint.fp8 import open_checkpoint
from glm5.checkpoint.load import load_model
from glm5.config import Glm5Config
from glm5.errors import CheckpointError
from glm5.model.forward import logits
from glm5.parity.hf_side import load_reference
from tests.tiny_models import TinyFolder, assert_all_close, assert_close, draw_tokens, edges
from tests.tiny_models import gradients as gradients_of

LENGTHS = (29, 10, 2)


def mtp_logits(model: Any, token_ids: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
    """(main logits, MTP logits), each [t, vocab]."""
    seen: list[Tensor] = []
    handle = model.mtp.layers[0].register_forward_hook(lambda _, args, out: seen.append(out[0]))
    main = logits(model, token_ids, cut)
    handle.remove()
    (hidden,) = seen
    return main, model.output_layer(hidden)[0][:, 0]


class PlainMtp:
    """h' = layer(W_eh [enorm(embed(t_{i+1})); hnorm(h_i)]); logits = W_head norm(h')."""

    def __init__(self, folder: Path) -> None:
        self.glm5 = Glm5Config.from_hf(folder)
        self.main = load_reference(folder, self.glm5, torch.device("cpu"))
        prefix = f"model.layers.{self.glm5.num_hidden_layers}."
        with open_checkpoint(folder, self.glm5) as reader:
            names = [name for name in reader.names() if name.startswith(prefix)]
            self.tensors = {name.removeprefix(prefix): reader.read(name) for name in names}
        self.layer = self._decoder_layer()

    def _decoder_layer(self) -> nn.Module:
        config = self.main.config
        config.indexer_types = [*self.glm5.indexer_types, "full"]
        config.mlp_layer_types = [*self.glm5.mlp_layer_types, "sparse"]
        layer = GlmMoeDsaDecoderLayer(config, layer_idx=self.glm5.num_hidden_layers)
        outside = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")
        inside = {k: v for k, v in self.tensors.items() if not k.startswith(outside)}
        layer.load_state_dict(self._fused_experts(inside))
        return layer.eval()

    def _fused_experts(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        def take(expert: int, linear: str) -> Tensor:
            return tensors.pop(f"mlp.experts.{expert}.{linear}.weight")

        experts = range(self.glm5.n_routed_experts)
        gate_up = [torch.cat([take(e, "gate_proj"), take(e, "up_proj")]) for e in experts]
        down = [take(e, "down_proj") for e in experts]
        fused = {"gate_up_proj": torch.stack(gate_up), "down_proj": torch.stack(down)}
        return tensors | {f"mlp.experts.{name}": tensor for name, tensor in fused.items()}

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.glm5.rms_norm_eps
        return nn.functional.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], eps)

    def logits(self, token_ids: Tensor) -> Tensor:
        """[t - 1, vocab]: row i predicts token i + 2 from tokens 0 .. i + 1."""
        ids = token_ids[None]
        hidden = self.main.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        following = self.main.model.embed_tokens(ids[:, 1:])
        joined = torch.cat([self._norm("enorm", following), self._norm("hnorm", hidden)], dim=-1)
        x = joined @ self.tensors["eh_proj.weight"].T
        positions = torch.arange(x.shape[1])[None]
        future = torch.full((x.shape[1],) * 2, torch.finfo(x.dtype).min).triu(1)
        out, _ = self.layer(
            x,
            attention_mask=future[None, None],
            position_ids=positions,
            position_embeddings=self.main.model.rotary_emb(x, positions),
        )
        return self.main.lm_head(self._norm("shared_head.norm", out))[0]


@pytest.mark.parametrize("variant", ["5", "5.2"])
@torch.no_grad()
def test_predictions_equal_the_plain_formula(tiny_folder: TinyFolder, variant: str) -> None:
    folder = tiny_folder(variant)
    model, plain = load_model(folder, include_mtp=True), PlainMtp(folder)
    token_ids = draw_tokens(sum(LENGTHS))
    _, got = mtp_logits(model, token_ids, edges(LENGTHS))
    for part, ids in zip(got.split(LENGTHS), token_ids.split(LENGTHS), strict=True):
        # the last row of a document has no following token
        assert_close(part[:-1], plain.logits(ids), 1e-5, f"length {len(ids)}")


@torch.no_grad()
def test_the_main_logits_are_unchanged(tiny_folder: TinyFolder) -> None:
    folder, token_ids = tiny_folder("5.2"), draw_tokens(sum(LENGTHS))
    main, _ = mtp_logits(load_model(folder, include_mtp=True), token_ids, edges(LENGTHS))
    assert torch.equal(main, logits(load_model(folder), token_ids, edges(LENGTHS)))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_gives_the_same_gradients(tiny_folder: TinyFolder, recompute: str) -> None:
    results = []
    for mode in ("none", recompute):
        model = load_model(tiny_folder("5"), include_mtp=True, recompute=mode).train()
        main, mtp = mtp_logits(model, draw_tokens(sum(LENGTHS)), edges(LENGTHS))
        (main.square().sum() + mtp.square().sum()).backward()
        results.append(gradients_of(model))
    assert any(name.startswith("mtp.") for name in results[0])
    assert_all_close(results[1], results[0])


def test_without_mtp_nothing_of_it_is_built(tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("5"))
    assert not any("mtp" in name for name, _ in model.named_modules())


def test_a_checkpoint_without_mtp_tensors_has_no_mtp(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = tiny_folder("5")
    glm5 = Glm5Config.from_hf(folder)
    load_reference(folder, glm5, torch.device("cpu")).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="no MTP layer"):
        load_model(tmp_path, include_mtp=True)
    ids = draw_tokens(12)
    with torch.no_grad():
        assert torch.equal(logits(load_model(tmp_path), ids), logits(load_model(folder), ids))
