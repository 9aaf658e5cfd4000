"""The engine contract, its drivers, and an OpenAI-compatible HTTP server for any engine."""

from openinfer.frontend.contract import Engine, EngineInfo, EngineSpec, EngineStats, Request, StepOutputs
from openinfer.frontend.recipe import Recipe

__all__ = ["Engine", "EngineInfo", "EngineSpec", "EngineStats", "Recipe", "Request", "StepOutputs"]
