"""Every setting of the engine: typed, documented, frozen, hashed. Imports no torch, so that checking a recipe takes no time.

Each class refuses keys that it does not know and values of another type; all errors of a configuration are reported at once.
A setting that counts or measures something carries its unit in its name.
"""

from engine.config.advantage import (
    AdvantageConfig,
    GAEAdvantageConfig,
    GPGAdvantageConfig,
    GRPOAdvantageConfig,
    GRPOPassKAdvantageConfig,
    OPOAdvantageConfig,
    OptimalTokenBaselineAdvantageConfig,
    OwnAdvantageConfig,
    ReinforcePlusPlusAdvantageConfig,
    ReinforcePlusPlusBaselineAdvantageConfig,
    ReMaxAdvantageConfig,
    RLOOAdvantageConfig,
)
from engine.config.algorithm import AlgorithmConfig, CriticConfig
from engine.config.base import Fraction, Name, Positive, Settings
from engine.config.ends import CollapseConfig, ConvergenceConfig, EndsConfig
from engine.config.entropy import AdaptiveEntropyConfig, EntropyConfig
from engine.config.groups import DropGroups, FilterGroups, GroupsConfig, KeepGroups, RescueConfig, SubstituteGroups
from engine.config.kl import AdaptiveKLConfig, KLConfig
from engine.config.length import LengthExtensionConfig
from engine.config.loss import (
    CISPOLossConfig,
    ClipCovLossConfig,
    DPPOLossConfig,
    GMPOLossConfig,
    GPGLossConfig,
    GSPOLossConfig,
    KLCovLossConfig,
    LossConfig,
    OwnLossConfig,
    PPOLossConfig,
    ReinforceLossConfig,
    SAPOLossConfig,
)
from engine.config.model import ArchitectureConfig, GgufConfig, ModelConfig
from engine.config.off_policy import ImportanceWeightsConfig, OffPolicyConfig, RejectionConfig
from engine.config.resources import MAIN_POOL, ROLES, PoolConfig, ResourcesConfig
from engine.config.reward import AnnotatorConfig, OwnRewardConfig, RewardConfig, RewardRunnerConfig, part_name
from engine.config.rollout import RolloutConfig, SamplingConfig
from engine.config.stages import EngineConfig, EvaluationConfig, RLStageConfig, SFTStageConfig, SFTValidationConfig
from engine.config.training import LoRAConfig, OptimizerConfig, StageTrainingConfig, TrainingConfig
from engine.config.truncated import KeepTruncated, MaskAfterStatistics, MaskBeforeStatistics, OverlongPenalty, TruncatedConfig

__all__ = [
    "MAIN_POOL",
    "ROLES",
    "AdaptiveEntropyConfig",
    "AdaptiveKLConfig",
    "AdvantageConfig",
    "AlgorithmConfig",
    "AnnotatorConfig",
    "ArchitectureConfig",
    "CISPOLossConfig",
    "ClipCovLossConfig",
    "CollapseConfig",
    "ConvergenceConfig",
    "CriticConfig",
    "DPPOLossConfig",
    "DropGroups",
    "EndsConfig",
    "EngineConfig",
    "EntropyConfig",
    "EvaluationConfig",
    "FilterGroups",
    "Fraction",
    "GAEAdvantageConfig",
    "GMPOLossConfig",
    "GPGAdvantageConfig",
    "GPGLossConfig",
    "GRPOAdvantageConfig",
    "GRPOPassKAdvantageConfig",
    "GSPOLossConfig",
    "GgufConfig",
    "GroupsConfig",
    "ImportanceWeightsConfig",
    "KLConfig",
    "KLCovLossConfig",
    "KeepGroups",
    "KeepTruncated",
    "LengthExtensionConfig",
    "LoRAConfig",
    "LossConfig",
    "MaskAfterStatistics",
    "MaskBeforeStatistics",
    "ModelConfig",
    "Name",
    "OPOAdvantageConfig",
    "OffPolicyConfig",
    "OptimalTokenBaselineAdvantageConfig",
    "OptimizerConfig",
    "OverlongPenalty",
    "OwnAdvantageConfig",
    "OwnLossConfig",
    "OwnRewardConfig",
    "PPOLossConfig",
    "PoolConfig",
    "Positive",
    "RLOOAdvantageConfig",
    "RLStageConfig",
    "ReMaxAdvantageConfig",
    "ReinforceLossConfig",
    "ReinforcePlusPlusAdvantageConfig",
    "ReinforcePlusPlusBaselineAdvantageConfig",
    "RejectionConfig",
    "RescueConfig",
    "ResourcesConfig",
    "RewardConfig",
    "RewardRunnerConfig",
    "RolloutConfig",
    "SAPOLossConfig",
    "SFTStageConfig",
    "SFTValidationConfig",
    "SamplingConfig",
    "Settings",
    "StageTrainingConfig",
    "SubstituteGroups",
    "TrainingConfig",
    "TruncatedConfig",
    "part_name",
]
