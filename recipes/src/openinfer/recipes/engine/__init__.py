"""The engine around a model, for recipes of ours and of others.

A recipe tells what is its own: `Recipe` (which checkpoints, which flags) and `Blueprint` (memory, weights, forward
pass). From these the modules here make the rest:

    recipe      Recipe, Source: what the command line asks of a recipe; light, imports no model code
    options     Options: the flags of an engine, from which parser, help, refusals and documentation are made
    limits      Limits, Room: the flags held against the model and the device
    blueprint   Blueprint: what a recipe makes of one checkpoint
    startup     build: checkpoint -> engine that is ready; plan: the same on the null device
    engine      Engine: frontend.contract over scheduler, pool and runner
    instruments Forced, Verdict, routing: how an engine is checked; the gate, and what measures one, is in openinfer.cli
    testing     EngineConformance: the test suite that every recipe passes
"""

from openinfer.recipes.engine.errors import SetupError, UnsupportedModel
from openinfer.recipes.engine.options import Options, option
from openinfer.recipes.engine.recipe import Recipe, Source

__all__ = ["Options", "Recipe", "SetupError", "Source", "UnsupportedModel", "option"]
