"""Generation with plain `transformers`: a loop that is easy to believe, for tiny models and for checking vLLM."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from engine import rope
from engine.config import LengthExtensionConfig, LoRAConfig, RolloutConfig, SamplingConfig
from engine.control.mesh import Mesh
from engine.reshard.checkpoint import checkpoint_of
from engine.reshard.landing import Landings
from engine.reshard.layout import Tensor
from engine.reshard.proof import Proof
from engine.reshard.recording import Copy, Wanted
from engine.reshard.synchronise import Arrivals, Loaded
from engine.rollout.backend import Request, Response
from engine.rollout.limits import check_prompts
from engine.rollout.stop import StopTexts
from engine.training.lora import add_adapters, take_adapters


class TransformersBackend:
    """The whole model on this rank. Requests are decoded side by side in batches of `max_concurrent_samples`; rows that are done leave the batch."""

    def __init__(
        self,
        model_directory: Path,
        config: RolloutConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_context_tokens: int,
        tokenizer: Any,
        lora: LoRAConfig | None,
    ) -> None:
        self.mesh(config, 1)  # refuses what this backend cannot do
        self._config = config
        self._device = device
        self._max_context_tokens = max_context_tokens
        self._tokenizer = tokenizer
        model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=dtype)
        if lora is not None:
            add_adapters(model, lora)
        self._model = model.to(device).eval().requires_grad_(False)
        self.weight_version: int | None = None
        ends = self._model.generation_config.eos_token_id  # a token, several, or None
        self._ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}

    @classmethod
    def mesh(cls, config: RolloutConfig, ranks: int) -> Mesh:
        """See `RolloutBackend`."""
        if config.tensor_parallel_ranks > 1:
            raise ValueError(
                f"rollout.tensor_parallel_ranks: {config.tensor_parallel_ranks} ranks cannot share an engine of rollout.backend=transformers; "
                "set it to 1, or choose rollout.backend=vllm"
            )
        return Mesh.grouped(ranks)

    def extend(self, extension: LengthExtensionConfig | None) -> None:
        """See `RolloutBackend`."""
        rope.extend(self._model, self._model.config, extension)

    def stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, Response]]:
        """See `RolloutBackend`. Every request has a random stream of its own; its neighbours change logits by float rounding only.

        Raises `ValueError` when a prompt leaves no room for a response.
        """
        check_prompts(requests, self._max_context_tokens)
        rows = [_Row(position, request, self._ends, self._max_context_tokens, self._tokenizer) for position, request in enumerate(requests)]
        size = self._config.max_concurrent_samples
        for start in range(0, len(rows), size):
            yield from self._decode(rows[start : start + size])

    def wants(self, tensors: Mapping[str, Tensor]) -> Wanted:
        """See `RolloutBackend`. Every tensor, whole."""
        own = checkpoint_of(self._model.config, self._model.dtype)
        for name, tensor in own.tensors.items():
            if name not in tensors or tensors[name].shape != tensor.shape:
                given = f"the trainer's shape is {tensors[name].shape}" if name in tensors else "the trainer has none"
                raise ValueError(f"{name}: the rollout's {self._model.config.model_type} has it with shape {tensor.shape}; {given}")
        if excess := [name for name in tensors if name not in own.tensors]:
            raise ValueError(f"{excess[0]}: the rollout's {self._model.config.model_type} has no place for it")
        copies = [Copy(name, tensor.whole, own.parts[name].parameter, own.parts[name].box) for name, tensor in own.tensors.items()]
        wanted = Wanted(copies, {name: tensor.dtype for name, tensor in own.tensors.items()})
        self._landings = Landings(wanted)
        return wanted

    def receive(self, arrivals: Arrivals, proof: Proof) -> Loaded:
        """See `RolloutBackend`."""
        self.weight_version = None
        self._landings.fill(dict(self._model.named_parameters()), arrivals, proof)
        self.weight_version = proof.version
        return Loaded()

    def load_adapter(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """See `RolloutBackend`. Raises `ValueError` when the adapter belongs to another model."""
        self.weight_version = None
        take_adapters(self._model, weights)
        self.weight_version = version

    def _decode(self, rows: list["_Row"]) -> Iterator[tuple[int, Response]]:
        cache = DynamicCache(config=self._model.config)
        # Padding stands on the left, so that the last column is every row's newest token.
        width = max(len(row.request.prompt_tokens) for row in rows)
        padding = [width - len(row.request.prompt_tokens) for row in rows]
        input_ids = torch.tensor([[0] * pad + list(row.request.prompt_tokens) for pad, row in zip(padding, rows, strict=True)])
        mask = torch.arange(width) >= torch.tensor(padding).unsqueeze(1)
        while True:
            tokens, log_probs = draw(self._logits(input_ids, mask, cache), rows)
            going = []
            for i, row in enumerate(rows):
                response = row.take(int(tokens[i]), float(log_probs[i]))
                if response is None:
                    going.append(i)
                else:
                    yield row.position, response
            if not going:
                return
            if len(going) < len(rows):
                cache.batch_select_indices(torch.tensor(going, device=self._device))
            rows = [rows[i] for i in going]
            input_ids = tokens[going].unsqueeze(1)
            mask = torch.cat([mask[going], torch.ones(len(going), 1, dtype=torch.bool)], dim=1)

    @torch.no_grad()
    def _logits(self, input_ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """[B, V] float32 on the host, of each row's next token. Grows the cache by `input_ids` [B, T]; `mask` [B, S] covers all it then holds."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        output = self._model(
            input_ids=input_ids.to(self._device),
            attention_mask=mask.to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1].float().cpu()
        return logits


class _Row:
    """A request and what has been drawn for it."""

    def __init__(self, position: int, request: Request, ends: set[int | None], max_context_tokens: int, tokenizer: Any) -> None:
        self.position = position
        self.request = request
        self.generator = torch.Generator().manual_seed(request.seed)
        self._ends = ends
        self._room = min(request.max_tokens, max_context_tokens - len(request.prompt_tokens))
        self._texts = StopTexts(tokenizer, request.sampling.stop) if request.sampling and request.sampling.stop else None
        self._tokens: list[int] = []
        self._log_probs: list[float] = []

    def take(self, token: int, log_prob: float) -> Response | None:
        """The response, if `token` is its last one."""
        self._tokens.append(token)
        self._log_probs.append(log_prob)
        finished = token in self._ends or (self._texts is not None and self._texts.complete(token))
        return Response(self._tokens, self._log_probs, finished) if finished or len(self._tokens) >= self._room else None


def draw(logits: torch.Tensor, rows: Sequence[_Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """One token [B] for each row, and its log-prob [B] under the distribution that it was drawn from.

    A row takes one uniform number from its generator and looks it up in the cumulated probabilities; a greedy row takes the likeliest token.
    """
    samplings = [row.request.sampling or SamplingConfig() for row in rows]
    log_probs = restrict(logits, samplings).log_softmax(-1)
    cumulated = log_probs.double().exp().cumsum(-1)
    uniform = torch.stack([torch.rand(1, generator=row.generator, dtype=torch.float64) for row in rows])
    # The first sum above the number: never that of a token with probability 0, which adds nothing.
    drawn = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True).squeeze(1)
    greedy = torch.tensor([row.request.sampling is None for row in rows])
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, log_probs.gather(-1, tokens.unsqueeze(1)).squeeze(1)


def restrict(logits: torch.Tensor, samplings: Sequence[SamplingConfig]) -> torch.Tensor:
    """Logits [B, V] divided by each row's temperature, and -inf where its min_p, then its top_k, then its top_p (nucleus) rule a token out.

    The order is vLLM's: each rule sees the probabilities that the one before left. min_p: arXiv:2407.01082; top_p: arXiv:1904.09751.
    """

    def column(values: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(values)).unsqueeze(1)

    logits = logits / column(sampling.temperature for sampling in samplings)
    probabilities = logits.softmax(-1)
    min_p = column(sampling.min_p for sampling in samplings)
    logits = logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    ordered, order = logits.sort(-1, descending=True)
    last = column((sampling.top_k or logits.shape[-1]) for sampling in samplings).clamp(max=logits.shape[-1]) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, last), -torch.inf)  # of equals at the border all stay
    probabilities = ordered.softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities
    top_p = column(sampling.top_p for sampling in samplings)
    ordered = ordered.masked_fill((likelier >= top_p) & (top_p < 1), -torch.inf)
    return logits.scatter(-1, order, ordered)
