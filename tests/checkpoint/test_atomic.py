from pathlib import Path

import pytest

from glm5.checkpoint.atomic import check_is_free, new_folder, remove_folder, remove_partials
from glm5.errors import CheckpointError


def test_a_folder_appears_at_the_end(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a" / "b") as staging:
        (staging / "file").write_text("x")
        assert not (tmp_path / "a" / "b").exists()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert (tmp_path / "a" / "b" / "file").read_text() == "x"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with new_folder(tmp_path / "a") as staging:
        (staging / "file").touch()
    assert (tmp_path / "a" / "file").exists()


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "a") as staging:
        (staging / "file").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_neither_a_file_nor_a_folder_in_use_is_free(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for taken in (tmp_path / "file", tmp_path):
        with pytest.raises(CheckpointError, match="not an empty folder"), new_folder(taken):
            pytest.fail("entered")
    check_is_free(tmp_path / "new")


@pytest.mark.parametrize("name", ["file/a", "file/a/b"])
def test_no_folder_lies_in_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / name, Path(name)):
        with pytest.raises(CheckpointError, match="file is a file"), new_folder(folder):
            pytest.fail("entered")
        with pytest.raises(CheckpointError, match="file is a file"):
            check_is_free(folder)


@pytest.mark.parametrize("is_folder", [True, False])
def test_another_process_that_was_faster_wins(tmp_path: Path, is_folder: bool) -> None:
    target = tmp_path / "a"
    with pytest.raises(CheckpointError, match="not an empty folder"), new_folder(target):
        if is_folder:
            (target / "theirs").mkdir(parents=True)
        else:
            target.write_text("theirs")
    assert list(tmp_path.iterdir()) == [target]
    assert (target / "theirs").is_dir() if is_folder else target.read_text() == "theirs"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed(tmp_path: Path, exists: bool) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if exists:
        (disk / "real").mkdir()
    (tmp_path / "link").symlink_to(disk / "real")
    with new_folder(tmp_path / "link") as staging:
        (staging / "file").touch()
        assert staging.parent == disk
    assert (tmp_path / "link").is_symlink() and (disk / "real" / "file").exists()


def test_a_folder_that_goes_has_another_name_while_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "file").touch()
    seen: list[str] = []
    monkeypatch.setattr("glm5.checkpoint.atomic.shutil.rmtree", lambda path: seen.append(path.name))
    remove_folder(tmp_path / "step-1")
    assert [path.name for path in tmp_path.iterdir()] == seen and seen[0].startswith(".step-1.")


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), new_folder(tmp_path / "step-1") as staging:
        (staging / "file").touch()
        # as after a kill: the folder is still there when the process is gone
        staging.with_name(staging.name[:-1] + "x").mkdir()
        raise FileExistsError
    (tmp_path / "step-0").mkdir()
    assert len(list(tmp_path.iterdir())) == 2
    remove_partials(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "step-0"]
    remove_partials(tmp_path / "absent")
