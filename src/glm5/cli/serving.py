"""The flags of an engine's server that an adapter needs."""

from __future__ import annotations

from glm5.checkpoint.adapter_engines import Engine, max_lora_rank


def server_flags(engine: Engine, rank: int, expert_lora: str) -> str:
    """What the server is started with, beside the model and the adapter's name and folder."""
    flags = ["--enable-lora", f"--max-lora-rank {max_lora_rank(rank, engine)}"]
    if engine == "sglang" and expert_lora != "none":
        flags += ["--lora-backend triton", "--moe-runner-backend triton"]
        flags += ["--disable-shared-experts-fusion"]
    if expert_lora == "shared_outer":
        shared = {"sglang": "--experts-shared-outer-loras", "vllm": "--enable-moe-shared-loras"}
        flags.append(shared[engine])
    return " ".join(flags)
