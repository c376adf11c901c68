"""The loop with a server: it learns as with an engine of its own, and outlives its server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.checkpoint.ckpt_dir import saved_steps
from glm5.config import Glm5Config
from glm5.errors import AdapterError, ConfigError, EngineError
from glm5.rl.engines.hf import HfEngine
from glm5.rl.run import train_rl
from glm5.train.metrics import read_metrics
from tests.rl.engines.openai_server import FakeVllm
from tests.rl.engines.serving import running
from tests.rl.engines.sglang_server import FakeSglang
from tests.rl.running import rl_config, without_times
from tests.tiny_models import TinyFolder
from tests.training import differing, saved_state

# linears that PEFT, which computes for these servers, loads from a serving folder
TARGETS = ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"]


@pytest.fixture(scope="module")
def inside(tiny_folder: TinyFolder) -> HfEngine:
    """What the servers compute with: latents are normed as the config says."""
    glm5 = Glm5Config.from_hf(tiny_folder("5"))
    glm5 = glm5.model_copy(update={"latent_norm_eps": glm5.rms_norm_eps})
    return HfEngine(tiny_folder("5"), glm5, torch.device("cpu"))


@pytest.fixture
def sglang(tiny_folder: TinyFolder, inside: HfEngine) -> FakeSglang:
    inside.load_model(tiny_folder("5"), 0)
    return FakeSglang(inside, tiny_folder("5"), Glm5Config.from_hf(tiny_folder("5")))


@pytest.fixture
def url(sglang: FakeSglang) -> Iterator[str]:
    with running(sglang.app()) as found:
        yield found


def sections(url: str, **rollout: Any) -> dict[str, Any]:
    return {
        "lora": {"targets": TARGETS},
        "rl": {"replay": "both"},
        "rollout": {"engine": "sglang", "url": url, "max_attempts": 2, **rollout},
    }


def test_a_server_is_as_good_as_an_engine_inside(
    tiny_folder: TinyFolder, tmp_path: Path, sglang: FakeSglang, url: str
) -> None:
    folder, served, own = tiny_folder("5"), tmp_path / "served", tmp_path / "own"
    train_rl(rl_config(folder, served, **sections(url, sleep=True)), quiet=True)
    local = {**sections(url), "rollout": {"engine": "hf", "latent_norm_eps": 1e-5}}
    train_rl(rl_config(folder, own, **local), quiet=True)
    for line, peer in zip(read_metrics(served), read_metrics(own), strict=True):
        assert line["reward"] == peer["reward"]
        assert line["grad_norm"] == pytest.approx(peer["grad_norm"], rel=1e-3)
        assert line["gap_abs_diff"] < 1e-5
        assert line["gap_routing_overlap"] == line["gap_topk_overlap"] == 1
    asked = [path for path, _ in sglang.bodies if path != "/generate"]
    assert asked.count("/load_lora_adapter") == 3
    # the last one is taken away, and the server is awake
    assert asked[-2:] == ["/resume_memory_occupation", "/unload_lora_adapter"]
    assert asked.count("/release_memory_occupation") == 3


def test_a_server_that_starts_again_goes_unnoticed(
    tiny_folder: TinyFolder, tmp_path: Path, sglang: FakeSglang, url: str
) -> None:
    folder, whole, out = tiny_folder("5"), tmp_path / "whole", tmp_path / "restarted"
    train_rl(rl_config(folder, whole, **sections(url)), quiet=True)
    sglang.reset()

    def restart(answer: dict[str, Any]) -> dict[str, Any]:
        sglang.restart()
        return answer

    # in the middle of the second step
    sglang.faults.add("/generate", *[None] * 17, restart)
    train_rl(rl_config(folder, out, **sections(url, num_in_flight=1)), quiet=True)
    assert sglang.faults.num_requests["/load_lora_adapter"] == 4
    assert without_times(read_metrics(out)) == without_times(read_metrics(whole))


def test_a_server_that_is_gone_is_told_and_resumed_from(
    tiny_folder: TinyFolder, tmp_path: Path, sglang: FakeSglang
) -> None:
    folder, whole, out = tiny_folder("5"), tmp_path / "whole", tmp_path / "died"
    with running(sglang.app()) as url:
        train_rl(rl_config(folder, whole, **sections(url)), quiet=True)
        sglang.reset()
        sglang.faults.add("/generate", *[None] * 24, *[503] * 100)
        with pytest.raises(EngineError, match=r"(?s)127\.0\.0\.1.*503"):
            train_rl(rl_config(folder, out, **sections(url)), quiet=True)
    assert saved_steps(out) == [2]
    sglang.reset()
    # another server, at another place
    with running(sglang.app()) as url:
        train_rl(rl_config(folder, out, **sections(url)), quiet=True)
    assert without_times(read_metrics(out)) == without_times(read_metrics(whole))
    assert differing(saved_state(out, 3), saved_state(whole, 3)) == []


def test_a_bad_record_costs_no_step(
    tiny_folder: TinyFolder, tmp_path: Path, sglang: FakeSglang, url: str
) -> None:
    def cut(answer: dict[str, Any]) -> dict[str, Any]:
        answer["meta_info"]["routed_experts"] = "AAAA"
        return answer

    sglang.faults.add("/generate", *[None] * 12, cut)
    with pytest.raises(EngineError, match=r"step 2 .* are no record of it"):
        train_rl(rl_config(tiny_folder("5"), tmp_path / "run", **sections(url)), quiet=True)
    assert saved_steps(tmp_path / "run") == [1]


def test_a_server_without_the_flags_is_refused_at_once(
    tiny_folder: TinyFolder, tmp_path: Path, sglang: FakeSglang, url: str
) -> None:
    sglang.flags["enable_return_indexer_topk"] = False
    run = rl_config(tiny_folder("5"), tmp_path / "run", **sections(url))
    with pytest.raises(EngineError, match="enable-return-indexer-topk"):
        train_rl(run, quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("replay", "flag"),
    [("routing", "enable_return_indexer_topk"), ("indexer", "enable_return_routed_experts")],
)
def test_a_server_needs_the_flags_of_what_is_replayed_alone(
    tiny_folder: TinyFolder,
    tmp_path: Path,
    sglang: FakeSglang,
    url: str,
    replay: str,
    flag: str,
) -> None:
    sglang.flags[flag] = False
    chosen = {**sections(url), "rl": {"replay": replay}, "train": {"steps": 1}}
    train_rl(rl_config(tiny_folder("5"), tmp_path / "run", **chosen), quiet=True)
    (line,) = read_metrics(tmp_path / "run")
    assert ("gap_routing_overlap" in line) == (replay == "routing")
    assert ("gap_topk_overlap" in line) == (replay == "indexer")


def test_vllm(tiny_folder: TinyFolder, tmp_path: Path, inside: HfEngine) -> None:
    folder = tiny_folder("5")
    inside.load_model(folder, 0)
    with running(FakeVllm(inside, folder).app()) as url:
        server = {"engine": "openai", "url": url, "model": "tiny"}
        chosen = {**sections(url), "rl": {}, "rollout": server}
        run = rl_config(folder, tmp_path / "run", **chosen)
        train_rl(run, quiet=True)
        refused = rl_config(
            folder, tmp_path / "refused", **{**chosen, "lora": {"targets": ["kv_b_proj"]}}
        )
        with pytest.raises((AdapterError, ConfigError), match="vllm does not serve"):
            train_rl(refused, quiet=True)
    lines = read_metrics(tmp_path / "run")
    assert len(lines) == 3 and all(line["gap_abs_diff"] < 1e-5 for line in lines)
    assert "gap_topk_overlap" not in lines[0]
