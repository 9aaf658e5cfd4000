"""Errors that a user can cause between a checkpoint and a ready engine.

ValueError
├── SetupError          flags that cannot work together, or a device that is too small
└── UnsupportedModel    a checkpoint asks for something that its recipe does not do

Every message is for the user: what was given, what is allowed, what to do.
"""


class SetupError(ValueError):
    """Flags that cannot work together, or a device that is too small."""

    user_can_mend = True


class UnsupportedModel(ValueError):
    """The checkpoint asks for something that its recipe does not do."""

    user_can_mend = True
