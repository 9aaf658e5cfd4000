"""The image and the composition name what is there. No image is built: that takes a daemon."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
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
    copies = [rest for kind, rest in instructions() if kind == "COPY" and "--from" not in rest]
    for name in (name for rest in copies for name in rest.split()[:-1]):
        assert (ROOT / name).exists(), name
        assert f"!{name}" in allowed, name
    runs = [shlex.split(rest) for kind, rest in instructions() if kind == "RUN" and rest.startswith("pip")]
    ours, others = ({word for word in words if word.startswith(".")} for words in runs[:2])
    folders = {f"./{path.parent.relative_to(ROOT)}" for path in ROOT.glob("libs/*/pyproject.toml")}
    assert ours == folders | {"./recipes", "./examples/llama", "."}
    assert others == folders | {"./recipes", ".[$EXTRAS]"}


def test_the_images_layers_change_with_what_changed() -> None:
    """What others made is installed before anything of this repository is copied into the last stage."""
    lines = (ROOT / "Dockerfile").read_text().split("\nFROM ")[-1].splitlines()
    last = [f"{line[:4].strip()} {line.split()[-1]}" for line in lines if line[:4] in ("COPY", "RUN ")]
    assert last[:2] == ["COPY ./", "RUN others.txt"]
    assert last[-1] == "COPY /usr/local"


def test_the_image_lists_what_others_made(tmp_path: Path) -> None:
    (line,) = [rest for kind, rest in instructions() if kind == "RUN" and rest.startswith("[")]
    python, dash, code = json.loads(line)
    names = ("openinfer-cli", "numpy", "openinfer-tensor", "msgspec")
    report = {"install": [{"metadata": {"name": name, "version": "1.2"}} for name in names]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    code = code.replace("'/", f"'{tmp_path}/")
    subprocess.run([sys.executable, dash, code], check=True)
    assert (python, (tmp_path / "others.txt").read_text()) == ("python", "msgspec==1.2\nnumpy==1.2\n")


def test_the_composition_is_for_this_machine_unless_asked() -> None:
    ports = [
        port for service in parsed("compose.yaml")["services"].values() for port in service.get("ports", ())
    ]
    assert ports == ["${BIND:-127.0.0.1}:8000:8000", "${BIND:-127.0.0.1}:3000:3000"]


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
