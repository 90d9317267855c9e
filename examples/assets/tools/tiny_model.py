#!/usr/bin/env python3
"""Makes ../tiny-nemotron-h: tokenizer, chat template and a Nemotron-H model of half a million parameters, pre-trained for
a few minutes on text.py. It knows some sentences about units but has never seen a question with an answer.

    pip install torch==2.11.0 transformers==5.17.0
    python instructions.py && python tiny_model.py
"""

import json
import os
import random
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import GenerationConfig, NemotronHConfig, NemotronHForCausalLM  # noqa: E402

import text  # noqa: E402

OUT = Path(__file__).resolve().parent.parent / "tiny-nemotron-h"
DATA = OUT.parent / "instructions.jsonl"
SEED = 11
VOCAB = 1024
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOT, IM_START, IM_END = range(3)
SEQ, BATCH, STEPS, LR = 128, 8, 600, 4e-3

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def make_tokenizer(corpus: list[str]) -> Tokenizer:
    """Byte-level BPE; every digit is its own token, so that numbers are read place by place."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer) -> None:
    tokenizer.save(str(OUT / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (OUT / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (OUT / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def make_model(vocab: int) -> NemotronHForCausalLM:
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    config = NemotronHConfig(
        vocab_size=vocab,
        hidden_size=96,
        layers_block_type=[letters[c] for c in "ME*M*E-"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=512,
        intermediate_size=192,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        conv_kernel=4,
        chunk_size=32,
        # The reference uses time_step_min as a floor of the step size; this far down it never acts.
        time_step_min=1e-12,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=96,
        routed_scaling_factor=1.0,
        pad_token_id=EOT,
        bos_token_id=None,
        eos_token_id=IM_END,
        use_cache=False,
        initializer_range=0.06,
    )
    model = NemotronHForCausalLM._from_config(config, dtype=torch.float32, experts_implementation="eager")
    start_steps(model, config)
    return model


@torch.no_grad()
def start_steps(model: NemotronHForCausalLM, config: NemotronHConfig) -> None:
    """Mamba step sizes between 0.001 and 0.1, the usual start, which time_step_min does not describe here."""
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            step = torch.exp(torch.linspace(-6.9, -2.3, config.mamba_num_heads))
            parameter.copy_(step + torch.log(-torch.expm1(-step)))


def pretrain(model: NemotronHForCausalLM, tokenizer: Tokenizer) -> None:
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS, pct_start=0.1)
    stream: list[int] = []
    start = time.time()
    for step in range(STEPS):
        while len(stream) < BATCH * SEQ:
            for doc in text.documents(rng):
                stream += tokenizer.encode(doc).ids + [EOT]
        ids = torch.tensor(stream[: BATCH * SEQ]).view(BATCH, SEQ)
        stream = stream[BATCH * SEQ :]
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:4}  loss {loss.item():.3f}  {time.time() - start:.0f} s", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    OUT.mkdir(exist_ok=True)
    docs = text.documents(random.Random(SEED))
    chats = [json.loads(line)["messages"] for line in DATA.read_text().splitlines()]
    tokenizer = make_tokenizer(docs + [m["content"] for chat in chats for m in chat])
    print(f"vocabulary {tokenizer.get_vocab_size()}")
    write_tokenizer(tokenizer)
    model = make_model(tokenizer.get_vocab_size())
    print(f"parameters {sum(p.numel() for p in model.parameters())}")
    pretrain(model, tokenizer)
    model.generation_config = GenerationConfig(eos_token_id=[IM_END, EOT], pad_token_id=EOT)
    model.save_pretrained(OUT)


if __name__ == "__main__":
    main()
