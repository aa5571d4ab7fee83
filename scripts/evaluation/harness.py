"""Runs lm-evaluation-harness (PyPI lm-eval) on our models, with its tasks and this repository's."""

import os
from pathlib import Path
from typing import Any

LOCAL_TASKS = Path(__file__).resolve().parent / "tasks"
Plan = list[tuple[str, int | None]]  # (task, shots), None for what the task says itself
SUITES: dict[str, Plan] = {
    # arXiv 2510.21450, its table of language models: tasks and numbers of shots
    "pararnn": [
        ("arc_challenge", 25), ("arc_challenge", 3), ("hellaswag", 10), ("hellaswag", 0),
        ("openbookqa", 10), ("openbookqa", 0), ("winogrande", 5), ("winogrande", 0),
        ("piqa", 0), ("mmlu", 0),
    ],
}  # fmt: skip
METRICS = ("acc", "acc_norm", "exact_match", "word_perplexity", "bits_per_byte", "perplexity")
Row = tuple[str, str, str, float, float | str]  # task, shots, metric, value, its standard error


def local_tasks() -> list[str]:
    return sorted(path.stem for path in LOCAL_TASKS.glob("*.yaml"))


def run(
    model: Any, tokenizer: Any, plan: Plan, max_length: int, batch: int, limit: int | None
) -> list[Row]:
    """Runs every task of the plan in turn.

    A recurrent model has no maximum length. Texts longer than `max_length` lose their beginning, as
    with a Transformer of that context length."""
    only_ours = all(task in local_tasks() for task, _ in plan)
    if only_ours:  # the libraries read these at import
        os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # lm-eval's own are thousands of files, which are read to know their names
    manager = TaskManager(include_path=str(LOCAL_TASKS), include_defaults=not only_ours)
    unknown = [task for task, _ in plan if not manager.match_tasks([task])]
    if unknown:
        raise ValueError(f"--tasks has {', '.join(unknown)}, but lm-eval has no such task")
    harness = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        max_length=max_length,
        batch_size=batch,
        backend="causal",
    )
    rows: list[Row] = []
    for task, shots in plan:
        found = simple_evaluate(
            harness, tasks=[task], num_fewshot=shots, task_manager=manager, limit=limit,
            bootstrap_iters=1000, log_samples=False,
        )  # fmt: skip
        assert found is not None  # None on ranks beyond the first, and there are none
        values = found["results"][task]
        used = str(found["n-shot"].get(task, "")) if shots is None else str(shots)
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if metric in METRICS:
                error = values.get(f"{metric}_stderr,{kind}", "")
                rows.append((task, used, metric, value, error))
    return rows
