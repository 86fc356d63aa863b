"""The whole configuration of one cluster, and the rules that hold between its sections.

Each section lives in its own module and checks itself; what sections must agree on is in agreement.py.
"""

from __future__ import annotations

from pydantic import model_validator
from pydantic_config import BaseConfig

from composer_prime.config.agreement import DisagreementError, disagreements
from composer_prime.config.channels import ChannelsConfig
from composer_prime.config.diloco import DilocoConfig
from composer_prime.config.inference import InferenceConfig
from composer_prime.config.model import ModelConfig
from composer_prime.config.monitor import MonitorConfig
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.config.run import RunConfig
from composer_prime.config.teachers import TeachersConfig
from composer_prime.config.trainer import TrainerConfig


class Config(BaseConfig):
    """composer-prime: asynchronous reinforcement learning of agentic coders."""

    run: RunConfig
    """Name, length and folder of the run."""
    model: ModelConfig
    """The policy that is trained."""
    inference: InferenceConfig = InferenceConfig()
    """Nodes that sample from the policy."""
    orchestrator: OrchestratorConfig
    """Environments, groups, buffer, evaluation."""
    trainer: TrainerConfig = TrainerConfig()
    """FSDP2 ranks, optimizer, checkpoints."""
    channels: ChannelsConfig = ChannelsConfig()
    """The loss."""
    teachers: TeachersConfig = TeachersConfig()
    """Models that are asked what they would have done, for channel 3's pairs."""
    diloco: DilocoConfig | None = None
    """Other clusters that train the same model; without it this cluster trains alone."""
    monitor: MonitorConfig = MonitorConfig()
    """Where metrics go besides metrics.jsonl."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        if self.diloco is not None:
            self.run._peer = self.diloco.peer_id
        if found := disagreements(self):
            raise DisagreementError(found)
        return self
