"""avref: adaptive verification in speculative decoding, a readable and measured reference on PyTorch."""

from __future__ import annotations

from avref import exact, features, metrics, sampling, workloads
from avref.config import SamplingParams, SpeculativeConfig
from avref.cost_table import CostTable
from avref.estimator import OnlineAcceptanceEstimator
from avref.llm import LLM
from avref.pruning import allocate, choose_budget, survival

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CostTable",
    "OnlineAcceptanceEstimator",
    "SamplingParams",
    "SpeculativeConfig",
    "allocate",
    "choose_budget",
    "exact",
    "features",
    "metrics",
    "sampling",
    "survival",
    "workloads",
]
