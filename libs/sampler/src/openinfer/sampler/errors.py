"""The errors of this library.

SamplerError
├── InvalidParams (ValueError)    a sampling parameter is outside what is allowed; ``.param`` names it
├── InvalidLogits (ValueError)    rows that no token can be drawn from; ``.rows`` lists them
├── InvalidGrammar (ValueError)   a grammar that is malformed or asks for what is not supported
├── GrammarFailed (RuntimeError)  a token that the grammar does not allow, or a grammar beyond its limits at run time
└── MissingExtra (ImportError)    an extra of this library is not installed

Array arguments of the wrong shape or dtype are a caller's bug, not a request's, and raise plain ValueError.
"""

from collections.abc import Sequence


class SamplerError(Exception):
    """Root of everything this library raises on purpose."""


class InvalidParams(SamplerError, ValueError):
    """A field of SamplingParams was refused.

    Attributes:
        param: the field's name, as a client spells it (OpenAI's ``error.param``).
    """

    user_can_mend = True

    def __init__(self, param: str, given: object, allowed: str) -> None:
        super().__init__(f"{param} is {given!r}: it must be {allowed}")
        self.param = param


class InvalidLogits(SamplerError, ValueError):
    """Rows hold NaN or +inf, or all of their logits are -inf or masked. Nothing was sampled.

    Attributes:
        rows: indices into the batch. The other rows are sound: fail these requests and sample the rest again.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        shown = ", ".join(map(str, self.rows[:8])) + (", ..." if len(self.rows) > 8 else "")
        super().__init__(
            f"rows {shown} of the logits cannot be sampled: the largest value of a row must be finite, also"
            " when divided by the temperature (no NaN, no +inf, and a token left that is not forbidden);"
            " fail these requests and sample the other rows again"
        )


class InvalidGrammar(SamplerError, ValueError):
    """A grammar is malformed, or uses an unsupported feature; the message names it."""

    user_can_mend = True


class GrammarFailed(SamplerError, RuntimeError):
    """A sequence cannot go on under its grammar: fail this request."""


class MissingExtra(SamplerError, ImportError):
    """A part of the library needs an extra that is not installed; the message has the command."""

    user_can_mend = True
