"""What the exports write of a job's last checkpoint."""

from collections.abc import Iterator

import torch
from torch import Tensor

from glm5.checkpoint.ckpt_dir import read_record, step_folder
from glm5.checkpoint.convert import hf_weights, mcore_tensors
from glm5.checkpoint.glm5_rules import glm5_rules
from glm5.export.factors import trained_adapter
from glm5.export.restore import restore_model
from tests.parallel.jobs import LAST_STEP, Job


def exported(job: Job) -> Iterator[tuple[str, Tensor]]:
    """Tensors under their Hugging Face names, as the exports write them."""
    checkpoint = step_folder(job.out_dir, LAST_STEP)
    record = read_record(checkpoint)
    model = restore_model(checkpoint, record, "float32")
    if record.kind == "adapter":
        adapter = trained_adapter(model, torch.float32)
        for path, factors in adapter.factors.items():
            yield f"{path}.a", factors.a
            yield f"{path}.b", factors.b
        yield from adapter.modules.items()
        return
    for hf_name, tensor in hf_weights(
        mcore_tensors(model), glm5_rules(model.config.glm5, include_mtp=record.include_mtp)
    ):
        yield hf_name, tensor.detach().clone()
