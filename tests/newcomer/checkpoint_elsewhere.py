"""Saved on one mesh, resumed on another, used by transformers: torchrun --nproc-per-node 2 checkpoint_elsewhere.py"""

import torch
import transformers

import meshkit as mk
from meshkit.algos.rollout import Prompt, Sampling, generate
from meshkit.data import train_tokenizer

tokenizer = train_tokenizer(["one two three four five"] * 4, vocab_size=300)
config = mk.models.LlamaConfig(
    vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8,
)  # fmt: skip
ids = torch.tensor([tokenizer.encode("one two three four five")] * 4)


def train(axes, steps):
    """Goes on from where the folder stands to `steps`."""
    with torch.device("meta"):
        model = mk.models.Llama(config)
    run = mk.parallelize(model, mk.init_mesh(axes), plan=mk.models.LLAMA_PLAN)
    mk.init_weights(run.model, seed=0)
    optimizer = mk.adamw(run, lr=1e-2)
    rows = ids.tensor_split(run.mesh.data_ranks)[run.mesh.data_rank]
    with mk.Checkpointer("checkpoints") as checkpoints:
        start = checkpoints.resume(run, optimizer)
        for _ in range(start, steps):
            loss = run.forward_backward({"input_ids": rows[:, :-1], "labels": rows[:, 1:]})
            optimizer.step()
            optimizer.zero_grad()
        checkpoints.save(steps, run, optimizer)
    return run, start, loss.item()


run, start, first = train("dp_shard=2", 4)
run, start, last = train("tp=2", 16)
assert start == 4 and last < first, (start, first, last)
run.export("exported", tokenizer)
prompt = tokenizer.encode("one two")
(answer,) = generate(
    run, [Prompt(ids=prompt, key=0)], sampling=Sampling(max_new_tokens=6, temperature=0, stop_ids=(tokenizer.eos_id,))
)
if run.mesh.rank == 0:
    theirs = transformers.AutoModelForCausalLM.from_pretrained("exported")
    written = theirs.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
    assert written.tolist() == list(answer.ids), (written, answer.ids)
    print(f"loss {first:.3f} to {last:.3f}; transformers writes: {tokenizer.decode(written.tolist())}")
