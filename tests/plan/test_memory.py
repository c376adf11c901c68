"""Predicted activations against what a step allocates, at a sixteenth of GLM-5.2's widths.

Rows are longer than topk, which is 128 here. On a CPU the `torch` backend's bounded chunks come on
top, so only runs are compared whose fullest moment is the loss: those without recompute.
`benchmarks/plan_memory.py` compares full widths on a GPU.
"""

import pytest
import torch

from benchmarks.plan_memory import ALL_LINEARS, Case, config_of, measure, predict
from glm5.plan.workload import Workload

# The full case is long enough for its activations to outweigh gloo's copy of all gradients.
CASES = {
    "lora on all linears": Workload(seq_len=160, recompute="none", targets=ALL_LINEARS),
    "full": Workload(mode="full", seq_len=448, recompute="none", indexer_loss=False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # on a CPU torch's AdamW steps one weight at a time
    monkeypatch.setattr("glm5.plan.memory.STEP_BYTES", 0)
    work = CASES[name]
    config = config_of(Case(name, 1, 1, 128, work), narrow=16)
    predicted = predict(config, work)
    measured = measure(config, work, torch.device("cpu"))
    stays = predicted.weights + predicted.gradients + predicted.optimizer
    assert stays == pytest.approx(measured["stays"], rel=0.02)
    assert predicted.peak == pytest.approx(measured["peak"], rel=0.05)
    assert predicted.peak - stays == pytest.approx(measured["peak"] - measured["stays"], rel=0.1)
