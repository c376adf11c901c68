"""The process of a verb: how it ends, and who tells why."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

from glm5.cli.app import app
from glm5.errors import Glm5Error


def run() -> None:
    """Runs a verb; an error of the user's is told in full, once, without a traceback."""
    from glm5.cli.quiet import quiet_libraries

    quiet_libraries()
    # as Ctrl-C does, so that whatever is half written is removed on the way out
    before = signal.signal(signal.SIGTERM, _end)
    try:
        app()
    except Glm5Error as error:
        _tell(error)
        sys.exit(error.exit_code)
    except OSError as error:
        # a full disk, a folder without permission: the user's to mend, and nothing half is left
        _tell(error)
        sys.exit(Glm5Error.exit_code)
    except RuntimeError as error:
        # what a process says that waits for one which has stopped
        if not _points_to_another(error):
            raise
        sys.exit(1)
    finally:
        _shut_down()
        signal.signal(signal.SIGTERM, before)


def _tell(error: Exception) -> None:
    """Of several processes one tells an error that all have: rank 0 if it is one of them."""
    from glm5.runtime.failures import rank_of_many, tells

    if tells(str(error)):
        rank = rank_of_many()
        print(f"{'' if rank is None else f'rank {rank}: '}error: {error}", file=sys.stderr)


def _points_to_another(error: RuntimeError) -> bool:
    """Says in one line which process to look at, where another one has an error of its own."""
    from glm5.runtime.failures import rank_of_many, told_by

    other = told_by()
    if other is None:
        return False
    reason = str(error).strip().partition("\n")[0]
    print(f"rank {rank_of_many()}: stopped, see rank {other} ({reason})", file=sys.stderr)
    return True


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _shut_down() -> None:
    """Ends the process group, if any: `glm5 --help` must not import torch to find out."""
    if "torch" in sys.modules:
        from glm5.runtime.distributed import shut_down

        shut_down()
