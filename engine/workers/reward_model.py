"""A discriminative reward model: a sequence classifier with one output, which reads the whole chat."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from engine.batch import Batch
from engine.workers.base import Annotator


class RewardModelWorker(Annotator):
    """A Hugging Face sequence classifier with one label, such as those of RewardBench; each rank holds a whole copy.

    Args:
        path: its directory or hub name.
        max_tokens: chats are cut to so many tokens, from the left.
        rows_per_pass: chats of one forward pass.

    Raises:
        ValueError: it cannot be loaded, has other than one label, or has no chat template.
    """

    def __init__(self, path: str, max_tokens: int = 4096, rows_per_pass: int = 16, **arguments: Any) -> None:
        super().__init__(**arguments)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForSequenceClassification.from_pretrained(path, dtype=self.dtype)
        except (OSError, ValueError) as error:
            raise ValueError(f"annotators.NAME.parameters.path: {path} cannot be loaded as a sequence classifier: {error}") from error
        if model.config.num_labels != 1:
            raise ValueError(f"annotators.NAME.parameters.path: {Path(path).name} has {model.config.num_labels} labels; a reward model has one")
        if not self._tokenizer.chat_template:
            raise ValueError(f"annotators.NAME.parameters.path: the tokenizer of {Path(path).name} has no chat template, and it is to read chats")
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.to(self.device).eval()
        self._max_tokens, self._rows_per_pass = max_tokens, rows_per_pass

    def annotate(self, rollout: Batch) -> Batch:
        """The model's score of each chat, as the tensor score [B] float32."""
        prompts = self.prompts_of(rollout)
        chats = [
            [*prompt.messages, {"role": "assistant", "content": response}]
            for prompt, response in zip(prompts, rollout.objects["response"], strict=True)
        ]
        # The same chats in every pass, whatever rows came with them: padding goes to the right, where no real token sees it.
        scores = [self._pass(chats[start : start + self._rows_per_pass]) for start in range(0, len(chats), self._rows_per_pass)]
        return Batch(tensors={"score": torch.cat(scores) if scores else torch.zeros(0)})

    @torch.no_grad()
    def _pass(self, chats: list[list[dict[str, str]]]) -> torch.Tensor:
        rows = [self._tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"][-self._max_tokens :] for chat in chats]
        padded = self._tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt").to(self.device)
        return self._model(**padded).logits[:, 0].float().cpu()
