import hashlib
import json
from pathlib import Path

import pytest
import torch

from glm5.checkpoint.fp8 import open_checkpoint
from glm5.checkpoint.hf_layout import check_hf_tensors
from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.checkpoint.tiny import tiny_config, write_tiny
from glm5.checkpoint.tiny_data import tiny_chats
from glm5.config import Glm5Config
from glm5.errors import CheckpointError, ConfigError

VARIANTS = ["5", "5.1", "5.2"]
NUM_TENSORS = {"5": 106, "5.1": 106, "5.2": 211}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {variant: write_tiny(root / variant, variant) for variant in VARIANTS}


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.mark.parametrize("variant", VARIANTS)
def test_folder_fits_its_own_config(folders: dict[str, Path], variant: str) -> None:
    config = Glm5Config.from_hf(folders[variant])
    reader = SafetensorsReader(folders[variant])
    assert check_hf_tensors(reader, config) is True
    prefix = f"model.layers.{config.num_hidden_layers}."
    assert sum(not name.startswith(prefix) for name in reader.names()) == NUM_TENSORS[variant]
    assert len({reader.file_of(name) for name in reader.names()}) >= 2
    assert {reader.dtype(name) for name in reader.names()} == {torch.float32}


def test_schedules(folders: dict[str, Path]) -> None:
    config = Glm5Config.from_hf(folders["5"])
    assert config.indexer_types == ("full",) * 3
    assert config.mlp_layer_types == ("dense", "sparse", "sparse")
    config = Glm5Config.from_hf(folders["5.2"])
    assert config.indexer_types == ("full",) * 3 + ("shared",) * 3 + ("full",)
    assert config.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 4
    assert config.rope_theta == 8e6


def test_no_weight_is_constant_or_zero(folders: dict[str, Path]) -> None:
    with SafetensorsReader(folders["5.2"]) as reader:
        for name in reader.names():
            assert reader.read(name).std() > 0.01, name


def test_the_same_arguments_give_the_same_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    first = digests(folders["5.2"])
    assert digests(write_tiny(tmp_path / "same", "5.2")) == first
    other = digests(write_tiny(tmp_path / "other", "5.2", seed=1))
    differing = {name for name in first if first[name] != other[name]}
    shards = {name for name in first if name.endswith(".safetensors")}
    assert differing == shards | {f"data/{name}.jsonl" for name in ("train", "eval", "shuffled")}
    assert digests(folders["5"]) == digests(folders["5.1"])


def test_bfloat16(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "5", dtype="bfloat16")
    reader = SafetensorsReader(folder)
    float32 = {name for name in reader.names() if reader.dtype(name) == torch.float32}
    assert float32 == {n for n in reader.names() if n.endswith("e_score_correction_bias")}
    assert len({reader.file_of(name) for name in reader.names()}) >= 2


def test_fp8_is_the_same_model_rounded(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "5.2", fp8=True)
    config = Glm5Config.from_hf(folder)
    assert config.fp8 is not None
    stored = SafetensorsReader(folder)
    kv_b = "model.layers.0.self_attn.kv_b_proj.weight"
    assert stored.dtype(kv_b) == torch.float8_e4m3fn
    assert stored.shape(f"{kv_b}_scale_inv") == (2, 1)
    plain = SafetensorsReader(folders["5.2"])
    with open_checkpoint(folder, config) as reader:
        assert check_hf_tensors(reader, config) is True
        for name in reader.names():
            exact = plain.read(name)
            error = (reader.read(name) - exact).abs().max()
            kept = stored.dtype(name) == torch.float32
            assert error == 0 if kept else 0 < error < 0.05 * exact.abs().max(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_smallest_folders_have_several_shards(tmp_path: Path, dtype: str) -> None:
    folder = write_tiny(tmp_path / "m", "5", fp8=True, dtype=dtype)
    assert len(list(folder.glob("*.safetensors"))) >= 2


def test_kept_modules_are_those_without_scales() -> None:
    kept = tiny_config("5", fp8=True)["quantization_config"]["modules_to_not_convert"]
    assert "lm_head" in kept
    assert "model.layers.3.eh_proj" in kept
    assert "model.layers.0.self_attn.indexer.weights_proj" in kept
    assert not any(name.endswith(("kv_b_proj", "wk", "wq_b", "down_proj")) for name in kept)


def test_wrong_use_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)unknown variant.*'5\.4'"):
        write_tiny(tmp_path / "m", "5.4")
    assert list(tmp_path.iterdir()) == []
    before = digests(folders["5"])
    with pytest.raises(CheckpointError, match="not an empty folder"):
        write_tiny(folders["5"], "5")
    assert digests(folders["5"]) == before


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    assert (write_tiny(tmp_path, "5") / "config.json").is_file()


@pytest.mark.parametrize("seed", [0, 1])
def test_chats_are_right_and_train_and_eval_are_apart(seed: int) -> None:
    questions = []
    for text, count in zip(tiny_chats(seed), (200, 20), strict=True):
        chats = [json.loads(line)["messages"] for line in text.splitlines()]
        assert len(chats) == count
        turns = [chat[-2:] for chat in chats]
        for user, assistant in turns:
            assert (user["role"], assistant["role"]) == ("user", "assistant")
            assert assistant["content"] == answer(user["content"])
        questions.append({next(m["content"] for m in c if m["role"] == "user") for c in chats})
    assert not questions[0] & questions[1]


def answer(question: str) -> str:
    task, _, word = question.partition(": ")
    if word:
        return word[::-1] if task == "reverse" else word
    a, b = question.removesuffix(" =").split(" + ")
    return str(int(a) + int(b))


@pytest.mark.parametrize("variant", ["5", "5.2"])
def test_transformers_loads_the_model_whole(folders: dict[str, Path], variant: str) -> None:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folders[variant], output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    mtp = f"model.layers.{model.config.num_hidden_layers}."
    assert report["unexpected_keys"]
    assert all(name.startswith(mtp) for name in report["unexpected_keys"])
    with torch.no_grad():
        logits = model(torch.arange(32)[None] * 7).logits
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 10


def test_transformers_loads_the_tokenizer(folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    config = Glm5Config.from_hf(folders["5.2"])
    tokenizer = AutoTokenizer.from_pretrained(folders["5.2"])
    for text in ("", "a  b\n\tc", "h\u00e9llo \u2713", "[gMASK]<sop><|user|>\nhi"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("a<|user|>")["input_ids"][1:] == [config.eos_token_id[1]]
    assert tokenizer.pad_token_id == config.pad_token_id
    assert tokenizer.eos_token_id in config.eos_token_id
    assert len(tokenizer) <= config.vocab_size


def test_chat_template_marks_what_the_assistant_says(folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders["5"])
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "1 + 1 ="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "repeat: ab"},
        {"role": "assistant", "content": "ab"},
    ]
    text = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert text == "[gMASK]<sop><|system|>\nS<|user|>\n1 + 1 =<|assistant|>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False).startswith(text)
    encoded = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    said = [token for token, is_assistant in pairs if is_assistant]
    assert tokenizer.decode(said) == "2<|endoftext|>ab<|endoftext|>"
