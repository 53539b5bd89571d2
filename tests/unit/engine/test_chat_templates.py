"""Chats of several turns under the styles of template that models come with: what is learnt is what generation would have to produce, turn by turn.

The templates are written for these tests after the styles' rules; every token is a character or a special token.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from engine.tokenizer import character_tokenizer, render_conversation, render_prompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (  # The system's message stands in the last user message, wherever that is.
    "{% set system = messages[0].content if messages[0].role == 'system' else none %}"
    "{% set turns = messages[1:] if system else messages %}{% set users = turns | selectattr('role', 'equalto', 'user') | list %}<s>"
    "{% for m in turns %}{% if m.role == 'user' %}[INST]{% if system and m == users[-1] %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
QWEN3 = (  # Thinking stays in the last answer only, and is written there even where there is none.
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STYLES = {
    "chatml": (CHATML, "<|im_end|>", "<|im_end|>"),
    # Their end of turn is not the end of the sequence.
    "llama": (LLAMA, "<|end_of_text|>", "<|eot_id|>"),
    "gemma": (GEMMA, "<eos>", "<end_of_turn>"),
    "mistral": (MISTRAL, "</s>", "</s>"),
    "qwen3": (QWEN3, "<|im_end|>", "<|im_end|>"),
}
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]"]

QUESTIONS = [{"role": "user", "content": "1+1"}, {"role": "user", "content": "and 2"}, {"role": "user", "content": "and 3"}]
SYSTEM = {"role": "system", "content": "Add."}


def tokenizer(style: str) -> PreTrainedTokenizerFast:
    template, end_of_sequence, _ = STYLES[style]
    made = character_tokenizer(512)
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL], special_tokens=True)
    made.chat_template, made.eos_token = template, end_of_sequence
    return made


TOKENIZERS = {style: tokenizer(style) for style in STYLES}


def conversation(*answers: str, system: bool = False) -> list[dict[str, str]]:
    turns = [message for turn in zip(QUESTIONS, answers, strict=False) for message in (turn[0], {"role": "assistant", "content": turn[1]})]
    return [SYSTEM, *turns] if system else turns


def learnt(style: str, chat: list[dict[str, str]]) -> list[list[str]]:
    """The texts that each row teaches, one for each run of learnt tokens."""
    rows = []
    for ids, mask in render_conversation(TOKENIZERS[style], chat):
        assert len(ids) == len(mask)
        runs: list[list[int]] = []
        for place, learn in enumerate(mask):
            if learn:
                if not mask[place - 1]:
                    runs.append([])
                runs[-1].append(ids[place])
        rows.append([TOKENIZERS[style].decode(run) for run in runs])
    return rows


# Mutations: only the last message; the turn's end left out (the model never stops), or the newline behind it learnt (no model generates it).
@pytest.mark.parametrize("style", ["chatml", "llama", "gemma", "mistral"])
def test_every_answer_and_its_end_of_turn_is_learnt(style: str) -> None:
    end = STYLES[style][2]
    assert learnt(style, conversation("2", "4", "7")) == [[f"2{end}", f"4{end}", f"7{end}"]]


@pytest.mark.parametrize("style", ["chatml", "llama"])
def test_a_system_message_is_not_learnt(style: str) -> None:
    end = STYLES[style][2]
    assert learnt(style, conversation("2", "4", system=True)) == [[f"2{end}", f"4{end}"]]


def test_a_template_that_drops_earlier_thinking_gives_a_row_for_each_answer() -> None:
    chat = conversation("<think>\none\n</think>\n\n2", "<think>\ntwo\n</think>\n\n4")
    # In the second row the first answer stands without its thinking, as generation sees it, and is not learnt that way.
    # Mutation: one row of the whole rendering: the first answer would be taught without its thinking.
    assert learnt("qwen3", chat) == [["<think>\none\n</think>\n\n2<|im_end|>"], ["<think>\ntwo\n</think>\n\n4<|im_end|>"]]
    (first, _), (second, _) = render_conversation(TOKENIZERS["qwen3"], chat)
    assert "one" in TOKENIZERS["qwen3"].decode(first)
    assert "one" not in TOKENIZERS["qwen3"].decode(second)
    # One answer is one row, whatever the template does to earlier ones.
    assert len(render_conversation(TOKENIZERS["qwen3"], chat[:2])) == 1


def test_a_template_that_moves_the_systems_message_gives_a_row_for_each_answer() -> None:
    rows = render_conversation(TOKENIZERS["mistral"], conversation("2", "4", system=True))
    assert [TOKENIZERS["mistral"].decode(ids) for ids, _ in rows] == [
        "<s>[INST]Add.\n\n1+1[/INST]2</s>",
        "<s>[INST]1+1[/INST]2</s>[INST]Add.\n\nand 2[/INST]4</s>",
    ]
    assert learnt("mistral", conversation("2", "4", system=True)) == [["2</s>"], ["4</s>"]]


def test_a_chat_that_the_template_refuses_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"the chat template refuses messages of the roles system, user, assistant: System role not supported"):
        render_conversation(TOKENIZERS["gemma"], conversation("2", system=True))


def test_a_chat_without_an_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is nothing to learn"):
        render_conversation(TOKENIZERS["chatml"], QUESTIONS[:1])


def test_markers_count_for_their_own_turn_alone() -> None:
    # A template with markers that drops earlier thinking: as without. Mutation: trust the markers of the whole rendering.
    marked = tokenizer("qwen3")
    marked.chat_template = QWEN3.replace("{% if loop.last %}<think>", "{% generation %}{% if loop.last %}<think>").replace(
        "{{ said }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n",
        "{{ said }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}",
    )
    chat = conversation("<think>\none\n</think>\n\n2", "<think>\ntwo\n</think>\n\n4")
    assert render_conversation(marked, chat) == render_conversation(TOKENIZERS["qwen3"], chat)


plain = st.text(alphabet="abc 0123\n", min_size=1, max_size=12).map(lambda text: f"x{text}x")
thinking = st.builds(lambda thought, said: f"<think>\n{thought}\n</think>\n\n{said}", plain, plain)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(STYLES)), st.lists(plain | thinking, min_size=1, max_size=3), st.booleans())
def test_learnt_tokens_follow_exactly_what_generation_is_prompted_with(style: str, answers: list[str], system: bool) -> None:
    chat = conversation(*answers, system=system and style != "gemma")
    made, end = TOKENIZERS[style], STYLES[style][2]
    rows = render_conversation(made, chat)
    found = 0
    for number, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        prompt = render_prompt(made, chat[:number])
        # Exactly one row has this answer behind its prompt, learnt from the first token after the prompt to the end of the turn.
        holding = [(ids, mask) for ids, mask in rows if ids[: len(prompt)] == prompt and len(mask) > len(prompt) and mask[len(prompt)]]
        assert len(holding) == 1
        ids, mask = holding[0]
        stop = next(place for place in range(len(prompt), len(mask) + 1) if place == len(mask) or not mask[place])
        assert made.decode(ids[len(prompt) : stop]).endswith(message["content"].split("</think>")[-1].strip("\n") + end)
        found += stop - len(prompt)
    assert found == sum(sum(mask) for _, mask in rows)
