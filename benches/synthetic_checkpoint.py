#!/usr/bin/env python3
"""Write a sharded checkpoint of a published size with made-up weights, fast: to measure how quickly it loads.

    python3 benches/synthetic_checkpoint.py /tmp/qwen --layers 8
    cargo run --release --example inspect_checkpoint -- /tmp/qwen --load

The layout is that of Qwen3-30B-A3B: bf16, one file per projection of every expert, shards of 5 GB. Weights are pseudo-random
numbers below 2, the same few megabytes again and again. Standard library only.
"""

import argparse
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

SHARD = 5_000_000_000
PATTERN = 16 << 20


def tensors(layers, experts, hidden, width, vocab, heads, groups, head):
    """Names and shapes in the order in which transformers writes them."""
    yield "model.embed_tokens.weight", [vocab, hidden]
    for layer in range(layers):
        base = f"model.layers.{layer}."
        yield base + "input_layernorm.weight", [hidden]
        for expert in range(experts):
            yield f"{base}mlp.experts.{expert}.down_proj.weight", [hidden, width]
            yield f"{base}mlp.experts.{expert}.gate_proj.weight", [width, hidden]
            yield f"{base}mlp.experts.{expert}.up_proj.weight", [width, hidden]
        yield base + "mlp.gate.weight", [experts, hidden]
        yield base + "post_attention_layernorm.weight", [hidden]
        yield base + "self_attn.k_norm.weight", [head]
        yield base + "self_attn.k_proj.weight", [groups * head, hidden]
        yield base + "self_attn.o_proj.weight", [hidden, heads * head]
        yield base + "self_attn.q_norm.weight", [head]
        yield base + "self_attn.q_proj.weight", [heads * head, hidden]
        yield base + "self_attn.v_proj.weight", [groups * head, hidden]
    yield "model.norm.weight", [hidden]
    yield "lm_head.weight", [vocab, hidden]


def pattern():
    """bf16 numbers with magnitude below 2: the top bit of every exponent is zero."""
    low, high = random.Random(0).randbytes(PATTERN // 2), random.Random(1).randbytes(PATTERN // 2)
    data = bytearray(PATTERN)
    data[0::2] = low
    data[1::2] = high.translate(bytes(byte & 0xBF for byte in range(256)))
    return bytes(data)


def write(path, shard, data):
    """One shard: its header, then the pattern over and over."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, size in shard:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while offset > 0:
            offset -= file.write(data[:offset] if offset < len(data) else data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, default=8, help="1.24 GB each, beside 1.24 GB of embedding and head [default: 8]")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--shard-bytes", type=int, default=SHARD)
    args = parser.parse_args()
    size = dict(hidden=2048, width=768, vocab=151936, heads=32, groups=4, head=128)
    os.makedirs(args.folder, exist_ok=True)

    shards = [[]]
    for name, shape in tensors(args.layers, args.experts, **size):
        elements = 1
        for n in shape:
            elements *= n
        if shards[-1] and sum(t[2] for t in shards[-1]) + 2 * elements > args.shard_bytes:
            shards.append([])
        shards[-1].append((name, shape, 2 * elements))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    total = sum(t[2] for shard in shards for t in shard)
    index = {"metadata": {"total_size": total}, "weight_map": {t[0]: name for name, shard in zip(names, shards) for t in shard}}
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "vocab_size": size["vocab"],
        "hidden_size": size["hidden"], "num_hidden_layers": args.layers, "num_attention_heads": size["heads"],
        "num_key_value_heads": size["groups"], "head_dim": size["head"], "num_experts": args.experts, "num_experts_per_tok": 8,
        "moe_intermediate_size": size["width"], "intermediate_size": 6144, "norm_topk_prob": True, "rope_theta": 1000000.0,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "hidden_act": "silu", "attention_bias": False,
    }
    start, data = time.time(), pattern()
    with ThreadPoolExecutor(min(len(shards), os.cpu_count() or 1)) as pool:
        list(pool.map(lambda pair: write(os.path.join(args.folder, pair[0]), pair[1], data), zip(names, shards)))
    for name, value in (("model.safetensors.index.json", index), ("config.json", config)):
        with open(os.path.join(args.folder, name), "w") as file:
            json.dump(value, file)
    seconds = time.time() - start
    print(f"{total / 1e9:.2f} GB in {len(shards)} shards, {seconds:.1f} s ({total / seconds / 1e9:.2f} GB/s)", file=sys.stderr)


if __name__ == "__main__":
    main()
