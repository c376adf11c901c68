"""Times one attention layer of GLM-5.2 whose tensor-parallel ranks share heads, or tokens.

    torchrun --nproc_per_node 2 -m benchmarks.attention_parallel [--json FILE]

One causal document in bf16, frozen weights, gradients to the input. Both ways must give the same
output and gradient before a time is printed. Bytes are those that a rank receives.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor

from glm5.bench.timing import interleaved_medians, peak_bytes
from glm5.checkpoint.tiny import tiny_config
from glm5.cli.quiet import quiet_libraries
from glm5.config import Glm5Config
from glm5.model.attention import DSASelfAttention
from glm5.model.query_shares import QueryShares
from glm5.model.routes import Routes
from glm5.model.transformer_config import glm5_transformer_config
from glm5.ops.backends import default_backend
from glm5.runtime.distributed import Layout, default_device, ensure_distributed, shut_down

LENGTHS = (8192, 32768, 65536)
WAYS = ("heads", "tokens")
GLM52 = {
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
}
# Two ways to the same sum in bf16 differ by its rounding.
BOUND = 2.0**-7


@dataclass(frozen=True)
class Line:
    """One way at one length, on the slowest rank."""

    attention_parallel: str
    tokens: int
    step_ms: float
    forward_ms: float
    indexer_ms: float
    """Projections, gathers and selection."""
    select_ms: float
    """Selection alone: scores of all keys, and the best of them."""
    exchange_ms: float
    received_bytes: int
    peak_bytes: int


def build(way: str, glm5: Glm5Config, layout: Layout) -> DSASelfAttention:
    """The layer with the same random weights in both ways."""
    config = glm5_transformer_config(
        glm5,
        device=default_device(),
        dtype=torch.bfloat16,
        backend=default_backend(default_device().type),
        layout=layout,
        attention_parallel=way,
    )
    attention = DSASelfAttention(config, 1, "full")
    rank = parallel_state.get_tensor_model_parallel_rank()
    for number, parameter in enumerate(attention.parameters()):
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        generator = torch.Generator(parameter.device).manual_seed(100 * number + rank * is_cut)
        noise = torch.empty_like(parameter).normal_(generator=generator)
        scale = 1.0 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
        parameter.data.copy_(noise * scale)
    return attention.requires_grad_(False).to(default_device()).eval()


def inputs(num_tokens: int, hidden_size: int) -> tuple[Tensor, Tensor]:
    """This rank's tokens [t / tp, 1, hidden_size], and a gradient for its output."""
    group = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator(default_device()).manual_seed(group.rank())
    shape = (num_tokens // group.size(), 1, hidden_size)
    x, grad = (
        torch.randn(shape, generator=generator, device=default_device(), dtype=torch.bfloat16)
        for _ in range(2)
    )
    return x, grad


def step(attention: DSASelfAttention, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """(output, gradient of x) of one forward and backward pass."""
    x = x.detach().requires_grad_()
    output, _ = attention(x, None)
    (grad_x,) = torch.autograd.grad(output, x, grad)
    return output.detach(), grad_x


def check_same(found: dict[str, tuple[Tensor, Tensor]]) -> list[float]:
    """Relative differences of output and gradient.

    Raises:
        AssertionError: they are more than rounding.
    """
    pairs = zip(*found.values(), strict=True)
    errors = [float((a - b).float().norm() / a.float().norm()) for a, b in pairs]
    assert all(error <= BOUND for error in errors), errors
    return errors


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Bytes that this rank receives in collectives of the tensor-parallel group."""
    received = [0]

    def counting(function: Callable[..., Any], side: int) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            size = kwargs["group"].size()
            received[0] += args[side].nbytes * (size - 1) // size
            return function(*args, **kwargs)

        return counted

    names = [
        (dist, "all_to_all_single", 0),
        (mappings, "dist_all_gather_func", 0),
        (mappings, "dist_reduce_scatter_func", 1),
        (layers, "dist_all_gather_func", 0),
        (layers, "dist_reduce_scatter_func", 1),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    for (module, name, side), (_, _, function) in zip(names, before, strict=True):
        setattr(module, name, counting(function, side))
    try:
        yield received
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def measure(ways: dict[str, DSASelfAttention], num_tokens: int) -> list[Line]:
    x, grad = inputs(num_tokens, GLM52["hidden_size"])
    differences = check_same({name: step(layer, x, grad) for name, layer in ways.items()})
    say(f"{num_tokens} tokens: output and gradient differ by {differences}")
    steps = {name: lambda layer=layer: step(layer, x, grad) for name, layer in ways.items()}
    times = {
        "step_ms": steps,
        "forward_ms": {name: forward(layer, x) for name, layer in ways.items()},
        "indexer_ms": {name: indexer(layer, x) for name, layer in ways.items()},
        "select_ms": {name: selection(layer, x) for name, layer in ways.items()},
        "exchange_ms": {"heads": lambda: None, "tokens": exchange(num_tokens)},
    }
    medians = {what: interleaved_medians(f, rounds=5, warmups=1) for what, f in times.items()}
    return [
        Line(
            name,
            num_tokens,
            **{what: slowest(values[name]) for what, values in medians.items()},
            received_bytes=bytes_of(steps[name]),
            peak_bytes=int(slowest(peak_bytes(steps[name]))),
        )
        for name in ways
    ]


def forward(layer: DSASelfAttention, x: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return layer(x, None)

    return run


def indexer(layer: DSASelfAttention, x: Tensor) -> Callable[[], object]:
    row = layer._token_row(x, None)
    own, routes = layer._own_tokens(row), layer._routes(row)
    q_latent = layer.q_layernorm(layer.linear_q_down_proj(x)[0])
    return lambda: layer.indexer(x, q_latent, own, row, routes)


def selection(layer: DSASelfAttention, x: Tensor) -> Callable[[], object]:
    row = layer._token_row(x, None)
    queries = row.of_this_rank() if layer.config.shares_queries else row
    routes = Routes.all_sparse(len(queries.starts))
    q_latent = layer.q_layernorm(layer.linear_q_down_proj(x)[0])
    projected = layer.indexer.project(x, q_latent, layer._own_tokens(row), queries)
    return lambda: layer.indexer.select(projected, queries, routes)


def exchange(num_tokens: int) -> Callable[[], object]:
    """Queries to their rank and outputs back, without what they are made of."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    heads = GLM52["num_attention_heads"] // size
    q = torch.empty(num_tokens, heads, 576, device=default_device(), dtype=torch.bfloat16)

    shares = QueryShares(Routes.all_sparse(num_tokens), q.device)

    def run() -> object:
        return shares.tokens_to_heads(shares.heads_to_tokens(shares.by_rank(q))[..., :512])

    return run


def bytes_of(run: Callable[[], object]) -> int:
    with counted_bytes() as received:
        run()
    return received[0]


def slowest(value: float) -> float:
    """The largest value of all ranks."""
    values = torch.tensor([value], dtype=torch.float64, device=default_device())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return float(values)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--date", default="")
    options = parser.parse_args()
    quiet_libraries()
    device = default_device()
    dist.init_process_group("nccl", device_id=device)
    layout = Layout(tp=dist.get_world_size())
    ensure_distributed(device, layout)
    glm5 = Glm5Config.from_hf_dict(tiny_config("5.2") | GLM52)
    ways = {way: build(way, glm5, layout) for way in WAYS}
    for num_tokens in LENGTHS:
        for line in measure(ways, num_tokens):
            say(str(line))
            if options.json is not None and dist.get_rank() == 0:
                about = {
                    "date": options.date,
                    "command": "torchrun --nproc_per_node 2 -m benchmarks.attention_parallel",
                    "op": "attention_layer",
                    "device": f"{layout.tp} x {torch.cuda.get_device_name()}",
                    "torch": torch.__version__,
                }
                with options.json.open("a") as file:
                    file.write(json.dumps(about | asdict(line)) + "\n")
    shut_down()


if __name__ == "__main__":
    main()
