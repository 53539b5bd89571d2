import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.tokenizer import CHARACTERS, SPECIAL_TOKENS, character_tokenizer, render_conversation, render_prompt

TOKENIZER = character_tokenizer(256)
CHAT = [{"role": "user", "content": "4 + 3 ="}, {"role": "assistant", "content": "<think>7</think>\\boxed{7}"}]
TWO_ANSWERS = [*CHAT, {"role": "user", "content": "and - 2"}, {"role": "assistant", "content": "\\boxed{5}"}]
SYSTEM = [{"role": "system", "content": "Add."}, *TWO_ANSWERS]

printable = st.text(alphabet=CHARACTERS, max_size=60)


def without_markers() -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer(256)
    tokenizer.chat_template = re.sub(r"\{%- (end)?generation -%\}", "", tokenizer.chat_template)
    return tokenizer


def masked_text(tokenizer: PreTrainedTokenizerFast, chat: list[dict[str, str]]) -> str:
    ((ids, mask),) = render_conversation(tokenizer, chat)
    assert len(ids) == len(mask)
    return str(tokenizer.decode([token for token, learn in zip(ids, mask, strict=True) if learn]))


# Mutation: leave out the Fuse decoder (spaces between characters), or clean_up_tokenization_spaces=True.
@settings(deadline=None)
@given(printable)
def test_printable_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    # A text may spell a special token, and is then read as one.
    if not any(token in text for token in SPECIAL_TOKENS):
        assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True) == text


# Mutation: remove a character of CHARACTERS.
def test_every_printable_character_is_one_token() -> None:
    ids = [TOKENIZER.encode(character) for character in ["\n", *map(chr, range(32, 127))]]
    assert all(len(token) == 1 for token in ids)
    assert len({token[0] for token in ids} - {TOKENIZER.unk_token_id}) == 96
    assert TOKENIZER.encode("é") == [TOKENIZER.unk_token_id]


# Mutation: add the answer tokens with add_special_tokens: rewards would never see a box.
def test_answer_tokens_are_single_and_survive_skipping_special_tokens() -> None:
    ids = TOKENIZER.encode("<think>7 5</think>\\boxed{5}<|im_end|>")
    assert len(ids) == 9  # <think> 7 space 5 </think> \boxed{ 5 } <|im_end|>
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<think>7 5</think>\\boxed{5}"


def test_the_end_of_a_turn_ends_the_sequence_and_padding_is_zero() -> None:
    assert TOKENIZER.eos_token == "<|im_end|>"
    assert TOKENIZER.pad_token_id == 0
    assert TOKENIZER.model_max_length == 256


# Mutation: a template that writes something else around the turns.
def test_chats_are_rendered_as_chatml() -> None:
    text = "<|im_start|>user\n4 + 3 =<|im_end|>\n<|im_start|>assistant\n<think>7</think>\\boxed{7}<|im_end|>\n"
    assert TOKENIZER.decode(render_conversation(TOKENIZER, CHAT)[0][0]) == text
    assert TOKENIZER.decode(render_prompt(TOKENIZER, CHAT[:1])) == "<|im_start|>user\n4 + 3 =<|im_end|>\n<|im_start|>assistant\n"


# Mutation: put '<|im_end|>' behind {% endgeneration %}: the model never learns to stop.
# Mutation (second tokenizer): do not cut the mask after the end of the turn: the newline behind it is learned.
@pytest.mark.parametrize("tokenizer", [TOKENIZER, without_markers()], ids=["markers", "prefixes"])
def test_the_mask_holds_the_assistants_text_and_its_end(tokenizer: PreTrainedTokenizerFast) -> None:
    assert masked_text(tokenizer, CHAT) == "<think>7</think>\\boxed{7}<|im_end|>"
    assert masked_text(tokenizer, SYSTEM) == "<think>7</think>\\boxed{7}<|im_end|>\\boxed{5}<|im_end|>"


@settings(deadline=None)
@given(st.lists(st.tuples(printable, printable), min_size=1, max_size=3))
def test_markers_and_prefixes_agree(turns: list[tuple[str, str]]) -> None:
    # A character that is text in one rendering must not complete a token of the template in another.
    chat = [{"role": role, "content": text.replace("<", "")} for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    assert render_conversation(TOKENIZER, chat) == render_conversation(without_markers(), chat)


# Mutation: render prompts without add_generation_prompt.
@settings(deadline=None)
@given(printable, printable)
def test_a_prompt_is_a_prefix_of_its_conversation(question: str, answer: str) -> None:
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ((ids, mask),) = render_conversation(TOKENIZER, chat)
    prompt = render_prompt(TOKENIZER, chat[:1])
    assert ids[: len(prompt)] == prompt
    assert not any(mask[: len(prompt)])
    assert mask[len(prompt)]


@pytest.mark.parametrize("markers", [False, True])
def test_a_template_whose_prompt_does_not_begin_its_answer_is_refused(markers: bool) -> None:
    # Mutations: no comparison with the prompt; none where there are markers.
    answer = "{% generation %}{{ m.content }}{% endgeneration %}" if markers else "{{ m.content }}"
    tokenizer = character_tokenizer(256)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]" + answer + "<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    chat = [*TWO_ANSWERS[:3], {"role": "assistant", "content": "plain"}]
    with pytest.raises(ValueError, match=r"message 3 \(assistant, 'plain'\): the chat template does not render the prompt before it"):
        render_conversation(tokenizer, chat)
    # Written into the messages, it fits.
    chat = [message | ({"content": "<think>" + message["content"]} if message["role"] == "assistant" else {}) for message in TWO_ANSWERS]
    assert len(render_conversation(tokenizer, chat)) == 1


def test_it_is_the_same_after_saving(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert loaded.chat_template == TOKENIZER.chat_template
    assert render_conversation(loaded, SYSTEM) == render_conversation(TOKENIZER, SYSTEM)
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.unk_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id, TOKENIZER.unk_token_id)
