"""Facts about the rows of a data set, over whole columns at once: duplicates, shared runs of words, language, drift. They judge nothing."""

import math
import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

BOILERPLATE_PROMPTS = 10
"""A run of words that stands in more of the different prompts than so many says how to answer, not what is asked (arXiv:2005.14165, appendix C)."""
UNKNOWN, NO_LETTERS = "unknown", "none"
_SCRIPTS = {
    "CJK": "zh",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "HANGUL": "ko",
    "CYRILLIC": "ru",
    "ARABIC": "ar",
    "HEBREW": "he",
    "DEVANAGARI": "hi",
    "THAI": "th",
}
"""First word of a character's Unicode name -> the language that is written so most often. Greek letters are formulas, mostly."""
_FUNCTION_WORDS = {
    "en": "the of and to is in that it for with as are how what many each find has have from by be this if than",
    "de": "der die das und ist in zu den ein eine nicht mit auf wie für von sind wird wenn dem des auch",
    "fr": "le la les des et est dans un une que pour avec sur combien de du si sont par qui au",
    "es": "el los las y es en un una que para con cuántos por del si son se cada al como",
    "it": "il gli e è in un una che per con quanti di del se sono ogni alla come lo",
    "pt": "o os e é em um uma que para com quantos por do da se são cada ao como não",
}


def normalised(texts: Sequence[str]) -> "pd.Series[str]":
    """Texts as their content: compatible characters alike (NFKC), no case, white space as single blanks.

    Signs stay: `4+3` is not `4-3`.
    """
    plain = pd.Series([unicodedata.normalize("NFKC", text) for text in texts], dtype=object)
    return plain.str.casefold().str.split().str.join(" ")


def duplicates(texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """For each text the row (from 0) of the first one with the same content, or -1 where it is the first itself. [rows]"""
    codes, _ = pd.factorize(normalised(texts))
    first = np.full(codes.max(initial=-1) + 1, -1, dtype=np.int64)
    rows = np.arange(len(codes), dtype=np.int64)
    first[codes[::-1]] = rows[::-1]
    return np.where(first[codes] == rows, -1, first[codes])


def shared_runs(evaluated: Sequence[str], learnt: Sequence[str], words: int) -> npt.NDArray[np.int64]:
    """For each evaluation text the first learnt text (row, from 0) that has a run of `words` words of it, or -1. [evaluated rows]

    A text with fewer words is looked for as a whole. Runs that stand in more than `BOILERPLATE_PROMPTS` of the different learnt texts do not count,
    unless they are the whole of both texts.
    """
    here, there = normalised(evaluated), normalised(learnt)
    found = here.map(there.drop_duplicates().pipe(lambda texts: pd.Series(texts.index, index=texts))).fillna(-1).to_numpy().astype(np.int64)
    here_words, here_lengths = _words(here)
    there_words, there_lengths = _words(there)
    for size in np.unique(np.minimum(here_lengths, words)):
        if size == 0:
            continue
        asked = np.flatnonzero(np.minimum(here_lengths, words) == size)
        theirs, in_text = _runs(there_words, there_lengths, int(size))
        ours, of_text = _runs(here_words, here_lengths, int(size))
        wanted = np.isin(of_text, asked)
        ours, of_text = ours[wanted], of_text[wanted]
        theirs, in_text = theirs[np.isin(theirs, ours)], in_text[np.isin(theirs, ours)]
        runs = pd.DataFrame({"run": theirs, "text": in_text, "content": pd.factorize(there)[0][in_text]})
        counts = runs.drop_duplicates(["run", "content"]).groupby("run").size()
        telling = runs[runs["run"].map(counts) <= BOILERPLATE_PROMPTS].groupby("run")["text"].min()
        first = pd.Series(ours).map(telling)
        for_text = pd.Series(first.to_numpy(), index=of_text).dropna().groupby(level=0).min()
        rows = for_text.index.to_numpy()
        found[rows] = np.where(found[rows] >= 0, found[rows], for_text.to_numpy().astype(np.int64))
    return found


def languages(texts: Sequence[str]) -> list[str]:
    """A guess for each text, by its script and, in Latin script, by its function words: a code such as `en`; `unknown`, or `none` without letters.

    No more than that: a text of two words, or one in Dutch, is `unknown`, Ukrainian is `ru`, and Japanese without a syllable sign is `zh`.
    """
    plain = normalised(texts).str.replace(r"\\[a-z]+|\$[^$]*\$", " ", regex=True)
    letters = plain.str.replace(r"[\W\d_]+", "", regex=True)
    alphabet = {character for text in letters for character in set(text)}
    scripts = {character: unicodedata.name(character, "").split(" ")[0] for character in alphabet}
    known = {word: code for code in reversed(_FUNCTION_WORDS) for word in _FUNCTION_WORDS[code].split()}
    tokens = plain.str.findall(r"[^\W\d_]+").explode()
    votes = pd.crosstab(tokens.index, tokens.map(known)).reindex(plain.index, fill_value=0)
    latin = votes.idxmax(axis=1).where(votes.max(axis=1) > 0, UNKNOWN) if votes.shape[1] else pd.Series(UNKNOWN, index=plain.index)
    found = []
    for text, guess in zip(letters, latin, strict=True):
        codes = [_SCRIPTS.get(scripts[character], "latin") for character in text if scripts[character] != "GREEK"]
        if not codes:
            found.append(NO_LETTERS)
            continue
        code = "ja" if "ja" in codes else max(set(codes), key=codes.count)
        found.append(str(guess) if code == "latin" else code)
    return found


def shares(values: Sequence[object]) -> dict[str, float]:
    """Share of each value, the most frequent first; fractions of 1."""
    counts = pd.Series([str(value) for value in values], dtype=object).value_counts(normalize=True)
    return {str(name): float(share) for name, share in counts.items()}


def length_classes(tokens: Sequence[int]) -> list[str]:
    """Lengths in classes that double: `1-1`, `2-3`, `4-7`, ..."""
    lows = [1 << max(0, int(count).bit_length() - 1) for count in tokens]
    return [f"{low}-{2 * low - 1}" for low in lows]


def drift(before: Mapping[str, float], rows_before: int, now: Mapping[str, float], rows_now: int) -> float:
    """How far the shares of classes have moved beyond chance: the total variation distance, less twice what two samples of these sizes from one
    source differ by on average; at least 0.

    With pooled shares p the mean difference of one class is sqrt(2/pi) sqrt(p (1 - p) (1/n + 1/m)); the distance is half the sum over classes.
    """
    names = sorted({*before, *now})
    old, new = (np.array([shares.get(name, 0.0) for name in names]) for shares in (before, now))
    pooled = (old * rows_before + new * rows_now) / (rows_before + rows_now)
    chance = 0.5 * math.sqrt(2 / math.pi) * np.sqrt(pooled * (1 - pooled) * (1 / rows_before + 1 / rows_now)).sum()
    return float(max(0.0, 0.5 * np.abs(old - new).sum() - 2 * chance))


def _words(texts: "pd.Series[str]") -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Hashes of the words of all texts, one after the other, without the signs of a sentence's end; and how many words each text has."""
    split = texts.str.split()
    lengths = np.array([len(words) for words in split], dtype=np.int64)
    flat = split.explode().dropna().str.rstrip(".,;:!?")
    return pd.util.hash_array(flat.to_numpy(dtype=object)) if len(flat) else np.zeros(0, np.uint64), lengths


def _runs(words: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], size: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Hashes of all runs of `size` words that lie within one text, and which text that is."""
    text = np.repeat(np.arange(len(lengths)), lengths)
    count = len(words) - size + 1
    if count <= 0:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    whole = text[:count] == text[size - 1 :]
    hashes = np.zeros(count, np.uint64)
    for offset in range(size):
        # A polynomial in an odd number, modulo 2**64.
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[offset : offset + count]
    return hashes[whole], text[:count][whole]
