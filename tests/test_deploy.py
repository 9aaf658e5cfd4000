"""The image and the composition name what is there. No image is built: that takes a daemon."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from openinfer.cli import COMMANDS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def parsed(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return re.findall(r"^([A-Z]+) (.*)$", text, re.M)


def test_the_image_copies_what_is_there_and_installs_every_distribution() -> None:
    allowed = (ROOT / ".dockerignore").read_text().split()
    copied = [name for kind, rest in instructions() if kind == "COPY" for name in rest.split()[:-1]]
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in allowed, name
    (install,) = [rest for kind, rest in instructions() if kind == "RUN" and rest.startswith("pip")]
    folders = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("libs/*/pyproject.toml")}
    words = shlex.split(install)
    assert {word.removeprefix("./") for word in words if word.startswith("./")} == folders | {"recipes"}
    assert ".[$EXTRAS]" in words


def test_the_images_command_is_one() -> None:
    words = {kind: json.loads(rest) for kind, rest in instructions() if kind in ("ENTRYPOINT", "CMD")}
    assert words["ENTRYPOINT"] == ["openinfer"]
    assert words["CMD"][0] in COMMANDS
    assert (ROOT / words["CMD"][1] / "config.json").exists()


def test_the_composition_mounts_files_that_are_there_and_scrapes_the_server() -> None:
    services = parsed("compose.yaml")["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), volume
    assert (DEPLOY / services["openinfer"]["build"]["context"] / "Dockerfile").exists()
    (job,) = parsed("prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target.partition(":")[0] in services
    (source,) = parsed("grafana/sources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (boards,) = parsed("grafana/boards.yaml")["providers"]
    assert any(boards["options"]["path"] in volume for volume in services["grafana"]["volumes"])
    assert set(parsed("gpu.yaml")["services"]) == {"openinfer"}
