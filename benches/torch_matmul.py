#!/usr/bin/env python3
"""PyTorch's bf16 matmul at the shapes of `tests/gpu` `matmul_speed`, and its cross entropy over a vocabulary at the sizes of
`cross_entropy_speed`. TFLOP/s, median of 7 batches of about 30 ms; run it on the same GPU as the tests.

    python benches/torch_matmul.py
"""

import statistics
import time

import torch

# M, N, K; nt: weights [N, K], nn: [K, N], tn: the left operand transposed.
SHAPES = [
    (8192, 8192, 8192, "nt"), (4096, 4096, 4096, "nt"), (16384, 4096, 2048, "nt"), (16384, 2048, 4096, "nn"),
    (4096, 2048, 16384, "tn"), (16384, 512, 2048, "nt"), (512, 2048, 16384, "tn"), (8192, 4096, 2880, "nt"),
    (4096, 10304, 2688, "nt"), (10304, 2688, 4096, "tn"), (4096, 24576, 1536, "nt"), (1408, 151936, 2048, "nt"),
    (1408, 2048, 151936, "nn"), (151936, 2048, 1408, "tn"),
]


def seconds(f) -> float:
    def batch(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            f()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    batch(3)
    count = max(1, min(2000, int(0.03 / batch(3))))
    return statistics.median(batch(count) for _ in range(7))


def random(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)


print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
for m, n, k, kind in SHAPES:
    a = random(k, m).t() if kind == "tn" else random(m, k)
    b = random(n, k).t() if kind == "nt" else random(k, n)
    print(f"{m:>8} {n:>8} {k:>8} {kind} {2 * m * n * k / seconds(lambda: a @ b) / 1e12:9.0f}")

T, D, V = 16384, 2048, 151936
hidden, weight = random(T, D).requires_grad_(), (random(V, D) / D**0.5).requires_grad_()
labels = (torch.arange(T, device="cuda") * 7919) % V


def loss() -> None:
    logits = torch.nn.functional.linear(hidden, weight)
    torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum").backward()
    hidden.grad = weight.grad = None


loss()
base = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
time_s = seconds(loss)
peak = torch.cuda.max_memory_allocated() - base
print(f"loss T {T} D {D} V {V}: {time_s * 1e3:.1f} ms, {6 * T * D * V / time_s / 1e12:.0f} TFLOP/s, {peak / 1e6:.0f} MB beyond the inputs")
