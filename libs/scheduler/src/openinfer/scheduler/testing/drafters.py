"""DrafterConformance: the rules that every drafter must keep, as tests to subclass."""

import random

from ..drafters import Drafter
from .schedule import Mismatch


class DrafterConformance:
    """Subclass it in a test module, and pytest runs the rules on your drafter:

        class TestMine(DrafterConformance):
            def make_drafter(self):
                return MyDrafter()

    The rules: a proposal has at most as many tokens as the caller asks for. All its tokens occur in the vocabulary,
    which is 0..num_tokens - 1. The drafter changes no token of the sequence. Equal sequences get equal proposals,
    whether the drafter has seen them grow or not. A broken rule raises Mismatch.
    """

    num_tokens = 7
    """Size of the vocabulary of the random sequences."""

    def make_drafter(self) -> Drafter:
        """A new drafter, for one sequence."""
        raise NotImplementedError("return your drafter here")

    def test_proposals_are_short_and_in_the_vocabulary(self) -> None:
        """At most `count` tokens, each of the vocabulary."""
        for seed in range(30):
            rng = random.Random(seed)
            drafter, tokens = self.make_drafter(), [rng.randrange(self.num_tokens)]
            for _ in range(60):
                count, before = rng.randint(0, 9), list(tokens)
                found = list(drafter.propose(tokens, count))
                if len(found) > count or not set(found) <= set(range(self.num_tokens)):
                    raise Mismatch(
                        f"after {tokens} the drafter was asked for {count} tokens and gave {found}"
                    )
                if tokens != before:
                    raise Mismatch(f"the drafter changed the sequence {before} to {tokens}")
                tokens += [rng.randrange(self.num_tokens) for _ in range(rng.randint(0, 3))]

    def test_equal_sequences_get_equal_proposals(self) -> None:
        """A drafter that has seen a sequence grow proposes as one that sees it first."""
        for seed in range(30):
            rng = random.Random(seed)
            grown, tokens = self.make_drafter(), [rng.randrange(self.num_tokens)]
            for _ in range(40):
                old, new = grown.propose(tokens, 5), self.make_drafter().propose(tokens, 5)
                if list(old) != list(new):
                    raise Mismatch(f"after {tokens} one drafter proposes {list(old)}, a new one {list(new)}")
                tokens += [rng.randrange(self.num_tokens) for _ in range(rng.randint(1, 3))]
