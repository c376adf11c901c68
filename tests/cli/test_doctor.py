"""`glm5 doctor`."""

from dataclasses import asdict
from importlib.metadata import version

import pytest

from glm5.errors import MegatronCoreError
from glm5.runtime.megatron_core import probe_core
from tests.cli.conftest import Glm5


def test_it_lists_versions_device_and_backends(glm5: Glm5) -> None:
    result = glm5("doctor", "--json")
    assert result.exit_code == 0
    report = result.json
    assert report["ok"] is True
    assert report["packages"]["torch"] == version("torch")
    assert report["backends"]["torch"] is True and "megatron" in report["backends"]
    assert report["megatron_core"] == asdict(probe_core())
    text = glm5("doctor").out
    assert "indexer_rope" in text
    assert version("megatron-core") in text and report["device"] in text


def test_a_core_that_is_not_known_fails_and_is_told(
    glm5: Glm5, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> None:
        raise MegatronCoreError("this Megatron-Core is not known", remedy="install another one")

    monkeypatch.setattr("glm5.cli.doctor.probe_core", unknown)
    result = glm5("doctor")
    assert result.exit_code == 1
    assert "is not known" in result.out and "install another one" in result.out
    result = glm5("doctor", "--json")
    assert result.json["ok"] is False and result.json["megatron_core"] == {}


@pytest.mark.parametrize(
    ("package", "code"),
    [
        (("no-such-package", "", "required"), 1),
        (("torch", "==1.0.*", "required"), 1),
        (("no-such-package", "", "optional"), 0),
    ],
)
def test_what_is_missing_or_too_old(
    glm5: Glm5, monkeypatch: pytest.MonkeyPatch, package: tuple[str, str, str], code: int
) -> None:
    monkeypatch.setattr("glm5.cli.doctor._PACKAGES", (package,))
    result = glm5("doctor", "--json")
    assert result.exit_code == code and result.json["ok"] is (code == 0)
    assert ("FAILED" in glm5("doctor").out) is (code == 1)
