"""`python -m avref COMMAND`: quickstart, generate, profile, selfcheck, bench, train, trace, vllm-args,
simulate, study."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; user errors print one line and return 2."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 2
    try:
        return int(arguments.run(arguments) or 0)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"avref: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="avref", description="Adaptive verification in speculative decoding: run it, measure it, take it apart."
    )
    commands = parser.add_subparsers(title="commands")

    quick = _command(
        commands,
        "quickstart",
        _quickstart,
        "compare no speculation, fixed lengths and adaptive verification on this machine (about 5 minutes)",
    )
    quick.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="requests running at once")
    quick.add_argument("--repeats", type=int, default=3)
    quick.add_argument("--max-tokens", type=int, default=32, help="tokens per request")
    quick.add_argument("--output", type=Path, default=Path("."), help="folder for quickstart.json and figures/")

    generate = _command(commands, "generate", _generate, "answer one prompt with adaptive verification")
    generate.add_argument("prompt")
    generate.add_argument("--max-tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, default=1.0)
    generate.add_argument("--top-p", type=float, default=0.95)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--num-speculative-tokens", type=int, default=7)
    generate.add_argument("--plain", action="store_true", help="no speculation")

    profile = _command(commands, "profile", _profile, "measure this machine's cost table again")
    profile.add_argument("--max-num-seqs", type=int, default=32)
    profile.add_argument("--num-speculative-tokens", type=int, default=7)
    profile.add_argument("--context", type=int, default=128, help="cached tokens per request")
    profile.add_argument("--output", type=Path, help="also save the table here")

    check = _command(
        commands, "selfcheck", _selfcheck, "parity, losslessness and speed on this machine, each beside its bar"
    )
    check.add_argument("--quick", action="store_true", help="parity and losslessness only")
    check.add_argument("--output", type=Path, help="also write the report here")

    bench = _command(
        commands,
        "bench",
        _bench,
        "every arm and drafter, on this machine (about an hour; it goes on where it was stopped)",
    )
    names = ("concurrency", "workloads", "drafters", "outside")
    bench.add_argument("--blocks", nargs="+", default=names, metavar="BLOCK", help="some of " + ", ".join(names))
    bench.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N")
    bench.add_argument("--repeats", type=int, default=3)
    bench.add_argument("--max-tokens", type=int, default=48, help="tokens per request")
    bench.add_argument("--minutes", type=float, help="start no run that would go beyond them")
    bench.add_argument("--prompts", help="a file (.txt, .jsonl, .json), or humaneval, gsm8k, mt_bench, speed_bench")
    bench.add_argument("--max-model-len", type=int, default=512, help="tokens of a prompt and its answer")
    bench.add_argument("--output", type=Path, default=Path("bench"), help="folder for results, journal and figures/")

    train = commands.add_parser("train", help="distil a drafter for a target")
    train.add_argument("method", choices=["draft_model", "eagle", "mtp", "dflash", "dspark"])
    train.add_argument("--model", default="smollm2")
    train.add_argument(
        "--output", type=Path, default=Path("drafter"), help="folder; a run that was stopped continues there"
    )
    train.add_argument("--prompts", type=int, default=6000, help="training prompts to sample answers to")
    train.add_argument("--texts", type=int, default=2000, help="pieces of text that ships with Python to read")
    train.add_argument("--init", type=Path, help="start from the tensors of another trained drafter")
    train.add_argument("--steps", type=int, default=None)
    train.set_defaults(run=_train)

    trace = _command(commands, "trace", _trace, "record what a drafter says along the target's own answers")
    trace.add_argument("--num-speculative-tokens", type=int, default=7)
    trace.add_argument("--offsets", type=int, default=5000, help="offsets to record, the five workloads in turn")
    trace.add_argument("--greedy", action="store_true", help="drafts are the most likely tokens, q is one-hot")
    trace.add_argument("--temperature", type=float, default=1.0)
    trace.add_argument("--top-p", type=float, default=0.95)
    trace.add_argument("--max-tokens", type=int, default=192, help="tokens per answer")
    trace.add_argument("--seed", type=int, default=0)
    trace.add_argument("--output", type=Path, default=Path("trace.npz"))

    vllm = commands.add_parser("vllm-args", help="the vLLM command of a configuration, and what differs there")
    vllm.add_argument("--model", default="smollm2", help="target: smollm2, a folder, or a hub id")
    vllm.add_argument("--method", default="dflash", help="drafter family")
    vllm.add_argument("--drafter", default=None, help="drafter folder or hub id")
    vllm.add_argument("--num-speculative-tokens", type=int, default=7)
    vllm.add_argument("--draft-sample-method", default="probabilistic", help="probabilistic or greedy")
    vllm.add_argument("--fixed", action="store_true", help="verify every draft: no adaptive verification")
    vllm.add_argument("--settings", default="{}", metavar="JSON", help="other keys of a speculative_config, as JSON")
    vllm.add_argument("--max-num-seqs", type=int)
    vllm.add_argument("--max-model-len", type=int)
    vllm.add_argument("--dtype")
    vllm.set_defaults(run=_vllm_args)
    _studies(commands)
    return parser


def _studies(commands: Any) -> None:
    text = "replay a trace under a cost table: every arm, from one request to thousands, and an oracle"
    simulate = commands.add_parser("simulate", help=text, description=text)
    simulate.add_argument("--trace", default="dflash", help="name of a shipped trace, or an .npz file")
    simulate.add_argument("--table", default="measured", help="measured, b300, t4, a100, h100, h200, or a file")
    simulate.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="running at once")
    simulate.add_argument("--output", type=Path, default=Path("simulate"), help="folder for table, numbers and figure")
    simulate.set_defaults(run=_simulate)

    text = "the article's claims and ours, measured on traces (about 2 minutes)"
    study = commands.add_parser("study", help=text, description=text)
    study.add_argument("--traces", nargs="+", default=[], metavar="NAME", help="names or files (all that are shipped)")
    study.add_argument(
        "--output", type=Path, default=Path("figures"), help="folder for claims.md, claims.json, figures"
    )
    study.set_defaults(run=_study)


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--model", default="smollm2", help="target: smollm2, a folder, or a hub id")
    parser.add_argument("--method", default="dflash", help="drafter family")
    parser.add_argument(
        "--drafter", default=None, help="drafter folder or hub id (default: the one shipped for smollm2)"
    )
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.set_defaults(run=run)
    return parser


def _quickstart(a: argparse.Namespace) -> None:
    from avref import quickstart

    result = quickstart.quickstart(
        a.model,
        a.method,
        a.drafter,
        concurrency=a.concurrency,
        repeats=a.repeats,
        max_tokens=a.max_tokens,
        device=a.device,
        dtype=a.dtype,
    )
    print(quickstart.table(result))
    print("wrote " + ", ".join(str(p) for p in quickstart.save(result, a.output)))


def _generate(a: argparse.Namespace) -> None:
    from avref import LLM, SamplingParams

    config = None if a.plain else _speculative(a)
    llm = LLM(a.model, config, device=a.device, dtype=a.dtype, max_num_seqs=1)
    params = SamplingParams(temperature=a.temperature, top_p=a.top_p, max_tokens=a.max_tokens, seed=a.seed)
    has_template = llm.tokenizer is not None and llm.tokenizer.chat_template
    out = (llm.chat if has_template else llm.generate)([a.prompt], params)[0].outputs[0]
    s = llm.stats
    print(out.text)
    decode_ms = s.draft_ms + s.verify_ms + s.sample_ms + s.other_ms
    rate = (s.num_tokens - s.num_requests) / decode_ms * 1e3 if decode_ms else float("nan")
    print(
        f"[{s.num_tokens} tokens, {s.num_steps} target forwards, {s.tokens_per_request_step:.2f} tokens each, "
        f"{rate:.0f} tokens/s, {out.finish_reason}]",
        file=sys.stderr,
    )


def _profile(a: argparse.Namespace) -> None:
    from avref import LLM, profiling

    llm = LLM(a.model, _speculative(a), device=a.device, dtype=a.dtype, max_num_seqs=a.max_num_seqs)
    table = profiling.load_or_profile(llm, context=a.context, again=True)
    if a.output:
        table.save(a.output)
    print("requests  tokens  verify ms")
    for requests, tokens, ms in table.metadata["verify_points"]:
        print(f"{requests:8d}  {tokens:6d}  {ms:9.1f}")
    print("requests   depth  draft ms")
    for requests, depth, ms in table.metadata["draft_points"]:
        print(f"{requests:8d}  {depth:6d}  {ms:8.1f}")


def _selfcheck(a: argparse.Namespace) -> int:
    from avref import selfcheck

    report = selfcheck.run(a.model, a.method, a.drafter, device=a.device, dtype=a.dtype, quick=a.quick)
    text = selfcheck.render(report)
    print(text)
    if a.output:
        a.output.write_text(text + "\n")
    return 0 if selfcheck.passed(report) else 1


def _bench(a: argparse.Namespace) -> None:
    from avref.evidence import bench, bench_report

    result = bench.bench(
        a.model,
        a.method,
        a.drafter,
        folder=a.output,
        blocks=a.blocks,
        concurrency=a.concurrency,
        repeats=a.repeats,
        max_tokens=a.max_tokens,
        minutes=a.minutes,
        prompts=a.prompts,
        device=a.device,
        dtype=a.dtype,
        max_model_len=a.max_model_len,
    )
    print(bench_report.markdown(result))
    print(f"wrote bench.json, bench.md and figures/ under {a.output}")


def _train(a: argparse.Namespace) -> None:
    from avref.train import command

    folder = command.run(a.method, a.model, a.output, a.prompts, a.texts, a.steps, a.init)
    print(f"wrote {folder}")


def _trace(a: argparse.Namespace) -> None:
    from avref import LLM, SamplingParams, workloads
    from avref.evidence import traces

    config = {
        "method": a.method,
        "model": a.drafter,
        "num_speculative_tokens": a.num_speculative_tokens,
        "draft_sample_method": "greedy" if a.greedy else "probabilistic",
    }
    llm = LLM(a.model, config, device=a.device, dtype=a.dtype, max_num_seqs=32)
    trace = traces.record(
        llm,
        {name: workloads.load(name) for name in workloads.NAMES},
        SamplingParams(temperature=a.temperature, top_p=a.top_p, max_tokens=a.max_tokens),
        offsets=a.offsets,
        seed=a.seed,
        use_tqdm=True,
    )
    path = traces.save(trace, a.output)
    size = path.stat().st_size / 1e6
    print(
        f"wrote {path}: {len(trace):,} offsets of {len(trace.num_tokens)} answers, {size:.1f} MB; overlap by position"
    )
    for name in (None, *trace.header["workloads"]):
        row = traces.overlap_by_position(trace, name)[0]
        print(f"{name or 'all':>14}  " + " ".join(f"{x:.3f}" for x in row))


def _vllm_args(a: argparse.Namespace) -> None:
    from avref.vllm_args import parse_settings, vllm_args

    config = {
        "method": a.method,
        "model": a.drafter,
        "num_speculative_tokens": a.num_speculative_tokens,
        "draft_sample_method": a.draft_sample_method,
        "enable_adaptive_verification": not a.fixed,
        **parse_settings(a.settings),
    }
    made = vllm_args(config, a.model, max_num_seqs=a.max_num_seqs, max_model_len=a.max_model_len, dtype=a.dtype)
    print(made)
    print(made.report(), file=sys.stderr)


def _simulate(a: argparse.Namespace) -> None:
    from avref.evidence import simulate, tables, traces

    trace = traces.load(a.trace)
    result = simulate.simulate(trace, tables.named(a.table, trace, max(a.requests)), a.requests)
    paths = simulate.save(result, a.output)
    print(simulate.markdown(result))
    print("wrote " + ", ".join(str(p) for p in paths))


def _study(a: argparse.Namespace) -> None:
    from avref.evidence import study

    result = study.run(a.traces)
    paths = study.save(result, a.output)
    for claim in result["claims"]:
        print(f"{claim['verdict']:>24}  {claim['statement']}")
    print("wrote " + ", ".join(str(p) for p in paths))


def _speculative(a: argparse.Namespace) -> dict[str, Any]:
    return {
        "method": a.method,
        "model": a.drafter,
        "num_speculative_tokens": a.num_speculative_tokens,
        "draft_sample_method": "probabilistic",
        "enable_adaptive_verification": True,
    }
