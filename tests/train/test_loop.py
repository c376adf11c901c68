"""A step of the loop is plain autograd on the whole batch, and changes only what trains."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm5.errors import ConfigError, DivergedError
from glm5.lora.attach import is_adapter
from glm5.model.forward import logits
from glm5.train.loop import LossSum, TrainLoop
from glm5.train.metrics import METRICS_FILE, MetricsLog, read_metrics
from glm5.train.packing import PackedRow, concat_rows
from glm5.train.stop import StopRequest
from tests.tiny_models import TinyFolder, assert_all_close
from tests.training import (
    batch_of,
    randomise_adapters,
    run_config,
    snapshot,
    start,
    trained,
    write_few_chats,
)

FULL = {"lora": None, "data": {"max_samples": 12}}


class Saves(list[int]):
    """A save function that only notes its steps."""

    def __call__(self, step: int) -> None:
        self.append(step)


def run_loop(loop: TrainLoop, folder: Path | None = None) -> list[int]:
    """Every step of the run; returns the steps that were saved."""
    saves = Saves()
    if folder is None:
        loop.run(1, None, saves, StopRequest())
        return saves
    with MetricsLog(folder, total_steps=loop.section.steps, quiet=True) as log:
        loop.run(1, log, saves, StopRequest())
    return saves


def reduced_gradients(loop: TrainLoop, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Fills the returned dict with the gradients that the optimiser is about to use."""
    found: dict[str, Tensor] = {}
    step = loop.state.optimizer.step

    def spy() -> Any:
        for name, parameter in trained(loop.state.chunks[0].module):
            found[name] = parameter.main_grad.clone()
        return step()

    monkeypatch.setattr(loop.state.optimizer, "step", spy)
    return found


def plain_loss(model: nn.Module, rows: list[PackedRow]) -> Tensor:
    """Mean over the assistant's tokens of the whole batch, without any of Megatron's losses."""
    row = concat_rows(rows)
    log_probs = F.log_softmax(logits(model, row.input_ids, row.cu_seqlens).float(), dim=-1)
    picked = log_probs.gather(1, row.labels[:, None])[:, 0]
    return -(picked * row.loss_mask).sum() / row.loss_mask.sum()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_a_step_is_plain_autograd_however_the_batch_is_cut(
    tiny_folder: TinyFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    micro_batch_size: int,
) -> None:
    train = {"steps": 1, "global_batch_size": 4, "micro_batch_size": micro_batch_size}
    loop = start(run_config(tiny_folder("5.2"), tmp_path, train=train))
    model = loop.state.chunks[0].module
    randomise_adapters(model)
    rows = batch_of(loop, 1)
    # the mean over rows would be another loss
    assert len({float(row.loss_mask.sum()) for row in rows}) > 1
    expected = plain_loss(model, rows)
    parameters = dict(trained(model))
    by_hand = dict(
        zip(parameters, torch.autograd.grad(expected, list(parameters.values())), strict=True)
    )
    found = reduced_gradients(loop, monkeypatch)
    run_loop(loop, tmp_path)
    (line,) = read_metrics(tmp_path)
    assert line["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert line["trained_tokens"] == sum(int(row.loss_mask.sum()) for row in rows)
    assert line["tokens"] == sum(row.num_tokens for row in rows)
    assert_all_close(found, by_hand, limit=1e-4, floor=1e-3)
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in by_hand.values()]))
    assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_only_adapters_change_and_only_they_cost_gradient_memory(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    loop = start(run_config(tiny_folder("5.2"), tmp_path))
    model = loop.state.chunks[0].module
    before = snapshot(model)
    run_loop(loop)
    after = snapshot(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if is_adapter(name)} != set()
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            assert parameter.grad is None and not hasattr(parameter, "main_grad"), name
    wrapped = loop.state.chunks[0]
    buffers = [*wrapped.buffers, *wrapped.expert_parallel_buffers]
    num_trained = sum(parameter.numel() for _, parameter in trained(model))
    padding = sum(buffer.grad_data.numel() for buffer in buffers) - num_trained
    # buffers divide into equal shares of ranks
    assert 0 <= padding < 0.01 * num_trained


def test_full_training_updates_every_parameter_but_not_the_routers_bias(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    loop = start(run_config(tiny_folder("5.2"), tmp_path, train={"steps": 2}, **FULL))
    model = loop.state.chunks[0].module
    before = snapshot(model)
    run_loop(loop)
    after = snapshot(model)
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {name for name in before if name.endswith("expert_bias")} != set()


@pytest.mark.cores
def test_the_mtp_layer_trains_and_is_not_part_of_the_reported_loss(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    losses = {}
    for mtp in (False, True):
        # an expert of the MTP layer learns from the few tokens with a loss that it gets
        train = {"steps": 2, "global_batch_size": 6}
        loop = start(
            run_config(tiny_folder("5"), tmp_path, model={"mtp": mtp}, train=train, **FULL)
        )
        before = snapshot(loop.state.chunks[0].module)
        run_loop(loop, tmp_path / str(mtp))
        losses[mtp] = read_metrics(tmp_path / str(mtp))[0]["loss"]
    after = snapshot(loop.state.chunks[0].module)
    mtp_names = [name for name in after if name.startswith("mtp.") and "bias" not in name]
    assert len(mtp_names) > 10
    assert [name for name in mtp_names if torch.equal(before[name], after[name])] == []
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)


def test_adapters_of_the_indexer_learn_from_its_own_loss(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-k has no gradient: the main loss alone would leave them where they are."""
    gradients = {}
    for coeff in (0.001, 0.002):
        run = run_config(
            tiny_folder("5.2"),
            tmp_path,
            lora={"targets": ["wq_b", "wk", "weights_proj", "o_proj"]},
            train={"steps": 1, "indexer_loss_coeff": coeff},
            optimizer={"clip_grad": 0.0},
        )
        loop = start(run)
        randomise_adapters(loop.state.chunks[0].module)
        gradients[coeff] = reduced_gradients(loop, monkeypatch)
        run_loop(loop)
    once, twice = gradients[0.001], gradients[0.002]
    of_indexer = {name for name in once if ".indexer." in name}
    assert of_indexer and all(once[name].abs().sum() > 0 for name in of_indexer)
    doubled = {name: (2 if name in of_indexer else 1) * once[name] for name in once}
    assert_all_close(twice, doubled, limit=1e-5)


def test_recomputed_activations_give_the_same_losses(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    losses = {}
    for recompute in ("none", "selective", "full"):
        run = run_config(tiny_folder("5.2"), tmp_path, model={"recompute": recompute})
        run_loop(start(run), tmp_path / recompute)
        losses[recompute] = [line["loss"] for line in read_metrics(tmp_path / recompute)]
    assert len(set(losses["none"])) == 4
    assert losses["selective"] == pytest.approx(losses["none"], rel=1e-5)
    assert losses["full"] == pytest.approx(losses["none"], rel=1e-5)


def test_bf16_keeps_fp32_copies_and_follows_fp32(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    losses = {}
    for dtype in ("float32", "bfloat16"):
        loop = start(
            run_config(tiny_folder("5", dtype="bfloat16"), tmp_path, model={"dtype": dtype})
        )
        run_loop(loop, tmp_path / dtype)
        losses[dtype] = [line["loss"] for line in read_metrics(tmp_path / dtype)]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.03)
    assert losses["bfloat16"] != losses["float32"]
    model = loop.state.chunks[0].module
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    rounded = 0.0
    for _, parameter in trained(model):
        # this rank's share, which is all of it, as a row
        main_param = parameter.main_param.view_as(parameter)
        assert main_param.dtype == torch.float32
        assert torch.equal(main_param.to(torch.bfloat16), parameter)
        rounded += float((main_param - parameter).abs().sum())
    assert rounded > 0


def test_evaluation_is_the_mean_over_all_rows_and_leaves_no_trace(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = tiny_folder("5.2")
    data = {"eval": write_few_chats(folder, tmp_path / "eval.jsonl", count=8)}
    runs = {}
    for name, every in (("without", 0), ("with", 1)):
        section = {"steps": 2, "eval_every": every}
        run = run_config(folder, tmp_path, data=data if every else {}, train=section)
        loop = start(run)
        run_loop(loop, tmp_path / name)
        runs[name] = read_metrics(tmp_path / name)
    assert [line["loss"] for line in runs["with"]] == [line["loss"] for line in runs["without"]]
    assert loop.eval_data is not None and len(loop.eval_data) > 1
    rows = [loop.eval_data[row] for row in range(len(loop.eval_data))]
    model = loop.state.chunks[0].module.eval()
    with torch.no_grad():
        expected = float(plain_loss(model, rows))
    assert runs["with"][-1]["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert runs["with"][0]["eval_loss"] != runs["with"][1]["eval_loss"]

    def keeps_a_graph(tensor: Tensor) -> Tensor:
        pytest.fail("evaluation keeps tensors for a backward pass")

    with torch.autograd.graph.saved_tensors_hooks(keeps_a_graph, lambda tensor: tensor):
        total = loop.evaluate(loop.eval_data)
    assert total.mean == pytest.approx(expected, rel=1e-6)
    assert loop.state.chunks[0].training


@pytest.mark.parametrize(
    ("section", "logged", "evaluated", "saved"),
    [
        ({"steps": 5}, [1, 2, 3, 4, 5], [5], [5]),
        ({"steps": 5, "log_every": 2}, [2, 4, 5], [5], [5]),
        ({"steps": 4, "log_every": 4, "save_every": 3}, [4], [4], [3, 4]),
        # what was evaluated is logged, whatever log_every says
        ({"steps": 5, "log_every": 5, "eval_every": 2}, [2, 4, 5], [2, 4, 5], [5]),
    ],
)
def test_what_is_due_when(
    tiny_folder: TinyFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: dict[str, int],
    logged: list[int],
    evaluated: list[int],
    saved: list[int],
) -> None:
    folder = tiny_folder("5")
    data = {"eval": str(folder / "data/eval.jsonl")}
    loop = start(run_config(folder, tmp_path, data=data, train=section))
    values = {"loss": 1.0, "grad_norm": 1.0, "tokens": 8, "step_seconds": 2.0}
    monkeypatch.setattr(loop, "_step", lambda step: dict(values))
    monkeypatch.setattr(loop, "evaluate", lambda data: LossSum(6.0, 2))
    assert run_loop(loop, tmp_path) == saved
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == logged
    assert [line["step"] for line in lines if line.get("eval_loss") == 3.0] == evaluated
    assert {line["tokens_per_second"] for line in lines} == {4.0}


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_an_evaluation_that_is_no_number_saves_nothing(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poison: float
) -> None:
    folder = tiny_folder("5")
    data = {"eval": str(folder / "data/eval.jsonl")}
    loop = start(run_config(folder, tmp_path, data=data, train={"steps": 1}))
    values = {"loss": 1.0, "grad_norm": 1.0, "tokens": 8, "step_seconds": 2.0}
    monkeypatch.setattr(loop, "_step", lambda step: dict(values))
    monkeypatch.setattr(loop, "evaluate", lambda data: LossSum(poison, 2))
    saves = Saves()
    with (
        MetricsLog(tmp_path, total_steps=1, quiet=True) as log,
        pytest.raises(DivergedError, match="eval_loss"),
    ):
        loop.run(1, log, saves, StopRequest())
    assert saves == [] and len(read_metrics(tmp_path)) == 1


def test_a_stop_saves_at_once_and_adds_no_line(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("5")
    data = {"eval": str(folder / "data/eval.jsonl")}
    loop = start(run_config(folder, tmp_path, data=data, train={"steps": 9, "log_every": 2}))
    stop = StopRequest()

    def step(number: int) -> dict[str, float]:
        stop.asked_by = "SIGTERM" if number == 3 else None
        return {"loss": 1.0, "grad_norm": 1.0, "tokens": 8, "step_seconds": 2.0}

    monkeypatch.setattr(loop, "_step", step)
    saves = Saves()
    with MetricsLog(tmp_path, total_steps=9, quiet=True) as log:
        assert loop.run(1, log, saves, stop) == 3
    assert saves == [3]
    assert [line["step"] for line in read_metrics(tmp_path)] == [2]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_logged_and_ends_the_run(
    tiny_folder: TinyFolder, tmp_path: Path, poison: float
) -> None:
    loop = start(run_config(tiny_folder("5"), tmp_path, train={"log_every": 3, "save_every": 1}))
    first, second = batch_of(loop, 1), batch_of(loop, 2)
    seen = torch.cat([row.input_ids for row in first])
    new = next(int(t) for row in second for t in row.input_ids if t not in seen)
    embedding = loop.state.chunks[0].module.embedding.word_embeddings.weight
    embedding.data[new, 0] = poison
    saves = Saves()
    log = MetricsLog(tmp_path, total_steps=4, quiet=True)
    with pytest.raises(DivergedError, match="diverged at step 2") as caught, log:
        loop.run(1, log, saves, StopRequest())
    assert caught.value.exit_code == 1
    assert saves == [1]
    (line,) = read_metrics(tmp_path)
    assert line["step"] == 2 and not math.isfinite(line["loss"])
    text = (tmp_path / METRICS_FILE).read_text()
    assert json.loads(text)["loss"] in ("NaN", "Infinity")


def test_a_batch_must_divide_over_the_ranks(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_config(
        tiny_folder("5"), tmp_path, train={"global_batch_size": 4, "micro_batch_size": 2}
    )
    loop = start(run)
    monkeypatch.setattr("glm5.train.loop.parallel_state.get_data_parallel_world_size", lambda: 3)
    with pytest.raises(ConfigError, match="multiple of 6"):
        TrainLoop(loop.state, loop.train_data, None, run.train, shuffle=False)
