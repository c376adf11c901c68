"""The learning rate, clipping and AdamW itself, against their formulas."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.train.loop import TrainLoop
from glm5.train.metrics import MetricsLog, read_metrics
from glm5.train.stop import StopRequest
from tests.tiny_models import TinyFolder, assert_close
from tests.training import run_config, start, trained


def logged(loop: TrainLoop, folder: Path) -> list[dict[str, Any]]:
    with MetricsLog(folder, total_steps=loop.section.steps, quiet=True) as log:
        loop.run(1, log, lambda step: None, StopRequest())
    return read_metrics(folder)


def rate(schedule: str, done: int, *, steps: int, warmup: int, top: float, low: float) -> float:
    """The rate of the next step, after `done` steps."""
    if done <= warmup and warmup:
        return top * done / warmup
    progress = (done - warmup) / (steps - warmup)
    share = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[schedule]
    return low + (top - low) * share


@pytest.mark.parametrize(
    ("schedule", "warmup", "low"),
    [("constant", 0, 0.0), ("linear", 0, 1e-4), ("cosine", 0, 0.0), ("cosine", 3, 1e-4)],
)
def test_the_learning_rate_follows_its_schedule(
    tiny_folder: TinyFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    warmup: int,
    low: float,
) -> None:
    optimizer = {"lr": 1e-3, "min_lr": low, "schedule": schedule, "warmup_steps": warmup}
    loop = start(run_config(tiny_folder("5"), tmp_path, optimizer=optimizer, train={"steps": 7}))
    report = {"loss_sum": torch.tensor(1.0), "num_tokens": torch.tensor(1)}
    monkeypatch.setattr(loop, "_forward", lambda *args, **kwargs: [report])
    rates = [line["lr"] for line in logged(loop, tmp_path)]
    options = {"steps": 7, "warmup": warmup, "top": 1e-3, "low": low}
    assert rates == pytest.approx([rate(schedule, done, **options) for done in range(7)])


def norm_of(tensors: list[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in tensors])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("clip", [0.0, 1e-3, 1e9])
def test_gradients_are_clipped_by_their_global_norm_and_the_norm_is_always_told(
    tiny_folder: TinyFolder, tmp_path: Path, clip: float, dtype: str
) -> None:
    run = run_config(
        tiny_folder("5"),
        tmp_path,
        model={"dtype": dtype},
        train={"steps": 1},
        optimizer={"clip_grad": clip},
    )
    loop = start(run)
    (line,) = logged(loop, tmp_path)
    used = [
        (p.main_param.grad if dtype == "bfloat16" else p.main_grad)
        for _, p in trained(loop.state.chunks[0].module)
    ]
    assert line["grad_norm"] > 1e-3
    expected = clip if 0 < clip < 1 else line["grad_norm"]
    assert norm_of(used) == pytest.approx(expected, rel=1e-4)


def test_three_steps_are_torchs_adamw(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = {
        "lr": 1e-2,
        "schedule": "constant",
        "weight_decay": 0.1,
        "beta1": 0.8,
        "beta2": 0.9,
        "eps": 1e-6,
        "clip_grad": 0.0,
    }
    loop = start(run_config(tiny_folder("5"), tmp_path, optimizer=optimizer, train={"steps": 3}))
    parameters = dict(trained(loop.state.chunks[0].module))
    mirror = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    peer = torch.optim.AdamW(mirror.values(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    step = loop.state.optimizer.step

    def both() -> Any:
        for name, parameter in parameters.items():
            mirror[name].grad = parameter.main_grad.clone()
        peer.step()
        return step()

    monkeypatch.setattr(loop.state.optimizer, "step", both)
    logged(loop, tmp_path)
    for name, parameter in parameters.items():
        assert_close(parameter.detach(), mirror[name].detach(), what=name)
