"""Self-speculative drafting: the target's own first n layers, its final norm and its head, without any training.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) drafts with a part of the target, and finds the layers to leave out
by a search; LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) exits after layer n of a target trained for that. Here
it is the exit after layer n, of any target.

The first n layers compute for a token what they compute in the target. So the drafter reads and writes the target's
own cache: accepted tokens are there already, with nothing to catch up on. The keys and values of drafts lie beyond the
request's last final token, where verification writes anew before anything reads, as with all rejected drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from avref.config import SpeculativeConfig
from avref.drafters.base import Said, Step, TokenByToken
from avref.layout import Layout
from avref.packed import PackedModel

if TYPE_CHECKING:
    from avref.llm import LLM

# Of the target's layers, by default. Measured on the default target's answers to 20 warm-up prompts (temperature 1,
# top-p .95): truncated and whole model overlap by .08 after 8 of 30 layers, .10 after 12, .13 after 16, .18 after 20,
# .34 after 24, .51 after 28. Without training for an exit the early layers say next to nothing, and 24 layers with the
# head cost .84 of a forward (by weights): on this target no n pays. At .8 there is at least something to verify.
SHARE = 0.8


def truncated(model: Any, num_layers: int | None = None) -> Any:
    """A causal LM that ends after the first `num_layers` layers of `model` (None: .8 of them, rounded).

    Final norm, head and weights are the model's own. Only the two outer modules are copied, so the model is untouched
    and no weight is held twice. Raises ValueError for a number of layers that the model does not have, and for a model
    whose layers are not one list named `layers` or `h` in its decoder, or whose `forward` is replaced.
    """
    body = model.base_model
    name = next((n for n in ("layers", "h") if isinstance(getattr(body, n, None), nn.ModuleList)), None)
    if body is model or name is None:
        raise ValueError(
            "method 'layer_skip' needs a decoder with its layers in a list named 'layers' or 'h'; "
            f"{type(model).__name__}.{model.base_model_prefix} has neither: use another method"
        )
    layers = getattr(body, name)
    default = max(1, round(SHARE * len(layers)))
    n = default if num_layers is None else num_layers
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= len(layers):
        raise ValueError(
            f"speculative_config['model'] is {n!r}; with method 'layer_skip' it is the number of layers to draft with, "
            f"1 to the target's {len(layers)} (None: {default})"
        )
    if any("forward" in vars(m) for m in (model, body)):  # the copy's would still run the whole model
        raise ValueError(
            f"method 'layer_skip' cannot cut this {type(model).__name__}: its forward is replaced, as device_map does "
            "over several devices; load it on one"
        )
    return _with(model, model.base_model_prefix, _with(body, name, nn.ModuleList(list(layers)[:n])))


def _with(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """A shallow copy of `module` with another child: all else is shared."""
    copied = copy.copy(module)
    copied._modules = {**module._modules, name: child}
    return copied


class LayerSkip(TokenByToken):
    """Drafts x_1 .. x_K with K forwards of the target's first layers; every forward serves all running requests."""

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: Any, num_layers: int | None, max_length: int) -> None:
        self.truncated, self.max_length = truncated(model, num_layers), max_length
        self.model: PackedModel | None = None

    @classmethod
    def load(cls, config: SpeculativeConfig, llm: LLM, max_rows: int) -> LayerSkip:
        """The first `config.model` layers of the LLM's target; ValueError as `truncated` raises it."""
        return cls(llm.model, config.model, llm.max_model_len)

    def attach(self, target: PackedModel) -> None:
        """Draft on the target's own cache; the engine calls this before any request enters."""
        self.model = PackedModel(self.truncated, target.cache.max_rows, target.cache.max_length)
        self.model.cache = target.cache

    def enter(self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None) -> None:
        """The target's prefill has filled the cache."""

    def extend(
        self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None, kept: Sequence[int]
    ) -> None:
        """The target's verification has filled the cache."""

    def clear(self) -> None:
        """The engine clears the target's cache."""

    def move(self, source: int, target: int) -> None:
        """The engine moves the target's cache."""

    def start(self, lengths: Sequence[int], pending: Tensor, depth: int) -> Step:
        # Position `last` belongs to no final token of a running request. A request that ends before the others' depth
        # drafts on there: something harmless, as its capacity lets nobody verify it.
        model, last = self.model, self.max_length - 1
        assert model is not None, "attach comes first"

        def step(k: int, token: Tensor) -> Said:
            layout = Layout([min(n + k, last) for n in lengths], [1] * len(lengths), model.device)
            return Said(model.forward(token, layout)[0].float())  # [R, V]

        return step
