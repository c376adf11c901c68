"""An adapter that is taken off leaves the base as it was."""

from pathlib import Path

import torch

from glm5.checkpoint.adapter_io import attach_adapter, check_loaded_tensors, detach_adapter
from glm5.config import Glm5Config
from tests.adapters import adapter_of, config, hf_dir, load_hf, logits, make_factors, write

__all__ = ["config", "hf_dir"]


def test_detached_is_the_base(hf_dir: Path, config: Glm5Config, tmp_path: Path) -> None:
    modules = {
        "model.norm.weight": torch.rand(config.hidden_size),
        "model.layers.2.mlp.gate.weight": torch.randn(config.n_routed_experts, config.hidden_size),
        "model.layers.2.mlp.gate.e_score_correction_bias": torch.randn(config.n_routed_experts),
    }
    base = load_hf(hf_dir)
    before, names = logits(base), list(base.state_dict())
    for adapter in (adapter_of(make_factors(config), modules), adapter_of(make_factors(config))):
        folder = tmp_path / str(len(adapter.modules))
        write(folder, adapter, config)
        model = attach_adapter(base, folder)
        check_loaded_tensors(model, folder)
        assert (logits(base) - before).abs().max() > 1e-2
        base = detach_adapter(model)
        assert torch.equal(logits(base), before)
        assert list(base.state_dict()) == names
