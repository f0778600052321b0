"""Stop strings: where a text that comes in pieces ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in text that comes in pieces, and holds back only what may still become one.

    The stop whose last character comes first wins; of several that end together, the longest. So the result does not
    depend on how the text is cut into pieces. ``include`` keeps the stop itself in the text. Constant memory beyond
    the stops, a few comparisons per character and stop. Raises ``ValueError`` for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include = include
        self._borders = [_borders(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)  # how much of each stop the text so far ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is final now, the stop that was found or None). After a match nothing more is given out."""
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        seen = self._held + text
        for end in range(len(self._held) + 1, len(seen) + 1):
            if (found := self._advance(seen[end - 1])) is not None:
                self.matched, self._held = found, ""
                return seen[: end if self._include else end - len(found)], found
        keep = len(seen) - max(self._lengths)
        self._held = seen[keep:]
        return seen[:keep], None

    def flush(self) -> str:
        """The text still held back, once, when no more comes: it did not become a stop."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Take one character; the longest stop that it completes."""
        found: str | None = None
        for index, stop in enumerate(self._stops):
            length = self._lengths[index]
            while length and stop[length] != character:
                length = self._borders[index][length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                found = stop if found is None or length > len(found) else found
                length = self._borders[index][length - 1]
            self._lengths[index] = length
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix of the stop: the length of its longest proper prefix that is also its suffix (as in KMP search).

    Without it a long stop string from a client would cost its square per token.
    """
    borders = [0] * len(stop)
    for end in range(1, len(stop)):
        length = borders[end - 1]
        while length and stop[length] != stop[end]:
            length = borders[length - 1]
        borders[end] = length + (stop[length] == stop[end])
    return borders
