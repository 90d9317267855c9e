"""Ours beside transformers on the same GPU.

    python3 benches/compare.py speed  --benchmark target/release/examples/benchmark --out results
    python3 benches/compare.py curves --benchmark target/release/examples/benchmark --out results

`speed` runs every case with the reference's settings and with ours, one process after the other, and writes compare.json and
compare.md with ratios. `curves` trains the same weights on the same tokens for 50 steps with both and writes curves.md with
both loss curves and their largest difference; only losses count there, so its processes run side by side. It also runs on a CPU
(--device cpu and a benchmark built without cuda). A run that fails or exceeds its time limit is a row that says so; with --deadline
no run begins that many seconds after the start, and what is left out is named.
"""

import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
START = time.time()
# preset, layers, rows, tokens per row, settings of the reference (their names and meanings are in reference.py). The Mamba layers of
# Nemotron-H run in plain PyTorch, whatever the setting, because mamba-ssm is not a dependency of transformers.
CASES = [
    ("qwen3_30b_a3b", 8, 2, 4096, ["default", "compiled", "eager"]),
    ("qwen3_30b_a3b", 8, 4, 4096, ["default", "compiled"]),
    ("nemotron3_nano", 14, 1, 4096, ["default", "eager"]),
    ("gpt_oss_20b", 8, 2, 4096, ["default", "flex"]),
    ("qwen3_8b", 8, 4, 4096, ["default", "compiled"]),
]


def run(command, limit):
    """The last JSON line of a command, or {"failed": why}."""
    start = time.time()
    print("$", " ".join(map(str, command)), file=sys.stderr, flush=True)
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result after {limit:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(done.stderr[-8000:], file=sys.stderr, flush=True)
        return {"failed": f"exit code {done.returncode}: {reason(done.stderr)[:400]}"}
    result = json.loads(lines[-1])
    result["wall_seconds"] = time.time() - start
    print(f"  {result['wall_seconds']:.0f} s", file=sys.stderr, flush=True)
    return result


def reason(stderr):
    """The message of a panic or of a Python exception; else the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for at, line in enumerate(lines):
        if "panicked at" in line:
            return " ".join(lines[at : at + 3])
    return lines[-1] if lines else "no output"


def write(args, name, lines):
    """After every run, so that a comparison that is cut off leaves what it has."""
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("\n".join(lines) + "\n")


def row(name, result, reference):
    if "failed" in result:
        return f"| {name} | {result['failed']} | | | | | | |"
    speed = result["step"]["tokens_per_second"]
    ratio = f"{speed / reference['step']['tokens_per_second']:.2f}" if reference and "step" in reference else ""
    used, reserved = result.get("peak_gib") or (float("nan"), float("nan"))
    return (f"| {name} | {result['step']['median_ms']:.1f} | {speed:,.0f} | "
            f"{result['without_optimizer']['tokens_per_second']:,.0f} | {ratio} | {used:.1f} | {reserved:.1f} | "
            f"{result['losses'][0]:.3f} to {result['losses'][-1]:.3f} |")


def table(case, args, runs):
    preset, layers, batch, seq, _ = case
    reference = runs.get("transformers, default")
    return [f"## {preset}, {layers} layers, batch {batch}, sequence {seq}, {args.routing} routing", "",
            "| | step ms | tokens/s | without optimizer | ratio to default | used GiB | reserved GiB | loss |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *[row(name, result, reference) for name, result in runs.items()], ""]


def speed(args):
    cases = [case for case in CASES if not args.case or f"{case[0]}:{case[2]}" in args.case or case[0] in args.case]
    if not cases:
        raise SystemExit(f"no case {args.case}: " + ", ".join(f"{case[0]}:{case[2]}" for case in CASES))
    done = []
    for case in cases:
        preset, layers, batch, seq, settings = case
        common = ["--preset", preset, "--layers", layers, "--batch", batch, "--seq", seq, "--routing", args.routing,
                  "--steps", args.steps, "--warmup", args.warmup]
        settings = [name for name in args.settings or settings if name in settings]
        commands = {f"transformers, {name}": [sys.executable, HERE / "reference.py", "speed", *common, "--setting", name]
                    for name in settings}
        # Ours second: a comparison that is cut off has the number that matters most.
        names = list(commands)
        commands = {name: commands[name] for name in names[:1]} | {"burn-moe": [args.benchmark, *common]} | commands
        runs = {}
        done.append((case, runs))
        for name, command in commands.items():
            left = (args.deadline or float("inf")) - (time.time() - START)
            runs[name] = run(command, min(args.limit, left)) if left > 10 else {"failed": "not run: no time left"}
            write(args, "compare.json", [json.dumps([{"case": case, "runs": runs} for case, runs in done], indent=1)])
            write(args, "compare.md", [line for case, runs in done for line in table(case, args, runs)])
    print((pathlib.Path(args.out) / "compare.md").read_text())
    return all("failed" not in runs["burn-moe"] for _, runs in done)


ALLOWED = {"fp32": 0.02, "bf16": 0.1}


def curve(args, model, folder):
    """Both sides of one model: the reference, and ours in every dtype."""
    theirs = run([sys.executable, HERE / "reference.py", "curve", "--model", model, "--out", folder, "--device", args.device,
                  "--lr", args.lr, "--dtypes", *args.dtypes], args.limit)
    if "failed" in theirs:
        return theirs, {}
    command = [args.benchmark, "--from-safetensors", folder, "--tokens", pathlib.Path(folder) / "tokens.i32", "--batch",
               theirs["batch"], "--seq", theirs["seq"], "--steps", theirs["steps"], "--warmup", 0, "--lr", args.lr, "--skip-plain"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ours = list(pool.map(lambda dtype: run([*command, "--dtype", dtype], args.limit), args.dtypes))
    return theirs, dict(zip(args.dtypes, ours))


def curves(args):
    lines, good = [], True
    with tempfile.TemporaryDirectory() as root, concurrent.futures.ThreadPoolExecutor() as pool:
        folders = [pathlib.Path(root) / model for model in args.models]
        results = list(pool.map(lambda pair: curve(args, *pair), zip(args.models, folders)))
    for model, (theirs, ours) in zip(args.models, results):
        for dtype in args.dtypes:
            lines.append(f"## {model}, {dtype}")
            run_of_ours = ours.get(dtype, {"failed": "not run"})
            failed = [f"{who}: {result['failed']}" for who, result in [("transformers", theirs), ("burn-moe", run_of_ours)]
                      if "failed" in result]
            if failed:
                lines += ["", *failed, ""]
                good = False
                continue
            pairs = list(zip(theirs["losses"][dtype], run_of_ours["losses"], strict=True))
            step, (a, b) = max(enumerate(pairs, 1), key=lambda item: abs(item[1][0] - item[1][1]))
            worst = abs(a - b)
            verdict = "within" if worst <= ALLOWED[dtype] else "MORE THAN"
            good &= worst <= ALLOWED[dtype] and pairs[-1][1] < pairs[0][1]
            lines += ["", f"{theirs['steps']} steps of {theirs['batch']} x {theirs['seq']} tokens. Largest difference {worst:.4f} at step "
                          f"{step} ({a:.4f} and {b:.4f}), {verdict} the allowed {ALLOWED[dtype]}.",
                      "", "| step | transformers | burn-moe | difference |", "| --- | --- | --- | --- |"]
            shown = [i for i in range(len(pairs)) if i % 5 == 0 or i == len(pairs) - 1]
            lines += [f"| {i + 1} | {pairs[i][0]:.4f} | {pairs[i][1]:.4f} | {pairs[i][1] - pairs[i][0]:+.4f} |" for i in shown]
            lines.append("")
    write(args, "curves.md", lines)
    print("\n".join(lines))
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in [("speed", speed), ("curves", curves)]:
        p = commands.add_parser(name)
        p.set_defaults(run=function)
        p.add_argument("--benchmark", required=True, help="the example `benchmark`, built")
        p.add_argument("--out", default="results")
        p.add_argument("--limit", type=float, default=300, help="seconds for one run")
        if name == "speed":
            p.add_argument("--case", action="append", help="only this preset, or preset:rows; may be given several times")
            p.add_argument("--settings", nargs="*", help="only these settings of the reference")
            p.add_argument("--routing", choices=["real", "balanced"], default="real")
            p.add_argument("--steps", type=int, default=8, help="counted steps of each loop, of both sides")
            p.add_argument("--warmup", type=int, default=3)
            p.add_argument("--deadline", type=float, help="seconds after which no run begins")
        else:
            p.add_argument("--models", nargs="+", default=["qwen3_moe", "nemotron_h"])
            p.add_argument("--dtypes", nargs="+", choices=ALLOWED, default=["fp32", "bf16"])
            p.add_argument("--device", default="cuda")
            p.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    sys.exit(0 if args.run(args) else 1)


if __name__ == "__main__":
    main()
