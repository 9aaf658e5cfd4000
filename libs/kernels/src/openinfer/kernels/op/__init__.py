"""Op and its parts: contract, launches and how they are packed, target, numpy helpers, cases."""
