"""Uses flashcell where pip has just installed it, and no checkout is near.

    python -I first_use.py installed|hub MODEL KERNEL...

checks that each kernel comes from where the first argument says and computes what torch does, and lets
the model, a name on the Hub, write.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import flashcell


def main() -> None:
    source, name, *kernels = sys.argv[1:]
    for kernel in kernels:
        info = flashcell.kernel_info(kernel, "cpu", "cpu")  # an error without the kernel
        print(info)
        if info.source != source:
            raise SystemExit(f"{kernel} is {info.source}, but must be {source}")
    theirs = torch.nn.LSTM(32, 64, num_layers=2, batch_first=True)
    ours = flashcell.LSTM(32, 64, num_layers=2, batch_first=True, backend="cpu")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 50, 32)
    torch.testing.assert_close(ours(x)[0], theirs(x)[0])
    print("flashcell.LSTM computes what torch.nn.LSTM does")
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    model.config.backend = "cpu"
    prompt = tokenizer("def read_", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    print(f"{name} writes: {tokenizer.decode(tokens[0], skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
