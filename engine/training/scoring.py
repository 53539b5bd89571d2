"""What comes after the decoder: log-probs and measures of their distribution, or values, of the response tokens alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from engine.training.backend import Measure
from engine.training.packing import Packing

LOGIT_FACTORS = ("logits_scaling", "logit_scale", "lm_head_multiplier")
"""Names under which architectures of transformers 5.19 scale their logits (Granite, Cohere, Falcon-H1)."""


class ResponseModel(nn.Module):
    """A decoder that runs over the real tokens only (`packed`) or over padded rows, and gives the states that come before response tokens.

    All of a pass happens inside `forward`, because parameters that a sharded root holds are whole only there.
    """

    def __init__(self, causal: PreTrainedModel, packed: bool) -> None:
        super().__init__()
        self.causal = causal
        self.packed = packed

    def states(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, response_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From [B, T] each: the hidden state [R, H] before each of the R response tokens, in order of rows and tokens; and those tokens [R]."""
        if self.packed:
            packing = Packing.of(attention_mask)
            ids, wanted = packing.pack(input_ids), packing.pack(response_mask)
            passed: Mapping[str, Any] = {"input_ids": ids.unsqueeze(0), "position_ids": packing.position.unsqueeze(0), "packing": packing}
        else:
            # Padding stands on the right, where causal attention keeps it out of every real token: no attention mask is needed.
            ids, wanted = input_ids.flatten(), response_mask.flatten()
            passed = {"input_ids": input_ids}
        hidden = self.causal.base_model(**passed, use_cache=False).last_hidden_state.flatten(0, 1)
        at = wanted.nonzero().squeeze(1)
        return hidden[at - 1], ids[at]


class PolicyModel(ResponseModel):
    """A causal language model as a policy: log-prob of each response token, and measures of the distribution that it is drawn from."""

    def __init__(self, causal: PreTrainedModel, packed: bool, rows_at_once: int) -> None:
        super().__init__(causal, packed)
        check_head(causal.config)
        self.softcap: float | None = getattr(causal.config, "final_logit_softcapping", None)
        self.rows_at_once = rows_at_once

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        response_mask: torch.Tensor,
        temperature: float,
        measures: Sequence[Measure] = (),
    ) -> tuple[torch.Tensor, ...]:
        """[B, T] each, to log-probs and the measures in the order asked for, [B, T] each as in `TokenScores`.

        Logits [rows_at_once, V] exist for a part of the response tokens at a time. The backward pass makes them again, part by part.
        """
        hidden, tokens = self.states(input_ids, attention_mask, response_mask)
        if len(tokens) <= self.rows_at_once:
            # Without a response token this still ties the result to the model, so that this rank takes part in the backward pass.
            columns = self._score(hidden, tokens, temperature, measures)
        else:
            parts = [
                checkpoint(self._score, *part, temperature, measures, use_reentrant=False, preserve_rng_state=False)
                for part in zip(torch.split(hidden, self.rows_at_once), torch.split(tokens, self.rows_at_once), strict=True)
            ]
            columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        zeros = torch.zeros(response_mask.shape, dtype=columns[0].dtype, device=columns[0].device)
        return tuple(zeros.masked_scatter(response_mask, column) for column in columns)

    def _score(self, hidden: torch.Tensor, tokens: torch.Tensor, temperature: float, measures: Sequence[Measure]) -> tuple[torch.Tensor, ...]:
        # Few tensors [rows, V] at a time: what is not kept for the backward pass is free before the next one is made.
        log_softmax = F.log_softmax(self._logits(hidden) / temperature, dim=-1)
        log_probs = log_softmax.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return log_probs, *(_MEASURES[measure](log_softmax, temperature) for measure in measures)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.causal.get_output_embeddings()(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _entropy(log_softmax: torch.Tensor, temperature: float) -> torch.Tensor:
    # -sum_v p_v log p_v, summed without a tensor of the products. Its gradient is finite wherever log p is; that of `entr` is NaN at p = 0.
    return -torch.einsum("rv,rv->r", log_softmax.exp(), log_softmax)


def _entropy_temperature_1(log_softmax: torch.Tensor, temperature: float) -> torch.Tensor:
    # The softmax does not see that temperature x log_softmax differs from the logits, row by row, by a constant.
    return _entropy(F.log_softmax(temperature * log_softmax, dim=-1), 1.0)


def _squared_probabilities(log_softmax: torch.Tensor, temperature: float) -> torch.Tensor:
    return (2 * log_softmax).exp().sum(-1)


_MEASURES: Mapping[Measure, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "entropy": _entropy,
    "entropy_temperature_1": _entropy_temperature_1,
    "squared_probabilities": _squared_probabilities,
}


class ValueModel(ResponseModel):
    """A decoder with one number for each token on top, 0 at first."""

    def __init__(self, causal: PreTrainedModel, packed: bool) -> None:
        super().__init__(causal, packed)
        causal.set_output_embeddings(nn.Identity())
        weight = causal.get_input_embeddings().weight
        self.value_head = nn.Linear(causal.config.hidden_size, 1, dtype=weight.dtype, device=weight.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """[B, T] each, to the value [B, T] of the state before each response token; 0 elsewhere."""
        hidden, _ = self.states(input_ids, attention_mask, response_mask)
        # The head computes in the type that its parameters are kept in: it is sharded by itself, without mixed precision.
        values = self.value_head(hidden.to(torch.promote_types(hidden.dtype, torch.float32))).squeeze(-1)
        return torch.zeros(response_mask.shape, dtype=values.dtype, device=values.device).masked_scatter(response_mask, values)


def check_head(config: PreTrainedConfig) -> None:
    """ValueError for an architecture that does more with its logits than a softcap (Gemma 2, arXiv:2408.00118)."""
    if factors := [name for name in LOGIT_FACTORS if getattr(config, name, None) not in (None, 1, 1.0)]:
        raise ValueError(f"model {config.model_type} scales its logits by {', '.join(factors)}, which training does not; choose another model")
