"""The kernels of one training step, the largest first, from a profile written under BURN_MOE_PROFILE.

    BURN_MOE_PROFILE=profile.txt target/release/examples/benchmark --preset qwen3_30b_a3b --layers 8 --batch 4 --skip-plain --warmup 2 --steps 2
    python3 benches/kernel_table.py profile.txt --steps 4

The profile has a line for every launch and a table at every synchronisation; the example `benchmark` synchronises after every step, so
the lines before the last table are the last step. Library products (profile.txt.products) are counted over all --steps steps, warm-up
included. Every time is from idle device to idle device; the shortest of all is taken to be the waiting and subtracted. Bytes are those of a
raw kernel's buffers, touched once: the floor of a kernel that is bound by memory.
"""

import argparse
import collections
import re
import statistics

UNITS = {"s": 1e6, "ms": 1e3, "\u00b5s": 1.0, "us": 1.0, "ns": 1e-3}
LINE = re.compile(r"^\| ([0-9.]+)(s|ms|\u00b5s|us|ns) *\| (.*)")


def launches(path):
    """Lists of (microseconds, name), one list for every stretch between two tables."""
    steps, current = [], []
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("|\u23ba") and current:
                steps.append(current)
                current = []
            elif match := LINE.match(line):
                current.append((float(match[1]) * UNITS[match[2]], match[3].strip()))
    return steps + ([current] if current else [])


def short(name):
    """Module and function of a CubeCL kernel; a raw kernel's own name."""
    name = re.split(r": |<", name)[0]
    parts = [part for part in name.split("::") if part]
    return "::".join(parts[-3:-1]) if len(parts) > 3 else name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("--steps", type=int, required=True, help="steps of the run, warm-up included")
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--bandwidth", type=float, default=4300, help="of the device, in GB/s")
    args = parser.parse_args()
    steps = [step for step in launches(args.profile) if len(step) > 20]
    if not steps:
        raise SystemExit(f"{args.profile} has no launches: was BURN_MOE_PROFILE set?")
    kernels = collections.defaultdict(list)
    for time, name in steps[-1]:
        kernels[short(name)].append(time)
    try:
        products = [launch for step in launches(args.profile + ".products") for launch in step]
    except FileNotFoundError:
        products = []
    by_name = collections.defaultdict(list)
    for time, name in products:
        by_name[name].append(time)
    waiting = min(min(times) for times in [*kernels.values(), *by_name.values()])
    rows = []
    for name, times in kernels.items():
        rows.append((sum(times) - waiting * len(times), len(times), name))
    for name, times in by_name.items():
        count = len(times) / args.steps
        # The first product of a shape asks the library for an algorithm: the median has none of that.
        rows.append(((statistics.median(times) - waiting) * count, round(count), name))
    rows.sort(reverse=True)
    total = sum(row[0] for row in rows)
    print(f"{sum(row[1] for row in rows)} launches, {total / 1e3:.1f} ms; {waiting:.1f} us of waiting subtracted from each.\n")
    print("| kernel | launches | ms | share | us each | floor us | rate |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for time, count, name in rows[: args.top]:
        each = time / max(count, 1)
        floor, rate = "", ""
        if match := re.search(r" m (\d+) n (\d+) k (\d+) batch (\d+)", name):
            m, n, k, batch = map(int, match.groups())
            rate = f"{2 * m * n * k * batch / max(each, 1e-3) / 1e6:.0f} TFLOP/s"
        elif match := re.search(r" bytes (\d+)", name):
            size = int(match[1])
            floor, rate = f"{size / args.bandwidth / 1e3:.0f}", f"{size / max(each, 1e-3) / 1e3:.0f} GB/s"
            name = f"{name[: match.start()]}, {size / 1e6:.0f} MB"
        print(f"| {name} | {count} | {time / 1e3:.2f} | {100 * time / total:.1f} % | {each:.0f} | {floor} | {rate} |")
    left = rows[args.top :]
    print(f"| {len(left)} others | {sum(r[1] for r in left)} | {sum(r[0] for r in left) / 1e3:.2f} | "
          f"{100 * sum(r[0] for r in left) / total:.1f} % | | | |")


if __name__ == "__main__":
    main()
