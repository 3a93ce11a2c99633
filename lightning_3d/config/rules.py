"""What the value of one option may be, as a test and as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lightning_3d.errors import nearest

AXIS_KEYS = ("data", "pipeline", "tensor")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The values that an option accepts.

    Attributes:
        valid: The values in words, after "must be".
        accepts: Whether a value is one of them.
        words: The accepted words, if it is words; they serve "did you mean".
    """

    valid: str
    accepts: Callable[[object], bool]
    words: tuple[str, ...] = ()

    def complaint(self, name: str, value: object) -> str:
        """Returns the line that refuses ``value`` for the option ``name``."""
        return f"{name}={value!r} must be {self.valid}{did_you_mean(value, self.words)}"


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Returns `` (did you mean X?)`` if a known word is close to what was given, else nothing."""
    close = nearest(given, known) if isinstance(given, str) else None
    return f" (did you mean {close}?)" if close else ""


def one_of(*words: str) -> Rule:
    """Returns the rule of an option that takes one of a few words."""
    return Rule(valid=f"one of {', '.join(words)}", accepts=lambda value: value in words, words=words)


def or_word(word: str, rule: Rule) -> Rule:
    """Returns the rule that also takes one word, such as "auto"."""
    return Rule(
        valid=f"{rule.valid} or {word}", accepts=lambda value: value == word or rule.accepts(value), words=(word,)
    )


def or_null(rule: Rule) -> Rule:
    """Returns the rule that also takes None."""
    return Rule(
        valid=f"{rule.valid} or null", accepts=lambda value: value is None or rule.accepts(value), words=rule.words
    )


def integer(least: int, most: int | None = None) -> Rule:
    """Returns the rule of an integer within bounds, both included."""

    def accepts(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        return value >= least and (most is None or value <= most)

    return Rule(
        valid=f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}",
        accepts=accepts,
    )


def _is_list_of(value: object, accepts: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(accepts(part) for part in value)


def _is_style_map(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(part, str) for pair in value.items() for part in pair)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_axis_order(value: object) -> bool:
    return isinstance(value, str) and sorted(value.split(",")) == sorted(AXIS_KEYS)


COUNT = integer(1)
AUTO_COUNT = or_word("auto", COUNT)
FLAG = Rule(valid="true or false", accepts=lambda value: isinstance(value, bool))
TEXT = Rule(valid="a text that is not empty", accepts=lambda value: isinstance(value, str) and value != "")
SECONDS = Rule(valid="a number above 0", accepts=_is_positive)
COUNTS = Rule(valid="a list of integers of at least 1", accepts=lambda value: _is_list_of(value, COUNT.accepts))
NAMES = Rule(
    valid="a module's name, a list of names",
    accepts=lambda value: TEXT.accepts(value) or _is_list_of(value, TEXT.accepts),
)
STYLES = Rule(valid="a mapping of globs to styles", accepts=_is_style_map)
AXIS_ORDER = Rule(valid=f"{', '.join(AXIS_KEYS)} in some order, separated by commas alone", accepts=_is_axis_order)
