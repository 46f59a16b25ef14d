"""`LLM`: the facade. Loads a target and a drafter, builds the engine, and generates."""

from __future__ import annotations

import hashlib
import operator
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from tqdm.auto import tqdm

from avref import confidence, drafters, models
from avref.config import SamplingParams, SpeculativeConfig, whole
from avref.cost_table import CostTable
from avref.engine import Engine, Request
from avref.estimator import OnlineAcceptanceEstimator
from avref.packed import PackedModel
from avref.parity import check_parity
from avref.stats import Stats

DEFAULT_LEN, MOST_SEQS = 1024, 2**16
_SEEDS = 2**32


@dataclass(frozen=True)
class CompletionOutput:
    """One completion: its token ids, its text, and why it ended.

    `finish_reason` is "stop" (EOS or a stop token, which is then the last id) or "length".
    """

    token_ids: list[int]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class RequestOutput:
    """vLLM's shape: the prompt's ids and a list with one completion."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    """A target, optionally with a drafter, behind one `generate`.

    model: "smollm2" (the default target), a local folder, a hub id, or a loaded Hugging Face causal LM (then pass
    `tokenizer`, unless prompts are token ids). speculative_config: a dictionary as in vLLM (see `SpeculativeConfig`);
    None is plain decoding. A loaded model keeps avref's attention; `packed.plain_attention(model)` gives Hugging Face's
    back for as long as it is open. device: None picks CUDA when there is one. dtype: "auto" is the fastest safe one.
    (Both are for a model loaded by name; a loaded one stays as it is.) max_num_seqs: R, requests running at once.
    max_model_len: prompt and output tokens of one request (None: 1024, or the target's positions if it has fewer).
    cost_table: milliseconds of a step; None profiles this machine at the first use (and keeps the result on disk).
    seed: for requests without one of their own. Further keywords go to Hugging Face's `from_pretrained` (`device_map`,
    `trust_remote_code`); those that say where files lie (`token`, `revision`, `cache_dir`) also load the tokenizer.

    Raises ValueError or RuntimeError, before any generation, for unknown settings, different tokenizers, and models
    that the packed forward does not reproduce.
    """

    def __init__(
        self,
        model: Any = models.DEFAULT_TARGET,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        tokenizer: Any = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        cost_table: CostTable | None = None,
        seed: int = 0,
        **model_kwargs: Any,
    ) -> None:
        self._in_use = threading.Lock()
        self.config = SpeculativeConfig.from_dict(speculative_config)
        whole("max_num_seqs", max_num_seqs, 1, MOST_SEQS)
        whole("seed", seed, 0, 2**63 - 1)
        if max_model_len is not None:
            whole("max_model_len", max_model_len, 1)
        if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
            raise ValueError(f"tokenizer is {tokenizer!r}; give a loaded Hugging Face tokenizer")
        named = isinstance(model, (str, Path))
        if not named:
            _check_loaded(model, device, dtype, model_kwargs)
        if named:
            self.device, self.name = models.choose_device(device), str(model)
            models.check_place(model)
            if self.config:
                drafters.check_shipped(self.config, self.name)  # before anything is fetched
            loaded_as = models.choose_dtype(dtype, self.device)
            self.model = models.load_model(model, self.device, loaded_as, **model_kwargs)
            self.device = self.model.device  # a device_map may have placed it elsewhere
        else:
            self.device, self.model = model.device, model.eval()
            self.name = str(getattr(model, "_avref_name", None) or model.config._name_or_path or type(model).__name__)
        self.dtype = self.model.dtype
        self.tokenizer = tokenizer
        if self.tokenizer is None and named:
            self.tokenizer = models.load_tokenizer(model, **model_kwargs)
        self.vocab_size = self.model.get_output_embeddings().weight.shape[0]
        if not getattr(self.model, "_avref_parity", None):
            check_parity(self.model)
            self.model._avref_parity = True
        self.max_model_len = self._check_length(max_model_len)
        self.seed, self._num_requests = seed, 0
        self.eos_ids = self._eos_ids()
        target = PackedModel(self.model, max_num_seqs, self.max_model_len)
        drafter = drafters.load(self.config, self, max_num_seqs) if self.config else None
        adaptive = bool(self.config and self.config.enable_adaptive_verification)
        self._check_costs(cost_table, max_num_seqs)
        estimator = None
        if adaptive and self.config and confidence.resolve(self.config, drafter) == "estimator":
            estimator = OnlineAcceptanceEstimator(
                self.config.num_speculative_tokens, **{"device": self.device, **self.config.estimator}
            )
        self.engine = Engine(
            target, drafter, self.config, max_num_seqs=max_num_seqs, estimator=estimator, cost_table=cost_table
        )

    # ---- what users read ----
    @property
    def stats(self) -> Stats:
        """Counts and times of the last `generate`."""
        return self.engine.stats

    @property
    def estimator(self) -> OnlineAcceptanceEstimator | None:
        """The online fit, where confidence comes from one; it persists over `generate` calls."""
        return self.engine.estimator

    @property
    def cost_table(self) -> CostTable | None:
        """The measured step costs that budgets are chosen with."""
        return self.engine.cost_table

    @cost_table.setter
    def cost_table(self, table: CostTable | None) -> None:
        self._check_costs(table, self.engine.max_num_seqs)
        self.engine.cost_table = table

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """The engine and its caches, for one caller at a time; RuntimeError for a second one, in any thread."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "requests are already running on this LLM, or its cost table is being measured: wait for that, or use "
                "another LLM"
            )
        try:
            yield
        finally:
            self._in_use.release()

    # ---- generation ----
    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the order of the prompts.

        `sampling_params` is one `SamplingParams` for all prompts, or one per prompt; None is `SamplingParams()`.
        Without adaptive verification a seed that is given twice makes two requests draw alike. With it the second one
        gets a seed of its own, in the same call or in a later one: what one request draws may decide what is verified
        of another, directly or by what was learned from it, and would then be tied to the other's draws. So a call is
        repeated by a new LLM, not by this one. No request without a seed draws like another of the same call.
        All prompts are checked before the first runs: ValueError for an empty prompt, one longer than the context, a
        token id outside the vocabulary.
        """
        requests = self._requests(prompts, sampling_params)
        with (
            tqdm(total=len(requests), disable=not use_tqdm, unit="request", dynamic_ncols=True) as bar,
            closing(self._steps(requests, lambda: bool(self.engine.waiting or self.engine.running))) as steps,
        ):
            for finished in steps:
                bar.update(finished)
                bar.set_postfix_str(f"{self.stats.num_tokens} tokens", refresh=False)
        return [RequestOutput(r.prompt_ids, [self._completion(r)]) for r in requests]

    def measure(self, prompts: Any, sampling_params: Any = None) -> Stats:
        """Counts and times of decoding with a full batch: stop once fewer than `max_num_seqs` requests are running.

        Give more prompts than `max_num_seqs`; those that have not ended by then are dropped. A batch that drains would
        punish whoever ends early.
        """
        with closing(self.measuring(prompts, sampling_params)) as steps:
            deque(steps, maxlen=0)
        return self.stats

    def measuring(self, prompts: Any, sampling_params: Any = None) -> Generator[int, None, None]:
        """`measure`, one engine step for each item asked for, so that several LLMs can take turns (`arms.race`)."""
        engine = self.engine
        requests = self._requests(prompts, sampling_params)
        yield from self._steps(requests, lambda: bool(engine.waiting) or len(engine.running) >= engine.max_num_seqs)

    def _requests(self, prompts: Any, sampling_params: Any) -> list[Request]:
        prompt_ids = self._encode(prompts)
        params = self._params(sampling_params, len(prompt_ids))
        # A CPU generator keeps 32 bits of its seed. Those that were given are taken before others are found.
        taught = "" if self.estimator is None else self.estimator.taught()
        given = [None if p.seed is None else self._moved(p.seed, taught) for p in params]
        taken, used = {seed % _SEEDS for seed in given if seed is not None}, set[int]()
        requests = []
        for ids, own, seed in zip(prompt_ids, params, given, strict=True):
            self._num_requests += 1
            if seed is None:
                seed = self._moved(self.seed * 1_000_003 + self._num_requests, taught)
            if own.seed is None or (self.engine.adaptive and seed % _SEEDS in used):
                while seed % _SEEDS in taken:
                    seed += 1_000_003
            taken.add(seed % _SEEDS)
            used.add(seed % _SEEDS)
            requests.append(self._request(ids, own, seed % 2**63))
        self.engine.num_calls += 1
        return requests

    def _moved(self, seed: int, taught: str) -> int:
        """The seed that stands for `seed` in this call: under adaptive verification each call has seeds of its own.

        What an adaptive engine decides depends on what earlier calls drew. Drawn again, the same numbers would meet
        decisions that know them. So it is too where the estimator was taught elsewhere (`load_state_dict`, or
        coefficients in the configuration): what it knows goes into the new seed.
        """
        if not self.engine.adaptive or not (self.engine.num_calls or taught):
            return seed
        digest = hashlib.blake2b(f"{self.engine.num_calls} {taught} {seed}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big")

    def _steps(self, requests: list[Request], keep_going: Callable[[], bool]) -> Generator[int, None, None]:
        """Run the engine on these requests, a step at a time -> how many finished in each; times it leaves in `stats`.

        Only steps are timed, not what the caller does between them.
        """
        engine = self.engine
        if engine.has_budget and engine.cost_table is None and requests:
            from avref.profiling import load_or_profile

            engine.cost_table = load_or_profile(self)
        with self.claimed():
            engine.stats = Stats.zeros(engine.num_positions)
            engine.watch.reset()
            try:
                for request in requests:
                    engine.add(request)
                while keep_going():
                    started = time.perf_counter()
                    finished = engine.step()
                    engine.stats.wall_s += time.perf_counter() - started
                    yield len(finished)
                if engine.running or engine.waiting:
                    engine.abort()  # those that `measure` drops
            except BaseException:
                engine.abort()  # one bad step must not leave requests behind for the next call
                raise
            finally:
                for name, ms in engine.watch.read().items():
                    setattr(engine.stats, f"{name}_ms", ms)

    def chat(
        self,
        messages: Sequence[str] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: Any = None,
        use_tqdm: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` behind the tokenizer's chat template.

        Each item is a user's message, or a list of {"role", "content"} messages. `chat_template_kwargs` go to the
        template (`{"enable_thinking": False}` of Qwen3).
        """
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            raise ValueError(f"chat_template_kwargs is {chat_template_kwargs!r}; give a dictionary, or None")
        return self.generate(self.chat_ids(messages, **(chat_template_kwargs or {})), sampling_params, use_tqdm)

    def chat_ids(
        self, messages: Sequence[str] | Sequence[Sequence[Mapping[str, str]]], **template_kwargs: Any
    ) -> list[list[int]]:
        """Token ids of messages in the tokenizer's chat template, ready for the assistant's turn.

        template_kwargs go to the template. Raises ValueError without a template, and for what is no message.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ValueError("chat needs a tokenizer with a chat template; use generate with plain text or token ids")
        if isinstance(messages, str):
            messages = [messages]
        if not isinstance(messages, Sequence):
            raise ValueError(f"messages is {messages!r}; give a list of strings or of conversations")
        for item in messages:
            turns = [] if isinstance(item, str) else item
            if not isinstance(turns, Sequence) or not all(isinstance(t, Mapping) for t in turns):
                raise ValueError(
                    f"a conversation is {item!r}; give a string, or a list of {{'role', 'content'}} messages"
                )
        conversations = [[{"role": "user", "content": m}] if isinstance(m, str) else list(m) for m in messages]
        template = self.tokenizer.apply_chat_template
        settings = {**template_kwargs, "add_generation_prompt": True, "tokenize": False}
        texts = []
        for conversation in conversations:
            try:
                texts.append(template(conversation, **settings))
            except (TypeError, ValueError, TemplateError) as error:
                raise ValueError(
                    f"the tokenizer's chat template does not take {conversation!r} ({error}): give messages of 'role' "
                    "and 'content' as text, and settings that the template knows"
                ) from error
        return [self.tokenizer.encode(t, add_special_tokens=False) for t in texts]

    def prompt_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of users' messages: behind the chat template where there is one, else as plain text."""
        if self.tokenizer is not None and self.tokenizer.chat_template:
            return self.chat_ids(texts)
        return self._encode(texts)

    def _encode(self, prompts: Any) -> list[list[int]]:
        if not isinstance(prompts, (str, Sequence)) or isinstance(prompts, (bytes, bytearray)):
            raise ValueError(
                f"prompts is {type(prompts).__name__}; give a string, a list of strings, or lists of token ids"
            )
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if any(isinstance(p, str) for p in prompts) and self.tokenizer is None:
            raise ValueError("text prompts need a tokenizer: pass LLM(..., tokenizer=...) or give lists of token ids")
        encoded = []
        for i, prompt in enumerate(prompts):
            if not isinstance(prompt, (str, Sequence)) or isinstance(prompt, (bytes, bytearray)):
                raise ValueError(f"prompt {i} is {prompt!r}; a prompt is a string or a list of token ids")
            if isinstance(prompt, str) and (bad := re.search("[\ud800-\udfff]", prompt)):
                raise ValueError(
                    f"prompt {i} holds {bad[0]!r}, half of a UTF-16 pair and no character: read the text as UTF-8"
                )
            try:
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
            except TypeError as error:
                raise ValueError(f"prompt {i} is {prompt!r}; token ids are whole numbers") from error
            if not ids:
                raise ValueError(f"prompt {i} is empty; give at least one token")
            if not (0 <= min(ids) and max(ids) < self.vocab_size):
                wrong = max(ids) if max(ids) >= self.vocab_size else min(ids)
                raise ValueError(f"prompt {i} holds token id {wrong}; ids go from 0 to {self.vocab_size - 1}")
            if len(ids) >= self.max_model_len:
                raise ValueError(
                    f"prompt {i} has {len(ids)} tokens; max_model_len={self.max_model_len} leaves no room to generate. "
                    "Shorten it or raise max_model_len"
                )
            encoded.append(ids)
        return encoded

    def _params(self, params: Any, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * count
        given = list(params) if isinstance(params, Sequence) else [params]
        for one in given:
            if not isinstance(one, SamplingParams):
                raise ValueError(f"sampling_params holds {one!r}; give SamplingParams(...), for all or one per prompt")
            if max(one.stop_token_ids, default=0) >= self.vocab_size:
                raise ValueError(
                    f"stop_token_ids holds {max(one.stop_token_ids)}; ids go from 0 to {self.vocab_size - 1}"
                )
        if len(given) != count:
            raise ValueError(f"{len(given)} sampling_params for {count} prompts; give one for all or one per prompt")
        return given

    def _request(self, ids: list[int], params: SamplingParams, seed: int) -> Request:
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        return Request(self._num_requests, ids, params, self.max_model_len, stops, torch.Generator().manual_seed(seed))

    def _completion(self, request: Request) -> CompletionOutput:
        ids = request.output_ids
        text = "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=True)
        return CompletionOutput(ids, text, request.finish_reason or "")

    def _eos_ids(self) -> frozenset[int]:
        sources = (getattr(self.model, "generation_config", None), self.model.config, self.tokenizer)
        configured = [getattr(source, "eos_token_id", None) for source in sources]
        flat = [t for c in configured for t in (c if isinstance(c, (list, tuple)) else [c])]
        return frozenset(t for t in flat if t is not None)

    def _check_costs(self, table: Any, max_num_seqs: int) -> None:
        if table is None:
            return
        if not isinstance(table, CostTable):
            raise ValueError(f"cost_table is {table!r}; give a CostTable, or None to profile this machine")
        if self.config is None or not self.config.enable_adaptive_verification:
            return
        deepest = table.draft_ms.shape[1] - 1 if table.draft_ms.ndim == 2 else MOST_SEQS  # one depth stands for all
        for what, covered, name, value in (
            ("requests", table.max_requests, "max_num_seqs", max_num_seqs),
            ("drafts", deepest, "num_speculative_tokens", self.config.num_speculative_tokens),
        ):
            if covered < value:
                raise ValueError(
                    f"the cost table covers {covered} {what}, {name} is {value}; profile up to that many "
                    f"(python -m avref profile --{name.replace('_', '-')}) or lower {name}"
                )
        short = [r for r in range(1, max_num_seqs + 1) if table.token_limit(r) < r]
        if short:
            raise ValueError(
                f"the cost table covers {table.token_limit(short[0])} tokens for {short[0]} requests, too few for one "
                "each; profile again (python -m avref profile)"
            )

    def _check_length(self, max_model_len: int | None) -> int:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if max_model_len is None:
            return min(DEFAULT_LEN, limit or DEFAULT_LEN)
        if limit is not None and max_model_len > limit:
            raise ValueError(
                f"max_model_len={max_model_len} is beyond the {limit} positions of {self.name}; pass at most {limit}"
            )
        return max_model_len


def _check_loaded(model: Any, device: Any, dtype: Any, model_kwargs: Mapping[str, Any]) -> None:
    if not models.is_causal_lm(model):
        raise ValueError(f"model is {type(model).__name__}; give a name, a folder, or a loaded Hugging Face causal LM")
    given = [*model_kwargs, *(["device"] if device is not None else []), *(["dtype"] if dtype != "auto" else [])]
    if given:
        raise ValueError(f"{', '.join(given)} given with a loaded model: these are for loading a model by name")


def _ids(prompt: Sequence[Any]) -> list[int]:
    """Token ids as plain integers; TypeError for anything else, True and False included."""
    if any(isinstance(t, bool) for t in prompt):
        raise TypeError("a truth value is no token id")
    return [operator.index(t) for t in prompt]
