"""How builds are asked for: right base, labels, the machine's certificates as a secret, and helpful refusals."""

from __future__ import annotations

import pytest

import occamy
from components import IMAGE

from .dockerfiles import DOCKERFILES, building


def options(image: str, tool: str = "podman") -> list[str]:
    """The build of an image on a Python image."""
    command: list[str] = building.build_command(image, tool, {"BASE_IMAGE": "python:3.11.14"}, "https://git/occamy")
    return command


def test_every_dockerfile_is_built_by_some_name() -> None:
    names = {name.removesuffix("-gpu") for name in (*building.ON_PYTHON, *building.ON_OURS, *building.ON_GPU)}
    assert names == {file.parent.name for file in DOCKERFILES}


def test_what_an_image_is_made_of_is_built_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    for image, sources in building.ON_OURS.items():
        assert set(sources.values()) <= {*building.ON_PYTHON, *built}
        built.append(image)
    ran: list[list[str]] = []
    monkeypatch.setattr(building, "_run", lambda command, env: ran.append(command))
    building.build("harnesses", "podman", "", "https://git/occamy")
    names = {name: f"localhost/occamy-{name}:{occamy.__version__}" for name in ("sandbox", "rollout")}
    assert {f"BASE_IMAGE={names['sandbox']}", f"PROGRAMS_IMAGE={names['rollout']}"} <= set(ran[0])


def test_the_image_of_pipelines_is_the_trainer() -> None:
    assert f"localhost/{IMAGE}" in options("trainer")
    assert f"localhost/occamy-trainer:{occamy.__version__}" in options("trainer")
    assert not any(IMAGE in word for word in options("base"))


def test_version_base_and_source_are_passed_on() -> None:
    words = options("operator", "docker")
    assert f"VERSION={occamy.__version__}" in words
    assert {"BASE_IMAGE=python:3.11.14", "SOURCE=https://git/occamy"} <= set(words)
    assert words[words.index("--tag") + 1] == f"occamy-operator:{occamy.__version__}"


def test_certificates_are_a_secret_and_never_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CERT", "/certificates.pem")
    words = options("base")
    assert words[words.index("--secret") + 1] == "id=ca,src=/certificates.pem"
    assert [word for word in words if "certificates" in word] == ["id=ca,src=/certificates.pem"]
    monkeypatch.delenv("PIP_CERT")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert "--secret" not in options("base")


def test_an_image_that_is_not_there_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        building.main(["trainr"])
    assert "no such image: trainr; there are base, operator" in capsys.readouterr().err


def test_without_a_tool_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert building.main(["operator"]) == 1
    assert "apt-get install podman runc debootstrap" in capsys.readouterr().err


def test_debian_is_taken_only_with_its_signature() -> None:
    assert "--force-check-gpg" in building.debootstrap_command("/folder")
