"""How good a drafter is: its overlap with the target on the target's own held-out samples.

The overlap is taken by position, given that the drafts before were accepted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from avref import sampling, workloads
from avref.config import SamplingParams, SpeculativeConfig
from avref.drafters import weights
from avref.drafters.dflash import DFlashConfig, DFlashModel
from avref.llm import LLM
from avref.train.data import Recorder, Sequences, record
from avref.train.dflash import block_states


@torch.inference_mode()
def overlap_by_position(
    model: DFlashModel, target: Any, data: Sequences, top_p: float, blocks: int = 16
) -> tuple[Tensor, Tensor]:
    """(overlap [K], weight [K]) over every offset of every recorded answer.

    At each offset the block's slot k has q_k and the target p_k (after top-p), and sum(min(p_k, q_k)) is its
    acceptance probability. The sampled token y_j came from an accepted draft with probability

        min(1, q_j(y_j) / p_j(y_j)).

    The product of these over j < k weighs slot k, which makes the average the acceptance rate at position k given an
    accepted prefix.
    """
    depth, width = model.config.block_size, model.config.hidden_size
    embedding, unembed = target.get_input_embeddings(), target.get_output_embeddings()
    vocab_ids = model.vocab_ids
    head = unembed.weight[vocab_ids]
    total, weight = torch.zeros(depth, dtype=torch.float64), torch.zeros(depth, dtype=torch.float64)
    for ids, states_of, start in zip(data.ids, data.hidden, data.prompt_lengths, strict=True):
        hidden = states_of.float()
        states = len(hidden)
        if states - start < depth:
            continue
        # [n, V], row j is the law of the token at start + j + 1
        p = _target_law(unembed(hidden[start:, -width:]), top_p)
        for first in range(start, states - depth + 1, blocks):
            anchors = torch.arange(first, min(first + blocks, states - depth + 1))
            out = block_states(model, embedding, hidden[None], ids[anchors][None], anchors[None], depth)[0]  # [M, K, D]
            q = torch.softmax(out @ head.T, dim=-1)  # [M, K, V_d]
            place = anchors[:, None] + torch.arange(depth)  # [M, K]
            p_here = p[place - start]  # [M, K, V]
            overlap = torch.minimum(p_here[..., vocab_ids], q).sum(-1)
            y = ids[place + 1]
            position = torch.searchsorted(vocab_ids, y).clamp_max(len(vocab_ids) - 1)
            q_y = q.gather(-1, position[..., None])[..., 0] * (vocab_ids[position] == y)
            p_y = p_here.gather(-1, y[..., None])[..., 0].clamp_min(1e-12)
            reach = torch.cat([torch.ones(len(anchors), 1), (q_y / p_y).clamp_max(1).cumprod(-1)[:, :-1]], dim=1)
            total += (overlap * reach).sum(0).double()
            weight += reach.sum(0).double()
    return total / weight.clamp_min(1e-9), weight


def held_out_overlap(
    llm: LLM, drafter: Any = None, *, per_workload: int = 40, max_tokens: int = 96, top_p: float = 0.95
) -> dict[str, list[float]]:
    """Overlap by position on fresh samples for the evaluation prompts: one row per workload, and "all".

    `drafter` is a folder or a loaded model; None is the one shipped for the target.
    """
    config = SpeculativeConfig("dflash", model=drafter)
    model = drafter if isinstance(drafter, DFlashModel) else weights.load(config, llm, DFlashConfig, DFlashModel)
    sampler = LLM(llm.model, None, llm.tokenizer, max_num_seqs=32, max_model_len=llm.max_model_len, seed=llm.seed)
    recorder = Recorder(model.config.target_layers)
    params = SamplingParams(temperature=1.0, top_p=top_p, max_tokens=max_tokens)
    parts = {}
    for name in workloads.NAMES:
        data = Sequences([record(sampler, recorder, workloads.load(name, per_workload), params)])
        parts[name] = overlap_by_position(model, llm.model, data, top_p)
    total = torch.stack([o * w for o, w in parts.values()]).sum(0) / torch.stack([w for _, w in parts.values()]).sum(0)
    return {"all": total.tolist(), **{name: o.tolist() for name, (o, _) in parts.items()}}


def _target_law(logits: Tensor, top_p: float) -> Tensor:
    n = len(logits)
    return sampling.probs(logits.float(), torch.ones(n), torch.zeros(n, dtype=torch.long), torch.full((n,), top_p))
