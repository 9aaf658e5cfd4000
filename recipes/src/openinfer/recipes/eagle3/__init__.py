"""EAGLE-3: one decoder layer that drafts for a model, from a checkpoint of its own in the published form.

It reads the residual stream at three layers of the model, and the embedding of the token that follows. Its own residual
stream takes their place for the draft after the first. It has a vocabulary of its own: the part of the tokens that is
drawn most. Any recipe whose model has these parts may have a head.
"""

from openinfer.recipes.eagle3.config import Head, TargetConfig
from openinfer.recipes.eagle3.model import Drafter

__all__ = ["Drafter", "Head", "TargetConfig"]
