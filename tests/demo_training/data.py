"""Makes the tokenizer, a training row to look at, and the evaluation file.

python data.py tokenizer OUT_DIR          train the byte-level BPE and write its files
python data.py sample OUT_DIR [LENGTH]    print one training row
python data.py eval OUT_DIR FILE.jsonl    write 200 held-out dialogues

Everything the assistant says is a function of the dialogue, so that an answer is right or wrong.
"""

import random
import sys

import numpy as np
from encoder import Encoder
from passages import Filler
from questions import write_eval
from rows import training_row
from tokenizer import train_tokenizer


def sample(folder, length=600):
    encoder = Encoder(folder)
    ids, classes = training_row(random.Random(), encoder, Filler("train"), length)
    print(encoder.tok.decode(ids, skip_special_tokens=False), "\n", np.bincount(classes))


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("tokenizer", "sample", "eval"):
        sys.exit(__doc__)
    what, folder, *rest = sys.argv[1:]
    if what == "tokenizer":
        train_tokenizer(folder)
    elif what == "sample":
        sample(folder, *map(int, rest))
    else:
        write_eval(folder, *rest)
