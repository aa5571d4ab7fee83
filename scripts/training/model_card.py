"""Writes model_cards/<name>/: the files of the Hub model repository, and a card of measured numbers."""

import lzma
import platform
import shutil
import string
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from training.step import held_out_loss

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "model_cards" / "TEMPLATE.md"
TEMPLATE_OWN_TEXT = ROOT / "model_cards" / "TEMPLATE_OWN_TEXT.md"
PROMPT = "def read_"


def save_model(folder: Path, training, state: dict[str, torch.Tensor]) -> None:
    """Saves weights (`state`), tokenizer, recipe and loss curve in a user's format."""
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    training.unwrapped.save_pretrained(folder, state_dict=state)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # it was readable for its owner only
    training.texts.tokenizer.save_pretrained(folder)
    training.recipe.write(folder / "recipe.yaml")
    shutil.copyfile(training.run / "training_log.csv", folder / "training_log.csv")


def write_model(folder: Path, training, corpus, state: dict[str, torch.Tensor]) -> None:
    """Writes the model's files and its card; the card's numbers are measured on the files read
    back."""
    save_model(folder, training, rounded(state))
    draw_curve(training, folder / "curve.png")

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loaded = loaded.to(training.accelerator.device)
    loaded.config.backend = training.args.backend
    tokenizer = AutoTokenizer.from_pretrained(folder)
    recipe, lanes = training.recipe, training.texts.held_out_lanes
    nats = held_out_loss(loaded, lanes, recipe.length, recipe.carry, recipe.isolate)
    facts = describe_run(training) | describe_corpus(training, corpus)
    facts |= {
        "held_out_loss": f"{nats:.4f}",
        "bits_per_byte": f"{training.texts.bits_per_byte(nats):.4f}",
        "weights_mb": f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f}",
        "prompt": PROMPT,
        "sample": sample(loaded, tokenizer),
    }
    card = string.Template(TEMPLATE.read_text()).substitute(facts)
    (folder / "README.md").write_text(card)


def write_own_model(folder: Path, training, state: dict[str, torch.Tensor]) -> None:
    """Writes a model that was trained on a user's text, and its card; its held-out number is the
    log's last."""
    save_model(folder, training, state)
    draw_curve(training, folder / "curve.png")
    texts, data = training.texts, training.recipe.data
    last = training.log.rows()[-1]
    local = data["path"] == "text"
    facts = describe_run(training) | {
        "data": "local text" if local else f"{data['path']} {data.get('name', '')}".strip(),
        "held_out_loss": f"{float(last['held_out_loss']):.4f}",
        "bits_per_byte": f"{float(last['held_out_bits_per_byte']):.4f}",
        "held_out_documents": f"{len(texts.held_out_texts):,}",
        "held_out_bytes": f"{texts.held_out_bytes:,}",
    }
    card = string.Template(TEMPLATE_OWN_TEXT.read_text()).substitute(facts)
    (folder / "README.md").write_text(card)


def rounded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rounds matrices to bf16, which halves the file; vectors keep their dtype."""
    state, done = dict(state), {}
    for name, tensor in list(state.items()):
        if tensor.ndim >= 2 and not name.endswith("bias"):
            # a tied head stays the same tensor as the embedding, and is stored once
            state[name] = done.setdefault(tensor.data_ptr(), tensor.to(torch.bfloat16))
    return state


def describe_run(training) -> dict[str, str]:
    """Returns what a card says about the model and the run, whatever the text."""
    recipe, seconds = training.recipe, training.progress["seconds"]
    model = training.unwrapped
    return {
        "name": recipe.name,
        "model_type": model.config.model_type,
        "parameters": f"{training.parameters:,}",
        "architecture": ", ".join(
            f"{key} {value}" for key, value in recipe.model.items() if key != "model_type"
        ),
        "vocab_size": str(len(training.texts.tokenizer)),
        "seen_tokens": f"{recipe.steps * recipe.batch * recipe.length:,}",
        "steps": f"{recipe.steps:,}",
        "batch": str(recipe.batch),
        "length": str(recipe.length),
        "precision": {"no": "fp32", "bf16": "bf16 autocast, fp32 weights"}[recipe.precision],
        "dropout": f"dropout {recipe.dropout}, " if recipe.dropout else "",
        "duration": f"{seconds / 60:.0f} minutes" if seconds > 150 else f"{seconds:.0f} seconds",
        "machine": machine(training.accelerator.device),
        "torch": torch.__version__,
    }


def describe_corpus(training, corpus) -> dict[str, str]:
    """Returns what a card says about the standard library, and how to run the recipe again."""
    recipe, texts = training.recipe, training.texts
    packed = lzma.compress("".join(texts.held_out_texts).encode(), preset=9 | lzma.PRESET_EXTREME)
    return {
        "recipe": f"scripts/recipes/{training.args.recipe.name}",
        "options": " --device cuda" if training.accelerator.device.type == "cuda" else "",
        "python": corpus.python,
        "sha256": corpus.sha256,
        "files": str(sum(texts.files)),
        "held_out_files": str(texts.files[1]),
        "held_out_in": str(recipe.held_out_in),
        "training_bytes": f"{texts.bytes[0]:,}",
        "held_out_bytes": f"{texts.bytes[1]:,}",
        "training_tokens": f"{texts.tokens:,}",
        "epochs": f"{recipe.steps * recipe.batch * recipe.length / texts.tokens:.1f}",
        "xz_bits_per_byte": f"{8 * len(packed) / texts.bytes[1]:.2f}",
    }


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads ({platform.system()} {platform.machine()})"


@torch.no_grad()
def sample(model, tokenizer) -> str:
    """Generates the card's sample text, once, with a fixed seed."""
    torch.manual_seed(0)
    inputs = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    settings = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "max_new_tokens": 160}
    output = model.generate(**inputs, **settings)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def draw_curve(training, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = training.log.rows()
    held_out = [row for row in rows if row["held_out_bits_per_byte"]]
    scale = training.texts.bits_per_byte(1.0)  # nats per token to bits per byte
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
    axes.plot(
        [int(row["tokens"]) / 1e6 for row in rows],
        [float(row["train_loss"]) * scale for row in rows],
        color="0.65",
        label="training",
    )
    axes.plot(
        [int(row["tokens"]) / 1e6 for row in held_out],
        [float(row["held_out_bits_per_byte"]) for row in held_out],
        color="C0",
        marker=".",
        label="held out",
    )
    axes.set(xlabel="tokens seen (millions)", ylabel="bits per byte", title=training.recipe.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
