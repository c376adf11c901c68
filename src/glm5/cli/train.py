"""`glm5 train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glm5.cli.output import Output
from glm5.cli.progress import byte_bar
from glm5.rl.run_config import RlConfig, read_run
from glm5.train.run import train
from glm5.train.state import is_writer


def run_train(run_file: Path, overrides: Sequence[str], *, json: bool) -> None:
    """Trains and says where the checkpoint is, once however many processes a launcher started."""
    output = Output(json)
    run = read_run(run_file, overrides)
    with byte_bar("reading the model", quiet=json) as reading:
        if isinstance(run, RlConfig):
            # its packages are not needed for fine-tuning
            from glm5.rl.run import train_rl

            result = train_rl(run, say=output.say, show=output.show, reading=reading, quiet=json)
        else:
            result = train(run, say=output.say, reading=reading, quiet=json)
    if not is_writer():
        return
    if result.stopped_by:
        output.say(f"stopped by {result.stopped_by}; the same command goes on from here")
    output.result(
        {
            "checkpoint": str(result.checkpoint),
            "step": result.step,
            "finished": result.stopped_by is None,
        }
    )
