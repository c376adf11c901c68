"""The check passes what the writer writes, and refuses every way in which a file can be wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from glm5.checkpoint.adapter_io import Engine, check_serving_adapter, read_adapter
from glm5.checkpoint.adapter_read import read_form
from glm5.config import Glm5Config
from glm5.errors import AdapterError
from tests import engine_loaders
from tests.adapters import (
    RANK,
    SETTINGS,
    WEIGHTS,
    adapter_of,
    edit_settings,
    edit_tensors,
    make_factors,
    write,
)
from tests.checkpoint.test_adapter_serving import ENGINES, LAYOUTS, in_layout, served
from tests.checkpoint.test_adapter_serving import write as write_serving

Tensors = dict[str, Tensor]
Edit = Callable[[Tensors], None]
Good = Callable[[str, Engine], Path]

MODEL = "base_model.model.model.layers"
ATTENTION, EXPERTS = f"{MODEL}.2.self_attn", f"{MODEL}.2.mlp.experts"


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory, config: Glm5Config) -> Good:
    """good(layout, engine) -> a folder that the engine serves; to be copied, not changed."""
    made: dict[tuple[str, Engine], Path] = {}

    def folder(layout: str, engine: Engine) -> Path:
        key = (layout, engine)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("good") / "adapter"
            torch.manual_seed(0)
            adapter = in_layout(make_factors(config, served(engine, "all")), layout)
            write_serving(made[key], adapter, engine, config)
        return made[key]

    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_passes_what_is_written(
    good: Good, layout: str, engine: Engine, config: Glm5Config
) -> None:
    check_serving_adapter(good(layout, engine), engine, config)
    engine_loaders.load(good(layout, engine), engine, config)


def drop(*names: str) -> Edit:
    """Without the pairs of these modules."""

    def edit(tensors: Tensors) -> None:
        for name in names:
            for side in "AB":
                del tensors[f"{name}.lora_{side}.weight"]

    return edit


def drop_half(name: str) -> Edit:
    return lambda tensors: tensors.__delitem__(f"{name}.lora_B.weight")


def add(name: str, a: tuple[int, ...] = (RANK, 32), b: tuple[int, ...] = (16, RANK)) -> Edit:
    """One more pair."""

    def edit(tensors: Tensors) -> None:
        tensors[f"{name}.lora_A.weight"] = torch.ones(a)
        tensors[f"{name}.lora_B.weight"] = torch.ones(b)

    return edit


def rename(old: str, new: str) -> Edit:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


def shape(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def dtype(names: str, new: torch.dtype) -> Edit:
    return lambda tensors: tensors.update(
        {name: tensor.to(new) for name, tensor in tensors.items() if names in name}
    )


# what is wrong: (layout, edit of the tensors, what the message says)
FAULTS: dict[str, tuple[str, Edit, str]] = {
    "empty": ("per_expert", dict.clear, "no tensors"),
    "q_a without kv_a": ("per_expert", drop(f"{ATTENTION}.kv_a_proj_with_mqa"), "q_a_proj without"),
    "kv_a without q_a": ("per_expert", drop(f"{ATTENTION}.q_a_proj"), "with_mqa without"),
    "dense without gate": ("per_expert", drop(f"{MODEL}.0.mlp.gate_proj"), "up_proj without"),
    "dense without up": ("per_expert", drop(f"{MODEL}.0.mlp.up_proj"), "gate_proj without"),
    "shared without gate": (
        "per_expert",
        drop(f"{MODEL}.2.mlp.shared_experts.gate_proj"),
        "shared_experts.up_proj without",
    ),
    "expert without gate": ("per_expert", drop(f"{EXPERTS}.1.gate_proj"), "some experts"),
    "expert without up": ("per_expert", drop(f"{EXPERTS}.1.up_proj"), "some experts"),
    "expert without down": ("per_expert", drop(f"{EXPERTS}.1.down_proj"), "some experts"),
    "one expert missing": (
        "per_expert",
        drop(*(f"{EXPERTS}.4.{leaf}_proj" for leaf in ("gate", "up", "down"))),
        "some experts",
    ),
    "w1 missing": ("shared_outer", drop(f"{EXPERTS}.w1"), "some of w1, w2, w3"),
    "w3 missing": ("shared_outer", drop(f"{EXPERTS}.w3"), "some of w1, w2, w3"),
    "w2 missing": ("shared_outer", drop(f"{EXPERTS}.w2"), "some of w1, w2, w3"),
    "half of a pair": ("per_expert", drop_half(f"{ATTENTION}.o_proj"), "half of a pair"),
    "half of an expert": ("per_expert", drop_half(f"{EXPERTS}.0.up_proj"), "half of a pair"),
    "half of the experts": ("shared_outer", drop_half(f"{EXPERTS}.w2"), "half of a pair"),
    "2-D beside 3-D": (
        "shared_outer",
        add(f"{EXPERTS}.1.gate_proj", b=(24, RANK)),
        "2-D tensors beside",
    ),
    "an expert too many": ("per_expert", rename("experts.4.", "experts.5."), "does not have"),
    "unknown module": ("per_expert", rename("o_proj", "out_proj"), "does not have"),
    "no factor": ("per_expert", rename("o_proj.lora_A", "o_proj.lora_E"), "no factors"),
    "router": ("per_expert", add(f"{MODEL}.2.mlp.gate", b=(5, RANK)), "does not have"),
    "a whole module": (
        "per_expert",
        lambda tensors: tensors.update({f"{MODEL}.2.mlp.gate.weight": torch.ones(5, 32)}),
        "no factors",
    ),
    "MTP layer": ("per_expert", add(f"{MODEL}.5.self_attn.q_a_proj"), "does not have"),
    "indexer of a shared layer": (
        "per_expert",
        add(f"{MODEL}.4.self_attn.indexer.wq_b", (RANK, 16), (256, RANK)),
        "does not have",
    ),
    "experts as PEFT fuses them": (
        "per_expert",
        add(f"{EXPERTS}.base_layer", (5 * RANK, 32), (48, 5 * RANK)),
        "as PEFT fuses",
    ),
    "A transposed": ("per_expert", shape(f"{ATTENTION}.o_proj.lora_A.weight", torch.t), "of shape"),
    "other inputs": (
        "per_expert",
        shape(f"{ATTENTION}.q_b_proj.lora_A.weight", lambda t: t[:, 1:]),
        "of shape",
    ),
    "other outputs": (
        "per_expert",
        shape(f"{EXPERTS}.3.down_proj.lora_B.weight", lambda t: t[1:]),
        "of shape",
    ),
    "a smaller rank": (
        "per_expert",
        shape(f"{EXPERTS}.3.gate_proj.lora_A.weight", lambda t: t[1:]),
        "of shape",
    ),
    "2-D shared side": (
        "shared_outer",
        shape(f"{EXPERTS}.w1.lora_A.weight", lambda t: t[0]),
        "of shape",
    ),
    "shared side per expert": (
        "shared_outer",
        shape(f"{EXPERTS}.w3.lora_A.weight", lambda t: t.expand(5, -1, -1)),
        "of shape",
    ),
    "an expert too few": (
        "shared_outer",
        shape(f"{EXPERTS}.w2.lora_A.weight", lambda t: t[:4]),
        "of shape",
    ),
    "integers": ("per_expert", dtype("o_proj", torch.int32), "dtype"),
    "float8": ("per_expert", dtype("", torch.float8_e4m3fn), "dtype"),
    "two dtypes": ("per_expert", dtype("o_proj", torch.bfloat16), "several dtypes"),
    "some names without prefix": (
        "per_expert",
        rename(f"{MODEL}.1.", "model.layers.1."),
        "with and without",
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fault", FAULTS)
def test_refuses(
    fault: str, engine: Engine, good: Good, config: Glm5Config, tmp_path: Path
) -> None:
    config = config.model_copy(update={"num_nextn_predict_layers": 1})
    layout, edit, message = FAULTS[fault]
    folder = Path(shutil.copytree(good(layout, engine), tmp_path / "adapter"))
    edit_tensors(folder, edit)
    with pytest.raises(AdapterError, match=message):
        check_serving_adapter(folder, engine, config)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": RANK + 1}, "of shape"),
        ({"r": None}, "r is not supported"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"o_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"o_proj": 4}}, "alpha_pattern"),
        ({"modules_to_save": ["mlp.gate"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": "all-linear"}, "target_modules"),
        ({"target_modules": ["q_a_proj"]}, "target_modules"),
    ],
)
def test_refuses_settings(
    settings: dict[str, Any],
    message: str,
    engine: Engine,
    good: Good,
    config: Glm5Config,
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(good("per_expert", engine), tmp_path / "adapter"))
    edit_settings(folder, **settings)
    with pytest.raises(AdapterError, match=message):
        check_serving_adapter(folder, engine, config)


def test_rslora_is_read_by_vllm_alone(good: Good, config: Glm5Config, tmp_path: Path) -> None:
    for engine in ENGINES:
        folder = Path(shutil.copytree(good("per_expert", engine), tmp_path / engine))
        edit_settings(folder, use_rslora=True)
    check_serving_adapter(tmp_path / "vllm", "vllm", config)
    loaded = engine_loaders.load(tmp_path / "vllm", "vllm", config)
    read = read_adapter(tmp_path / "vllm", config, "serving").factors
    for path, pair in read.items():
        assert_close(loaded[path].float(), pair.scale * pair.b @ pair.a)
    with pytest.raises(AdapterError, match="use_rslora, which sglang does not read"):
        check_serving_adapter(tmp_path / "sglang", "sglang", config)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"layers_to_transform": [0, 1, 2, 3, 4]},
        {"rank_pattern": {"wk": RANK}},
    ],
)
def test_settings_that_readers_read_apart(
    settings: dict[str, Any], good: Good, config: Glm5Config, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(good("per_expert", "sglang"), tmp_path / "adapter"))
    edit_settings(folder, **settings)
    message = f"{next(iter(settings))}(?s:.*)--from sglang(?s:.*)--from vllm"
    with pytest.raises(AdapterError, match=message):
        read_adapter(folder, config)
    with pytest.raises(AdapterError, match=message):
        read_form(folder)
    edit_settings(folder, **dict.fromkeys(settings, False if "use_rslora" in settings else None))
    assert read_form(folder) == "serving"


def test_vllm_names(good: Good, config: Glm5Config, tmp_path: Path) -> None:
    """What sglang loads under other names, vllm does not."""
    for layout, edit, message in (
        ("per_expert", rename("base_model.model.", ""), "without base_model"),
        ("shared_outer", rename("experts.w1.", "experts.gate_proj."), "does not map"),
        ("per_expert", rename("experts.0.gate_proj.", "experts.0.w1."), "does not map"),
    ):
        folder = Path(shutil.copytree(good(layout, "vllm"), tmp_path / message / layout))
        edit_tensors(folder, edit)
        check_serving_adapter(folder, "sglang", config)
        with pytest.raises(AdapterError, match=message):
            check_serving_adapter(folder, "vllm", config)


@pytest.mark.parametrize("name", ["kv_b_proj", "wk", "weights_proj"])
def test_vllm_serves_less(name: str, config: Glm5Config, tmp_path: Path) -> None:
    factors = make_factors(config, lambda path: path.endswith(f".{name}"))
    write_serving(tmp_path / "adapter", adapter_of(factors), "sglang", config)
    with pytest.raises(AdapterError, match=f"vllm does not serve adapters of {name}"):
        check_serving_adapter(tmp_path / "adapter", "vllm", config)
    with pytest.raises(engine_loaders.RejectedError):
        engine_loaders.load(tmp_path / "adapter", "vllm", config)


def test_refuses_a_folder_for_peft(config: Glm5Config, tmp_path: Path) -> None:
    write(tmp_path / "adapter", adapter_of(make_factors(config)), config)
    for engine in ENGINES:
        with pytest.raises(AdapterError, match="would not serve"):
            check_serving_adapter(tmp_path / "adapter", engine, config)
    with pytest.raises(engine_loaders.RejectedError):
        engine_loaders.load(tmp_path / "adapter", "sglang", config)


def test_refuses_pickle_and_damage(good: Good, config: Glm5Config, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good("per_expert", "sglang"), tmp_path / "adapter"))
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-1])
    with pytest.raises(AdapterError, match="damaged"):
        check_serving_adapter(folder, "sglang", config)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="never loaded"):
        check_serving_adapter(folder, "sglang", config)
    (folder / SETTINGS).write_text(json.dumps([]))
    with pytest.raises(AdapterError, match="damaged or incomplete"):
        check_serving_adapter(folder, "sglang", config)
