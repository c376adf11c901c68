import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import ConfigError
from glm5.train.claim import claimed


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claimed(folder), pytest.raises(ConfigError, match="another process"):
        claimed(folder).__enter__()
    with claimed(folder):
        pass


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", Path("/")):
        with pytest.raises(ConfigError, match="output folder is none"), claimed(place):
            pytest.fail("claimed")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_nothing_stays_beside_the_folder(tmp_path: Path) -> None:
    with claimed(tmp_path / "run"):
        pass
    with pytest.raises(RuntimeError), claimed(tmp_path / "run"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_no_claim(tmp_path: Path) -> None:
    lock = tmp_path / ".run.lock"
    code = f"import fcntl, os; fcntl.flock(open({str(lock)!r}, 'w'), 2); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL and lock.exists()
    with claimed(tmp_path / "run"):
        pass
    assert not lock.exists()


def test_a_lock_on_a_removed_file_is_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder removes the file after we opened it and before we lock it."""
    flock, opened = fcntl.flock, []

    def late(file: Any, kind: int) -> None:
        opened.append(file)
        if len(opened) == 1:
            Path(file.name).unlink()
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with claimed(tmp_path / "run"), pytest.raises(ConfigError, match="another process"):
        claimed(tmp_path / "run").__enter__()
    assert len(opened) == 3


def test_many_at_once_never_hold_it_together(tmp_path: Path) -> None:
    holders, most, errors = 0, 0, []

    def work() -> None:
        nonlocal holders, most
        for _ in range(200):
            try:
                with claimed(tmp_path / "run"):
                    holders += 1
                    most = max(most, holders)
                    os.sched_yield()
                    holders -= 1
            except ConfigError:
                os.sched_yield()
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, errors) == (1, [])
    assert list(tmp_path.iterdir()) == []
