"""Ours beside transformers on the same GPU, one process after the other.

    python3 benches/compare.py speed  --benchmark target/release/examples/benchmark --out results
    python3 benches/compare.py curves --benchmark target/release/examples/benchmark --out results

`speed` runs every case with the reference's default, compiled and eager settings and with ours, and writes compare.json and
compare.md with ratios. `curves` trains the same weights on the same tokens for 50 steps with both and writes curves.md with
both loss curves and their largest difference; it also runs on a CPU (--device cpu and a benchmark built without cuda).
A run that fails or exceeds its time limit is a row that says so.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
# preset, layers, rows, tokens per row
CASES = [("qwen3_30b_a3b", 8, 2, 4096), ("nemotron3_nano", 14, 1, 4096)]


def run(command, limit):
    """The last JSON line of a command, or {"failed": why}."""
    start = time.time()
    print("$", " ".join(map(str, command)), file=sys.stderr, flush=True)
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result after {limit} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"failed": f"exit code {done.returncode}: {last[:300]}"}
    result = json.loads(lines[-1])
    print(f"  {time.time() - start:.0f} s", file=sys.stderr, flush=True)
    return result


def write(args, name, lines):
    """After every case, so that a run that is cut off leaves what it has."""
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("\n".join(lines) + "\n")


def row(name, result, reference):
    if "failed" in result:
        return f"| {name} | {result['failed']} | | | | | |"
    speed = result["step"]["tokens_per_second"]
    ratio = f"{speed / reference['step']['tokens_per_second']:.2f}" if reference and "step" in reference else ""
    used, reserved = result.get("peak_gib") or (float("nan"), float("nan"))
    return (f"| {name} | {result['step']['median_ms']:.1f} | {speed:,.0f} | "
            f"{result['without_optimizer']['tokens_per_second']:,.0f} | {ratio} | {used:.1f} | {reserved:.1f} |")


def speed(args):
    results, lines = [], []
    cases = [case for case in CASES if not args.case or case[0] in args.case]
    for preset, layers, batch, seq in cases:
        common = ["--preset", preset, "--layers", layers, "--batch", batch, "--seq", seq, "--routing", args.routing]
        runs = {}
        for setting in args.settings:
            command = [sys.executable, HERE / "reference.py", "speed", *common, "--setting", setting]
            runs[f"transformers, {setting}"] = run(command, args.limit)
        runs["burn-moe"] = run([args.benchmark, *common], args.limit)
        reference = runs.get("transformers, default")
        lines += [f"## {preset}, {layers} layers, batch {batch}, sequence {seq}, {args.routing} routing", "",
                  "| | step ms | tokens/s | without optimizer | ratio to default | used GiB | reserved GiB |",
                  "| --- | --- | --- | --- | --- | --- | --- |"]
        lines += [row(name, result, reference) for name, result in runs.items()] + [""]
        results.append({"case": [preset, layers, batch, seq], "runs": runs})
        write(args, "compare.json", [json.dumps(results, indent=1)])
        write(args, "compare.md", lines)
    print("\n".join(lines))
    return all("failed" not in result["runs"]["burn-moe"] for result in results)


def curves(args):
    lines, good = [], True
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            exported = subprocess.run([sys.executable, HERE / "reference.py", "export", "--model", model, "--out", folder])
            exported.check_returncode()
            shape = json.loads((pathlib.Path(folder) / "tokens.json").read_text())
            for dtype, allowed in [("fp32", 0.02), ("bf16", 0.1)]:
                theirs = run([sys.executable, HERE / "reference.py", "train", "--folder", folder, "--dtype", dtype,
                              "--device", args.device, "--lr", args.lr], args.limit)
                ours = run([args.benchmark, "--from-safetensors", folder, "--tokens", pathlib.Path(folder) / "tokens.i32",
                            "--batch", shape["batch"], "--seq", shape["seq"], "--steps", shape["steps"], "--warmup", 0,
                            "--dtype", dtype, "--lr", args.lr, "--skip-plain"], args.limit)
                lines.append(f"## {model}, {dtype}, {shape['steps']} steps of {shape['batch']} x {shape['seq']} tokens")
                failed = [f"{who}: {result['failed']}" for who, result in [("transformers", theirs), ("burn-moe", ours)]
                          if "failed" in result]
                if failed:
                    lines += ["", *failed, ""]
                    write(args, "curves.md", lines)
                    good = False
                    continue
                pairs = list(zip(theirs["losses"], ours["losses"], strict=True))
                step, (a, b) = max(enumerate(pairs, 1), key=lambda item: abs(item[1][0] - item[1][1]))
                worst = abs(a - b)
                verdict = "within" if worst <= allowed else "MORE THAN"
                good &= worst <= allowed and pairs[-1][1] < pairs[0][1]
                lines += ["", f"Largest difference {worst:.4f} at step {step} ({a:.4f} and {b:.4f}), {verdict} the allowed {allowed}.",
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
        p.add_argument("--limit", type=int, default=300, help="seconds for one run")
        if name == "speed":
            p.add_argument("--case", action="append", help="only this preset; may be given several times")
            p.add_argument("--settings", nargs="*", default=["default", "compiled", "eager"])
            p.add_argument("--routing", choices=["real", "balanced"], default="real")
        else:
            p.add_argument("--models", nargs="+", default=["qwen3_moe", "nemotron_h"])
            p.add_argument("--device", default="cuda")
            p.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    sys.exit(0 if args.run(args) else 1)


if __name__ == "__main__":
    main()
