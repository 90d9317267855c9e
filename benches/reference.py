"""The reference: whole training steps of transformers on one GPU, with the output format of the example `benchmark`.

    python3 benches/reference.py speed --preset qwen3_30b_a3b --layers 8 --batch 2 --setting default
    python3 benches/reference.py curve --model qwen3_moe --out FOLDER --dtypes fp32 bf16

`speed` prints one JSON line. `curve` writes a middle-sized model with random weights (a Hugging Face folder) and tokens for
50 steps to the folder, trains it in every dtype and prints the loss of every step. Needs torch and transformers 5.
"""

import argparse
import json
import pathlib
import time

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

# attention, expert implementation (None: the library's choice), torch.compile. The library's attention is sdpa, but eager for GPT-OSS,
# whose sinks sdpa does not have; flex_attention has them and never holds the scores.
SETTINGS = {
    "default": (None, None, False),
    "compiled": (None, None, True),
    "flex": ("flex_attention", None, False),
    "eager": ("eager", "eager", False),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def qwen3_moe(**fields):
    return transformers.Qwen3MoeConfig(norm_topk_prob=True, decoder_sparse_step=1, tie_word_embeddings=False,
                                       output_router_logits=False, rms_norm_eps=1e-6, rope_theta=1e6, **fields)


def nemotron_h(pattern, **fields):
    return transformers.NemotronHConfig(hybrid_override_pattern=pattern, num_hidden_layers=len(pattern), n_groups=fields.pop("groups"),
                                        conv_kernel=4, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
                                        n_group=1, topk_group=1, mlp_hidden_act="relu2", **fields)


def preset(name, layers, experts):
    """Published widths: the presets of the example `benchmark`."""
    if name == "qwen3_30b_a3b":
        return qwen3_moe(vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers or 48,
                         num_attention_heads=32, num_key_value_heads=4, head_dim=128, max_position_embeddings=40960,
                         num_experts=experts or 128, num_experts_per_tok=8, moe_intermediate_size=768)
    if name == "nemotron3_nano":
        return nemotron_h(NANO[: layers or len(NANO)], vocab_size=131072, hidden_size=2688, num_attention_heads=32, head_dim=128,
                          num_key_value_heads=2, mamba_num_heads=64, mamba_head_dim=64, groups=8, ssm_state_size=128,
                          chunk_size=128, intermediate_size=1856, moe_intermediate_size=1856,
                          moe_shared_expert_intermediate_size=3712, n_routed_experts=experts or 128, num_experts_per_tok=6)
    if name == "gpt_oss_20b":
        layers = layers or 24
        kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
        return transformers.GptOssConfig(vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=layers,
                                         head_dim=64, num_attention_heads=64, num_key_value_heads=8, sliding_window=128,
                                         num_local_experts=experts or 32, num_experts_per_tok=4, layer_types=kinds)
    if name == "deepseek_v3":
        layers = layers or 61
        return transformers.DeepseekV3Config(vocab_size=129280, hidden_size=7168, num_hidden_layers=layers,
                                             first_k_dense_replace=min(3, layers - 1), n_routed_experts=experts or 256)
    if name == "qwen3_8b":
        return transformers.Qwen3Config(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=layers or 36,
                                        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
                                        rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False)
    raise SystemExit(f"unknown preset {name}: qwen3_30b_a3b, nemotron3_nano, gpt_oss_20b, deepseek_v3 or qwen3_8b")


def middle(name):
    """A model that trains in seconds and is large enough for the GPU's kernels."""
    if name == "qwen3_moe":
        return qwen3_moe(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, num_experts=16, num_experts_per_tok=4,
                         moe_intermediate_size=128)
    if name == "nemotron_h":
        # A floor of 1e-10 never acts: transformers applies it in training, the published model does not.
        return nemotron_h("ME*MEM*E", vocab_size=4096, hidden_size=256, num_attention_heads=4, head_dim=64, num_key_value_heads=2,
                          mamba_num_heads=8, mamba_head_dim=64, groups=2, ssm_state_size=64, chunk_size=64, intermediate_size=256,
                          moe_intermediate_size=128, moe_shared_expert_intermediate_size=256, n_routed_experts=16,
                          num_experts_per_tok=4, time_step_min=1e-10)
    raise SystemExit(f"unknown model {name}: qwen3_moe or nemotron_h")


def balance(model):
    """Deals the tokens of Qwen3-MoE evenly, as `--routing balanced` does."""
    found = 0
    for module in model.modules():
        if type(module).__name__ != "Qwen3MoeTopKRouter":
            continue
        found += 1

        def forward(hidden, module=module):
            hidden = hidden.reshape(-1, module.hidden_dim)
            logits = nn.functional.linear(hidden, module.weight)
            rows, k, experts = hidden.shape[0], module.top_k, module.num_experts
            ids = (torch.arange(rows * k, device=hidden.device) % experts).view(rows, k)
            weights = torch.softmax(logits, -1, dtype=torch.float).gather(1, ids)
            return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ids

        module.forward = forward
    if not found:
        raise SystemExit("--routing balanced is written for Qwen3-MoE only")


def timed(step, steps, warmup):
    seconds = []
    for i in range(warmup + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if i >= warmup:
            seconds.append(time.perf_counter() - start)
        elif i == warmup - 1:
            torch.cuda.reset_peak_memory_stats()
    return sorted(seconds)


def timing(seconds, tokens):
    median = seconds[len(seconds) // 2]
    return {"median_ms": median * 1e3, "min_ms": seconds[0] * 1e3, "tokens_per_second": tokens / median}


def speed(args):
    torch.manual_seed(args.seed)
    attention, experts, compiled = SETTINGS[args.setting]
    config = preset(args.preset, args.layers, args.experts)
    config.use_cache = False
    options = {"attn_implementation": attention, "experts_implementation": experts}
    options = {name: value for name, value in options.items() if value}
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype], **options)
    model.train()
    if args.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if args.routing == "balanced":
        balance(model)
    parameters = sum(p.numel() for p in model.parameters())
    run = torch.compile(model) if compiled else model
    ids = torch.randint(0, config.vocab_size, (args.batch, args.seq), device="cuda")
    losses = []

    def backward():
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    def without_optimizer():
        backward()
        model.zero_grad(set_to_none=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)

    def whole():
        loss = backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())

    tokens = args.batch * args.seq
    other = timed(without_optimizer, args.steps, args.warmup)
    seconds = timed(whole, args.steps, args.warmup)
    peak = [torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30]
    print(json.dumps({
        "backend": f"transformers {transformers.__version__}, torch {torch.__version__}", "setting": args.setting,
        "attention": model.config._attn_implementation, "experts": getattr(model.config, "_experts_implementation", None),
        "parameters": parameters, "tokens_per_step": tokens, "step": timing(seconds, tokens),
        "without_optimizer": timing(other, tokens), "peak_gib": peak, "losses": losses,
        "settings": {k: v for k, v in vars(args).items() if k != "run"},
    }), flush=True)


def structured_tokens(vocab, shape, seed):
    """Sequences with something to learn: the next token follows from the last one, except one time in eight."""
    rng = np.random.default_rng(seed)
    steps, batch, seq = shape
    following = rng.permutation(vocab)
    tokens = np.empty(shape, dtype=np.int32)
    tokens[..., 0] = rng.integers(0, vocab, (steps, batch))
    for i in range(1, seq):
        random = rng.integers(0, vocab, (steps, batch))
        keep = rng.random((steps, batch)) > 0.125
        tokens[..., i] = np.where(keep, following[tokens[..., i - 1]], random)
    return tokens


def curve(args):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(args.seed)
    folder = pathlib.Path(args.out)
    model = AutoModelForCausalLM.from_config(middle(args.model), dtype=torch.float32)
    model.save_pretrained(folder)
    # 64 tokens of the vocabulary: every pair is met often enough in 50 steps.
    tokens = structured_tokens(64, (args.steps, args.batch, args.seq), args.seed)
    tokens.astype("<i4").tofile(folder / "tokens.i32")
    tokens = torch.tensor(tokens.astype(np.int64), device=args.device)
    losses = {dtype: train(folder, tokens, dtype, args) for dtype in args.dtypes}
    print(json.dumps({"steps": args.steps, "batch": args.batch, "seq": args.seq, "losses": losses}), flush=True)


def train(folder, tokens, dtype, args):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], attn_implementation="sdpa").to(args.device).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for ids in tokens:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("speed")
    p.set_defaults(run=speed)
    p.add_argument("--preset", default="qwen3_30b_a3b")
    p.add_argument("--setting", choices=SETTINGS, default="default")
    p.add_argument("--layers", type=int)
    p.add_argument("--experts", type=int)
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--seq", type=int, default=4096)
    p.add_argument("--routing", choices=["real", "balanced"], default="real")
    p.add_argument("--recompute", action="store_true")
    p.add_argument("--dtype", choices=DTYPES, default="bf16")
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--lr", type=float, default=1e-5)
    p = commands.add_parser("curve")
    p.set_defaults(run=curve)
    p.add_argument("--model", default="qwen3_moe")
    p.add_argument("--out", required=True)
    p.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    p.add_argument("--device", default="cuda")
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
