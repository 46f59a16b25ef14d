"""`python -m avref COMMAND`: its options, and what each command calls."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Options = dict[str, dict[str, Any]]
_MODEL: Options = {"--model": {"default": "smollm2", "help": "target: smollm2, a folder, or a hub id"}}
_PAIR: Options = {
    **_MODEL,
    "--method": {"default": "dflash", "help": "drafter family"},
    "--drafter": {
        "type": lambda text: int(text) if text.isdecimal() else text,
        "help": "drafter folder or hub id, layers of layer_skip (default: the one shipped for smollm2)",
    },
}
_MACHINE: Options = {**_PAIR, "--device": {}, "--dtype": {"default": "auto"}}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; user errors print one line and return 2."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 2
    try:
        _check_output(arguments)
        return int(arguments.run(arguments) or 0)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        print(f"avref: error: {error}", file=sys.stderr)
        if type(error).__name__ == "OutOfMemoryError":  # torch's; every arm has a cache of its own
            print("avref: fewer requests at once or a smaller --max-model-len need less memory", file=sys.stderr)
        return 2


def _check_output(a: argparse.Namespace) -> None:
    """Raise ValueError where the command could not write its result, before it does hours of work for it."""
    output = getattr(a, "output", None)
    if output is None:
        return
    is_file = a.run in (_profile, _selfcheck, _trace)
    if is_file and output.is_dir():
        raise ValueError(f"--output is {str(output)!r}, which is a folder; give the name of a file")
    nearest = output.absolute().parent if is_file else output.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"--output is {str(output)!r}, but {str(nearest)!r} is no folder that can be written")


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Says each option's default, unless that is nothing or the text says it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.default in (None, False, argparse.SUPPRESS) or "default" in (action.help or "")
        return action.help if said else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="avref", description="Adaptive verification in speculative decoding: run it, measure it, take it apart."
    )
    commands = parser.add_subparsers(title="commands")

    def command(name: str, run: Any, text: str, shared: Options = _MACHINE) -> Any:
        """Its parser's `add_argument`, once the options that it shares with others are in."""
        own = commands.add_parser(name, help=text, description=text, formatter_class=_Defaults)
        own.set_defaults(run=run)
        for flag, settings in shared.items():
            own.add_argument(flag, **settings)
        return own.add_argument

    text = "compare no speculation, fixed lengths and adaptive verification on this machine (six to nine minutes)"
    add = command("quickstart", _quickstart, text)
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="requests running at once")
    add("--repeats", type=int, default=3, help="times that every arm runs")
    add("--max-tokens", type=int, default=24, help="tokens per request")
    add("--max-model-len", type=int, default=512, help="tokens of a prompt and its answer")
    add("--output", type=Path, default=Path("."), help="folder for quickstart.json and figures/")

    add = command("generate", _generate, "answer one prompt with adaptive verification")
    add("prompt")
    add("--max-tokens", type=int, default=128, help="tokens of the answer")
    add("--temperature", type=float, default=1.0, help="0 is greedy")
    add("--top-p", type=float, default=0.95, help="1 keeps all tokens")
    add("--seed", type=int, default=0, help="of the draws")
    add("--num-speculative-tokens", type=int, help="K (default: 7, or what the drafter was trained for)")
    add("--max-model-len", type=int, help="tokens of the prompt and its answer")
    add("--plain", action="store_true", help="no speculation")

    add = command("profile", _profile, "measure this machine's cost table again")
    add("--max-num-seqs", type=int, default=32, help="requests at once")
    add("--num-speculative-tokens", type=int, help="K (default: 7, or what the drafter was trained for)")
    add("--context", type=int, default=128, help="cached tokens per request")
    add("--max-model-len", type=int, help="tokens of a prompt and its answer")
    add("--output", type=Path, help="also save the table here")

    add = command("selfcheck", _selfcheck, "parity, losslessness and speed on this machine, each beside its bar")
    add("--quick", action="store_true", help="parity and losslessness only")
    add("--output", type=Path, help="also write the report here")

    text = "every arm and drafter, on this machine (about an hour; it goes on where it was stopped)"
    add = command("bench", _bench, text)
    names = ("concurrency", "workloads", "drafters", "outside")
    add("--blocks", nargs="+", default=names, metavar="BLOCK", help="some of " + ", ".join(names))
    add("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N")
    add("--repeats", type=int, default=3, help="times that every arm runs")
    add("--max-tokens", type=int, default=32, help="tokens per request")
    add("--minutes", type=float, help="start no run that would go beyond them")
    add("--prompts", help="a file (.txt, .jsonl, .json), or humaneval, gsm8k, mt_bench, speed_bench")
    add("--max-model-len", type=int, default=512, help="tokens of a prompt and its answer")
    add("--output", type=Path, default=Path("bench"), help="folder for results, journal and figures/")

    add = command("train", _train, "distil a drafter for a target (on the CPU; hours for the default target)", _MODEL)
    add("method", choices=["draft_model", "eagle", "mtp", "dflash", "dspark"])
    add("--output", type=Path, default=Path("drafter"), help="folder; a run that was stopped continues there")
    add("--prompts", type=int, default=6000, help="training prompts to sample answers to")
    add("--texts", type=int, default=2000, help="pieces of text that ships with Python to read")
    add("--init", type=Path, help="start from the tensors of another trained drafter")
    add("--steps", type=int, help="training steps (default: the method's own)")

    add = command(
        "trace", _trace, "record what a drafter says along the target's own answers (goes on where it was stopped)"
    )
    add("--num-speculative-tokens", type=int, help="K (default: 7, or what the drafter was trained for)")
    add("--offsets", type=int, default=5000, help="offsets to record, the five workloads in turn")
    add("--greedy", action="store_true", help="drafts are the most likely tokens, q is one-hot")
    add("--temperature", type=float, default=1.0, help="0 is greedy")
    add("--top-p", type=float, default=0.95, help="1 keeps all tokens")
    add("--max-tokens", type=int, default=192, help="tokens per answer")
    add("--max-model-len", type=int, help="tokens of a prompt and its answer")
    add("--seed", type=int, default=0, help="of the draws")
    add("--output", type=Path, default=Path("trace.npz"), help="the trace file")

    add = command("vllm-args", _vllm_args, "the vLLM command of a configuration, and what differs there", _PAIR)
    add("--num-speculative-tokens", type=int, help="K (default: 7, or what the drafter was trained for)")
    add("--draft-sample-method", default="probabilistic", help="probabilistic or greedy")
    add("--fixed", action="store_true", help="verify every draft: no adaptive verification")
    add("--settings", default="{}", metavar="JSON", help="other keys of a speculative_config, as JSON")
    add("--max-num-seqs", type=int)
    add("--max-model-len", type=int)
    add("--dtype")

    text = "replay a trace under a cost table: every arm, from one request to thousands, and an oracle"
    add = command("simulate", _simulate, text, {})
    add("--trace", default="dflash", help="name of a shipped trace, or an .npz file")
    add("--table", default="measured", help="measured, b300, t4, a100, h100, h200, or a file")
    add("--requests", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="running at once")
    add("--output", type=Path, default=Path("simulate"), help="folder for table, numbers and figure")

    add = command("study", _study, "the article's claims and ours, measured on traces (about 2 minutes)", {})
    add("--traces", nargs="+", default=[], metavar="NAME", help="names or files (all that are shipped)")
    add("--output", type=Path, default=Path("figures"), help="folder for claims.md, claims.json, figures")
    return parser


def _call(function: Callable[..., Any], a: argparse.Namespace, **more: Any) -> Any:
    """The function, given those of its parameters that the command line has under the same name."""
    named = {name: value for name, value in vars(a).items() if name in inspect.signature(function).parameters}
    return function(**(named | more))


def _speculative(a: argparse.Namespace, **more: Any) -> dict[str, Any]:
    from avref.evidence.bench_setting import depth_of

    num = a.num_speculative_tokens
    return {
        "method": a.method,
        "model": a.drafter,
        "num_speculative_tokens": depth_of(a.method, a.drafter, 7) if num is None else num,
        "draft_sample_method": "probabilistic",
        "enable_adaptive_verification": True,
        **more,
    }


def _quickstart(a: argparse.Namespace) -> None:
    from avref import quickstart

    result = _call(quickstart.quickstart, a)
    print(quickstart.table(result))
    _wrote(quickstart.save(result, a.output))


def _generate(a: argparse.Namespace) -> None:
    from avref import LLM, SamplingParams

    config, params = None if a.plain else _speculative(a), _call(SamplingParams, a)
    llm = LLM(a.model, config, device=a.device, dtype=a.dtype, max_num_seqs=1, max_model_len=a.max_model_len)
    out, s = llm.generate(llm.prompt_ids([a.prompt]), params)[0].outputs[0], llm.stats
    print(out.text)
    decode_ms = s.draft_ms + s.verify_ms + s.sample_ms + s.other_ms
    rate = (s.num_tokens - s.num_requests) / decode_ms * 1e3 if decode_ms else float("nan")
    print(
        f"[{s.num_tokens} tokens, {s.num_steps} target forwards, {s.tokens_per_request_step:.2f} tokens each, "
        f"{rate:.1f} tokens/s, {out.finish_reason}]",
        file=sys.stderr,
    )


def _profile(a: argparse.Namespace) -> None:
    from avref import LLM, profiling

    more = {"max_num_seqs": a.max_num_seqs, "max_model_len": a.max_model_len}
    llm = LLM(a.model, _speculative(a), device=a.device, dtype=a.dtype, **more)
    table = profiling.load_or_profile(llm, context=a.context, again=True)
    for what, size in (("verify", "tokens"), ("draft", "depth")):
        print(f"requests  {size:>6}  {what} ms")
        for requests, number, ms in table.metadata[f"{what}_points"]:
            print(f"{requests:8d}  {number:6d}  {ms:{len(what) + 3}.1f}")
    if a.output:
        table.save(a.output)


def _selfcheck(a: argparse.Namespace) -> int:
    from avref import selfcheck
    from avref.files import write_text

    report = _call(selfcheck.run, a)
    text = selfcheck.render(report)
    print(text)
    if a.output:
        write_text(a.output, text + "\n")
    return 0 if selfcheck.passed(report) else 1


def _bench(a: argparse.Namespace) -> None:
    from avref.evidence import bench, bench_report

    print(bench_report.markdown(_call(bench.bench, a, folder=a.output)))
    print(f"wrote bench.json, bench.md and figures/ under {a.output}")


def _train(a: argparse.Namespace) -> None:
    from avref.train import command

    print(f"wrote {command.run(a.method, a.model, a.output, a.prompts, a.texts, a.steps, a.init)}")


def _trace(a: argparse.Namespace) -> None:
    from avref import LLM, SamplingParams, workloads
    from avref.evidence import traces

    mode = "greedy" if a.greedy else "probabilistic"
    config = _speculative(a, draft_sample_method=mode, enable_adaptive_verification=False)
    params = SamplingParams(temperature=a.temperature, top_p=a.top_p, max_tokens=a.max_tokens)
    llm = LLM(a.model, config, device=a.device, dtype=a.dtype, max_num_seqs=32, max_model_len=a.max_model_len)
    texts = {name: workloads.load(name) for name in workloads.NAMES}
    journal = a.output.with_name(a.output.name + ".journal")  # a recording that was killed goes on from it
    trace = traces.record(llm, texts, params, offsets=a.offsets, seed=a.seed, use_tqdm=True, journal=journal)
    path = traces.save(trace, a.output)
    journal.unlink()
    size = f"{len(trace):,} offsets of {len(trace.num_tokens)} answers, {path.stat().st_size / 1e6:.1f} MB"
    print(f"wrote {path}: {size}; overlap by position")
    for name in (None, *trace.header["workloads"]):
        if name and not trace.answers_of(name).size:
            continue  # few offsets may not reach every workload
        row = traces.overlap_by_position(trace, name)[0]
        print(f"{name or 'all':>14}  " + " ".join(f"{x:.3f}" for x in row))


def _vllm_args(a: argparse.Namespace) -> None:
    from avref.vllm_args import parse_settings, vllm_args

    own = {"draft_sample_method": a.draft_sample_method, "enable_adaptive_verification": not a.fixed}
    settings = parse_settings(a.settings)
    for key in (_speculative(a) | own).keys() & settings.keys():
        raise ValueError(f"--settings has {key!r}, which has an option of its own; use that")
    made = _call(vllm_args, a, config=_speculative(a, **own, **settings))
    print(made)
    print(made.report(), file=sys.stderr)


def _simulate(a: argparse.Namespace) -> None:
    from avref.evidence import simulate, tables, traces

    trace = traces.load(a.trace)
    result = simulate.simulate(trace, tables.named(a.table, trace, max(a.requests)), a.requests)
    print(simulate.markdown(result))
    _wrote(simulate.save(result, a.output))


def _study(a: argparse.Namespace) -> None:
    from avref.evidence import study

    result = study.run(a.traces)
    for claim in result["claims"]:
        print(f"{claim['verdict']:>24}  {claim['statement']}")
    _wrote(study.save(result, a.output))


def _wrote(paths: Sequence[Path]) -> None:
    print("wrote " + ", ".join(str(p) for p in paths))
