from __future__ import annotations

import pickle

import pytest

from omni_components.demo import Phrase, PromptError, parse_prompt
from omni_components.demo.text import MAX_DIGITS, MAX_TOKENS, VOCABULARY, encode_words


@pytest.mark.parametrize(
    ("prompt", "digits", "adjectives"),
    [
        ("seven", [7], [None]),
        ("7", [7], [None]),
        ("three one four", [3, 1, 4], [None] * 3),
        ("314", [3, 1, 4], [None] * 3),
        ("a thin 2", [2], ["thin"]),
        ("The BOLD nine, a five and thin 0!", [9, 5, 0], ["bold", None, "thin"]),
        ("one-two 34", [1, 2, 3, 4], [None] * 4),
        ("  zero\n", [0], [None]),
    ],
)
def test_a_prompt_names_digits_and_adjectives(
    prompt: str, digits: list[int], adjectives: list[str | None]
) -> None:
    phrases = parse_prompt(prompt)
    assert [phrase.digit for phrase in phrases] == digits
    assert [phrase.adjective for phrase in phrases] == adjectives


@pytest.mark.parametrize("prompt", ["", "   ", "...", "and"])
def test_an_empty_prompt_says_so(prompt: str) -> None:
    with pytest.raises(PromptError, match="empty") as caught:
        parse_prompt(prompt)
    assert caught.value.word is None


def test_an_unknown_word_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(PromptError) as caught:
        parse_prompt("a bold sevn")
    error = caught.value
    assert (error.word, error.nearest, error.prompt) == ("sevn", "seven", "a bold sevn")
    assert "seven" in error.known
    assert "thin" in error.known
    assert "'sevn'" in str(error)
    assert "Did you mean 'seven'?" in str(error)
    assert "Known words" in str(error)


@pytest.mark.parametrize("prompt", ["x" * 5000, "a\x00b", "\u0663", "\u00b2", "-3.x", "7\u202e"])
def test_a_strange_word_makes_one_short_line(prompt: str) -> None:
    with pytest.raises(PromptError) as caught:
        parse_prompt(prompt)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 300


@pytest.mark.parametrize("prompt", ["a thin", "seven the", "thin bold 3", "thin a 3", "the the 3"])
def test_words_out_of_order_are_refused(prompt: str) -> None:
    with pytest.raises(PromptError, match=r"follow"):
        parse_prompt(prompt)


def test_more_digits_than_fit_are_refused_with_both_numbers() -> None:
    assert len(parse_prompt("1" * MAX_DIGITS)) == MAX_DIGITS
    with pytest.raises(PromptError, match=rf"{MAX_DIGITS + 1} digits; {MAX_DIGITS} fit"):
        parse_prompt("1" * (MAX_DIGITS + 1))


def test_the_error_pickles() -> None:
    error = PromptError("a prompt", "A problem", "sevn")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.prompt, again.problem, again.word) == (error.prompt, error.problem, error.word)


def test_every_phrase_fits_and_pads() -> None:
    longest = Phrase(("the", "thin", "three"))
    assert len(encode_words(longest.words)) == MAX_TOKENS
    assert 0 not in encode_words(longest.words)
    assert encode_words(()) == [VOCABULARY.index("<start>"), 0, 0, 0]
