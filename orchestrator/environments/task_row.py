"""The base of the rows of our task sets. Importing this imports verifiers."""

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.utils.artifacts import MAX_ARTIFACT_BYTES


class TaskRow(vf.TaskData):
    """verifiers' row of a task, for type checkers: they take a field for required whose default is positional."""

    artifact_max_bytes: int = Field(default=MAX_ARTIFACT_BYTES, gt=0)
