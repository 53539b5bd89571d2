"""A character tokenizer with a chat template, and the rendering of chats for any tokenizer that has a template."""

import re
from collections.abc import Mapping, Sequence

from jinja2.exceptions import TemplateError
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
Row = tuple[list[int], list[bool]]
"""Token ids and which of them are to be learnt, [T] each."""


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
    return list(_render(tokenizer, messages, add_generation_prompt=True)["input_ids"])


def render_conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Row]:
    """Rows to learn a chat from: token ids [T] each, and a mask [T] that is True on what the assistant has to produce, its texts and ends of turn.

    One row where the template renders every turn as it did when the turn was the last one. Some templates rewrite what came before (they drop earlier
    thinking, or move the system's message along); then there is one row for each of the assistant's messages, prompted with what
    generation is prompted with there, and each is learnt in its own row.

    Templates with `{% generation %}` markers say themselves what the assistant produces. For all others it is what the rendering up to a
    message has beyond the rendering of the prompt before it, up to the end of the turn (ChatML writes a newline after it, which no model
    ever generates).

    Raises:
        ValueError: there is no message of the assistant; the template refuses the chat; or it does not render a prompt as the beginning of
            its answer, so that training would not see what generation sees. The message is named.
    """
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("no message is the assistant's; there is nothing to learn")
    rows = [_answer(tokenizer, messages, number) for number in answers]
    whole, mask = rows[-1]
    if any(whole[: len(ids)] != ids for ids, _ in rows):
        return rows
    for _, of_turn in rows:
        mask = [learn or other for learn, other in zip(mask, of_turn + [False] * (len(whole) - len(of_turn)), strict=True)]
    return [(whole, mask)]


def _answer(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], number: int) -> Row:
    """The chat up to message `number`, and what of it is to be learnt of that message."""
    marked = re.search(r"\{%-?\s*generation\b", tokenizer.get_chat_template()) is not None
    rendered = _render(tokenizer, messages[: number + 1], return_assistant_tokens_mask=marked)
    before, through = render_prompt(tokenizer, messages[:number]), list(rendered["input_ids"])
    if through[: len(before)] != before:
        raise ValueError(
            f"message {number} (assistant, {messages[number]['content'][:60]!r}): the chat template does not render the prompt before it as the "
            "beginning of the answer, so training would not see what generation sees. Often a template adds to the prompt what the message should "
            "begin with, such as <think>: write it into the messages, or use another template"
        )
    if marked:
        return through, [bool(flag) and place >= len(before) for place, flag in enumerate(rendered["assistant_masks"])]
    end = _end_of_turn(tokenizer, through, len(before))
    return through, [len(before) <= place < end for place in range(len(through))]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int) -> int:
    """Behind the last end-of-sequence token from `start` on, else behind a special token that only white space follows, else the end."""
    for place in range(len(ids), start, -1):
        if ids[place - 1] == tokenizer.eos_token_id:
            return place
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    last = next((place for place in range(len(ids), start, -1) if ids[place - 1] in special), len(ids))
    return len(ids) if tokenizer.decode(ids[last:]).strip() else last


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **settings: bool) -> Mapping[str, list[int]]:
    try:
        # A bare list of ids is the default in some versions of transformers only.
        rendered: Mapping[str, list[int]] = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, **settings)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"the chat template refuses messages of the roles {roles}: {error}") from error
    return rendered
