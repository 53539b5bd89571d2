"""A character tokenizer with a chat template, and the rendering of chats for any tokenizer that has a template."""

import re
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TURN = "<|im_end|>"
# A turn's header is one token: it is text of ChatML all the same, but the rows of a small model are a third shorter.
TURN_HEADERS = ["<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n"]
SPECIAL_TOKENS = ["<pad>", "<unk>", "<|im_start|>", END_OF_TURN, *TURN_HEADERS]
# Not special, so that decoding with skip_special_tokens, which is what reward functions are given, keeps them.
ANSWER_TOKENS = ["<think>", "</think>", "\\boxed{"]
CHARACTERS = ["\n", *(chr(code) for code in range(0x20, 0x7F))]

# The assistant's text and its end of turn stand between the generation markers: the model must learn to stop, too.
CHAT_TEMPLATE = """
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".strip()

Message = Mapping[str, str]


def character_tokenizer(max_context_tokens: int) -> PreTrainedTokenizerFast:
    """Tokenizer of printable ASCII and newline, one token a character; any other character becomes <unk>.

    `<think>`, `</think>` and `\\boxed{` are one token each. Turns are ChatML's; the end of a turn is the end of the sequence. Padding is 0.

    Args:
        max_context_tokens: written into the tokenizer as its `model_max_length`.
    """
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS, *ANSWER_TOKENS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ANSWER_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token=END_OF_TURN,
        additional_special_tokens=["<|im_start|>", *TURN_HEADERS],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_context_tokens,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat, up to where the assistant's next answer begins."""
    return _render(tokenizer, messages, add_generation_prompt=True)


def render_conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Token ids [T] of a chat, and a mask [T] that is True on what the assistant has to produce: its text and its end of turn.

    Templates with `{% generation %}` markers say themselves what that is. For all others it is what the rendering up to an assistant message
    has beyond the rendering of the prompt before it, up to the end-of-sequence token where there is one (ChatML writes a newline
    after it, which no model ever generates).

    Raises:
        ValueError: the template does not render a prompt as a prefix of the conversation (some drop earlier thinking or add something to a
            prompt), so that training would not see what generation sees; the message is named.
    """
    if re.search(r"\{%-?\s*generation\b", tokenizer.get_chat_template()):
        rendered = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(rendered["input_ids"]), [bool(flag) for flag in rendered["assistant_masks"]]
    ids = _render(tokenizer, messages)
    mask = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render_prompt(tokenizer, messages[:i])
        through = _render(tokenizer, messages[: i + 1])
        if through[: len(before)] != before or ids[: len(through)] != through:
            raise ValueError(
                f"message {i} (assistant, {message['content'][:60]!r}): the chat template renders the turns up to it differently when they stand "
                "alone, so what the model should learn is not a part of what it is prompted with; use a template with {% generation %} markers, "
                "or conversations with one assistant message"
            )
        end = len(through)
        while end > len(before) and through[end - 1] != tokenizer.eos_token_id:
            end -= 1
        end = end if end > len(before) else len(through)
        mask[len(before) : end] = [True] * (end - len(before))
    return ids, mask


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool = False) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, add_generation_prompt=add_generation_prompt
    )  # A bare list of ids is the default in some versions of transformers only.
    return list(rendered["input_ids"])
