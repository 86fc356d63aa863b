"""A run as an Amazon SageMaker training job on one machine: launcher, ranks and inference nodes share its GPUs.

    python infra/sagemaker/training_job.py --image ACCOUNT.dkr.ecr.REGION.amazonaws.com/composer-prime-trainer:0.1.0 \
        --role arn:aws:iam::ACCOUNT:role/ROLE --bucket BUCKET --run qwen3-8b-a1 \
        --config configs/qwen3-8b/a1.toml --dry-run

Without --dry-run boto3 starts the job. The image is the target `trainer` of infra/images/Dockerfile, in your ECR. The
run's folder is SageMaker's checkpoint folder: it is copied to the bucket all the time and back after a spot
interruption, and the run resumes from there. Machines outside the VPC cannot reach the job, so no rented nodes join it.

Validated offline: the request against boto3's own service model (infra/check_infra.py). Not run: create_training_job.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

FOLDER = "/opt/ml/checkpoints"
_START = """resume=()
if [ -e {folder}/{run}/run_id ]; then resume=(--resume); fi
exec trainer @ {config} --run.name {run} --run.output_dir {folder} "${{resume[@]}}"
"""


def request(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of boto3's `create_training_job`."""
    limit_s = round(options.hours * 3600)
    stopping = {"MaxRuntimeInSeconds": limit_s}
    if options.spot:
        stopping["MaxWaitTimeInSeconds"] = 2 * limit_s
    script = _START.format(folder=FOLDER, run=options.run, config=options.config)
    return {
        "TrainingJobName": options.job or options.run,
        "RoleArn": options.role,
        "AlgorithmSpecification": {
            "TrainingImage": options.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["tini", "--", "bash", "-c"],
            "ContainerArguments": [script],
        },
        "ResourceConfig": {"InstanceType": options.machine, "InstanceCount": 1, "VolumeSizeInGB": options.disk},
        "OutputDataConfig": {"S3OutputPath": f"s3://{options.bucket}/output"},
        "CheckpointConfig": {"S3Uri": f"s3://{options.bucket}/checkpoints/{options.run}", "LocalPath": FOLDER},
        "StoppingCondition": stopping,
        "EnableManagedSpotTraining": options.spot,
    }


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description="Start a run as a SageMaker training job.", allow_abbrev=False)
    options.add_argument("--image", required=True)
    options.add_argument("--role", required=True, help="ARN of the role that the job runs as")
    options.add_argument("--bucket", required=True)
    options.add_argument("--run", required=True, help="run.name: letters, digits and dashes")
    options.add_argument("--config", required=True, help="TOML file in the image")
    options.add_argument("--job", help="name of the job, new for each start; default: the run's")
    options.add_argument("--machine", default="ml.p5.48xlarge")
    options.add_argument("--disk", type=int, default=500, help="GB")
    options.add_argument("--hours", type=float, default=24.0)
    options.add_argument("--spot", action="store_true")
    options.add_argument("--region")
    options.add_argument("--dry-run", action="store_true", help="print the request and stop")
    return options


def main() -> None:
    options = parser().parse_args()
    job = request(options)
    print(json.dumps(job, indent=2))
    if options.dry_run:
        return
    import boto3  # not a dependency: pip install boto3

    print(boto3.client("sagemaker", region_name=options.region).create_training_job(**job)["TrainingJobArn"])


if __name__ == "__main__":
    main()
