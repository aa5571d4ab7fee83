"""Trains a flash_rnn model on a folder of text files with transformers' Trainer.

    python scripts/recipes/with_trainer.py FOLDER --output_dir DIR --max_steps 100 --bf16
    torchrun --nproc-per-node 8 scripts/recipes/with_trainer.py FOLDER --output_dir DIR ...

Everything after FOLDER is transformers.TrainingArguments. The collator lays the documents of a batch
end to end in one row and says by position_ids where each begins: no padding, and no leak.
"""

import argparse
from glob import escape
from pathlib import Path

from datasets import load_dataset
from transformers import (
    AutoTokenizer,
    DataCollatorWithFlattening,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from flashcell import FlashRNNConfig, FlashRNNForCausalLM

TOKENIZER = Path(__file__).resolve().parents[2] / "model_cards/flash-rnn-python-5m"
LONGEST = 1024  # tokens of a document


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="All other options are those of transformers.TrainingArguments, such as --output_dir.",
    )
    parser.add_argument("folder", type=Path)
    given, rest = parser.parse_known_args()
    (training,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(rest)

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    files = sorted(escape(str(path)) for path in given.folder.rglob("*") if path.is_file())
    texts = load_dataset("text", data_files=files, sample_by="document", split="train")
    rows = texts.map(
        lambda row: {"input_ids": tokenizer(row["text"])["input_ids"][:LONGEST]},
        remove_columns=texts.column_names,
    )
    config = FlashRNNConfig(
        vocab_size=len(tokenizer), cell="lstm", hidden_size=128, intermediate_size=256,
        num_hidden_layers=2, num_heads=2, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    trainer = Trainer(
        model=FlashRNNForCausalLM(config),
        args=training,
        train_dataset=rows,
        data_collator=DataCollatorWithFlattening(),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
