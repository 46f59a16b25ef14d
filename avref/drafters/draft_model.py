"""A smaller causal LM with the same tokenizer drafts token by token (Leviathan et al. 2023; Chen et al. 2023).

Its forwards are batched and packed like the target's. The draft cache follows the target's: tokens that the target
kept stay, the rest is overwritten. After a full acceptance the last draft was never fed to the drafter, so it waits in
`backlog` and enters together with the next pending token; a step that drafts nothing just makes the backlog longer.

The LM is any Hugging Face one, or a `TinyLlama` that was trained for the target: it borrows the target's embedding and
some rows of its head, and drafts a reduced vocabulary of V_d ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from avref import models
from avref.config import SpeculativeConfig
from avref.drafters import weights
from avref.drafters.base import Said, Step, TokenByToken
from avref.layout import Layout, send
from avref.packed import PackedModel
from avref.parity import check_parity

if TYPE_CHECKING:
    from avref.llm import LLM


@dataclass
class TinyLlamaConfig:
    """Shape of a `TinyLlama`, in the words of transformers' `LlamaConfig`.

    `vocab_size` is the target's; of it the model drafts `draft_vocab_size` ids.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    draft_vocab_size: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def llama(self) -> Any:
        """The `LlamaConfig` of this shape, with a vocabulary of one: the target brings embedding and head."""
        from transformers import LlamaConfig

        numbers = asdict(self)
        rope = {"rope_type": "default", "rope_theta": numbers.pop("rope_theta")}
        del numbers["draft_vocab_size"]
        ends = {"bos_token_id": None, "eos_token_id": None}
        return LlamaConfig(**{**numbers, **ends, "vocab_size": 1, "rope_parameters": rope, "tie_word_embeddings": True})


class TinyLlama(nn.Module):
    """The trained part of a draft model: layers and final norm of a Llama, under the names that Hugging Face uses."""

    vocab_ids: Tensor  # [V_d] the target's ids of the draft vocabulary, sorted

    def __init__(self, config: TinyLlamaConfig) -> None:
        from transformers import LlamaModel

        super().__init__()
        self.config = config
        self.model = LlamaModel(config.llama())
        self.model.embed_tokens = None
        self.register_buffer("vocab_ids", torch.arange(config.draft_vocab_size))

    def forward(self, embedded: Tensor) -> Tensor:
        """Token embeddings [B, L, D] -> final states [B, L, D]; causal, from position 0 on."""
        return cast(Tensor, self.model(inputs_embeds=embedded, use_cache=False).last_hidden_state)

    def on(self, target: Any) -> Any:
        """A `LlamaForCausalLM` of these layers on the target's own embedding.

        Its head has the target's rows of the draft vocabulary; the result's `draft_vocab_ids` [V_d] name them.
        """
        from transformers import AutoModelForCausalLM

        head = target.get_output_embeddings()
        # made in the target's dtype rather than cast: a cast would round the rotary frequencies too
        llama = AutoModelForCausalLM.from_config(self.config.llama(), dtype=head.weight.dtype).to(head.weight.device)
        llama.model.load_state_dict(self.model.state_dict(), strict=False)  # all but the embedding
        llama.set_input_embeddings(target.get_input_embeddings())
        ids = self.vocab_ids.to(head.weight.device)
        rows = nn.Linear(head.weight.shape[1], len(ids), bias=False, device="meta")
        rows.weight = nn.Parameter(head.weight.detach()[ids], requires_grad=False)
        llama.set_output_embeddings(rows)
        llama.config.vocab_size, llama.draft_vocab_ids = len(ids), ids
        return llama.eval()


class DraftModel(TokenByToken):
    """Drafts x_1 .. x_K with K forwards of a causal LM; every forward serves all running requests."""

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: Any, max_rows: int, max_length: int, target_vocabulary: int) -> None:
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
        self.max_length = min(max_length, limit)
        self.model = PackedModel(model, max_rows, self.max_length)
        self.vocabulary = min(target_vocabulary, model.get_output_embeddings().weight.shape[0])
        self.vocab_ids: Tensor | None = getattr(model, "draft_vocab_ids", None)  # [V_d], None: the target's own ids
        self.last_id = model.get_input_embeddings().weight.shape[0] - 1
        self.cached = [0] * max_rows  # tokens of each row in the draft cache
        self.backlog: list[list[int]] = [[] for _ in range(max_rows)]  # final tokens that are not
        self.fed = [0] * max_rows  # tokens of the last proposal in the cache, the pending one included

    @classmethod
    def load(cls, config: SpeculativeConfig, llm: LLM, max_rows: int) -> DraftModel:
        model = config.model
        if model is None and not (llm.name == models.DEFAULT_TARGET and weights.shipped("draft_model").is_dir()):
            raise ValueError(
                "method 'draft_model' needs speculative_config['model']: "
                "a local folder or a hub id of a smaller model with the target's tokenizer"
            )
        if model is None or isinstance(model, TinyLlama) or weights.is_drafter(model):
            model = cls._trained(config, llm)
        elif isinstance(model, nn.Module):
            if not models.is_causal_lm(model):
                raise ValueError(f"speculative_config['model'] is {type(model).__name__}; give a causal LM")
            if model.device != llm.model.device:
                raise ValueError(
                    f"the draft model is on {model.device}, the target on {llm.model.device}; move it there first"
                )
            model = model.eval()
        else:
            weights.check_not_where_it_was_trained(model)
            if llm.tokenizer is not None:
                models.check_same_tokenizer(llm.tokenizer, models.load_tokenizer(model))
            model = models.load_model(model, llm.device, llm.dtype)
        check_parity(model)
        return cls(model, max_rows, llm.max_model_len, llm.vocab_size)

    @staticmethod
    def _trained(config: SpeculativeConfig, llm: LLM) -> Any:
        tiny = config.model
        if not isinstance(tiny, TinyLlama):
            tiny = weights.load(config, llm, TinyLlamaConfig, TinyLlama)
        weights.check_vocab_ids(tiny.vocab_ids, tiny.config.vocab_size, "draft_model")
        made_for = (tiny.config.hidden_size, tiny.config.vocab_size)
        have = (llm.model.config.get_text_config().hidden_size, llm.vocab_size)
        if made_for != have:
            raise ValueError(
                f"this draft_model drafter was trained for a target of width {made_for[0]} with {made_for[1]} token "
                f"ids, {llm.name} has width {have[0]} and {have[1]} ids; train one for it: "
                "python -m avref train draft_model"
            )
        return tiny.on(llm.model)

    def enter(self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None) -> None:
        chunks = [ids[: self.max_length] for ids in tokens]
        layout = Layout([0] * len(chunks), [len(c) for c in chunks], self.model.device, layout.first_row)
        self.model.forward(self._packed(chunks), layout, layout.last)
        for row, chunk in enumerate(chunks, start=layout.first_row):
            self.cached[row], self.backlog[row], self.fed[row] = len(chunk), [], 0

    def extend(
        self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None, kept: Sequence[int]
    ) -> None:
        for row, (ids, n) in enumerate(zip(tokens, kept, strict=True)):
            in_cache = min(n, self.fed[row])
            self.cached[row] += in_cache
            self.backlog[row] += ids[in_cache:n]
            self.fed[row] = 0

    def clear(self) -> None:
        self.model.cache.clear()

    def move(self, source: int, target: int) -> None:
        self.model.cache.move(source, target)
        self.cached[target], self.fed[target] = self.cached[source], self.fed[source]
        self.backlog[target] = list(self.backlog[source])

    def start(self, lengths: Sequence[int], pending: Tensor, depth: int) -> Step:
        rows, last = range(len(lengths)), self.max_length - 1
        # a request at the drafter's last position gets no drafts; its row computes something harmless
        alive = [r for r in rows if lengths[r] < last]
        chunks = [[*self.backlog[r], t] if r in alive else [t] for r, t in enumerate(pending.tolist())]
        starts = [self.cached[r] if r in alive else last for r in rows]
        for r in alive:
            self.cached[r] += len(self.backlog[r])
            self.backlog[r] = []

        def step(k: int, token: Tensor) -> Said:
            if k == 0:
                packed, layout = self._packed(chunks), Layout(starts, [len(c) for c in chunks], self.model.device)
            else:
                packed = token.clamp(max=self.last_id)
                layout = Layout([min(n + k, last) for n in lengths], [1] * len(rows), self.model.device)
            for r in alive:
                self.fed[r] = k + 1
            logits, _ = self.model.forward(packed, layout, layout.last)  # [R, V_d]
            return Said(logits[:, : self.vocabulary].float())

        return step

    def _packed(self, chunks: Sequence[Sequence[int]]) -> Tensor:
        ids = send(list(itertools.chain.from_iterable(chunks)), self.model.device)
        return ids.clamp_(max=self.last_id)  # an id beyond a narrower table reads as its last one: only drafts suffer
