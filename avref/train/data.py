"""Training data: the target's own samples with its hidden states, recorded while it decodes.

One shard per group of prompts: token ids, where the answer starts, the target's hidden states of the drafter's
layers, and at every position the target's most likely next tokens. The engine that serves is the engine that records:
`Recorder` sits where a drafter would and never drafts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm.auto import tqdm

from avref.config import SamplingParams
from avref.engine import Request
from avref.evidence.bench_setting import fingerprint
from avref.files import differences, load_tensors, save_tensors, write_text
from avref.layout import Layout

TOP = 128  # target probabilities kept per position; the rest is folded into the normaliser


class Recorder:
    """Keeps the target's hidden states of every running request; a drafter that makes no drafts."""

    max_length = 0

    def __init__(self, hidden_layers: Sequence[int]) -> None:
        self.hidden_layers = tuple(hidden_layers)
        self.rows: dict[int, list[Tensor]] = {}

    def enter(self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None) -> None:
        assert hidden is not None
        for row, states in enumerate(hidden.split([len(t) for t in tokens]), start=layout.first_row):
            self.rows[row] = [states.bfloat16()]

    def extend(
        self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None, kept: Sequence[int]
    ) -> None:
        assert hidden is not None
        for row, state in enumerate(hidden.bfloat16()):
            self.rows[row].append(state[None])

    def clear(self) -> None:
        self.rows.clear()

    def move(self, source: int, target: int) -> None:
        self.rows[target] = self.rows[source]


def collect(
    llm: Any, recorder: Recorder, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[tuple[list[int], int, Tensor]]:
    """Sample one answer per prompt -> (ids, prompt length, hidden [len(ids) - 1, n D]) for each.

    Requests come in the order in which they finish, not in the order of the prompts.
    """
    done: list[tuple[list[int], int, Tensor]] = []

    def keep(row: int, request: Request) -> None:
        ids = request.prompt_ids + request.output_ids
        done.append((ids, len(request.prompt_ids), torch.cat(recorder.rows[row])[: len(ids) - 1]))

    before = llm.engine.drafter, llm.engine.on_finish
    llm.engine.drafter, llm.engine.on_finish = recorder, keep
    try:
        llm.generate(prompts, params, use_tqdm=True)
    finally:
        llm.engine.drafter, llm.engine.on_finish = before
        recorder.clear()
    return done


@torch.inference_mode()
def label(model: Any, final_hidden: Tensor, chunk: int = 512, count: int = TOP) -> tuple[Tensor, Tensor]:
    """The target's `TOP` most likely next tokens at every position, from its final hidden states [N, D].

    Returns ids [N, TOP] and log-probabilities [N, TOP].
    """
    ids, logs = [], []
    for part in final_hidden.split(chunk):
        logits = model.get_output_embeddings()(part.to(model.dtype)).float()
        top, index = logits.topk(min(count, logits.shape[-1]), dim=-1)
        ids.append(index.int())
        logs.append((top - logits.logsumexp(dim=-1, keepdim=True)).half())
    return torch.cat(ids), torch.cat(logs)


def record(
    llm: Any, recorder: Recorder, prompts: Sequence[str], params: SamplingParams | Sequence[SamplingParams]
) -> dict[str, Tensor]:
    """Sample one answer per prompt and return a shard: everything laid end to end, in order of finishing.

    ids [sum n], lengths [N], prompt_lengths [N], hidden [sum (n - 1), n_layers D] bfloat16, and the target's most
    likely next tokens at every state, top_ids and top_logs [sum (n - 1), TOP].
    """
    done = collect(llm, recorder, llm.prompt_ids(prompts), params)
    return _shard(llm, [ids for ids, _, _ in done], [n for _, n, _ in done], [h for _, _, h in done])


def _shard(
    llm: Any, ids: Sequence[Sequence[int]], prompt_lengths: Sequence[int], states: Sequence[Tensor]
) -> dict[str, Tensor]:
    hidden = torch.cat(list(states))
    width = llm.model.config.get_text_config().hidden_size
    top_ids, top_logs = label(llm.model, hidden[:, -width:])
    return {
        "ids": torch.tensor([t for one in ids for t in one], dtype=torch.int32),
        "lengths": torch.tensor([len(one) for one in ids]),
        "prompt_lengths": torch.tensor(prompt_lengths),
        "hidden": hidden,
        "top_ids": top_ids,
        "top_logs": top_logs,
    }


@torch.inference_mode()
def record_texts(
    llm: Any, hidden_layers: Sequence[int], texts: Sequence[str], max_tokens: int = 256
) -> dict[str, Tensor]:
    """Read given texts instead of sampling answers, and return a shard as `record` does.

    A text stands where an answer would, behind a request to continue it; every position is labelled with what the
    target would say there.
    """
    ids: list[list[int]] = []
    prompt_lengths, states = [], []
    for text in tqdm(texts, desc="reading", unit="text"):
        prompt = llm.prompt_ids(["Continue this text."])[0]
        whole = prompt + llm.tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
        layout = Layout([0], [len(whole)], llm.device)
        packed = torch.tensor(whole, device=llm.device)
        _, hidden = llm.engine.target.forward(packed, layout, layout.last, hidden_layers)
        ids.append(whole)
        prompt_lengths.append(len(prompt))
        states.append(hidden[:-1].bfloat16())
    llm.engine.target.cache.clear()
    return _shard(llm, ids, prompt_lengths, states)


def build_shards(
    llm: Any, recorder: Recorder, prompts: Sequence[str], params: SamplingParams, folder: Path, per_shard: int = 128
) -> list[Path]:
    """Write the missing shards of sampled answers; a run that was stopped loses at most the one in progress.

    Each answer has a seed of its own, so that a run in parts records what one in a single go does. Returns the files
    in order. Raises ValueError for a folder that holds shards of another target or of other layers.
    """

    def make(start: int, part: Sequence[str]) -> dict[str, Tensor]:
        return record(llm, recorder, part, [replace(params, seed=start + i) for i in range(len(part))])

    _check_origin(llm, recorder.hidden_layers, folder)
    return _build(folder, "shard", prompts, per_shard, make, asdict(params))


def build_text_shards(
    llm: Any, hidden_layers: Sequence[int], texts: Sequence[str], folder: Path, per_shard: int = 256
) -> list[Path]:
    """Write the shards of read texts that are missing; as `build_shards`."""
    _check_origin(llm, hidden_layers, folder)
    return _build(folder, "shard-text", texts, per_shard, lambda _, part: record_texts(llm, hidden_layers, part), {})


def _check_origin(llm: Any, hidden_layers: Sequence[int], folder: Path) -> None:
    """Note which target and layers the shards of a folder hold, or compare with the note."""
    path, origin = folder / "origin.json", {"target": fingerprint(llm.model), "layers": list(hidden_layers)}
    if not path.is_file():
        write_text(path, json.dumps(origin) + "\n")
        return
    try:
        changed = differences(json.loads(path.read_bytes()), origin)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}): delete the folder, or use another one") from error
    if changed:
        raise ValueError(f"the shards in {str(folder)!r} hold something else ({changed}): use another folder")


def _build(
    folder: Path,
    name: str,
    items: Sequence[str],
    per_shard: int,
    make: Callable[[int, Sequence[str]], dict[str, Tensor]],
    settings: Mapping[str, Any],
) -> list[Path]:
    """Shards of `make(start, part)`; one that was made from the same part of `items` and `settings` is kept."""
    paths = []
    for number, start in enumerate(tqdm(range(0, len(items), per_shard), desc=name, unit="shard")):
        part = items[start : start + per_shard]
        paths.append(folder / f"{name}-{number:03d}.safetensors")
        source = hashlib.sha256(json.dumps([start, list(part), settings]).encode()).hexdigest()
        if not paths[-1].is_file() or _source(paths[-1]) not in (source, None):
            save_tensors(make(start, part), paths[-1], source=source)
    return paths


def _source(path: Path) -> str | None:
    """What a shard was made from, read without its tensors; None for a damaged one, which is refused when loaded."""
    try:
        with safe_open(path, "pt") as file:
            return str(json.loads((file.metadata() or {}).get("metadata", "{}")).get("source", ""))
    except (OSError, SafetensorError, ValueError):
        return None


class Sequences:
    """Recorded sequences in memory.

    Sequence i has `ids[i]` [n], `hidden[i]` [n - 1, n_layers D] bfloat16, `top_ids[i]` and `top_logs[i]`
    [n - 1, TOP], and its answer starts at `prompt_lengths[i]`. With `embedding`, the target's hidden state 0 was not
    recorded and is looked up there.
    """

    def __init__(self, shards: Iterable[Mapping[str, Tensor]], embedding: Any = None) -> None:
        self.embedding = embedding
        self.ids: list[Tensor] = []
        self.hidden: list[Tensor] = []
        self.top_ids: list[Tensor] = []
        self.top_logs: list[Tensor] = []
        self.prompt_lengths: list[int] = []
        for shard in shards:
            lengths = shard["lengths"].tolist()
            states = [n - 1 for n in lengths]
            self.ids += [x.long() for x in shard["ids"].split(lengths)]
            self.hidden += shard["hidden"].split(states)
            self.top_ids += shard["top_ids"].split(states)
            self.top_logs += shard["top_logs"].split(states)
            self.prompt_lengths += shard["prompt_lengths"].tolist()
        if not self.ids:
            raise ValueError("no recorded sequences: sample some first")

    @classmethod
    def load(cls, *places: Path, embedding: Any = None) -> Sequences:
        """Shards, and all shards in folders, in this order; RuntimeError for a damaged one."""
        inside = "shard-*.safetensors"
        paths = [path for p in places for path in (sorted(p.glob(inside)) if p.is_dir() else [p])]
        remedy = "delete it, and the next run records it again"
        return cls((load_tensors(path, remedy)[0] for path in paths), embedding)

    def fingerprint(self) -> str:
        """A hash of all token ids and of what is kept of their states: data that differ differ here."""
        digest = hashlib.sha256(f"{self.prompt_lengths} {self.hidden[0].shape[1]}".encode())
        for ids in self.ids:
            digest.update(ids.numpy().data)
        return digest.hexdigest()[:16]

    def keep_layers(self, recorded: Sequence[int], wanted: Sequence[int]) -> None:
        """Keep only the hidden states that a drafter reads (views where they lie behind one another)."""
        if tuple(recorded) == tuple(wanted):
            return
        width = self.hidden[0].shape[1] // len(recorded)
        places = [recorded.index(layer) for layer in wanted]
        if places and places == list(range(places[0], places[0] + len(places))):
            part = slice(places[0] * width, (places[-1] + 1) * width)
            self.hidden = [h[:, part] for h in self.hidden]
        else:
            self.hidden = [h.unflatten(1, (-1, width))[:, places].flatten(1) for h in self.hidden]

    @torch.no_grad()
    def states(self, i: int) -> Tensor:
        """The target's hidden states on sequence i, all layers side by side in float32 [n - 1, n D]."""
        recorded = self.hidden[i].float()
        if self.embedding is None:
            return recorded
        return torch.cat([self.embedding(self.ids[i][:-1]).float(), recorded], dim=-1)

    def __len__(self) -> int:
        return len(self.ids)

    def frequent_ids(self, count: int, always: Sequence[int], vocabulary: int, upto: int | None = None) -> Tensor:
        """The `count` ids with the most target probability in the first `upto` sequences (default: all), sorted.

        Those in `always` are among them.
        """
        mass = torch.zeros(vocabulary)
        rows = zip(self.top_ids[:upto], self.top_logs[:upto], self.prompt_lengths[:upto], strict=True)
        for ids, logs, start in rows:
            mass.index_add_(0, ids[start - 1 :].flatten().long(), logs[start - 1 :].float().exp().flatten())
        mass[list(always)] = float("inf")
        return mass.topk(count).indices.sort().values
