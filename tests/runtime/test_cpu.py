"""The CPU runtime is switched on once, explicitly, and only where there is no GPU."""

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from glm5.errors import BackendError
from glm5.runtime import cpu
from glm5.runtime.cpu import enable_cpu_runtime

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the real runtime")


@cpu_only
def test_a_second_call_changes_nothing() -> None:
    enable_cpu_runtime()
    before = dict(vars(torch.cuda)), len(_get_current_function_mode_stack())
    enable_cpu_runtime()
    assert (dict(vars(torch.cuda)), len(_get_current_function_mode_stack())) == before


@cpu_only
def test_cuda_means_cpu_once_enabled() -> None:
    enable_cpu_runtime()
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2, device=torch.device("cuda", 0)).device.type == "cpu"
    x = torch.ones(2)
    assert x.cuda() is x
    assert x.to("cuda:0").device.type == "cpu"
    assert x.to(device="cuda").device.type == "cpu"
    assert x.to(torch.float64).dtype == torch.float64
    with torch.cuda.stream(torch.cuda.Stream()):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        torch.cuda.current_stream().wait_event(event)
        assert event.query()


@cpu_only
def test_seeds_and_states_are_the_cpus() -> None:
    enable_cpu_runtime()
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), first)


def test_a_gpu_is_never_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu._MODE, "active", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    before = dict(vars(torch.cuda))
    with pytest.raises(BackendError, match=r"(?s)2 CUDA device.*CUDA_VISIBLE_DEVICES"):
        enable_cpu_runtime()
    assert dict(vars(torch.cuda)) == before
