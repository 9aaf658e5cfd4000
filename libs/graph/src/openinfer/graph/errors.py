"""Everything this library raises.

GraphError
 ├── FieldError (ValueError)     a row field is declared or written in a way its shape or dtype does not allow
 ├── RingFull (RuntimeError)     more results are under way than the read-back ring holds
 ├── NotPossible (RuntimeError)  an engine's weights or memory cannot be had that way now
 ├── UnknownStep (LookupError)   a step was launched that was never recorded, or no bucket is large enough
 └── MissingExtra (ImportError)  an extra of this library is not installed
"""


class GraphError(Exception):
    """Base of all errors of openinfer.graph."""


class FieldError(GraphError, ValueError):
    """A row field is declared twice, has a dtype that is not 4 bytes wide, or is written outside its shape."""


class RingFull(GraphError, RuntimeError):
    """The oldest result must be taken before another step's can be read back."""


class NotPossible(GraphError, RuntimeError):
    """The weights cannot be updated, or the memory not given back, as it stands. Nothing has changed."""

    user_can_mend = True


class UnknownStep(GraphError, LookupError):
    """No step was recorded under this key, or no bucket is large enough."""


class MissingExtra(GraphError, ImportError):
    """A part of the library needs an extra that is not installed; the message has the command."""

    user_can_mend = True
