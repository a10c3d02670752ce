"""LoRA fine-tuning of a small model of transformers, on own chats, for PEFT: torchrun --nproc-per-node 2 lora_sft.py"""

import json
from pathlib import Path

import peft
import torch
import transformers

import meshkit as mk
from meshkit.data import (
    CHATML_TOKENS,
    ExampleLoader,
    chatml,
    encode_chat,
    encode_records,
    read_records,
    train_tokenizer,
)

mesh = mk.init_mesh("dp_shard=2")
if mesh.rank == 0:
    chats = [[("user", f"What comes after {i}?"), ("assistant", str(i + 1))] for i in range(32)]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]}) for chat in chats]
    Path("chats.jsonl").write_text("\n".join(lines))
torch.distributed.barrier()
lines = Path("chats.jsonl").read_text().splitlines()
tokenizer = train_tokenizer(lines, vocab_size=300, extra_special_tokens=CHATML_TOKENS)
chat = chatml(tokenizer)
examples = encode_records(read_records("chats.jsonl"), lambda record: encode_chat(chat, record.fields["messages"]))
loader = ExampleLoader(
    examples, seq_len=128, global_batch=8, seed=0,
    rank=mesh.data_rank, ranks=mesh.data_ranks, packing="step",
)  # fmt: skip

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config)
if mesh.rank == 0:
    model.save_pretrained("base")
mk.lora.attach(model, None, rank=8, targets=("**.{q,v,up,down}_proj",), modules_to_save=("lm_head",))
run = mk.parallelize(model, mesh)
optimizer = mk.adamw(run, lr=3e-2)
losses = []
for _ in range(12):
    losses.append(run.forward_backward(next(loader)).item())
    mk.clip_grad_norm(run, 1.0)
    optimizer.step()
    optimizer.zero_grad()
assert losses[-1] < losses[0] - 1, losses
run.export("adapter", chat, base="base")

ids = torch.tensor([[0, 5, 6, 7]])
with torch.no_grad():
    ours = run.model(input_ids=ids).logits
if mesh.rank == 0:
    theirs = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained("base"), "adapter").eval()
    with torch.no_grad():
        assert torch.allclose(theirs(input_ids=ids).logits, ours, atol=1e-4)
    print(f"PEFT reads what was learnt: loss {losses[0]:.3f} to {losses[-1]:.3f}")
