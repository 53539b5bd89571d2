from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.rollout.stop import StopTexts
from engine.tokenizer import character_tokenizer

CHARACTERS = character_tokenizer(64)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that most characters of the world take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


BYTES = byte_tokenizer()
LETTERS = st.text("ab é€😀", max_size=12)


def completed_at(tokenizer: PreTrainedTokenizerFast, tokens: list[int], texts: list[str]) -> int | None:
    reader = StopTexts(tokenizer, texts)
    return next((i for i, token in enumerate(tokens) if reader.complete(token)), None)


# Mutations: decode each token alone; keep the text of the last token only; cut the tail to two characters fewer; believe half a character.
@given(text=LETTERS, stop=st.lists(st.text("ab é€😀", min_size=1, max_size=3), min_size=1, max_size=2))
def test_a_stop_text_is_complete_with_its_last_byte(text: str, stop: list[str]) -> None:
    ends = [text.find(one) + len(one) for one in stop if one in text]
    expected = len(text[: min(ends)].encode()) - 1 if ends else None
    assert completed_at(BYTES, BYTES(text)["input_ids"], stop) == expected


def test_a_token_of_several_characters_may_hold_the_stop_text() -> None:
    tokens = CHARACTERS("12\\boxed{3}")["input_ids"]
    assert completed_at(CHARACTERS, tokens, ["boxed"]) == 2
    assert completed_at(CHARACTERS, tokens, ["2\\b"]) == 2
    assert completed_at(CHARACTERS, tokens, ["{3}"]) == 4


# Mutations: read the names of special tokens as text, which ends at "pad" what nobody sees; never look at them.
def test_a_special_token_is_no_text_but_can_be_named() -> None:
    tokens = CHARACTERS("ab<pad>c<|im_start|>d")["input_ids"]
    assert completed_at(CHARACTERS, tokens, ["pad", "<"]) is None
    assert completed_at(CHARACTERS, tokens, ["bc"]) == 3
    assert completed_at(CHARACTERS, tokens, ["<|im_start|>"]) == 4
