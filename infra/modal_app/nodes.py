"""Inference nodes on Modal: each call of `node` is one container with one GPU that joins the run of an invite.

    orchestrator invite outputs/RUN --nodes 8 --trust-nodes > invite.txt
    modal secret create composer-invite COMPOSER_INVITE="$(cat invite.txt)"
    export COMPOSER_PACKAGE='composer-prime[vllm] @ git+https://...'
    modal run --detach infra/modal_app/nodes.py --count 8
    modal app stop composer-nodes                           # ends them and their billing

Modal ends a container after 24 hours at the latest. A container keeps nothing: its successor is a new node with a key
of its own, uses up one of --nodes, and fetches the weights again.

Validated offline: import, image and function under modal (infra/check_infra.py). Not run: modal run.
"""

from __future__ import annotations

import os
import subprocess

import modal

PACKAGE = os.environ.get("COMPOSER_PACKAGE", "")  # what uv installs
if modal.is_local() and not PACKAGE:
    raise SystemExit("COMPOSER_PACKAGE is not set: what uv installs, such as 'composer-prime[vllm] @ git+https://...'")
GPU = os.environ.get("COMPOSER_GPU", "H100")

app = modal.App("composer-nodes")
image = modal.Image.debian_slim(python_version="3.12").apt_install("gcc", "libc6-dev").uv_pip_install(PACKAGE)


@app.function(
    image=image,
    gpu=GPU,
    cpu=8.0,
    memory=64 * 1024,
    timeout=24 * 3600,
    secrets=[modal.Secret.from_name("composer-invite", required_keys=["COMPOSER_INVITE"])],
)
def node(number: int) -> int:
    """Serve until the run is over. Return the exit status of `inference join`, which reads $COMPOSER_INVITE."""
    name = f"modal-{os.environ.get('MODAL_TASK_ID', 'task')}-{number}"
    return subprocess.run(["inference", "join", "--name", name]).returncode


@app.local_entrypoint()
def main(count: int = 1) -> None:
    statuses = list(node.map(range(count)))
    print(f"{statuses.count(0)} of {count} nodes ended well")
