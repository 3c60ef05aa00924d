"""Reference numbers of a checkpoint from transformers, for tests of other implementations.

python golden.py CHECKPOINT_DIR OUT.npz
"""

import sys

import model as M
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GOLDEN = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "user", "content": "My sister's locker code is 4821."}],
    [
        {"role": "user", "content": "My sister's locker code is 4821."},
        {"role": "assistant", "content": "Noted: your sister's locker code is 4821."},
        {
            "role": "user",
            "content": "Please read this:\n\nThe old bridge was closed in the winter. Nobody in Oslo repaired it, because the river was calm.",
        },
        {"role": "assistant", "content": "I have read it."},
        {"role": "user", "content": "What is my sister's locker code?"},
    ],
    [
        {"role": "system", "content": "You are a notebook assistant."},
        {"role": "user", "content": "My favourite colour is teal and my cat is called Miso."},
        {"role": "assistant", "content": "Noted: your favourite colour is teal. Your cat's name is Miso."},
        {"role": "user", "content": "Actually, my favourite colour is now amber."},
        {"role": "assistant", "content": "Updated: your favourite colour is now amber."},
        {"role": "user", "content": "What's my favourite colour?"},
    ],
]


@torch.no_grad()
def golden(path, out):
    """Reference numbers from transformers, float32, CPU. The MTP head, which transformers does not run, comes from model.py."""
    tok = AutoTokenizer.from_pretrained(path)
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    hf.generation_config.eos_token_id = None  # 64 tokens whatever comes
    d = {}
    for i, messages in enumerate(GOLDEN):
        for thinking in (False, True):
            name = f"prompt{i}" + ("_thinking" if thinking else "")
            text = tok.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
            )
            ids = torch.tensor([tok(text, add_special_tokens=False).input_ids])
            d[name + "_ids"] = ids[0].numpy().astype(np.int32)
            d[name + "_last_logits"] = hf(ids).logits[0, -1].numpy()
            g = hf.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=64,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
            d[name + "_greedy"] = g.sequences[0, ids.shape[1] :].numpy().astype(np.int32)
            top = torch.stack(g.scores)[:, 0].topk(2, -1).values
            d[name + "_greedy_margin"] = (top[:, 0] - top[:, 1]).numpy()
            print(name, ids.shape[1], repr(tok.decode(d[name + "_greedy"]).split("<|im_end|>")[0]))
    ids = torch.tensor(d["prompt2_ids"].astype(np.int64))[None]
    t = ids.shape[1]
    full = hf(ids).logits[0]
    d["short_ids"], d["short_logits"] = ids[0, :48].numpy().astype(np.int32), full[:48].numpy()
    i, j = torch.arange(t)[:, None], torch.arange(t)[None]
    m = ((j <= i) & ((i - j < 16) | (j < 4)))[None, None]
    w = hf(ids, attention_mask={"full_attention": m, "linear_attention": None}).logits[0]
    d["window16_sinks4_ids"], d["window16_sinks4_last_logits"] = ids[0].numpy().astype(np.int32), w[-1].numpy()
    d["window16_sinks4_argmax"] = w.argmax(-1).numpy().astype(np.int32)
    net = M.load(path)
    h = net.trunk(ids)
    print("model.py against transformers, largest difference of logits:", (net.logits(h) - full).abs().max().item())
    x = net.logits(net.draft(h[:-1], ids[:, 1:]))  # row t: from h_t and token t+1, the logits of token t+2
    d["mtp_ids"], d["mtp_hidden"] = ids[0].numpy().astype(np.int32), h.numpy()
    d["mtp_last_logits"], d["mtp_argmax"] = x[-1].numpy(), x.argmax(-1).numpy().astype(np.int32)
    np.savez_compressed(out, **d)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    golden(*sys.argv[1:])
