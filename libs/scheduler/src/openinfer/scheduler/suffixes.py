"""Suffixes: a Drafter that looks up the longest end of the sequence that has occurred before."""

from collections import Counter
from collections.abc import Sequence

from .drafters import Occurrences
from .errors import InvalidSetup

WINDOW = 1 << 15
"""Tokens that are looked up at least, the latest; at most twice as many. It bounds memory, and the work on a prompt."""
PLACES = 16
"""Earlier places of the last two tokens that are compared, the latest first."""


class Suffixes:
    """A Drafter that proposes what followed the longest suffix of the sequence that has occurred before.

    It looks at the latest places where the last two tokens occurred. Of these it keeps the places that match furthest
    back, up to `depth` tokens. They vote on each next token, and those that agree vote on. The proposal ends where the
    winner has less than `least_share` of all places, or after `factor` tokens for each token that matched: a long
    match is worth many drafts, a short one few.

    A new token costs one entry of the index. A look-up costs PLACES * depth comparisons at most. Raises InvalidSetup
    for a depth below 2, a factor of 0 or less, or a share that is not in [0, 1].
    """

    def __init__(self, depth: int = 24, factor: float = 1.0, least_share: float = 0.1) -> None:
        if depth < 2 or factor <= 0 or not 0 <= least_share <= 1:
            raise InvalidSetup(
                f"suffixes of {depth} tokens, {factor} drafts a token, share {least_share}; give a depth of 2 or more, "
                "a factor above 0 and a share in [0, 1]"
            )
        self._depth, self._factor, self._least_share = depth, factor, least_share
        self._places = Occurrences(2)

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        if len(tokens) < 3:
            return ()
        places, matched = self._matches(tokens)
        most, all_places, end = min(count, max(1, int(self._factor * matched))), len(places), len(tokens)
        found: list[int] = []
        while places and len(found) < most:
            # Past the end of the sequence a place goes on in the proposal, as a text that repeats itself does.
            votes = [tokens[place] if place < end else found[place - end] for place in places]
            token, share = Counter(votes).most_common(1)[0]  # of equals the first, which is the latest
            if share < self._least_share * all_places:
                break
            found.append(token)
            places = [place + 1 for place, vote in zip(places, votes, strict=True) if vote == token]
        return found

    def _matches(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The places after the longest suffix that occurred before, the latest first, and its length. The first token
        that counts follows from the length alone. So a sequence has the same proposals whether it was seen to grow or
        not."""
        end, best, places = len(tokens), 0, list[int]()
        start = max(end // WINDOW - 1, 0) * WINDOW
        for place in self._places.find(tokens, PLACES, start):
            length = 2
            while (
                length < self._depth
                and place - length > start
                and tokens[place - length - 1] == tokens[end - length - 1]
            ):
                length += 1
            if length > best:
                best, places = length, []
            if length == best:
                places.append(place)
        return places, best
