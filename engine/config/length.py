"""Contexts beyond the one that a model was made for."""

from typing import Annotated, Literal

from pydantic import Field

from engine.config.base import Positive, Settings


class LengthExtensionConfig(Settings):
    """Rotary position embeddings that reach further, by YaRN (Peng et al. 2023, arXiv:2309.00071, sections 3.2 and 3.4)."""

    method: Literal["yarn"] = "yarn"
    factor: Annotated[float, Field(ge=1)]
    """Slow frequencies are divided by it, fast ones stay; the context becomes so many times as long. 1 changes nothing."""
    attention_factor: Annotated[float, Field(gt=0)] | None = None
    """Queries and keys are multiplied by it, exactly as it is given; 1.0 switches the correction of the attention's temperature off (POLARIS).
    null is the paper's, 0.1 ln(factor) + 1."""
    original_max_context_tokens: Positive | None = None
    """Context that the frequencies were trained for; null takes the model's `max_position_embeddings`."""

    @property
    def changes_nothing(self) -> bool:
        """Frequencies and attention stay to the last bit."""
        return self.factor == 1 and self.attention_factor in (None, 1)
