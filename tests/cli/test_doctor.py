"""`glm5 doctor`."""

from importlib.metadata import version

import pytest

from tests.cli.conftest import Glm5


def test_it_lists_versions_device_and_backends(glm5: Glm5) -> None:
    result = glm5("doctor", "--json")
    assert result.exit_code == 0
    report = result.json
    assert report["ok"] is True
    assert report["packages"]["torch"] == version("torch")
    assert report["backends"]["torch"] is True and "megatron" in report["backends"]
    text = glm5("doctor").out
    assert version("megatron-core") in text and report["device"] in text


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
