"""The one exception of this package, and how names from a checkpoint are shown in its sentence."""

from __future__ import annotations

MAX_SHOWN_CHARACTERS = 200


class CheckpointError(ValueError):
    """One sentence that names the file or flag at fault and the remedy."""


def shown(text: object) -> str:
    """A name as it may appear in a one-line message: printable, and cut in the middle when long.

    Names come from untrusted headers and may hold line breaks, escapes or lone surrogates.
    """
    line = "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for character in str(text)
    )
    if len(line) <= MAX_SHOWN_CHARACTERS:
        return line
    half = MAX_SHOWN_CHARACTERS // 2
    return f"{line[:half]}...{line[-half:]}"


def wrong_shape_of_json(path: object, expected: str) -> CheckpointError:
    """The error for a JSON file that parses but holds something else than `expected`."""
    return CheckpointError(f"{shown(path)} does not hold {expected}; copy or download it again")
