"""What the demo can be asked for, and how a prompt becomes token ids.

A prompt is one or more phrases, and every phrase is one digit of the picture:

    phrase := [article] [adjective] digit

Articles are `a`, `an`, `the`. Adjectives are `thin` and `bold`, and speak of the digit right after them.
Digits are `zero` to `nine` or `0` to `9`; `314` is three of them. Case, punctuation and the word `and` do
not matter.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

PAD, START = "<pad>", "<start>"
ARTICLES = ("a", "an", "the")
ADJECTIVES = ("thin", "bold")
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUMERALS = tuple("0123456789")

KNOWN_WORDS = (*ARTICLES, *ADJECTIVES, *NUMBER_WORDS, *NUMERALS)
# The order is part of the trained weights: row i of the embedding is VOCABULARY[i].
VOCABULARY = (PAD, START, *KNOWN_WORDS)
MAX_TOKENS = 4  # <start>, article, adjective, digit
MAX_DIGITS = 24

_TOKEN_IDS = {word: index for index, word in enumerate(VOCABULARY)}
_VALUES = {word: value for words in (NUMBER_WORDS, NUMERALS) for value, word in enumerate(words)}
_SEPARATORS = re.compile(r"[\s,;:.!?\-\u2013\u2014'\"]+")
_KNOWN_ADVICE = "Known words: zero to nine, 0 to 9, the adjectives thin and bold, the articles a, an and the."


class PromptError(ValueError):
    """A prompt that names no picture.

    Attributes:
        prompt: the prompt as given.
        problem: what is wrong with it, one sentence without its full stop.
        word: the word that is not known, or `None` where the words are known but their order is not.
    """

    def __init__(self, prompt: str, problem: str, word: str | None = None) -> None:
        super().__init__(prompt, problem, word)  # as positional arguments, so that the error pickles
        self.prompt = prompt
        self.problem = problem
        self.word = word

    @property
    def known(self) -> tuple[str, ...]:
        """Every word that a prompt may hold."""
        return KNOWN_WORDS

    @property
    def nearest(self) -> str | None:
        """The known word most like the unknown one, if any is."""
        matches = difflib.get_close_matches(self.word or "", KNOWN_WORDS, n=1)
        return matches[0] if matches else None

    def __str__(self) -> str:
        guess = f" Did you mean {self.nearest!r}?" if self.nearest else ""
        return f"{self.problem}.{guess} {_KNOWN_ADVICE}"


@dataclass(frozen=True, slots=True)
class Phrase:
    """One digit of a prompt, in the words that asked for it."""

    words: tuple[str, ...]

    @property
    def digit(self) -> int:
        """The digit named, 0 to 9."""
        return _VALUES[self.words[-1]]

    @property
    def adjective(self) -> str | None:
        """`"thin"`, `"bold"`, or `None` where the prompt leaves it open."""
        return next((word for word in self.words if word in ADJECTIVES), None)


def parse_prompt(prompt: str) -> tuple[Phrase, ...]:
    """Split a prompt into phrases, one per digit.

    Raises:
        PromptError: the prompt is empty, too long, holds an unknown word, or its words are out of order.
    """
    phrases: list[Phrase] = []
    pending: list[str] = []
    for word in _split_words(prompt):
        _check_word(prompt, word, pending)
        pending.append(word)
        if word in _VALUES:
            phrases.append(Phrase(tuple(pending)))
            pending.clear()
    if pending:
        raise PromptError(prompt, f"No digit follows {pending[-1]!r}")
    if not phrases:
        raise PromptError(prompt, "The prompt is empty; name at least one digit, such as 'seven'")
    if len(phrases) > MAX_DIGITS:
        raise PromptError(prompt, f"The prompt names {len(phrases)} digits; {MAX_DIGITS} fit in a picture")
    return tuple(phrases)


def encode_words(words: tuple[str, ...]) -> list[int]:
    """Token ids of one phrase, padded to `MAX_TOKENS`; no words at all is the unconditional prompt."""
    ids = [_TOKEN_IDS[START], *(_TOKEN_IDS[word] for word in words)]
    return ids + [_TOKEN_IDS[PAD]] * (MAX_TOKENS - len(ids))


def _split_words(prompt: str) -> list[str]:
    words: list[str] = []
    for chunk in _SEPARATORS.split(prompt.lower()):
        if chunk.isascii() and chunk.isdigit():
            words.extend(chunk)
        elif chunk and chunk != "and":
            words.append(chunk)
    return words


def _check_word(prompt: str, word: str, pending: list[str]) -> None:
    if word not in KNOWN_WORDS:
        raise PromptError(prompt, f"{_shorten(word)!r} is not a word that this demo knows", word)
    second_adjective = word in ADJECTIVES and pending[-1:] and pending[-1] in ADJECTIVES
    if second_adjective or (word in ARTICLES and pending):
        raise PromptError(prompt, f"{word!r} cannot follow {pending[-1]!r}; a digit must come between them")


def _shorten(word: str, limit: int = 40) -> str:
    return word if len(word) <= limit else word[: limit - 1] + "\u2026"
