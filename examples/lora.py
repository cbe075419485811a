# %% [markdown]
# # Fine-tune a language model with LoRA: text by author
#
# Authors keep their texts. They fine-tune one language model with small adapters (LoRA), share a part of the
# adapters, and each keeps the rest: a model that writes a little more like its author.
#
#     python examples/lora.py
#     python examples/lora.py --checkpoint HuggingFaceTB/SmolLM2-135M --rounds 5
#
# Without a checkpoint it is a small transformer of characters, which some authors train before the others
# adapt it, on a CPU in about a minute. A checkpoint is a folder or a name on the Hugging Face Hub (needs
# `pip install transformers peft`). The texts are Shakespeare's roles where PARTITA_DATA has them
# (`partita data get shakespeare`), else sentences that are made up here.

# %%
import argparse
import math
import os
import random
from pathlib import Path

import numpy as np
import torch

import partita as pt

METHODS = ("shared", "fedsa", "ffa", "ditto", "alone")
parser = argparse.ArgumentParser(description="Federated fine-tuning with LoRA on text by author.")
parser.add_argument("--checkpoint", help="a causal language model: a folder, or its name on the Hub")
parser.add_argument("--method", choices=METHODS, default="fedsa")
parser.add_argument("--rank", type=int, default=8)
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--authors", type=int, default=8)
parser.add_argument("--length", type=int, default=64, help="tokens in a sample")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--pretrain", type=int, default=40, help="rounds on other authors, without a checkpoint")
parser.add_argument("--out", type=Path, default=Path("runs/lora"))
options = parser.parse_args()


# %% [markdown]
# ## The texts
#
# In your case: `{"ann": "all that Ann wrote", "bob": "..."}`.


# %%
def shakespeare(path: Path, authors: int) -> dict[str, str]:
    """The roles that say most, one of each play in turn."""
    archive = dict(np.load(path))
    begin, end = archive["offset"][:-1], archive["offset"][1:]
    longest = np.argsort(begin - end)[:authors]
    names = [f"{archive['play_name'][archive['play'][i]]}/{archive['role'][i]}" for i in longest]
    return {name: bytes(archive["text"][begin[i] : end[i]]).decode() for name, i in zip(names, longest)}


def made_up(authors: int) -> dict[str, str]:
    """Authors who share a grammar and differ in what they like to write about."""
    nouns = (
        "river",
        "tower",
        "garden",
        "engine",
        "letter",
        "winter",
        "harbour",
        "mirror",
        "shadow",
        "violin",
    )
    verbs = ("follows", "forgets", "repairs", "paints", "remembers", "loses", "admires", "sells", "hides")
    hows = ("slowly", "again", "alone", "by night", "with care", "for nothing", "at dawn", "in silence")
    ends = (".", "!", "?", "...", ";")
    texts = {}
    for number in range(authors):
        draw = random.Random(number)
        liked, done, said = draw.sample(nouns, 3), draw.sample(verbs, 3), draw.sample(hows, 4)
        text = ""
        while len(text) < 6000:
            end = draw.choices(ends, [1 + 9 * (i == number % len(ends)) for i in range(len(ends))])[0]
            one, other = draw.choice(liked), draw.choice(nouns)
            text += f"The {one} {draw.choice(done)} the {other} {draw.choice(said)}{end} "
        texts[f"author {number + 1}"] = text
    return texts


stored = Path(os.environ.get("PARTITA_DATA", "")) / "shakespeare.npz"
count = options.authors if options.checkpoint else 2 * options.authors
texts = shakespeare(stored, count) if stored.is_file() else made_up(count)
texts = {name: text[:20000] for name, text in texts.items()}

# %% [markdown]
# ## A model with adapters
#
# The base is frozen: it is neither trained nor sent. `pt.models.add_adapters` and peft's `get_peft_model`
# name the factors alike, `lora_A` and `lora_B`.

# %%
torch.manual_seed(0)
if options.checkpoint:
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    base = AutoModelForCausalLM.from_pretrained(options.checkpoint)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=options.rank, target_modules="all-linear")
    model = peft.get_peft_model(base, config)

    def encode(text: str) -> list[int]:
        return tokenizer(text, verbose=False)["input_ids"]

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

else:
    alphabet = sorted({letter for text in texts.values() for letter in text})
    number = {letter: i for i, letter in enumerate(alphabet)}

    def encode(text: str) -> list[int]:
        return [number[letter] for letter in text]

    def decode(ids: list[int]) -> str:
        return "".join(alphabet[i] for i in ids)


def federated(names: list[str]) -> pt.data.FederatedData:
    """Samples of some tokens, the last fifth of each author for testing; y are the same tokens."""
    rows, author, held_out = [], [], []
    for name in names:
        ids = np.array(encode(texts[name]))
        samples = ids[: len(ids) // options.length * options.length].reshape(-1, options.length)
        rows.append(samples)
        author += [name] * len(samples)
        held_out.append(np.arange(len(samples)) >= 0.8 * len(samples))
    ids = np.concatenate(rows)
    x = {"input_ids": ids} if options.checkpoint else ids
    return pt.data.from_arrays(x, ids, author, test=np.concatenate(held_out), validation=0)


work = {"steps": 8, "batch": 8, "loss": "next_token", "metric": "perplexity", "seed": 0, "baselines": False}
adam = {"optimizer": pt.optim.adamw()}
names = list(texts)
if not options.checkpoint:
    names, others = names[: options.authors], names[options.authors :]
    small = pt.models.transformer(
        len(alphabet), length=options.length, width=64, depth=2, heads=4, hidden=128, seed=0
    )
    print(f"{len(others)} other authors train the base model.")
    before = pt.federate(
        small, federated(others), pt.fedavg(lr=3e-3, **adam), rounds=options.pretrain, **work
    )
    model = pt.models.add_adapters(before.model(), "lora", rank=options.rank)
    model = pt.models.freeze(model, but="adapter")

data = federated(names)
trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, of which {trained:,} are trained\n{data}")

# %% [markdown]
# ## Adapters for all, and adapters of one's own
#
# | method | shared | each author keeps |
# | --- | --- | --- |
# | shared (FedIT) | A and B | nothing |
# | fedsa (FedSA-LoRA) | A | B |
# | ffa (FFA-LoRA) | B; A stays as it was drawn | nothing |
# | ditto | A and B | A and B of its own, pulled to the shared ones |
# | alone | nothing | A and B |

# %%
lr = options.lr
adapted = pt.models.freeze(model, "*lora_A*") if options.method == "ffa" else model
method = {
    "shared": pt.fedavg(lr=lr, **adam),
    "fedsa": pt.fedsim(personal="*lora_B*", lr=lr, **adam),
    "ffa": pt.fedavg(lr=lr, **adam),
    "ditto": pt.ditto(lr=lr, lam=0.1, **adam),
    "alone": pt.local(lr=lr, **adam),
}[options.method]
work["rounds"] = options.rounds
shared = pt.federate(model, data, pt.fedavg(lr=lr, **adam), **work)
run = pt.federate(adapted, data, method, **{**work, "baselines": {"global": shared}})

# %% [markdown]
# ## Perplexity per author
#
# exp of the mean of −log p over the tokens of an author's test texts: as many tokens as the model hesitates
# between. Lower is better. "before" is the base model, "shared" the one with adapters for all.


# %%
@torch.no_grad()
def perplexity(net: torch.nn.Module, client: int) -> float:
    """The same as `metric="perplexity"`, written out."""
    x, y = data.client(client, "test")
    output = net(**x).logits if options.checkpoint else net(x)
    return math.exp(torch.nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), y[:, 1:].flatten()))


start = [perplexity(model.eval(), i) for i in range(data.clients)]
scores = {"before": start, "shared": shared.scores("global"), options.method: run.scores("personal")}
print(f"\n{'perplexity':32}" + "".join(f"{kind:>10}" for kind in scores))
for i, name in enumerate(data.names):
    print(f"{name:32}" + "".join(f"{values[i]:10.3f}" for values in scores.values()))
print(f"{'mean':32}" + "".join(f"{np.mean(values):10.3f}" for values in scores.values()))
sent, of_all = (r.summary()["bytes_up"] / options.rounds / data.clients for r in (run, shared))
print(f"\nAn author sends {sent / 1e3:,.1f} kB in a round ({of_all / 1e3:,.1f} kB with shared adapters).")

# %% [markdown]
# ## Use an author's model
#
# `run.client(i).model()` is what the author deploys: an ordinary module, or peft's model with its methods.

# %%
served = run.client(0).model()
prompt = encode("The ")
if options.checkpoint:
    served.save_pretrained(options.out / "adapter")  # the adapter alone, for peft.PeftModel.from_pretrained
    ids = served.generate(input_ids=torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
else:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(80):
            ids.append(int(served(torch.tensor([ids[-options.length :]]))[0, -1].argmax()))
print(f"\n{data.names[0]}: {decode(ids)}")

options.out.mkdir(parents=True, exist_ok=True)
print(f"\nOpen {run.report(options.out / 'report.html')}")
