"""Every setting of the engine: typed, documented, frozen, hashed. Imports no torch, so that checking a recipe takes no time.

Each class refuses keys that it does not know and values of another type; all errors of a configuration are reported at once.
A setting that counts or measures something carries its unit in its name.
"""

from engine.config.advantage import AdvantageConfig
from engine.config.algorithm import AlgorithmConfig, CriticConfig, KLConfig
from engine.config.base import Fraction, Name, Positive, Settings
from engine.config.loss import LossConfig
from engine.config.model import ArchitectureConfig, GgufConfig, ModelConfig
from engine.config.off_policy import ImportanceWeightsConfig, OffPolicyConfig, RejectionConfig
from engine.config.resources import MAIN_POOL, ROLES, PoolConfig, ResourcesConfig
from engine.config.reward import AnnotatorConfig, RewardConfig
from engine.config.rollout import RolloutConfig, SamplingConfig
from engine.config.stages import EngineConfig, EvaluationConfig, RLStageConfig, SFTStageConfig
from engine.config.training import LoRAConfig, OptimizerConfig, StageTrainingConfig, TrainingConfig

__all__ = [
    "MAIN_POOL",
    "ROLES",
    "AdvantageConfig",
    "AlgorithmConfig",
    "AnnotatorConfig",
    "ArchitectureConfig",
    "CriticConfig",
    "EngineConfig",
    "EvaluationConfig",
    "Fraction",
    "GgufConfig",
    "ImportanceWeightsConfig",
    "KLConfig",
    "LoRAConfig",
    "LossConfig",
    "ModelConfig",
    "Name",
    "OffPolicyConfig",
    "OptimizerConfig",
    "PoolConfig",
    "Positive",
    "RLStageConfig",
    "RejectionConfig",
    "ResourcesConfig",
    "RewardConfig",
    "RolloutConfig",
    "SFTStageConfig",
    "SamplingConfig",
    "Settings",
    "StageTrainingConfig",
    "TrainingConfig",
]
