"""The example of docs/megatron_bridge.md does what it says, as it stands there."""

import re
from pathlib import Path

import pytest
import torch

from glm5 import load_model, logits
from tests.tiny_models import TinyFolder, draw_tokens

DOC = Path(__file__).parents[2] / "docs/megatron_bridge.md"


def test_the_example_runs(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "GLM-5.2").symlink_to(tiny_folder("5.2"))
    monkeypatch.chdir(tmp_path)
    seen: dict[str, object] = {}
    exec(compile(code, str(DOC), "exec"), seen)
    factors = [f for n, f in seen["model"][0].named_parameters() if n.endswith("linear_out.weight")]
    assert len(factors) == 7 * 5 + 3 * 2 + 4 * 4
    assert all(float(factor.main_grad.abs().max()) > 0 for factor in factors)
    # B is zero still: the tuned model is the one that it came from
    tokens = draw_tokens(30)
    with torch.no_grad():
        tuned, base = (load_model(tmp_path / name) for name in ("GLM-5.2-tuned", "GLM-5.2"))
        assert torch.equal(logits(tuned, tokens), logits(base, tokens))
