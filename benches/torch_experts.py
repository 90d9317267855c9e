"""Speed of the expert layer in PyTorch, the rows of `experts_speed` in burn-ep-backend/tests/gpu/experts_speed.rs.

    python benches/torch_experts.py

The layer is the grouped path of transformers 5.17 (`grouped_mm_experts_forward`): sort, gather, torch._grouped_mm with eager
activation, weights, reshape and sum. Time is the median of batches of about 20 ms; TFLOP/s counts the products only. An
argument names the models to time by a part of their name.
"""

import statistics
import sys
import time

import numpy
import torch

TOKENS = 16_384
ALPHA, LIMIT = 1.702, 7.0
#         name, hidden, width, experts, experts per token, activation, bias
MODELS = [
    ("Qwen3-30B-A3B", 2048, 768, 128, 8, "swiglu", False),
    ("Nemotron-3-Nano", 2688, 1856, 128, 6, "relu2", False),
    ("GPT-OSS-20B", 2880, 2880, 32, 4, "clamped", True),
    ("DeepSeek-V3 (64 of 256 experts)", 7168, 2048, 64, 8, "swiglu", False),
]


def grouped_mm(rows, weight, offsets):
    function = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return function(rows, weight, offs=offsets)


def ids(experts, top_k, skewed):
    rng = numpy.random.default_rng(0)
    rank = rng.permutation(experts)
    weight = numpy.where(rank % 8 == 7, 0.0, (rank + 1.0) ** -0.7) if skewed else numpy.ones(experts)
    # the k largest of log(weight) + Gumbel noise are k draws without replacement
    with numpy.errstate(divide="ignore"):
        keys = numpy.log(weight) + rng.gumbel(size=(TOKENS, experts))
    return torch.from_numpy(numpy.argsort(-keys, axis=1)[:, :top_k].copy()).cuda()


def activate(up, kind):
    if kind == "relu2":
        return torch.relu(up).square()
    if kind == "swiglu":
        gate, linear = up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * linear
    gate, linear = up[..., ::2], up[..., 1::2]
    gate, linear = gate.clamp(max=LIMIT), linear.clamp(-LIMIT, LIMIT)
    return (linear + 1) * (gate * torch.sigmoid(gate * ALPHA))


def layer(x, ids_tk, weights_tk, up, up_bias, down, down_bias, kind):
    top_k, experts = ids_tk.shape[1], up.shape[0]
    sorted_ids, order = torch.sort(ids_tk.reshape(-1))
    counts = torch.histc(sorted_ids.int(), bins=experts, min=0, max=experts - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    rows = grouped_mm(x[order // top_k], up.transpose(-2, -1), offsets)
    if up_bias is not None:
        rows = rows + up_bias[sorted_ids]
    rows = grouped_mm(activate(rows, kind), down.transpose(-2, -1), offsets)
    if down_bias is not None:
        rows = rows + down_bias[sorted_ids]
    rows = rows * weights_tk.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return rows[inverse].view(x.shape[0], top_k, -1).sum(dim=1).to(x.dtype)


def seconds(run):
    def batch(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    batch(2)
    calls = min(max(int(0.02 / batch(2)), 1), 100)
    return statistics.median(batch(calls) for _ in range(5))


def main():
    print(torch.__version__, torch.cuda.get_device_name())
    torch.manual_seed(0)
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, d, f, experts, top_k, kind, bias in MODELS:
        if only not in name:
            continue
        f_up = f if kind == "relu2" else 2 * f
        rows = TOKENS * top_k

        def random(*shape, scale=1.0, grad=False):
            return (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_(grad)

        x = random(TOKENS, d, grad=True)
        up, down = random(experts, f_up, d, scale=d**-0.5, grad=True), random(experts, d, f, scale=f**-0.5, grad=True)
        up_bias = random(experts, f_up, scale=0.1, grad=True) if bias else None
        down_bias = random(experts, d, scale=0.1, grad=True) if bias else None
        weights = torch.rand(TOKENS, top_k, device="cuda", dtype=torch.bfloat16).requires_grad_()
        inputs = [t for t in (x, weights, up, down, up_bias, down_bias) if t is not None]
        # routing moves the times little; one model shows it
        for routing in ("balanced", "skewed") if name.startswith("Qwen3") else ("balanced",):
            ids_tk = ids(experts, top_k, routing == "skewed")
            offsets = torch.cumsum(torch.bincount(ids_tk.reshape(-1), minlength=experts), dim=0, dtype=torch.int32)

            def line(what, flop, run):
                t = seconds(run)
                print(f"{name} | {routing} | {what} | {t * 1e3:.3f} ms | {flop / t / 1e12:.0f} TFLOP/s", flush=True)

            def flop(columns, inner):
                return 2 * rows * columns * inner

            with torch.no_grad():
                rows_d, rows_f, rows_up = random(rows, d), random(rows, f), random(rows, f_up)
                line("up product", flop(f_up, d), lambda: grouped_mm(rows_d, up.transpose(-2, -1), offsets))
                line("down product", flop(d, f), lambda: grouped_mm(rows_f, down.transpose(-2, -1), offsets))
                line("down: gradient of rows", flop(d, f), lambda: grouped_mm(rows_d, down, offsets))
                line("down: gradient of weight", flop(d, f), lambda: grouped_mm(rows_d.t(), rows_f, offsets))
                line("up: gradient of rows", flop(f_up, d), lambda: grouped_mm(rows_up, up, offsets))
                line("up: gradient of weight", flop(f_up, d), lambda: grouped_mm(rows_up.t(), rows_d, offsets))
                del rows_d, rows_f, rows_up

            def forward():
                return layer(x, ids_tk, weights, up, up_bias, down, down_bias, kind)

            work = flop(f_up, d) + flop(d, f)
            with torch.no_grad():
                line("layer forward", work, forward)
            grad = torch.randn_like(x)
            line("layer forward and backward", 3 * work, lambda: torch.autograd.grad(forward(), inputs, grad))


if __name__ == "__main__":
    main()
